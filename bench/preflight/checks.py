"""Measure one node: the rates of its processors and its memory, and the state of its GPUs.

All GPUs of a node work at the same time, as in training, and a rate is that of the slowest GPU.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, TypeVar

import psutil
import torch

from ..cores import usable_cores
from ..measure.nvml import clocks, gpu_facts
from ..measure.step_parts import clock_for

#: Duration of a window. A CPU quota is enforced in periods of 100 ms, so a window must contain many periods.
WINDOW_S = 2.0
#: A single matrix product takes at least this time, so that the time to start the product is negligible.
_PRODUCT_S = 0.004
_MIN_SIZE, _MAX_SIZE = 256, 8192
#: Size of the memory that is copied (larger than caches), and size of the part that one call copies.
_MEMORY_BYTES = 256 * 2**20
_CPU_PART_BYTES = 8 * 2**20
#: Time for which GPUs work before their clocks are read, and number of products that are queued at a time.
_LOADED_S = 1.0
_QUEUED = 50


def devices() -> list[torch.device]:
    """Return all GPUs that this process sees, or the CPU if there is none."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return gpus or [torch.device("cpu")]


def product_size(device: torch.device) -> int:
    """Return the size of square matrices whose product takes some milliseconds on ``device``."""
    size = _MIN_SIZE
    while size < _MAX_SIZE:
        multiply, _ = _product(device, size)
        multiply()
        if min(_timed(multiply, [device]) for _ in range(3)) >= _PRODUCT_S:
            break
        size *= 2
    return size


def product_rate(on: Sequence[torch.device], size: int, *, windows: int) -> float:
    """Return the FLOP/s of a matrix product: float32 on the CPU, bfloat16 on GPUs.

    All devices work at the same time, as in training. The result is the rate of the slowest device.
    """
    return _slowest_rate(on, lambda device: _product(device, size), windows)


def memory_rate(on: Sequence[torch.device], *, windows: int) -> float:
    """Return the bytes/s that a copy within the memory of the slowest device reads and writes."""
    return _slowest_rate(on, _copy, windows)


Work = Callable[[], object]
Result = TypeVar("Result")


def _product(device: torch.device, size: int) -> tuple[Work, float]:
    """Return a function that computes a matrix product, and its number of floating-point operations."""
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    # A GPU draws less power for constant numbers, which would hide a low power limit or poor cooling.
    a, b, out = (torch.rand(size, size, dtype=kind, device=device) for _ in range(3))
    return lambda: torch.mm(a, b, out=out), 2.0 * size**3


