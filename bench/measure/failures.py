"""Failures of ranks: one class per expected failure.

A rank that fails writes its failure to ``failure.RANK.json`` in the run's folder, beside printing it. `bench`
takes the reason of the run's end from there, and not from the line that the rank prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..finding import Recorded, Severity
from ..units import human_bytes, join_names
from .findings import SharedGpu, ranks_named
from .nccl_errors import NcclError

#: Files of the ranks that failed, in the run's folder.
FAILURES = "failure.{}.json"
_GPUS_NAMED = 3


@dataclass(frozen=True)
class HostRank:
    """A rank and its host, which is empty if it is not known."""

    rank: int
    host: str = ""

    def __str__(self) -> str:
        return ranks_on_hosts([self])


def ranks_on_hosts(ranks: Iterable[HostRank]) -> str:
    """Format ranks with their hosts, such as ``rank 0 on n1, ranks 1-3 on n2``."""
    groups: dict[str, list[int]] = {}
    for one in ranks:
        groups.setdefault(one.host, []).append(one.rank)
    named = (ranks_named(group) + (f" on {host}" if host else "") for host, group in groups.items())
    return ", ".join(named) or "none"


class Failure(Recorded):
    """The base of all failures.

    Attributes:
        effect: not empty if another rank failed before: that rank was ``lost``, or did not come in time.
        is_cause: true if the kind is a cause that `bench doctor` shows.
        failed: the ranks that failed; empty if the failure is not one of single ranks.
        nccl: NCCL's own error, if it is a part of the failure.
    """

    effect: ClassVar[Literal["", "lost", "late"]] = ""
    severity: Severity = "error"

    failed: tuple[HostRank, ...] = ()
    nccl: NcclError | None = None

    @property
    def is_cause(self) -> bool:
        """Whether `bench doctor` shows the failure as a cause."""
        return False

    @property
    def what(self) -> str:
        """What happened, without the ranks."""
        raise NotImplementedError

    def _message(self) -> str:
        return f"{ranks_on_hosts(self.failed)}: {self.what}" if self.failed else self.what


class RankFailed(Failure, kind="rank-failed"):
    """A failure that has no class of its own: a setting, a file or the network is not as it should be."""

    text: str
    remedy: str = ""

    @property
    def what(self) -> str:
        """The text."""
        return self.text


class RaisedError(Failure, kind="raised-error"):
    """An error that nobody expects; its traceback is above the message in the log."""

    error: str
    text: str = ""

    @property
    def what(self) -> str:
        """The type of the error, and NCCL's own error or the first line of its text."""
        return ": ".join(filter(None, (self.error, str(self.nccl or self.text))))


# -- memory, data and GPUs --------------------------------------------------------------


class OutOfMemory(Failure, kind="out-of-memory"):
    """The memory of the host or the GPU did not suffice; ``text`` is torch's error."""

    remedy = "lower the batch per rank, or set workload.activation_checkpointing to true"

    text: str = ""

    @property
    def what(self) -> str:
        """The error."""
        return f"out of memory: {self.nccl or self.text or 'no memory left'}"


class ModelTooLarge(Failure, kind="model-too-large"):
    """A model whose ``states`` do not fit into the memory that ``ranks`` of a host or GPU share."""

    remedy = "lower workload.parameters"

    states: str
    parameters: int
    needed_bytes: int
    ranks: int
    available_bytes: int

    @property
    def what(self) -> str:
        """The memory that is needed and available."""
        return (
            f"out of memory: {self.states} of {self.parameters:,} parameters need "
            f"{human_bytes(self.needed_bytes)} for {self.ranks} rank(s); "
            f"only {human_bytes(self.available_bytes)} are available"
        )


class DataTooSmall(Failure, kind="data-too-small"):
    """The data set has fewer samples than one step of all ranks needs."""

    is_cause = True
    remedy = "use fewer ranks, a smaller batch or more data"

    samples: int
    ranks: int
    batch: int

    @property
    def what(self) -> str:
        """The samples, and the samples of a step."""
        return (
            f"data set smaller than one step: {self.samples} training samples for "
            f"{self.ranks} ranks x {self.batch} = {self.ranks * self.batch}"
        )


class LossNotFinite(Failure, kind="loss-not-finite"):
    """The loss became NaN or infinite, in an epoch or (None) in the warm-up.

    ``value`` says which, if only one is possible. ``everywhere`` is true if ``ranks`` are all ranks.
    """

    is_cause = True
    remedy = "lower the learning rate, use bf16 or fp32 instead of fp16, or look for NaN in the data"

    epoch: int | None
    ranks: tuple[int, ...]
    everywhere: bool = False
    value: Literal["NaN", "infinite", "NaN or infinite"] = "NaN or infinite"

    @property
    def what(self) -> str:
        """Epoch and ranks."""
        section = "the warm-up" if self.epoch is None else f"epoch {self.epoch}"
        ranks = "every rank" if self.everywhere else ranks_named(self.ranks)
        return f"the loss became {self.value} in {section} on {ranks}"


