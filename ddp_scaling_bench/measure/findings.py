"""Findings of ranks, which env.json contains: about cores, GPUs, network, model and measurement of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..finding import Recorded, Severity
from ..units import (
    clauses,
    count,
    join_names,
    listed,
    names,
    number_ranges,
    seconds,
    short_name,
    short_percent,
)

# -- cores, GPUs and network ------------------------------------------------------------


class SharedCores(Recorded, kind="shared-cores"):
    """The threads of the ranks on each of ``machines`` (their hosts) outnumber the cores for the ranks.

    ``at_most`` threads per rank would have a core each; it is None if there are more ranks than cores.
    """

    heading = "Ranks share cores"
    verified = True
    remedy = "Use fewer ranks per node, fewer threads per rank (OMP_NUM_THREADS), or more cores per rank"
    remedy += " (cluster.cpus_per_task)."

    ranks: int
    threads: int
    cores: int
    core_ids: tuple[int, ...] = ()
    machines: tuple[tuple[str, ...], ...] = ()
    at_most: int | None = None

    def _message(self) -> str:
        ids = f" ({number_ranges(self.core_ids)})" if self.core_ids else ""
        hosts = listed([join_names([*map(short_name, one)]) for one in self.machines], limit=4)
        on = f" on {'each of ' if len(self.machines) > 1 else ''}{hosts}" if self.machines else ""
        shared = f"{count(self.ranks, 'rank')} share {count(self.cores, 'core')}{ids}{on}"
        if not self.at_most:
            return f"{shared}: adding ranks measures how cores are shared, not the network"
        advice = f"set cluster.cpus_per_task or OMP_NUM_THREADS to {self.at_most} or less"
        return f"{self.threads} threads of {shared}: {advice}"


@dataclass(frozen=True)
class SharedGpu:
    """A GPU that several ranks of a host use."""

    ranks: tuple[int, ...]
    host: str
    gpu: str

    def __str__(self) -> str:
        return f"ranks {number_ranges(self.ranks)} on {self.host} use the same GPU ({self.gpu})"


class SharedGpus(Recorded, kind="shared-gpus"):
    """Several ranks use one GPU."""

    heading = "Ranks share GPUs"
    verified = True

    gpus: tuple[SharedGpu, ...]

    def _message(self) -> str:
        return f"{clauses([*map(str, self.gpus)])}: the times are not those of a GPU per rank"


@dataclass(frozen=True)
class CoresOfNodes:
    """Hosts with the same number of cores, cores per rank, and quota of cores (None if there is no quota)."""

    hosts: tuple[str, ...]
    cores: int | None
    cores_per_rank: tuple[int, ...]
    quota: float | None = None

    def __str__(self) -> str:
        quota = "no quota" if self.quota is None else f"a quota of {self.quota:.6g}"
        cores = "" if self.cores is None else f"{count(self.cores, 'core')}, "
        return f"{names(self.hosts)}: {cores}{_or(self.cores_per_rank)} per rank, {quota}"


class UnequalNodes(Recorded, kind="unequal-nodes"):
    """Nodes differ in their number of cores, in cores per rank, or in quotas."""

    heading = "Unequal nodes"
    verified = True
    remedy = "Select one kind of node (cluster.constraint, cluster.partition)."

    nodes: tuple[CoresOfNodes, ...]

    def _message(self) -> str:
        return clauses([*map(str, self.nodes)])


@dataclass(frozen=True)
class ThreadsOfNodes:
    """Hosts whose ranks have the same numbers of threads."""

    hosts: tuple[str, ...]
    threads: tuple[int, ...]

    def __str__(self) -> str:
        return f"{names(self.hosts)}: {_or(self.threads)} per rank"


class ThreadsDiffer(Recorded, kind="threads-differ"):
    """Ranks differ in their number of threads."""

    heading = "Threads differ"
    verified = True
    remedy = "Set OMP_NUM_THREADS in cluster.env."

    nodes: tuple[ThreadsOfNodes, ...]

    def _message(self) -> str:
        return clauses([*map(str, self.nodes)])


class SocketFallback(Recorded, kind="socket-fallback"):
    """NCCL uses sockets between hosts with InfiniBand (``devices`` of one); ``disabled``: NCCL_IB_DISABLE."""

    interface: str
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    disabled: str | None = None

    def _message(self) -> str:
        check = "check NET/IB in nccl.log, NCCL_IB_HCA, NCCL_NET, `ulimit -l` and the container"
        reason = check if self.disabled is None else f"NCCL_IB_DISABLE={self.disabled} is set"
        unused = f"InfiniBand devices on {names(self.hosts)} have an active port ({names(self.devices)})"
        text = f"NCCL uses sockets ({self.interface}) between hosts, although {unused}"
        return f"{text}: expect a fraction of the bandwidth; {reason}"


class NoPeerAccess(Recorded, kind="no-peer-access"):
    """NCCL connects GPUs of a host through its memory, because of a ``setting`` or without a known reason.

    Without a setting, NCCL's log says that the GPUs are connected, or that they have NVLink.
    """

    setting: str = ""

    def _message(self) -> str:
        check = "check `nvidia-smi topo -p2p r` (ACS, IOMMU, virtualization), and let each rank see all GPUs"
        reason = f"{self.setting} is set: unset it" if self.setting else check
        text = "NCCL copies between GPUs of a host through its memory (SHM), although they can be peers (P2P)"
        return f"{text}: expect a fraction of the bandwidth; {reason}"


class WireBytesHigh(Recorded, kind="wire-bytes-high"):
    """The nodes sent more bytes than the strategy needs."""

    heading = "More bytes sent than needed"

    ratio: float

    def _message(self) -> str:
        why = "retransmissions, another algorithm than a ring, or messages of the training that bench"
        sent = f"the nodes sent {self.ratio:.2g} times the bytes that the strategy needs"
        return f"{sent}: other traffic on the nodes, {why} does not know"


class WireBytesUnseen(Recorded, kind="wire-bytes-unseen"):
    """The counters of the nodes' interfaces show only a share of the bytes that the strategy needs."""

    subject: tuple[str, ...] = ("wire_bytes_per_step",)
    share: float

    def _message(self) -> str:
        share = f"{short_percent(self.share)} of the bytes that the strategy needs"
        why = "so they do not see all of them, for example because the transport bypasses them"
        return f"the counters of the nodes' interfaces show {share}, {why}: wire_bytes_per_step is empty"