def _copy(device: torch.device) -> tuple[Work, float]:
    """Return a function that copies the next part of a large buffer, and the bytes it reads and writes."""
    total, part = _MEMORY_BYTES, _MEMORY_BYTES
    if device.type == "cpu":
        # Small parts: under a CPU quota, a long call would span several periods.
        part = _CPU_PART_BYTES
        total = max(part, min(total, psutil.virtual_memory().available // 16 // part * part))
    shape = (total // part, part)
    sources = torch.ones(shape, dtype=torch.uint8, device=device)
    targets = torch.zeros_like(sources)
    places = itertools.cycle(range(shape[0]))

    def copy_next() -> None:
        place = next(places)
        targets[place].copy_(sources[place])

    return copy_next, 2.0 * part


def _slowest_rate(
    on: Sequence[torch.device], prepare: Callable[[torch.device], tuple[Work, float]], windows: int
) -> float:
    prepared = [prepare(device) for device in on]
    works, amount = [work for work, _ in prepared], prepared[0][1]
    for work in works:
        work()
    if on[0].type == "cpu":
        return float(median([_cpu_rate(works[0], amount) for _ in range(windows)]))
    by_window = [_gpu_rates(works, amount, on) for _ in range(windows)]
    return min(float(median(rates)) for rates in zip(*by_window, strict=True))


def _cpu_rate(work: Work, amount: float) -> float:
    began, done = time.perf_counter(), 0
    while (now := time.perf_counter()) < began + WINDOW_S:
        work()
        done += 1
    return done * amount / (now - began)


def _gpu_rates(works: Sequence[Work], amount: float, on: Sequence[torch.device]) -> list[float]:
    """Return the rate of each GPU in a window in which all GPUs work."""
    once = _timed(works[0], on)
    repeats = max(1, math.ceil(WINDOW_S / max(once, 1e-6) / 2))
    timers = [clock_for(device) for device in on]
    begins = [timer.stamp() for timer in timers]
    _queue(works, repeats)
    ends = [timer.stamp() for timer in timers]
    _synchronize(on)
    spans = zip(timers, begins, ends, strict=True)
    return [repeats * amount / timer.seconds(begin, end) for timer, begin, end in spans]


def _queue(works: Sequence[Work], repeats: int) -> None:
    """Queue works in turn: a GPU's queue is limited, and filling it would block the start of the next GPU."""
    for _ in range(repeats):
        for work in works:
            work()


def _timed(work: Work, on: Sequence[torch.device]) -> float:
    _synchronize(on)
    began = time.perf_counter()
    work()
    _synchronize(on)
    return time.perf_counter() - began


def _synchronize(on: Sequence[torch.device]) -> None:
    for device in on:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def use_all_cores() -> int:
    """Let torch use all cores of this process, at most its CPU quota rounded up; return their number."""
    cores = usable_cores()  # beyond a quota, threads would only use it up while they wait
    torch.set_num_threads(cores)
    return cores


def gpu_state(on: Sequence[torch.device], size: int) -> dict[str, float | None]:
    """Return the worst value of each kind that NVML reports about this node's GPUs while all of them work.

    ``gpu-clock`` is in Hz. ``gpu-slowdown`` counts GPUs whose clocks are lowered because of their
    temperature or hardware. ``gpu-errors`` counts uncorrected memory errors and failed repairs of
    memory rows. The result is empty without GPUs.
    """
    indices = [device.index for device in on if device.type == "cuda"]
    if not indices:
        return {}
    states = _while_busy(on, [_product(device, size)[0] for device in on], lambda: list(map(clocks, indices)))
    facts = gpu_facts()
    mhz = _lowest(state["sm_mhz"] for state in states)
    return {
        "gpu-clock": None if mhz is None else mhz * 1e6,
        "gpu-slowdown": _total(_is_slowed(state["reasons"]) for state in states),
        "gpu-errors": _total(map(_errors, states, facts)),
        "pcie-width": _lowest(one["pcie_width"] for one in facts),
    }


def _while_busy(on: Sequence[torch.device], works: Sequence[Work], read: Callable[[], Result]) -> Result:
    """Return the result of ``read``, which is called in a thread after all GPUs have worked for a second.

    The next works are queued before the earlier ones end, so that no GPU is idle until ``read`` returns.
    """
    timers = [clock_for(device) for device in on]
    with ThreadPoolExecutor(1) as thread:
        earlier: list[Any] = []
        began, reading = time.perf_counter(), None
        while reading is None or not reading.done():
            _queue(works, _QUEUED)
            queued = [timer.stamp() for timer in timers]
            for stamp in earlier:
                stamp.synchronize()
            earlier = queued
            if reading is None and time.perf_counter() >= began + _LOADED_S:
                reading = thread.submit(read)
        _synchronize(on)
        return reading.result()


def _is_slowed(reasons: dict[str, list[str]] | None) -> bool | None:
    if reasons is None:
        return None
    # Alone, hw_slowdown can also mean that the clocks are changing.
    return bool(reasons["thermal"] or set(reasons["hardware"]) - {"hw_slowdown"})


def _errors(state: dict[str, Any], facts: dict[str, Any]) -> int | None:
    errors, rows = state["ecc_uncorrected"], facts["remapped_rows"]
    if errors is None and rows is None:
        return None
    return (errors or 0) + (rows["pending"] + rows["failure"] if rows else 0)


def _lowest(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
