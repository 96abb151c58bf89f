"""The causes of a slow step, and the other rows of a divided loss. docs/why.md describes them."""

from __future__ import annotations

from dataclasses import dataclass

#: Rows that are not causes: time that no timer covers, and loss not assigned to a cause. ``not-valid``
#: replaces all rows with a share, for a cell that has an error (see :mod:`analysis.checks.validity`).
OTHER, NOT_EXPLAINED, NOT_VALID = "other", "not-explained", "not-valid"
RESTS = (OTHER, NOT_EXPLAINED, NOT_VALID)
#: The whole loss of a cell.
LOSS = "loss"


@dataclass(frozen=True)
class Described:
    """A row of a divided loss in words: its title, what it is, and what to change."""

    title: str
    meaning: str = ""
    remedy: str = ""


#: By the name in causes.csv, in `bench doctor --json` and in docs/why.md.
CAUSES = {
    "late-rank": Described(
        "late rank",
        "One rank does more work in a part of the step, and all others wait for it.",
        "Give all ranks the same work: equal samples and lengths, and no work on one rank within the step.",
    ),
    "late-node": Described(
        "late node",
        "All ranks of one node take longer than the others, which wait for them.",
        "Leave this node out (bench submit, cluster.exclude) or have it checked: bench preflight.",
    ),
    "cpu-starved": Described(
        "too little CPU",
        "The ranks get less CPU time than they need: they share cores, a quota stops them, or foreign "
        "processes use their cores.",
        "Give each rank its own cores (cluster.cpus_per_task, --cpu-bind in srun_options, OMP_NUM_THREADS), "
        "use whole nodes (exclusive: true), and raise the CPU quota.",
    ),
    "clocks": Described(
        "low clocks",
        "The clock is lower than at the baseline or on the other ranks.",
        "Check power limit, temperature and application clocks of this device (nvidia-smi -q).",
    ),
    "host-bound": Described(
        "slow host",
        "The host launches work more slowly than the GPU executes it, so the GPU waits for the host.",
        "Give each launch more work: a larger batch per rank, torch.compile, CUDA graphs (mode "
        "reduce-overhead); or use a host with faster or less loaded cores.",
    ),
    "data-loading": Described(
        "data loading",
        "The step waits for the next batch.",
        "Use more workers (num_workers) and prefetching, cache or decode the data beforehand, and read it "
        "from a faster file system.",
    ),
    "outside-timers": Described(
        "calls outside all timers",
        "The script does other work in the step, such as checkpoints, logging or synchronisation with the "
        "device.",
        "Do such work less often or outside of the step: checkpoint and log every N steps, call .item() "
        "rarely, write files in the background.",
    ),
    "slow-fabric": Described(
        "slow network",
        "The network between the nodes is far slower than the nominal rate of their interfaces.",
        "Use the fast interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_IB_HCA), and compare the "
        "measured rate with its nominal rate: bench preflight.",
    ),
    "extra-communication": Described(
        "more communication than needed",
        "The script communicates more often than DDP needs to.",
        "Accumulate gradients under model.no_sync(), and reduce metrics every N steps instead of every step.",
    ),
    "unused-parameters": Described(
        "search for unused parameters",
        "DDP searches for unused parameters in every step, although all parameters are used.",
        "Construct DDP with find_unused_parameters=False.",
    ),
    "grad-strides": Described(
        "copies of gradients",
        "Gradients and DDP's buckets have different memory layouts, so DDP copies gradients in every step.",
        "Give parameters and gradients one layout: model.to(memory_format=...) before DDP, .contiguous().",
    ),
    "recompilation": Described(
        "recompilation",
        "torch.compile compiles again while the training runs.",
        "Keep shapes constant (drop_last=True, padding) or mark them dynamic; TORCH_LOGS=recompiles names "
        "the guard that fails.",
    ),
    "smaller-share": Described(
        "less work per rank",
        "Each rank has fewer samples than at the baseline, so fixed costs of the step count more.",
        "Use a larger batch per rank, or fewer ranks: fixed costs of a step are spread over fewer samples.",
    ),
    "memory-pressure": Described(
        "memory nearly full",
        "The GPU's memory is nearly full, so the allocator frees its cache and tries again.",
        "Lower the batch per rank a little, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    ),
    "overlap": Described(
        "other jobs on the nodes",
        "Another job, or another run of the study, used the nodes at the same time.",
        "Use whole nodes (exclusive: true) and run one job at a time (max_running: 1), then run again: "
        "bench submit --retry-disturbed.",
    ),
}
_OTHER_ROWS = {
    LOSS: Described("whole loss"),
    OTHER: Described("time outside all timers"),
    NOT_EXPLAINED: Described("not explained"),
    NOT_VALID: Described(
        "not valid",
        "An error limits the validity of these values.",
        "Remove the error that the table Validity of the report shows.",
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


def described(name: str) -> Described:
    """Return a row of a divided loss in words."""
    return CAUSES.get(name) or _OTHER_ROWS[name]
