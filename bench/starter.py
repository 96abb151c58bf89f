"""A first matrix for the machine at hand: commented, and planned as it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bench.slurm.parsing import NodeGroup
from bench.units import slurm_time

#: Longer than a first study's run should take; a partition's own limit may be shorter.
TIME_LIMIT_S = 20 * 60
MOST_NODES = 16


@dataclass(frozen=True)
class Partition:
    """One partition as a study sees it: its most frequent kind of node that is in service.

    ``free`` counts nodes that are idle now. ``gpu_type`` is None where nodes have no GPU, or
    one without a name.
    """

    name: str
    default: bool
    nodes: int
    free: int
    cpus: int
    gpus: int
    gpu_type: str | None
    time_limit_s: int | None

    def __str__(self) -> str:
        gpus = f"{self.gpus} x {self.gpu_type or 'GPU'}" if self.gpus else "no GPU"
        limit = slurm_time(self.time_limit_s) if self.time_limit_s else "none"
        nodes = f"{self.nodes} nodes ({self.free} free)"
        return f"{self.name}: {nodes}, {gpus}, {self.cpus} CPUs each, limit {limit}"


def partitions(groups: Sequence[NodeGroup]) -> list[Partition]:
    """Return the partitions that run jobs; those with GPUs first, then the default, then the largest."""
    by_name: dict[str, list[NodeGroup]] = {}
    for group in groups:
        if group.available and group.in_service and group.nodes:
            by_name.setdefault(group.partition, []).append(group)
    found = [_partition(own) for own in by_name.values()]
    return sorted(found, key=lambda p: (not p.gpus, not p.default, -p.nodes, p.name))


def _partition(groups: Sequence[NodeGroup]) -> Partition:
    """Return the partition with its most frequent kind of node."""
    kinds: dict[tuple[int, str | None, int], list[NodeGroup]] = {}
    for group in groups:
        gpu = max(group.gpus, key=lambda gres: gres.count, default=None)
        kind = (gpu.count if gpu else 0, gpu.kind if gpu else None, group.cpus)
        kinds.setdefault(kind, []).append(group)
    (gpus, gpu_type, cpus), own = max(
        kinds.items(), key=lambda item: (item[0][0] > 0, sum(g.nodes for g in item[1]))
    )
    return Partition(
        name=groups[0].partition,
        default=any(group.default for group in groups),
        nodes=sum(group.nodes for group in own),
        free=sum(group.nodes for group in own if group.state.startswith("idle")),
        cpus=cpus,
        gpus=gpus,
        gpu_type=gpu_type,
        time_limit_s=min((g.time_limit_s for g in own if g.time_limit_s), default=None),
    )


def cluster_matrix(partition: Partition, *, inherited: Collection[str] = ()) -> str:
    """Return a matrix for a partition: 1, 2, 4, ... of its nodes, strong and weak.

    ``inherited`` are the keys of ``cluster`` that a site file gives.
    """
    device = "cuda" if partition.gpus else "cpu"
    per_node = partition.gpus or min(8, max(1, partition.cpus // 4))
    sizes = [2**i for i in range(MOST_NODES.bit_length()) if 2**i <= min(partition.nodes, MOST_NODES)]
    ranks = sizes[-1] * per_node
    limit_s = min(TIME_LIMIT_S, partition.time_limit_s or TIME_LIMIT_S)
    gpu_line = f"  gpu_type: {partition.gpu_type}\n" if partition.gpu_type else ""
    why = "comes from the site file" if "account" in inherited else "if your site asks for one"
    account_line = f"  # account: project         # {why}\n"
    model = "transformer, parameters: 124M, precision: bf16" if device == "cuda" else "convnet"
    backends = (
        "[nccl]                # add gloo to see what the fabric is worth" if device == "cuda" else "[gloo]"
    )
    axis = "gpus_per_node" if device == "cuda" else "tasks_per_node"
    cores = max(1, partition.cpus // per_node)
    strong = 32 * ranks
    return f"""\
# {partition}
# What it would cost, and the scripts: bench plan; then: bench submit, bench status, bench report.
cluster:
  executor: slurm
  partition: {partition.name}
{account_line}{gpu_line}  cpus_per_task: {cores}            # cores, and threads, of one rank
  time_limit: "{slurm_time(limit_s)}"      # of one run at most
  exclusive: true             # no neighbour disturbs the measurement
  # setup: ["module load cuda", "source .venv/bin/activate"]   # lines before the launch
  # env: {{NCCL_SOCKET_IFNAME: "^docker,lo"}}                    # variables of the job
axes:                         # every combination is measured
  nodes: {sizes}
  {axis}: [{per_node}]
  backend: {backends}
  launcher: [srun]            # or torchrun
scaling:
  - {{mode: strong, global_batch: [{strong}]}}   # the same work on more ranks: 32 x {ranks} = {strong}
  - {{mode: weak, per_gpu_batch: [32]}}      # more work on more ranks
workload: {{device: {device}, model: {model}, steps_per_epoch: 50, epochs: 3, warmup_steps: 10}}
repeats: 3                    # three runs of each cell: enough for an interval
"""


def local_matrix(cores: int) -> str:
    """Return a matrix for this machine: 1, 2, 4, ... processes up to its cores."""
    sizes = [2**i for i in range(7) if 2**i <= max(cores, 2)]
    return f"""\
# This machine: {cores} cores, no Slurm found. Start it with: bench run this-file
cluster:
  executor: local             # this machine, one run after another
  time_limit: 5m              # of one run at most
axes:                         # every combination is measured
  tasks_per_node: {sizes}     # processes; each has one thread (cpus_per_task)
  backend: [gloo]
scaling:
  - {{mode: strong, global_batch: [{16 * sizes[-1]}]}}    # the same work on more processes
  - {{mode: weak, per_gpu_batch: [32]}}     # more work on more processes
workload: {{device: cpu, model: mlp, parameters: 2M, steps_per_epoch: 20, epochs: 3, warmup_steps: 5}}
repeats: 3                    # three runs of each cell: enough for an interval
"""
