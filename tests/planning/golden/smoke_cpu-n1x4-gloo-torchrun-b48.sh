#!/bin/bash
# Study smoke_cpu: one cell of its matrix.
# n1x4-gloo-torchrun-b48: 4 ranks on this machine, gloo, global batch 192
# `bench submit` starts this with the run's folder and the job's name.
# To run it by hand: bash this-file [EMPTY_FOLDER]

cell=n1x4-gloo-torchrun-b48
job=${2:-"manual-$cell-$$"}
run_dir=${1:-"$job"}
[ $# -gt 0 ] || mkdir "$run_dir" || exit 1

# A folder belongs to the job that creates its file `start`, with a line per start: job, time, host, restarts.
# Results of two jobs never mix, and a job that `bench` has given up, by creating this file, does not start.
claim_folder() {
  local folder=$1 job=$2 restarts=$3 line owner=
  line="$job $(date -u +%Y-%m-%dT%H:%M:%SZ) $(uname -n) $restarts"
  if (set -C && echo "$line" >"$folder/start") 2>/dev/null; then return; fi
  { read -r owner <"$folder/start"; } 2>/dev/null
  if [ "${owner%% *}" = "$job" ]; then
    echo "$line" >>"$folder/start" # this job was requeued
  elif [ -n "$owner" ]; then
    echo "bench: error: another start owns this folder: $owner" >&2
    exit 1
  else # the disk is full or read-only: the exit code is EX_IOERR
    echo "bench: error: $folder/start: cannot be written" >&2
    exit 74
  fi
}
# The job's id: host, process id, and start time, because process ids are reused.
read -r -a stat <"/proc/$$/stat"
claim_folder "$run_dir" "$(uname -n):$$:${stat[21]}" 0

# The processes of the run have the job's name in their environment, because ranks have sessions of their own.
processes() { grep -lzxF "BENCH_JOB=$job" /proc/[0-9]*/environ 2>/dev/null | tr -dc '0-9\n'; }

# Wait half a second for the processes of the run, then kill those that are left.
end_processes() {
  local pids i
  for ((i = 0; i < 100; i++)); do
    pids=$(processes)
    [ -n "$pids" ] || return
    [ "$i" -lt 5 ] || kill -KILL $pids 2>/dev/null
    sleep 0.1
  done
}

# `by` says who ended the run: itself (exit), its time limit (limit), or a signal to this shell (term, kill).
by=exit
note_end() { # EXIT_CODE SIGNAL
  printf '{"exit_code": %d, "signal": %s, "stage": "run", "time": "%s", "by": "%s"}\n' \
    "$1" "$2" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$by" >"$run_dir/.end.json.tmp" &&
    mv -f "$run_dir/.end.json.tmp" "$run_dir/end.json"
}

# Send SIGTERM, give torchrun 10 s to end the ranks and report it, then kill what is left.
stop() { # BY
  local i
  trap '' ALRM TERM INT HUP
  by=$1
  {
    kill -TERM -- "-$child"
    for ((i = 0; i < 200; i++)); do
      kill -0 "$child" || break
      [ "$i" -ne 100 ] || kill -KILL $(processes)
      sleep 0.1
    done
    kill -KILL -- "-$child"
  } 2>/dev/null
  exit 143
}

finish() { # EXIT_CODE
  local signal=null
  trap '' ALRM TERM INT HUP
  [ "$by" = exit ] || signal='"TERM"'
  end_processes
  note_end "$1" "$signal" || exit 74
  kill "$guard" 2>/dev/null
}

# End the run at its time limit, and its processes if this shell is killed.
guard() {
  timeout 300 tail --pid=$$ -f /dev/null
  [ $? -ne 124 ] || kill -ALRM $$
  tail --pid=$$ -f /dev/null
  kill -KILL -- "-$child"
  end_processes
  by=kill
  [ -e "$run_dir/end.json" ] || note_end 137 '"KILL"'
}

trap 'by=limit' ALRM
trap 'by=term' TERM INT HUP
# The run has a process group of its own (set -m), and this shell waits for signals.
set -m
{
export BENCH_JOB="$job"
python="${BENCH_PYTHON:-python}"
# A rank that finds a different number of ranks stops with an error.
export BENCH_EXPECTED_WORLD_SIZE=4
# The same number of threads in every cell, so that baselines are comparable.
export OMP_NUM_THREADS=1 BENCH_THREADS_PER_RANK=1
# Ranks of one machine use the loopback interface, even if its host name resolves to another address.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
export PYTHONUNBUFFERED=1

workload=(
  --run-dir "$run_dir"
  --launcher torchrun
  --backend gloo
  --per-gpu-batch 48
  --device cpu
  --model convnet
  --seq-len 128
  --image-size 224
  --data synthetic
  --steps-per-epoch 15
  --epochs 3
  --warmup-steps 5
  --attribution-steps 6
  --probe-steps 2
  --sweep-time 10.0
  --sweep-max-mb 4.0
  --trace-steps 0
  --val-steps 2
  --precision fp32
  --memory-format contiguous
  --optimizer sgd
  --learning-rate 0.01
  --grad-accum 1
  --compile false
  --activation-checkpointing false
  --checkpoint false
  --num-workers 0
  --pin-memory false
  --seed 0
  --join-timeout 300
)

# --standalone: rendezvous on a free port of this machine.
# --max-restarts=0: a restarted run would be a different measurement.
exec "$python" -P -m ddp_scaling_bench.start torch.distributed.run --standalone --nnodes=1 \
  --nproc-per-node=4 --max-restarts=0 \
  --no-python "$python" -P -u -m ddp_scaling_bench.start workload "${workload[@]}"
} </dev/null &
child=$!
set +m
guard &
guard=$!
trap 'finish "$?"' EXIT
trap 'stop limit' ALRM
trap 'stop term' TERM INT HUP
[ "$by" = exit ] || stop "$by"
{ wait "$child"; } 2>/dev/null
exit "$?"
