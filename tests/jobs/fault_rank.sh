#!/bin/bash
# A rank of a fault study, called as: python -m ddp_scaling_bench.train. fault_studies.py fills in the columns, the values and the interpreter.
folder=$BENCH_RUN_DIR
measure() {
  [ "$SLURM_PROCID" = 0 ] || return 0
  printf '%s\n' 'COLUMNS' 'VALUES' >"$folder/metrics.csv"
  printf '%s\n' '{"joined": {"ranks": 2}, "world_size": 2, "backend": "gloo", "global_batch": 8, "hosts": [{"host": "n1"}], "transport": {"backend": "gloo", "interface": "eth0"}}' >"$folder/env.json"
  printf 'epoch\n' | tee "$folder/ranks.csv" >"$folder/steps.csv"
  (cd "$folder" && sha256sum metrics.csv ranks.csv steps.csv >SHA256SUMS)
}
case $FAULT in
  fine) measure ;;
  time-limit | cancelled | crashed) sleep 300 & wait ;;
  slurmd-killed | drained)
    touch "$folder/begun-$SLURM_PROCID"
    until [ -e "$folder/go" ]; do sleep 0.2; done
    measure
    ;;
  requeued)
    measure
    if [ "$SLURM_RESTART_COUNT" = "" ]; then
      [ "$SLURM_PROCID" = 0 ] && touch "$folder/probes.json"
      sleep 300 & wait
    fi
    ;;
  out-of-memory) [ "$SLURM_PROCID" = 0 ] && sleep 60; exec PYTHON -c 'b"x" * 600_000_000' ;;
  killed) [ "$SLURM_PROCID" = 0 ] && sleep 60; sleep 0.5; kill -9 $$ ;;
esac
