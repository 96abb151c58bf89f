#!/bin/bash
# Study smoke_cpu: one cell of its matrix.
# n1x4-gloo-torchrun-b96: 4 ranks on this machine, gloo, global batch 384
# `bench submit` starts this with the run's folder and the job's name.
# To run it by hand: bash this-file [EMPTY_FOLDER]

cell=n1x4-gloo-torchrun-b96
job=${2:-"manual-$cell-$$"}
run_dir=${1:-"$job"}
mkdir -p "$run_dir" || exit 1
[[ $run_dir = /* ]] || run_dir=$PWD/$run_dir

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
if ! command -v "$python" >/dev/null; then
  echo "bench: error: on $(uname -n) there is no $python: name the environment in cluster.setup" >&2
  exit 127
fi
# The part of bench that runs in a job, as one file in the study's folder: the job needs no installation of bench.
package=${run_dir%/runs/*}/package/ddp_scaling_bench-DIGEST.zip
# By hand, the script is beside it.
[ -f "$package" ] || package=$(dirname "${BASH_SOURCE[0]}")/../package/ddp_scaling_bench-DIGEST.zip
if [ -f "$package" ]; then
  package=$(realpath "$package")
  export PYTHONPATH="$package${PYTHONPATH:+:$PYTHONPATH}"
else
  echo "bench: the study's folder has no package/ddp_scaling_bench-DIGEST.zip: using the installed ddp_scaling_bench" >&2
  package=
fi
# Ranks of one machine use the loopback interface, even if its host name resolves to another address.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"

# The same number of threads in every cell and under every launcher, so that baselines are comparable.
export OMP_NUM_THREADS=1 BENCH_THREADS_PER_RANK=1
# Output is written at once, so that it is complete even if the job is killed.
export PYTHONUNBUFFERED=1
# For the program of a rank, and for the tools of bench in the job.
export BENCH_RUN_DIR="$run_dir" BENCH_CELL_ID=n1x4-gloo-torchrun-b96 BENCH_BACKEND=gloo
export BENCH_PER_GPU_BATCH=96 BENCH_GRAD_ACCUM=1
world_size=4 # the number of ranks
export BENCH_GLOBAL_BATCH=$((BENCH_PER_GPU_BATCH * world_size * BENCH_GRAD_ACCUM))
join_timeout=300 # seconds

# Sizes and options, which every rank reads from cell.json.
cell_json=(
  '{'
  '  "launcher": "torchrun",'
  '  "backend": "gloo",'
  '  "tasks_per_node": 4,'
  '  "world_size": '"$world_size,"
  '  "per_gpu_batch": '"$BENCH_PER_GPU_BATCH,"
  '  "workload": {'
  '    "device": "cpu",'
  '    "model": "convnet",'
  '    "strategy": "ddp",'
  '    "parameters": null,'
  '    "seq_len": null,'
  '    "image_size": 224,'
  '    "data": "synthetic",'
  '    "steps_per_epoch": 8,'
  '    "epochs": 3,'
  '    "warmup_steps": 6,'
  '    "attribution_steps": 3,'
  '    "probe_steps": 2,'
  '    "sweep_time": 1.0,'
  '    "sweep_max_mb": 4.0,'
  '    "trace_steps": 0,'
  '    "val_steps": 1,'
  '    "precision": "fp32",'
  '    "memory_format": "contiguous",'
  '    "optimizer": "sgd",'
  '    "learning_rate": 0.01,'
  '    "grad_accum": '"$BENCH_GRAD_ACCUM,"
  '    "bucket_cap_mb": null,'
  '    "comm_dtype": null,'
  '    "comm_hook": "none",'
  '    "param_dtype": null,'
  '    "reduce_dtype": "fp32",'
  '    "fsdp_wrap": "block",'
  '    "compile": false,'
  '    "activation_checkpointing": false,'
  '    "checkpoint": false,'
  '    "num_workers": 0,'
  '    "pin_memory": true,'
  '    "seed": 0,'
  '    "join_timeout": '"$join_timeout"
  '  }'
  '}'
)
# The file appears as a whole, because hosts can share the folder. If it cannot be written, the exit code is
# EX_IOERR.
cell_file="$run_dir/.cell.$(uname -n).$$"
printf '%s\n' "${cell_json[@]}" >"$cell_file" && mv -f "$cell_file" "$run_dir/cell.json" || exit 74

# The program of a rank: the words of the matrix, which the shell does not expand.
command=(
  "$python"
  -m ddp_scaling_bench.train
)
# torchrun's agent on each node starts the ranks there. `python -m` would put the working folder first on the
# agent's import path, where a file of the user can be named torch.py or json.py.
agent='import os, sys; folder = os.path.realpath("."); '
agent+='sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != folder]; import runpy; '
agent+='runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)'
ranks=(
  "$python" -c "$agent"
  --nnodes=1
  --nproc-per-node=4
  # There is only one agent, which needs no rendezvous with others.
  --standalone
  --rdzv-conf="join_timeout=$join_timeout"
  # A restarted run would be a different measurement.
  --max-restarts=0
  --no-python
  "${command[@]}"
)

exec "${ranks[@]}"
} </dev/null &
child=$!
set +m
# Whoever reads the output of this script does not wait for the guard, which can end later.
guard >/dev/null 2>&1 &
guard=$!
trap 'finish "$?"' EXIT
trap 'stop limit' ALRM
trap 'stop term' TERM INT HUP
[ "$by" = exit ] || stop "$by"
{ wait "$child"; } 2>/dev/null
exit "$?"
