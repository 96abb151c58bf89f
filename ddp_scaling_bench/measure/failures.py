"""Failures of ranks: one class per expected failure.

A rank that fails writes its failure to ``failure.RANK.json`` in the run's folder, beside printing it. `bench`
takes the reason of the run's end from there, and not from the line that the rank prints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from ..errors import UnwritableError
from ..files import write_json
from ..finding import Recorded, Severity
from ..units import count, human_bytes, join_names
from .findings import SharedGpu, ranks_named
from .nccl_errors import NcclError

#: Files of the ranks that failed, in the run's folder.
FAILURES = "failure.{}.json"
#: The remedy if a rank left the loop while others go on.
LEAVE_TOGETHER = "let all ranks take equally many steps, and decide together when to stop"
_GPUS_NAMED = 3


def write_failures(found: Iterable[Failure], rank: int | None = None) -> None:
    """Write why this rank fails, unless it has done so before; a disk that is full is no further error."""
    number = next((os.environ[name] for name in ("RANK", "SLURM_PROCID") if name in os.environ), "0")
    folder = os.environ.get("BENCH_RUN_DIR")
    path = Path(folder or ".") / FAILURES.format(number if rank is None else rank)
    if folder and not path.exists():
        with suppress(OSError, UnwritableError):
            write_json(path, {"time": time.time(), "findings": [one.as_json() for one in found]})


@dataclass(frozen=True)
class HostRank:
    """A rank and its host, which is empty if it is not known."""

    rank: int
    host: str = ""

    def __str__(self) -> str:
        return ranks_on_hosts([self])


@dataclass(frozen=True)
class LeftRank(HostRank):
    """A rank that closed its recorder after a number of steps, while others go on."""

    steps: int = 0


def ranks_on_hosts(ranks: Iterable[HostRank]) -> str:
    """Format ranks with their hosts, such as ``rank 0 on n1, ranks 1-3 on n2``."""
    groups: dict[str, list[int]] = {}
    for one in ranks:
        groups.setdefault(one.host, []).append(one.rank)
    named = (ranks_named(group) + (f" on {host}" if host else "") for host, group in groups.items())
    return ", ".join(named) or "none"


class Failure(Recorded):
    """The base of all failures; ``failed`` are the ranks that failed, if it is one of single ranks."""

    #: Not empty if another rank failed before: that rank was lost, or did not come in time.
    effect: ClassVar[Literal["", "lost", "late"]] = ""
    #: Whether the kind is a cause that `bench doctor` shows.
    is_cause: ClassVar[bool] = False
    severity: Severity = "error"

    failed: tuple[HostRank, ...] = ()
    nccl: NcclError | None = None

    def _what(self) -> str:
        raise NotImplementedError

    def _message(self) -> str:
        return f"{ranks_on_hosts(self.failed)}: {self._what()}" if self.failed else self._what()


class RankFailed(Failure, kind="rank-failed"):
    """A failure that has no class of its own: a setting, a file or the network is not as it should be."""

    text: str
    remedy: str = ""

    def _what(self) -> str:
        return self.text


class RaisedError(Failure, kind="raised-error"):
    """An error that nobody expects; its traceback is above the message in the log."""

    error: str
    text: str = ""

    def _what(self) -> str:
        return ": ".join(filter(None, (self.error, str(self.nccl or self.text))))


class NoStep(Failure, kind="no-step"):
    """The program created a recorder, but took no step."""

    remedy = "put each step into `with recorder.step():`; or, if it resumed from an earlier run's checkpoint,"
    remedy += " let the command write to {run_dir}"

    def _what(self) -> str:
        return "the training took no step"


# -- memory, data and GPUs --------------------------------------------------------------


class OutOfMemory(Failure, kind="out-of-memory"):
    """The memory of the host or the GPU did not suffice; ``text`` is torch's error."""

    remedy = "lower the batch per rank, or set workload.activation_checkpointing to true"

    text: str = ""

    def _what(self) -> str:
        return f"out of memory: {self.nccl or self.text or 'no memory left'}"


