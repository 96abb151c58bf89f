"""Programs of ranks that pretend to have GPUs and NCCL."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import DistBackendError, PrefixStore

from ddp_scaling_bench.measure import peers
from ddp_scaling_bench.measure.environment import Device
from ddp_scaling_bench.measure.exchange import Collectives
from ddp_scaling_bench.measure.torch_internals import Symptom
from ddp_scaling_bench.measure.transport import request_nccl_log
from ddp_scaling_bench.train import gpus, nccl_watch
from ddp_scaling_bench.train import rank as rank_module
from tests.train.scenarios import before_each_batch, main, rank_of_env

WARNING = "n1:7:7 [0] init.cc:904 NCCL WARN Cuda failure 2 'out of memory'"
ERROR = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.28.9\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


def pretend_one_gpu() -> None:
    """All ranks of a host see the same GPU."""
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    gpus.device_of = lambda device, host: Device(str(device), "GPU-5ae1", "NVIDIA H100")
    gpus.pci_address = lambda index: "00000000:3B:00.0"


def one_gpu_with_nccl() -> int:
    """Two ranks would share a GPU; the start of NCCL would be printed."""
    pretend_one_gpu()
    rank_module._start_process_group = lambda session: print("NCCL starts", flush=True)
    return main()


def one_gpu_with_gloo() -> int:
    """Two ranks share a GPU, but compute on the CPU."""
    pretend_one_gpu()
    plain = gpus.choose_device

    def choose(kind: str, *args, **options):
        return torch.device("cpu"), plain("cuda", *args, **options)[1]

    rank_module.choose_device = choose
    return main()


def nccl_fails_at_its_start() -> int:
    """NCCL logs a warning to its file, then fails on each rank."""

    def start(session):
        path = Path(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())))
        path.write_text(f"n1:7:7 [0] NCCL INFO cudaDriverVersion 13000\n\n{WARNING}\n\n{WARNING}\n")
        print(f"log: {path}", flush=True)
        # The store ends with rank 0, which therefore waits until rank 1 no longer needs it.
        store = session.joined.store
        while store.add("rank 1 has started", session.launch.rank) < 1:
            time.sleep(0.01)
        raise DistBackendError(ERROR)

    pretend_nccl()
    rank_module._start_process_group = start
    return main()


def pretend_nccl() -> None:
    from ddp_scaling_bench.train import __main__ as main_module

    request_nccl_log(os.environ)
    plain = main_module.run
    main_module.run = lambda folder, cell, options: plain(folder, replace(cell, backend="nccl"), options)


def rank_1_is_lost(error: Symptom, end: int) -> int:
    """Rank 1 gets the signal ``end`` in its third batch; rank 0 then waits for ever, as it does for a GPU."""
    waits = threading.Event()

    def start(session):
        store = PrefixStore("group", session.joined.store)
        rank = session.launch.rank
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        return Collectives(session.device, "gloo")

    def act(number: int) -> None:
        if number == 3 and rank_of_env():
            os.kill(os.getpid(), end)
        elif number == 3:
            waits.set()
            threading.Event().wait()

    before_each_batch(act)
    pretend_nccl()
    rank_module._start_process_group = start
    nccl_watch.POLL_S, peers.REPORTS_TIMEOUT_S = 0.02, 0.2
    nccl_watch.group_error = lambda: error if waits.is_set() else Symptom.NONE
    return main()


def rank_1_is_killed() -> int:
    return rank_1_is_lost(Symptom.LOST, signal.SIGKILL)


def rank_1_hangs() -> int:
    return rank_1_is_lost(Symptom.TIMED_OUT, signal.SIGSTOP)