class AllocatorRetries(Recorded, kind="allocator-retries"):
    """The memory of a GPU did not suffice at once, which slows steps; ``rank`` had the most retries."""

    retries: int
    rank: int
    host: str

    def _message(self) -> str:
        text = f"the memory of the GPU was full {count(self.retries, 'time')}: the allocator freed its cache"
        return f"{text} and tried again, most often on rank {self.rank} ({short_name(self.host)})"


# -- differences from the plan ----------------------------------------------------------


class OtherLauncher(Recorded, kind="other-launcher"):
    """Another launcher than the planned one started the ranks."""

    planned: str
    used: str

    def _message(self) -> str:
        return f"the plan says launcher {self.planned}, but {self.used} started the ranks"


class OtherStrategy(Recorded, kind="other-strategy"):
    """Another strategy than the planned one is in use, because of the number of hosts and their ranks."""

    verified = True
    strategy: str
    used: str
    hosts: int

    def _message(self) -> str:
        used = f"this run uses {self.used} on {count(self.hosts, 'node')}"
        return f"strategy {self.strategy} needs several nodes with several ranks each: {used}"


class ScriptChanged(Recorded, kind="script-changed"):
    """A script had another SHA-256 when the run started than at the submission; both are shortened."""

    script: str
    submitted: str
    found: str

    def _message(self) -> str:
        found = f"its SHA-256 was {self.submitted}, and was {self.found} when the run started"
        return f"{self.script} has changed since the submission: {found}"


# -- model and measurement --------------------------------------------------------------


class NotStable(Recorded, kind="not-stable"):
    """The step time was not yet stable at the end of the warm-up."""

    heading = "Not yet stable"
    remedy = "Raise warmup_steps."

    steps: int

    def _message(self) -> str:
        return f"the step time was not yet stable after {count(self.steps, 'warm-up step')}"


class ClockWasSet(Recorded, kind="clock-was-set"):
    """Attribution steps are left out because a host's clock was set."""

    steps: int

    def _message(self) -> str:
        because = "because DDP's logger reads that clock; throughput is measured with another one"
        return f"a host's clock was set during {count(self.steps, 'attribution step')}: left out, {because}"


