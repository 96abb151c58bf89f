"""Programs of ranks for which the correct measurement is known in advance; some pretend to have GPUs and NCCL."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import DistBackendError, PrefixStore
from torch.nn.parallel import DistributedDataParallel

from ddp_scaling_bench.measure import peers
from ddp_scaling_bench.measure.environment import Device, device_of
from ddp_scaling_bench.measure.exchange import Collectives
from ddp_scaling_bench.measure.launch import launch_from
from ddp_scaling_bench.measure.step_parts import StepTimer
from ddp_scaling_bench.measure.torch_internals import Symptom
from ddp_scaling_bench.measure.transport import request_nccl_log
from ddp_scaling_bench.train import gpus, mfu, nccl_watch
from ddp_scaling_bench.train import rank as rank_module
from ddp_scaling_bench.train.data import Feed
from ddp_scaling_bench.train.models import DataShape
from ddp_scaling_bench.train.options import TrainOptions
from ddp_scaling_bench.train.strategies import fsdp
from ddp_scaling_bench.train.training import Task, Trainer, build_task, wrap
from tests.train.ranks import folder_of_test


def main() -> int:
    """Run the built-in training, whose import takes seconds."""
    from ddp_scaling_bench.train import __main__ as program

    return program.main()


def rank_of_env() -> int:
    return launch_from(os.environ).rank


def join_group(**more: object) -> int:
    launch = launch_from(os.environ)
    store = dist.TCPStore(launch.address, int(launch.port), launch.world_size, is_master=launch.rank == 0)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.world_size, **more)
    torch.set_num_threads(1)
    return launch.rank


def before_each_batch(act: Callable[[int], None], *, rank: int | None = None) -> None:
    """Call ``act`` with the number of the batch (from 1) before each batch, on one rank or on all."""
    if rank in (None, rank_of_env()):
        plain = Feed.next
        numbers = count(1)

        def following(self: Feed):
            act(next(numbers))
            return plain(self)

        Feed.next = following


def nan_on_rank_1() -> int:
    """Rank 1's inputs are NaN from the 15th batch on, after 3 to 9 steps of warm-up and a window."""
    plain = Feed.next
    numbers = count(1)

    def broken(self: Feed):
        inputs, targets = plain(self)
        return (inputs * float("nan") if next(numbers) >= 15 else inputs), targets

    if rank_of_env() == 1:
        Feed.next = broken
    return main()


def with_arguments(*words: str) -> int:
    sys.argv = ["train", *words]
    return main()


def raises_on_rank_1() -> int:
    """Rank 1 raises an unexpected error in its third batch."""

    def act(number: int) -> None:
        if number == 3:
            raise ZeroDivisionError("a defect\nof two lines")

    before_each_batch(act, rank=1)
    return main()


def out_of_memory_on_rank_1() -> int:
    """Rank 1 allocates more memory than any machine has, in its third batch."""

    def allocate(number: int) -> None:
        if number == 3:
            torch.empty(2**56, dtype=torch.uint8)

    before_each_batch(allocate, rank=1)
    return main()


def cannot_average_on_rank_1() -> int:
    def full(*size: object, **more: object) -> torch.Tensor:
        raise RuntimeError("a defect")

    if rank_of_env() == 1:
        fsdp.torch = SimpleNamespace(**{**vars(torch), "full": full})
    return main()


def sleeps_on_rank_1() -> int:
    """Rank 1 never reaches its 25th step, after an epoch: its process lives and does nothing."""

    def hang(number: int) -> None:
        if number == 25:
            time.sleep(600)

    before_each_batch(hang, rank=1)
    return main()


def clock_set_on_rank_1() -> int:
    """Rank 1's wall clock, as Python reads it, is set an hour back during an optimizer step.

    The step belongs to the first epoch's attribution window. The warm-up takes 3, 6 or 9 steps, so the timer
    identifies the step.
    """
    wall = time.time_ns
    stop = StepTimer.stop
    stops_so_far = shift = 0

    def stops(self: StepTimer):
        nonlocal stops_so_far, shift
        stops_so_far += 1
        if stops_so_far == 3:  # the first step of the window does not count
            shift = 3_600_000_000_000
        stop(self)

    if rank_of_env() == 1:
        time.time_ns = lambda: wall() - shift
        StepTimer.stop = stops
    return main()


def cpu_with_a_peak() -> int:
    """The CPU has a name and a stated peak."""
    plain = device_of
    rank_module.device_of = lambda device, host: replace(plain(device, host), model="a CPU")
    mfu.peaks = lambda: {"a CPU": mfu.Peak({"fp32": 1e12}, "https://example.org")}
    return main()


def compiled_without_inductor() -> int:
    """The model is traced and split at the buckets as usual, but not compiled by a C++ compiler (a minute)."""
    plain = Task.compile
    compiled = []

    def compile_for_tests(self: Task) -> None:
        plain(self, backend="aot_eager")
        compiled.append(self)

    Task.compile = compile_for_tests
    code = main()
    assert compiled
    return code


def naps_in_epochs() -> int:
    """Every batch sleeps, so that a test can act during the run."""
    before_each_batch(lambda number: time.sleep(0.02))
    return main()


def threads_left() -> int:
    """Report the Python threads that :func:`main` leaves behind."""
    code = main()
    print(
        "left:", [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    )
    return code


class FixedFeed:
    """A feed of given batches."""

    def __init__(self, batches, shape: DataShape) -> None:
        self.shape = shape
        self._batches = iter(batches)

    def next(self):
        return next(self._batches)


def weights_after_a_step() -> int:
    """Compare two micro-batches on two ranks with one plain step on all samples; rank 0 writes the error."""
    rank = join_group()
    folder = folder_of_test()
    options = TrainOptions(device="cpu", model="mlp", parameters=20_000, grad_accum=2, learning_rate=0.1)
    shape = DataShape((16,), (), 10)
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn((4, 8, 16), generator=source)
    targets = torch.randint(10, (4, 8), generator=source)

    model = wrap(build_task(options, shape), options)
    mine = [(inputs[2 * rank + micro], targets[2 * rank + micro]) for micro in range(2)]
    Trainer(model, FixedFeed(mine, shape), options).step()

    plain = build_task(options, shape)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    before = [p.detach().clone() for p in plain.parameters()]
    plain(inputs.flatten(0, 1), targets.flatten()).backward()
    optimizer.step()
    pairs = zip(model.module.parameters(), plain.parameters(), before, strict=True)
    found = [(float((a - b).abs().max()), float((b - c).abs().max())) for a, b, c in pairs]
    if rank == 0:
        content = {"error": max(e for e, _ in found), "change": max(c for _, c in found)}
        (folder / "weights.json").write_text(json.dumps(content))
    return 0


def no_memory_in_a_probe(rank: str, steps: str) -> int:
    """A rank has no memory for a probe, after the copy of the model has taken some steps of all ranks."""
    plain, seen = Trainer.backward, []

    def backward(self: Trainer, batch, *, syncs: bool):
        seen.append(self.model)
        exchanged = sum(isinstance(one, DistributedDataParallel) for one in seen if one is not seen[0])
        if self.model is not seen[0] and exchanged == int(steps):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return plain(self, batch, syncs=syncs)

    if rank_of_env() == int(rank):
        Trainer.backward = backward
    return main()


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