class ModelTooLarge(Failure, kind="model-too-large"):
    """A model whose ``states`` do not fit into the memory that ``ranks`` of a host or GPU share."""

    remedy = "lower workload.parameters"

    states: str
    parameters: int
    needed_bytes: int
    ranks: int
    available_bytes: int

    def _what(self) -> str:
        needed, available = human_bytes(self.needed_bytes), human_bytes(self.available_bytes)
        need = f"{self.states} of {self.parameters:,} parameters need {needed} for {self.ranks} rank(s)"
        return f"out of memory: {need}; only {available} are available"


class DataTooSmall(Failure, kind="data-too-small"):
    """The data set has fewer samples than one step of all ranks needs."""

    is_cause = True
    remedy = "use fewer ranks, a smaller batch or more data"

    samples: int
    ranks: int
    batch: int

    def _what(self) -> str:
        step = f"{self.ranks} ranks x {self.batch} = {self.ranks * self.batch}"
        return f"data set smaller than one step: {self.samples} training samples for {step}"


class LossNotFinite(Failure, kind="loss-not-finite"):
    """The loss became NaN or infinite in an epoch, or (None) in the warm-up; ``everywhere``: on all ranks."""

    is_cause = True
    remedy = "lower the learning rate, use bf16 or fp32 instead of fp16, or look for NaN in the data"

    epoch: int | None
    ranks: tuple[int, ...]
    everywhere: bool = False
    value: Literal["NaN", "infinite", "NaN or infinite"] = "NaN or infinite"

    def _what(self) -> str:
        section = "the warm-up" if self.epoch is None else f"epoch {self.epoch}"
        ranks = "every rank" if self.everywhere else ranks_named(self.ranks)
        return f"the loss became {self.value} in {section} on {ranks}"


@dataclass(frozen=True)
class GpuProblem:
    """Ranks without a GPU: they see none (``cpu_torch`` is a build without CUDA), or it has an ``error``."""

    ranks: tuple[int, ...]
    cpu_torch: str = ""
    device: str = ""
    error: str = ""

    def __str__(self) -> str:
        who = ranks_named(self.ranks)
        build = f", and torch {self.cpu_torch} is a build without CUDA" if self.cpu_torch else ""
        problem = f"{self.device} cannot be used: {self.error}"
        return f"{who}: {problem if self.device else f'no CUDA device is visible{build}'}"


class NoGpu(Failure, kind="no-gpu-on-node"):
    """Ranks have no GPU."""

    problems: tuple[GpuProblem, ...]

    @property
    def is_cause(self) -> bool:  # type: ignore[override]
        """Whether a rank sees no GPU; other errors are CUDA's, which the logs contain."""
        return any(not one.device for one in self.problems)

    def _what(self) -> str:
        return "; ".join(map(str, self.problems))

    def _remedy(self) -> str:
        remedy = "request GPUs for the job, install torch with CUDA, or set the device to cpu"
        return remedy if self.is_cause else ""


class DuplicateGpu(Failure, kind="duplicate-gpu"):
    """Several ranks would use one GPU, which NCCL refuses."""

    is_cause = True
    remedy = "request one GPU per rank (gpus_per_node), start fewer ranks per node, or use backend gloo"

    gpus: tuple[SharedGpu, ...]

    def _what(self) -> str:
        named = join_names([*map(str, self.gpus)], most=_GPUS_NAMED)
        return f"{named}, but NCCL needs a GPU for each rank"


# -- ranks that are missing or lost -----------------------------------------------------