class PartsNotTimed(Recorded, kind="parts-not-timed"):
    """The parts of a step are not measured.

    This release of ``torch`` does not show the communication; an optimizer steps before the model's backward
    pass ends, such as that of ``several`` models; or (without values) the model is only a part.
    """

    torch: str = ""
    strategy: str = ""
    several: bool = False

    def _message(self) -> str:
        if self.several:
            when = "before the backward pass of the recorder's model has ended: that of another model, or one"
            return (
                f"the parts of the step are not measured: an optimizer steps {when} within the backward pass"
            )
        part = "the recorder's model is a part of a sharded model; pass the model that the loop calls"
        unseen = f"torch {self.torch} does not show when {self.strategy} communicates"
        return f"the parts of the step are not measured: {unseen if self.torch else f'{part} to Recorder'}"


class ModelNotWrapped(Recorded, kind="model-not-wrapped"):
    """The recorder's model is not wrapped in DDP, but there are several ranks."""

    message = "the recorder's model is not wrapped in DDP: exposed communication is unknown and may count as"
    message += " backward; pass the DDP model to Recorder"


class ModelNotCalled(Recorded, kind="model-not-called"):
    """The loop never called the recorder's model in an instrumented step."""

    message = "the recorder's model was never called in an instrumented step, so forward and backward are"
    message += " unknown; pass the model that the loop calls to Recorder"


class SamplesUnknown(Recorded, kind="samples-unknown"):
    """The samples of a step are unknown: the first batch has a tensor of ``length``, not ``batch_size``."""

    length: int | float | None = None
    batch_size: int | None = None

    def _message(self) -> str:
        if self.batch_size is None:
            what = "the samples of a step are unknown, so there is no throughput"
            return f"{what}: pass samples=... (docs/recorder.md)"
        tensor = "no tensor" if self.length is None else f"a tensor of length {self.length:g}"
        size = f"but the batch size is {self.batch_size}, so the samples of a batch are unknown"
        return f"the first batch begins with {tensor}, {size}"


class SamplesOfReplicas(Recorded, kind="samples-of-replicas"):
    """The samples that ranks counted do not fit the layout, of ``model_parallel`` ranks per replica."""

    model_parallel: int
    remedy = (
        "Count the samples of each replica alike (recorder.step(samples=N) on one or all of its ranks), or "
        "correct axes.model_parallel."
    )

    def _message(self) -> str:
        what = f"the samples that the ranks counted do not fit {self.model_parallel} ranks per replica"
        return f"{what}: each number must occur equally often for each replica; there is no throughput"


class LayoutDoubtful(Recorded, kind="layout-doubtful"):
    """The ranks' first batches do not fit the ``replicas`` of the plan: ``different`` ones were read."""

    heading = "Layout differs from the plan"
    remedy = (
        "Set axes.model_parallel to the number of ranks that share a replica, 1 without model parallelism. "
        "With context parallelism, each rank may read its own part of a sample."
    )

    different: int
    replicas: int

    def _message(self) -> str:
        return (
            f"the ranks read {self.different} different first batches, but the plan has "
            f"{count(self.replicas, 'replica')}: their samples may be counted a wrong number of times"
        )


class RankUnfinished(Recorded, kind="rank-unfinished"):
    """Ranks did not end in time, so that the last records are lost."""

    remedy = "Create a recorder on every rank, and let every rank take equally many steps."

    ranks: tuple[int, ...]
    timeout_s: float

    def _message(self) -> str:
        late = f"{ranks_named(self.ranks)} did not finish within {self.timeout_s:g} s"
        return f"{late}: the last records are lost"


class StepsDiffer(Recorded, kind="steps-differ"):
    """Ranks recorded different numbers of epochs: the most and the fewest, each with a rank."""

    most_rank: int
    fewest_rank: int
    most: int
    fewest: int

    def _message(self) -> str:
        most, fewest = f"rank {self.most_rank} has {self.most}", f"rank {self.fewest_rank} has {self.fewest}"
        return f"ranks took different numbers of steps ({most}, {fewest} epochs): only common epochs are kept"


class NoWindow(Recorded, kind="no-window"):
    """A rank took too few steps for one window; ``steps`` is the least number."""

    remedy = "Take more steps, or lower warmup_steps and steps_per_epoch."

    steps: int

    def _message(self) -> str:
        few = f"a rank took fewer than {self.steps} steps, or ended before it could send them"
        return f"no window was recorded: {few}"


