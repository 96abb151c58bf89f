"""Training loops as users write them, each with a recorder; the expected readings are known in advance."""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_scaling_bench.measure.step_parts import DDP_ALWAYS_SAMPLED
from ddp_scaling_bench.record import Recorder
from tests.train.ranks import folder_of_test

NAP_S = 0.03
BATCH = 8
LENGTHS = {"warmup_steps": 3, "steps_per_epoch": 5, "attribution_steps": 3, "epochs": 2}
#: Steps of LENGTHS: warm-up, then twice (window, attribution with one uncounted step, two between).
ALL_STEPS = 3 + 2 * (5 + 4 + 2)
DEADLINE_S = 280
SPIN_CYCLES = 20_000_000


def join(timeout: timedelta | None = None, backend: str | None = "gloo") -> int:
    if timeout is None:
        dist.init_process_group(backend)
    else:  # of the collectives; the store has its own, because ranks may start at different times
        store, rank, ranks = next(dist.rendezvous("env://"))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    torch.set_num_threads(1)
    return dist.get_rank()


def network(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))


def batches(steps: int = ALL_STEPS, nap_s: float = 0.0) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(steps):
        time.sleep(nap_s)
        yield torch.randn(BATCH, 16), torch.randint(4, (BATCH,))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def leave() -> int:
    dist.barrier()
    sys.stdout.flush()
    return 0


Loop = Callable[[Recorder, DistributedDataParallel, torch.optim.Optimizer, int], None]
LOOPS: list[Loop] = []


def loop(body: Loop) -> Loop:
    """Let ``body`` be one of the loops of :func:`loops`, with a recorder, a model in DDP and the rank."""
    LOOPS.append(body)
    return body


def loops() -> int:
    """Execute all loops one after another, each with a recorder and a folder with its name.

    Torch chooses the backend.
    """
    rank = join(backend=None)
    for body in LOOPS:
        model, optimizer = trained(DistributedDataParallel(network()))
        with Recorder(model, run_dir=folder_of_test() / body.__name__, **LENGTHS) as recorder:
            body(recorder, model, optimizer, rank)
    return leave()


class PlantedClock:
    """The recorder's clock, which stands still but for ``sleep``."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        return round(self.now * 1e9)

    time_ns = perf_counter_ns


def wait_for_output(text: str) -> None:
    """Wait until rank 0 has printed ``text``."""
    output = folder_of_test() / "0.out"
    deadline = time.monotonic() + DEADLINE_S
    while text not in output.read_text():
        assert time.monotonic() < deadline, "the event never came"
        time.sleep(0.05)


def three_lines() -> int:
    """Rank 1's loader sleeps; nobody calls close."""
    rank = join()
    model, optimizer = trained(DistributedDataParallel(network()))
    recorder = Recorder(model, run_dir=folder_of_test(), **LENGTHS)
    for batch in recorder.batches(batches(nap_s=NAP_S if rank else 0.0)):
        with recorder.step():
            train(model, optimizer, batch)
    return leave()


@loop
def synchronises_each(recorder, model, optimizer, rank):
    """Two micro-batches per step that both synchronise, a common mistake."""
    for _ in range(ALL_STEPS):
        with recorder.step(samples=2 * BATCH):
            for points, labels in batches(2):
                cross_entropy(model(points), labels).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def closure(recorder, model, optimizer, rank):
    """An optimizer that calls the forward and the backward pass."""
    model.module.register_forward_pre_hook(lambda *given: time.sleep(NAP_S))
    for points, labels in recorder.batches(batches()):

        def again(points: Tensor = points, labels: Tensor = labels) -> float:
            optimizer.zero_grad()
            loss = cross_entropy(model(points), labels)
            loss.backward()
            return float(loss)

        with recorder.step():
            optimizer.step(again)


def own_group_without_ddp() -> int:
    """The loop reduces its gradients; how long it waits for them cannot be observed."""
    join()
    model, optimizer = trained(network())
    with Recorder(model, run_dir=folder_of_test(), **LENGTHS) as recorder:
        for batch in recorder.batches(batches()):
            with recorder.step():
                cross_entropy(model(batch[0]), batch[1]).backward()
                for weight in model.parameters():
                    dist.all_reduce(weight.grad)
                optimizer.step()
                optimizer.zero_grad()
    return leave()


@loop
def fetches_between(recorder, model, optimizer, rank):
    """The next batch is fetched between the forward and the backward pass of both micro-batches."""
    waiting = iter(recorder.batches(batches(2 * ALL_STEPS + 1, nap_s=NAP_S)))
    points, labels = next(waiting)
    for _ in range(ALL_STEPS):
        with recorder.step():
            for last in (False, True):
                model.require_backward_grad_sync = last
                loss = cross_entropy(model(points), labels)
                points, labels = next(waiting)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def evaluates_in_the_step(recorder, model, optimizer, rank):
    """The model is called without gradients before and after the backward pass of the same step."""
    model.module.register_forward_pre_hook(lambda *given: time.sleep(NAP_S))
    for points, labels in recorder.batches(batches()):
        with recorder.step():
            loss = cross_entropy(model(points), labels)
            with torch.no_grad():
                model(points)
            loss.backward()
            with torch.no_grad():
                model(points)
            optimizer.step()
            optimizer.zero_grad()