class OtherSize(Failure, kind="other-size"):
    """Another number of processes was started than planned; ``launcher`` is the planned one."""

    started: int
    planned: int
    launcher: str = ""

    def _what(self) -> str:
        return f"{self.started} of {self.planned} planned processes started"

    def _remedy(self) -> str:
        if self.launcher == "own" and self.started > self.planned:
            return "the command starts more processes than the matrix says: use {tasks_per_node}, {nodes}"
        if self.launcher == "own":
            return (
                "the command starts the ranks, and did not start or join them all: give its launcher the "
                "sizes, such as {nodes}, {tasks_per_node}, {node_rank} and {master_addr} (docs/recipes.md)"
            )
        if self.started > self.planned:
            return "check the launch line; the command must not contain another launcher"
        lacks_srun = self.started == 1 and self.launcher == "srun"
        return "does the launch line lack srun?" if lacks_srun else "check the launch line"


class RanksMissing(Failure, kind="ranks-missing"):
    """Ranks did not join in time; ``silent`` are the hosts of the job from which no rank joined."""

    missing: tuple[HostRank, ...]
    joined: tuple[HostRank, ...]
    timeout_s: float
    silent: tuple[str, ...] = ()

    def _what(self) -> str:
        number, missing, joined = len(self.joined), ranks_on_hosts(self.missing), ranks_on_hosts(self.joined)
        text = f"{number}/{number + len(self.missing)} ranks joined in {self.timeout_s:g} s"
        silent = f"; no rank joined from {', '.join(self.silent)}" if self.silent else ""
        return f"{text}; missing: {missing}; joined: {joined}{silent}"


class BrokenGroup(Failure):
    """Communication broke because of another rank, as far as this rank knows.

    ``first`` reported first that it fails, for the reason in ``said``; ``ended`` served the store, and no
    longer does; ``left`` are the ranks that had closed their recorders, and ``absent`` the others that
    reported nothing.
    """

    first: HostRank | None = None
    said: str = ""
    ended: HostRank | None = None
    absent: tuple[HostRank, ...] = ()
    left: tuple[LeftRank, ...] = ()

    def _because(self, absent: str, unknown: str) -> str:
        left = "; ".join(
            f"{ranks_on_hosts(group)} left the loop after {count(steps, 'step')}: "
            f"{'they closed their recorders' if len(group) > 1 else 'it closed its recorder'}"
            for steps in sorted({one.steps for one in self.left})
            if (group := [one for one in self.left if one.steps == steps])
        )
        text = "; ".join(filter(None, (left, absent if self.absent else ""))) or unknown
        if self.ended:
            text = f"{self.ended} has ended, and its own message says why"
        if self.first:
            text = f"{self.first} failed first: {self.said}"
        return "; ".join(filter(None, (text, str(self.nccl or ""))))


class LostConnection(BrokenGroup, kind="lost-connection"):
    """A rank lost the connection to another rank."""

    effect = "lost"

    @property
    def is_cause(self) -> bool:  # type: ignore[override]
        """Whether it is known why: the other rank left the loop."""
        return bool(self.left)

    def _remedy(self) -> str:
        return LEAVE_TOGETHER if self.left else ""

    def _what(self) -> str:
        absent = f"no report from {ranks_on_hosts(self.absent)}: it ended or was killed, or the host was lost"
        unknown = "it ended first, see its own message"
        return f"lost the connection to another rank: {self._because(absent, unknown)}"


class LateCollective(BrokenGroup, kind="nccl-timeout"):
    """A collective did not complete in its time-out (None: it is not known), which ``option`` sets."""

    effect = "late"
    is_cause = True

    timeout_s: float | None
    option: str

    def _what(self) -> str:
        limit = "its time-out" if self.timeout_s is None else f"{self.timeout_s:g} s"
        absent = f"{ranks_on_hosts(self.absent)} did not reach the collective"
        because = self._because(absent, "a rank hangs or was lost")
        return f"a collective did not complete in {limit}: {because}"

    def _remedy(self) -> str:
        look = "find out why" if self.absent else "see the other ranks' messages"
        raise_it = "" if self.first or self.ended else f"{look}, or raise {self.option}"
        return LEAVE_TOGETHER if self.left else raise_it