class FewerWindows(Recorded, kind="fewer-windows"):
    """The training ended before all planned windows; ``steps`` are those of the shortest window."""

    heading = "Fewer windows than planned"
    verified = True
    remedy = (
        "Let the training take more steps, or plan fewer epochs or steps_per_epoch. If it resumed from an"
    )
    remedy += " earlier run's checkpoint, let each run write to its own folder: {run_dir} in the command."

    epochs: int
    planned_epochs: int | None
    steps: int
    planned_steps: int

    def _message(self) -> str:
        windows = "" if self.planned_epochs is None else f"{self.epochs} of {self.planned_epochs} windows"
        steps = f"a window of {self.steps} of {self.planned_steps} steps"
        short = [windows] if self.planned_epochs and self.epochs < self.planned_epochs else []
        short += [steps] if self.steps < self.planned_steps else []
        return f"the training ended early: {' and '.join(short)}"


class SeparateTrainings(Recorded, kind="separate-trainings"):
    """The ranks do not train together; ``by`` is what shows it.

    Attributes:
        spread: the difference between the ranks' changes of a parameter, as a share of its change.
        share: bytes on the wire, as a share of what an exchange of gradients needs.
    """

    heading = "Ranks do not train together"
    verified = True
    severity: Severity = "error"
    remedy = "Wrap the model in DistributedDataParallel, or state workload.exchange: rare if it is meant."

    by: Literal["parameters", "copies", "bytes"]
    spread: float | None = None
    share: float | None = None

    def _message(self) -> str:
        spread = "" if self.spread is None else f" by {short_percent(self.spread)}"
        share = "" if self.share is None else f" ({short_percent(self.share)} of the bytes that it needs)"
        shown = {
            "parameters": f"the changes of their parameters differ{spread}",
            "copies": "their parameters are equal, but they exchanged nothing: each trained on the same data",
            "bytes": f"nearly nothing was sent between them{share}",
        }
        return f"the ranks do not train together: {shown[self.by]}"


class SlowFirstSteps(Recorded, kind="slow-first-steps"):
    """The first batch of each loop over the data takes longer than others, by ``excess_s`` on average.

    ``workers`` is true if the loader starts its workers anew for each loop.
    """

    heading = "Slow first step of each epoch"
    verified = True

    steps: int
    excess_s: float
    share: float
    workers: bool = False

    def _message(self) -> str:
        first = f"the first batch after each start of the loader takes {seconds(self.excess_s)} more"
        return f"{first} ({count(self.steps, 'step')}, {short_percent(self.share)} of the measured time)"

    def _remedy(self) -> str:
        keep = "Keep the loader's workers: DataLoader(persistent_workers=True)."
        return keep if self.workers else ""


class MeasurementsLost(Recorded, kind="measurements-lost"):
    """Measurements could not be written."""

    reason: str

    def _message(self) -> str:
        return f"measurements are lost: {self.reason}"


class WaitsForDevice(Recorded, kind="waits-for-device"):
    """The loop lets the host wait for the GPU, in a step ``waits`` times, so that it cannot run ahead."""

    heading = "Host waits for the GPU"
    remedy = "Read losses only every n steps: add them up in a tensor on the GPU, and call .item() once. Copy"
    remedy += " batches from pinned memory with non_blocking=True."

    waits: int

    def _message(self) -> str:
        often = f"{count(self.waits, 'time')} in a step"
        return f"the loop waits for the GPU {often}, such as in .item() or torch.cuda.synchronize()"


class SideStreams(Recorded, kind="side-streams"):
    """Other CUDA streams still worked for ``step_s`` per step after the stream of the training."""

    heading = "Work on other streams"
    remedy = "If a step needs this work, let its stream wait for it:"
    remedy += " torch.cuda.current_stream().wait_stream(other)."

    step_s: float

    def _message(self) -> str:
        late = f"other CUDA streams still worked for {seconds(self.step_s)} per step"
        return f"{late} when the stream of the training had ended: this time is added to the steps"


class OtherDdp(Recorded, kind="other-ddp"):
    """Another model with DDP trains in the same process."""

    heading = "Another model with DDP"
    message = "another model with DDP trains in the same process, and nothing times what it communicates: the"
    message += " times of communication are empty"
    remedy = "Put the models into one module, and wrap this module in DistributedDataParallel."


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def ranks_named(ranks: Sequence[int]) -> str:
    """Return numbers of ranks in words, such as ``ranks 1-3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {number_ranges(ranks)}"
