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
[ $# -gt 0 ] || mkdir -p "$run_dir" || exit 1

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
# A rank that finds a different number of ranks stops with an error.
export BENCH_EXPECTED_WORLD_SIZE=16
# The same number of threads in every cell, so that baselines are comparable.
export OMP_NUM_THREADS=8 BENCH_THREADS_PER_RANK=8
# gloo needs the name of one interface. Unless the matrix sets this name, use the interface that leads to
# another host. (By default, gloo uses the address of the machine's own name, often the loopback.)
if [ nccl = gloo ] && [ -z "${GLOO_SOCKET_IFNAME:-}" ]; then
  interface=$("$python" -P -m ddp_scaling_bench.start workload.network_interface "${BENCH_PEER:-${endpoint%:*}}") || exit 1
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME="$interface"
fi
export PYTHONUNBUFFERED=1

workload=(
  --run-dir "$run_dir"
  --launcher torchrun
  --backend nccl
  --per-gpu-batch 24
  --device cuda
  --model transformer
  --parameters 124000000
  --seq-len 128
  --image-size 224
  --data synthetic
  --steps-per-epoch 50
  --epochs 3
  --warmup-steps 10
  --attribution-steps 10
  --probe-steps 6
  --sweep-time 10.0
  --trace-steps 0
  --val-steps 2
  --precision bf16
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

processes=4
# Host 0 serves the rendezvous. is_host is explicit, because the host's name can differ from its address.
is_host=false
[ "$node" -ne 0 ] || is_host=true
# --rdzv-id: agents of another run that connect to this port are rejected.
# --local-addr: the address by which the other hosts reach this one, if known.
# --max-restarts=0: a restarted run would be a different measurement.
exec "$python" -P -m ddp_scaling_bench.start torch.distributed.run --nnodes=4 --nproc-per-node="$processes" \
  --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$rdzv_id" \
  --rdzv-conf="join_timeout=300,is_host=$is_host" \
  ${BENCH_ADDRESS:+"--local-addr=$BENCH_ADDRESS"} --max-restarts=0 \
  --no-python "$python" -P -u -m ddp_scaling_bench.start workload "${workload[@]}"
