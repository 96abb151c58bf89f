#!/bin/bash
# Study ssh_hosts: one cell of its matrix.
# n4x4-nccl-torchrun-b24: 16 ranks on 4 host(s), nccl, global batch 384
# The run's process (bench/jobs/ssh.py) starts this on each host. By hand: bash this-file RUN_FOLDER NODE ENDPOINT
# NODE is the host's number from 0, ENDPOINT is ADDRESS:PORT of host 0; a single host needs neither.

cell=n4x4-nccl-torchrun-b24
run_dir=${1:-"manual-$cell"}
node=${2:-0}
endpoint=${3:-localhost:29400}
rdzv_id=${4:-"$cell"}
mkdir -p "$run_dir" || exit 1
[[ $run_dir = /* ]] || run_dir=$PWD/$run_dir

# Environment variables of the matrix; the shell does not expand their values.
matrix_environment() {
  export NCCL_SOCKET_IFNAME='^docker,lo'
}
matrix_environment
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
# gloo needs the name of one interface. Unless the matrix sets this name, use the interface that leads to
# another host. (By default, gloo uses the address of the machine's own name, often the loopback.)
if [ nccl = gloo ] && [ -z "${GLOO_SOCKET_IFNAME:-}" ]; then
  interface=$("$python" -m ddp_scaling_bench.start train.network_interface "${BENCH_PEER:-${endpoint%:*}}") || exit 1
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME="$interface"
fi

# Host 0 serves the rendezvous.
is_host=false
[ "$node" -ne 0 ] || is_host=true

# The same number of threads in every cell and under every launcher, so that baselines are comparable.
export OMP_NUM_THREADS=8 BENCH_THREADS_PER_RANK=8
# Output is written at once, so that it is complete even if the job is killed.
export PYTHONUNBUFFERED=1
# For the program of a rank, and for the tools of bench in the job.
export BENCH_RUN_DIR="$run_dir" BENCH_CELL_ID=n4x4-nccl-torchrun-b24 BENCH_BACKEND=nccl
export BENCH_PER_GPU_BATCH=24 BENCH_GRAD_ACCUM=1
world_size=16 # the number of ranks
export BENCH_GLOBAL_BATCH=$((BENCH_PER_GPU_BATCH * world_size * BENCH_GRAD_ACCUM))
join_timeout=300 # seconds
# NCCL reports its network only in its log, which the recorder reads.
if [ -z "${NCCL_DEBUG:-}${NCCL_DEBUG_FILE:-}" ]; then
  export NCCL_DEBUG=INFO NCCL_DEBUG_FILE="${run_dir//%/%%}/nccl.%h.%p.log"
fi

# Sizes and options, which every rank reads from cell.json.
cell_json=(
  '{'
  '  "launcher": "torchrun",'
  '  "backend": "nccl",'
  '  "tasks_per_node": 4,'
  '  "world_size": '"$world_size,"
  '  "per_gpu_batch": '"$BENCH_PER_GPU_BATCH,"
  '  "workload": {'
  '    "device": "cuda",'
  '    "model": "transformer",'
  '    "strategy": "ddp",'
  '    "parameters": 124000000,'
  '    "seq_len": 512,'
  '    "image_size": 224,'
  '    "data": "synthetic",'
  '    "steps_per_epoch": 50,'
  '    "epochs": 3,'
  '    "warmup_steps": 10,'
  '    "attribution_steps": 10,'
  '    "probe_steps": 6,'
  '    "sweep_time": 10.0,'
  '    "sweep_max_mb": null,'
  '    "trace_steps": 0,'
  '    "val_steps": 2,'
  '    "precision": "bf16",'
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
  --nnodes=4
  --nproc-per-node=4
  --rdzv-backend=c10d
  --rdzv-endpoint="$endpoint"
  # Agents of another run that connect to this port are rejected.
  --rdzv-id="$rdzv_id"
  # is_host is explicit, because the host's name can differ from its address.
  --rdzv-conf="join_timeout=$join_timeout,is_host=$is_host"
  # The address by which the other hosts reach this one, if known.
  ${BENCH_ADDRESS:+"--local-addr=$BENCH_ADDRESS"}
  # A restarted run would be a different measurement.
  --max-restarts=0
  --no-python
  "${command[@]}"
)

exec "${ranks[@]}"