@loop
def unknown_samples(recorder, model, optimizer, rank):
    for batch in batches():
        with recorder.step():
            train(model, optimizer, batch)


@loop
def uneven_batches(recorder, model, optimizer, rank):
    """Rank 1 has one sample less in each step."""
    for points, labels in recorder.batches(batches()):
        with recorder.step(samples=BATCH - rank):
            train(model, optimizer, (points[rank:], labels[rank:]))
            recorder.loss(torch.tensor(float("nan")) if rank else torch.tensor(1.0))


def times_out() -> int:
    """Rank 1 sleeps for minutes in a step, and the collectives of rank 0 time out after 5 s.

    The exception is handled as by the interpreter: it prints the traceback and calls the exit functions.
    """
    rank = join(timeout=timedelta(seconds=5))
    model, optimizer = trained(DistributedDataParallel(network()))
    recorder = Recorder(model, run_dir=folder_of_test(), **LENGTHS)
    try:
        for number, batch in enumerate(batches()):
            with recorder.step(samples=BATCH):
                if number == 20 and rank == 1:
                    time.sleep(600)
                train(model, optimizer, batch)
    except RuntimeError as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()
        return 1
    return 0


def gets_sigterm() -> int:
    """Get SIGTERM in the second throughput window."""
    recorder = Recorder(run_dir=folder_of_test(), **LENGTHS)
    for number in range(ALL_STEPS):
        with recorder.step(samples=1):
            if number == 3 + 11 + 2:
                handler, wakeup = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
                threads = [thread.name for thread in threading.enumerate()]
                print(f"handler {handler.name}, wakeup {wakeup}, threads {threads}", flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001)
    return 0


@loop
def uneven_steps(recorder, model, optimizer, rank):
    """Rank 1 runs out of data after the first epoch; DDP's Join lets the other rank continue."""
    with Join([model]):
        for batch in recorder.batches(batches(ALL_STEPS - 11 * rank)):
            with recorder.step():
                train(model, optimizer, batch)


def raises() -> int:
    """Every rank raises in the second throughput window."""
    join()
    model, optimizer = trained(DistributedDataParallel(network()))
    began = time.monotonic()
    try:
        with Recorder(model, run_dir=folder_of_test(), **LENGTHS) as recorder:
            for number, batch in enumerate(recorder.batches(batches())):
                with recorder.step():
                    train(model, optimizer, batch)
                    if number == 15:
                        raise KeyError("planted")
    except KeyError:
        print(f"left after {time.monotonic() - began:.1f} s")
    return leave()


def one_rank_is_lost() -> int:
    """Rank 1 never reaches the end."""
    rank = join()
    model, optimizer = trained(DistributedDataParallel(network()))
    recorder = Recorder(model, run_dir=folder_of_test(), **LENGTHS)
    for batch in recorder.batches(batches()):
        with recorder.step():
            train(model, optimizer, batch)
    if rank:
        wait_for_output("did not finish")
        os._exit(0)
    recorder.close(timeout_s=0.3)
    return 0


@loop
def too_few_steps(recorder, model, optimizer, rank):
    for batch in recorder.batches(batches(3)):
        with recorder.step():
            train(model, optimizer, batch)


def before_the_group() -> int:
    """The first step comes before the process group."""
    recorder = Recorder(network(), run_dir=folder_of_test())
    try:
        recorder.begin()
    except Exception as error:
        print(error)
    return 0


@loop
def hooks(recorder, model, optimizer, rank):
    """Print the steps in which the model has hooks."""
    hooked = []
    for batch in recorder.batches(batches(ALL_STEPS + 5)):
        with recorder.step():
            train(model, optimizer, batch)
            hooked.append("x" if model._forward_hooks or model._forward_pre_hooks else ".")
    if rank == 0:
        print("".join(hooked))


def on_a_gpu() -> int:
    """Over nccl, the GPU spins in forward, in backward and in the optimizer, while the host runs ahead."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    model, optimizer = trained(DistributedDataParallel(network(4096).to(device), device_ids=[0]))

    def spin(*given: object) -> None:
        torch.cuda._sleep(SPIN_CYCLES)

    model.module.register_forward_pre_hook(spin)
    model.module.register_full_backward_pre_hook(spin)
    optimizer.register_step_pre_hook(spin)
    began = time.perf_counter()
    with Recorder(model, run_dir=folder_of_test(), **LENGTHS) as recorder:
        # On CUDA the warm-up includes the steps that DDP's logger always samples.
        for points, labels in recorder.batches(batches(ALL_STEPS + DDP_ALWAYS_SAMPLED)):
            with recorder.step():
                train(model, optimizer, (points.to(device), labels.to(device)))
        torch.cuda.synchronize()
    print(f"seconds {time.perf_counter() - began}")
    return leave()
