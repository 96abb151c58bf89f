#!/bin/bash
# Study strategies: one cell of its matrix.
# n1x2-gloo-torchrun-b8-strategy.fsdp-keep: 2 ranks on this machine, gloo, global batch 16
# `bench submit` does the same for this cell. To run it by hand: bash this-file [RUN_FOLDER]

cell=n1x2-gloo-torchrun-b8-strategy.fsdp-keep
run_dir=${1:-"manual-$cell"}
mkdir -p "$run_dir" || exit 1

python="${BENCH_PYTHON:-python}"
# A rank that finds a different number of ranks stops with an error.
export BENCH_EXPECTED_WORLD_SIZE=2
# The same number of threads in every cell, so that baselines are comparable.
export OMP_NUM_THREADS=1 BENCH_THREADS_PER_RANK=1
# Ranks of one machine use the loopback interface, even if its host name resolves to another address.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
export PYTHONUNBUFFERED=1

workload=(
  --run-dir "$run_dir"
  --launcher torchrun
  --backend gloo
  --per-gpu-batch 8
  --device cpu
  --model transformer
  --strategy fsdp-keep
  --parameters 500000
  --seq-len 32
  --image-size 224
  --data synthetic
  --steps-per-epoch 8
  --epochs 2
  --warmup-steps 3
  --attribution-steps 3
  --probe-steps 1
  --sweep-time 0.5
  --sweep-max-mb 1.0
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
  --nproc-per-node=2 --max-restarts=0 \
  --no-python "$python" -P -u -m ddp_scaling_bench.start workload "${workload[@]}"
