#!/bin/bash
# Study own: one cell of its matrix.
# n2x2-gloo-torchrun-b8: 4 ranks on 2 host(s), gloo, global batch 32
# `bench submit` starts this on each host. To run it by hand: bash this-file RUN_FOLDER NODE ENDPOINT
# NODE is the host's number from 0, ENDPOINT is ADDRESS:PORT of host 0; a single host needs neither.

cell=n2x2-gloo-torchrun-b8
run_dir=${1:-"manual-$cell"}
node=${2:-0}
endpoint=${3:-localhost:29400}
rdzv_id=${4:-"$cell"}
mkdir -p "$run_dir" || exit 1

# Environment variables of the matrix; the shell does not expand their values.
matrix_environment() {
  export DATA='a '"'"'b'"'"' $(c)'
}
matrix_environment
python="${BENCH_PYTHON:-python}"
if ! command -v "$python" >/dev/null; then
  echo "bench: error: on $(uname -n) there is no $python: name the environment in cluster.setup" >&2
  exit 127
fi
# A rank that finds a different number of ranks stops with an error.
export BENCH_EXPECTED_WORLD_SIZE=4
# The same number of threads in every cell, so that baselines are comparable.
export OMP_NUM_THREADS=1 BENCH_THREADS_PER_RANK=1
# gloo needs the name of one interface. Unless the matrix sets this name, use the interface that leads to
# another host. (By default, gloo uses the address of the machine's own name, often the loopback.)
if [ gloo = gloo ] && [ -z "${GLOO_SOCKET_IFNAME:-}" ]; then
  interface=$("$python" -P -m ddp_scaling_bench.start workload.network_interface "${BENCH_PEER:-${endpoint%:*}}") || exit 1
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME="$interface"
fi
export PYTHONUNBUFFERED=1

# Variables for bench.record, which the command can use, too.
export BENCH_RUN_DIR="$run_dir" BENCH_CELL_ID=n2x2-gloo-torchrun-b8 BENCH_BACKEND=gloo
export BENCH_GLOBAL_BATCH=32 BENCH_PER_GPU_BATCH=8 BENCH_GRAD_ACCUM=1
export BENCH_WARMUP_STEPS=10 BENCH_STEPS_PER_EPOCH=50
export BENCH_ATTRIBUTION_STEPS=10 BENCH_EPOCHS=3
# Counts the ranks on each node: a command with a launcher of its own can start other ranks than planned.
export BENCH_WATCHER="${BENCH_PYTHON:-$python}"
# The words of the matrix's command; the shell does not expand their values.
command=(
  train.py
  --batch=8
  --data 'a '"'"'b'"'"' $(c)'/'{'x'}'
  --out "$run_dir"'/it'"'"'s $HOME' ''
)

processes=2
# Host 0 serves the rendezvous. is_host is explicit, because the host's name can differ from its address.
is_host=false
[ "$node" -ne 0 ] || is_host=true
# --rdzv-id: agents of another run that connect to this port are rejected.
# --local-addr: the address by which the other hosts reach this one, if known.
# --max-restarts=0: a restarted run would be a different measurement.
# The command does not use bench.record, so this host is sampled before and after it, for conditions.json.
# Problems are written to conditions.err, and do not end the run.
sample_host() {
  "$python" -P -m ddp_scaling_bench.start measure.command_conditions "$1" "$run_dir" 2>>"$run_dir/conditions.err"
}
sample_host before
# torchrun gets a signal to the process group, too; the host is sampled after it has ended.
trap : TERM
("$BENCH_WATCHER" -P -m ddp_scaling_bench.start measure.process_watch "$BENCH_RUN_DIR" $$ </dev/null >/dev/null 2>&1 &)
"$python" -m torch.distributed.run --nnodes=2 --nproc-per-node="$processes" \
  --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$rdzv_id" \
  --rdzv-conf="join_timeout=300,is_host=$is_host" \
  ${BENCH_ADDRESS:+"--local-addr=$BENCH_ADDRESS"} --max-restarts=0 \
  "${command[@]}"
exit_code=$?
sample_host after
exit "$exit_code"
