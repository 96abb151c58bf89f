"""Test program for one rank: join over gloo, average the ranks, and time an all-reduce.

Prints one JSON line per rank. ``--megabytes`` is the size of the all-reduce.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time

import torch
import torch.distributed as dist

SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=8.4)
    options = parser.parse_args()
    for name, slurm in SLURM.items():  # torchrun sets these itself
        os.environ.setdefault(name, os.environ.get(slurm, ""))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mean = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(mean)
    mean /= dist.get_world_size()

    payload = torch.ones(int(options.megabytes * 1e6) // 4)
    dist.all_reduce(payload)  # warm-up: creates connections and buffers
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(payload)
    seconds = time.perf_counter() - began
    print(
        json.dumps(
            {
                "rank": dist.get_rank(),
                "world_size": dist.get_world_size(),
                "local_rank": int(os.environ["LOCAL_RANK"]),
                "host": socket.gethostname(),
                "mean": mean.item(),
                "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "bytes": payload.numel() * 4,
                "seconds": seconds,
            }
        ),
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