@dataclass(frozen=True)
class GpuProblem:
    """Ranks without a GPU: they see none, or ``device`` has an ``error``.

    ``cpu_torch`` is the release of torch if it is a build without CUDA.
    """

    ranks: tuple[int, ...]
    cpu_torch: str = ""
    device: str = ""
    error: str = ""

    def __str__(self) -> str:
        who = ranks_named(self.ranks)
        if self.device:
            return f"{who}: {self.device} cannot be used: {self.error}"
        build = f", and torch {self.cpu_torch} is a build without CUDA" if self.cpu_torch else ""
        return f"{who}: no CUDA device is visible{build}"


class NoGpu(Failure, kind="no-gpu-on-node"):
    """Ranks have no GPU."""

    problems: tuple[GpuProblem, ...]

    @property
    def is_cause(self) -> bool:
        """Whether a rank sees no GPU; other errors are CUDA's, which the logs contain."""
        return any(not one.device for one in self.problems)

    @property
    def what(self) -> str:
        """The ranks, and why they have none."""
        return "; ".join(map(str, self.problems))

    def _remedy(self) -> str:
        remedy = "request GPUs for the job, install torch with CUDA, or set the device to cpu"
        return remedy if self.is_cause else ""


class DuplicateGpu(Failure, kind="duplicate-gpu"):
    """Several ranks would use one GPU, which NCCL refuses."""

    is_cause = True
    remedy = "request one GPU per rank (gpus_per_node), start fewer ranks per node, or use backend gloo"

    gpus: tuple[SharedGpu, ...]

    @property
    def what(self) -> str:
        """The GPUs with their ranks."""
        named = join_names([*map(str, self.gpus)], most=_GPUS_NAMED)
        return f"{named}, but NCCL needs a GPU for each rank"


# -- ranks that are missing or lost -----------------------------------------------------


class OtherSize(Failure, kind="other-size"):
    """Another number of processes was started than planned; ``launcher`` is the planned one."""

    started: int
    planned: int
    launcher: str = ""

    @property
    def what(self) -> str:
        """Both numbers."""
        return f"{self.started} of {self.planned} planned processes started"

    def _remedy(self) -> str:
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

    @property
    def what(self) -> str:
        """How many ranks joined, and which did not."""
        ranks = len(self.missing) + len(self.joined)
        text = f"{len(self.joined)}/{ranks} ranks joined in {self.timeout_s:g} s"
        text += f"; missing: {ranks_on_hosts(self.missing)}; joined: {ranks_on_hosts(self.joined)}"
        return f"{text}; no rank joined from {', '.join(self.silent)}" if self.silent else text


class BrokenGroup(Failure):
    """Communication broke because of another rank, as far as this rank knows.

    Attributes:
        first: the rank that reported first that it fails, for the reason in ``said``.
        ended: the rank that served the store, and no longer does.
        absent: the ranks that reported nothing.
    """

    first: HostRank | None = None
    said: str = ""
    ended: HostRank | None = None
    absent: tuple[HostRank, ...] = ()

    def _because(self, absent: str, unknown: str) -> str:
        text = absent if self.absent else unknown
        if self.ended:
            text = f"{self.ended} has ended, and its own message says why"
        if self.first:
            text = f"{self.first} failed first: {self.said}"
        return "; ".join(filter(None, (text, str(self.nccl or ""))))


class LostConnection(BrokenGroup, kind="lost-connection"):
    """A rank lost the connection to another rank."""

    effect = "lost"

    @property
    def what(self) -> str:
        """What is known about the other rank."""
        absent = f"no report from {ranks_on_hosts(self.absent)}: killed, or the host was lost"
        unknown = "it ended first, see its own message"
        return f"lost the connection to another rank: {self._because(absent, unknown)}"


class LateCollective(BrokenGroup, kind="nccl-timeout"):
    """A collective did not complete in its time-out (None: it is not known), which ``option`` sets."""

    effect = "late"
    is_cause = True

    timeout_s: float | None
    option: str

    @property
    def what(self) -> str:
        """The time-out, and what is known about the rank that did not come."""
        limit = "its time-out" if self.timeout_s is None else f"{self.timeout_s:g} s"
        absent = f"{ranks_on_hosts(self.absent)} did not reach the collective"
        because = self._because(absent, "a rank hangs or was lost")
        return f"a collective did not complete in {limit}: {because}"

    def _remedy(self) -> str:
        look = "find out why" if self.absent else "see the other ranks' messages"
        return "" if self.first or self.ended else f"{look}, or raise {self.option}"
