"""The causes of a slow step: their names, titles and remedies. docs/why.md describes each of them."""

from __future__ import annotations

from typing import NamedTuple

#: Rows that are not causes: time that no timer covers, and loss not assigned to a cause. ``not-valid``
#: replaces all rows with a share, for a cell that has an error (see :mod:`analysis.checks.validity`).
OTHER, NOT_EXPLAINED, NOT_VALID = "other", "not-explained", "not-valid"
RESTS = (OTHER, NOT_EXPLAINED, NOT_VALID)
#: Separates the names of causes that the data do not distinguish.
TOGETHER = " or "


class Info(NamedTuple):
    """The title of a cause on the page, what it is, and what to change."""

    title: str
    meaning: str
    remedy: str


#: All causes by name. The names are those of causes.csv, of `bench doctor --json` and of docs/why.md.
CAUSES: dict[str, Info] = {
    "late-rank": Info(
        "late rank",
        "One rank does more work in a part of the step, and all others wait for it.",
        "Give all ranks the same work: equal samples and lengths, and no work on one rank within the step.",
    ),
    "late-node": Info(
        "late node",
        "All ranks of one node take longer than the others, which wait for them.",
        "Leave this node out (bench submit, cluster.exclude) or have it checked: bench preflight.",
    ),
    "cpu-starved": Info(
        "too little CPU",
        "The ranks get less CPU time than they need: they share cores, a quota stops them, or "
        "foreign processes use their cores.",
        "Give each rank its own cores (cluster.cpus_per_task, cpu_bind, OMP_NUM_THREADS), use whole nodes "
        "(exclusive: true), and raise the CPU quota.",
    ),
    "clocks": Info(
        "low clocks",
        "The clock is lower than at the baseline or on the other ranks.",
        "Check power limit, temperature and application clocks of this device (nvidia-smi -q).",
    ),
    "data-loading": Info(
        "data loading",
        "The step waits for the next batch.",
        "Use more workers (num_workers) and prefetching, cache or decode the data beforehand, and read it "
        "from a faster file system.",
    ),
    "outside-timers": Info(
        "calls outside all timers",
        "The script does other work in the step, such as checkpoints, logging or synchronisation "
        "with the device.",
        "Do such work less often or outside of the step: checkpoint and log every N steps, call .item() "
        "rarely, write files in the background.",
    ),
    "slow-fabric": Info(
        "slow network",
        "The network between the nodes is far slower than the nominal rate of their interfaces.",
        "Use the fast interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_IB_HCA), and compare the "
        "measured rate with its nominal rate: bench preflight.",
    ),
    "extra-communication": Info(
        "more communication than needed",
        "The script communicates more often than DDP needs to.",
        "Accumulate gradients under model.no_sync(), and reduce metrics every N steps instead of every step.",
    ),
    "unused-parameters": Info(
        "search for unused parameters",
        "DDP searches for unused parameters in every step, although all parameters are used.",
        "Construct DDP with find_unused_parameters=False.",
    ),
    "grad-strides": Info(
        "copies of gradients",
        "Gradients and DDP's buckets have different memory layouts, so DDP copies gradients in every step.",
        "Give parameters and gradients one layout: model.to(memory_format=...) before DDP, .contiguous().",
    ),
    "recompilation": Info(
        "recompilation",
        "torch.compile compiles again while the training runs.",
        "Keep shapes constant (drop_last=True, padding) or mark them dynamic; TORCH_LOGS=recompiles names "
        "the guard that fails.",
    ),
    "smaller-share": Info(
        "less work per rank",
        "Each rank has fewer samples than at the baseline, so fixed costs of the step count more.",
        "Use a larger batch per rank, or fewer ranks: fixed costs of a step are spread over fewer samples.",
    ),
    "memory-pressure": Info(
        "memory nearly full",
        "The GPU's memory is nearly full, so the allocator frees its cache and tries again.",
        "Lower the batch per rank a little, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    ),
    "overlap": Info(
        "other jobs on the nodes",
        "Another job, or another run of the study, used the nodes at the same time.",
        "Use whole nodes (exclusive: true) and run one job at a time (concurrent_runs: 1), then run again: "
        "bench submit --retry-disturbed.",
    ),
}
#: Names of warnings in logs (bench/doctor/catalogue/slow.toml) that are causes here.
OF_WARNINGS = {
    "slow-gradient-strides": "grad-strides",
    "slow-find-unused-parameters": "unused-parameters",
    "slow-recompilations": "recompilation",
    "slow-allocator-retries": "memory-pressure",
    "slow-too-many-workers": "cpu-starved",
    "slow-one-thread": "cpu-starved",
    "slow-nccl-socket": "slow-fabric",
    "slow-no-peer-access": "slow-fabric",
}


def parts_of(name: str) -> list[str]:
    """Split the name of a row into its causes: one, or several that the data do not distinguish."""
    return name.split(TOGETHER)


def title_of(name: str) -> str:
    """Return the title of a row for the page."""
    rest = {OTHER: "outside all timers", NOT_EXPLAINED: "not explained", NOT_VALID: "not valid"}
    return rest.get(name) or TOGETHER.join(CAUSES[one].title for one in parts_of(name))


def no_causes(error: str) -> str:
    """Return the sentence about the loss of a cell whose values are not valid because of an error."""
    return f"The loss is not divided among causes, because the values are not valid: see the error {error}."


def remedy_of(name: str) -> str:
    """Return what to change; empty for a row that is not a cause."""
    if name == NOT_VALID:
        return "`bench report` shows the error and how to remove it."
    return " ".join(CAUSES[one].remedy for one in parts_of(name) if one in CAUSES)


def meaning_of(name: str) -> str:
    """Return what the cause is."""
    if name == NOT_VALID:
        return "An error limits the validity of these values."
    return " ".join(CAUSES[one].meaning for one in parts_of(name) if one in CAUSES)
