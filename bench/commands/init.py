"""`bench init`: write a commented starter matrix for a cluster or for this machine.

With ``--command``, the matrix is for a user's own script.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddp_scaling_bench.cores import sizes_up_to, usable_cores
from ddp_scaling_bench.errors import BenchError, unwritable
from ddp_scaling_bench.units import slurm_time

from ..jobs.slurm.parsing import NodeGroup
from ..terminal import say, show

if TYPE_CHECKING:  # slow to import, and not needed by other commands
    from ..matrix.own_command import OwnCommand

#: The time limit that the matrix gives each run, unless the partition's limit is shorter.
TIME_LIMIT_S = 20 * 60
MOST_NODES = 16
#: Proposed for the built-in training.
_DATA_AXIS = "  # data: [synthetic, /path/to/data]   # real against synthetic data: see docs/matrix.md\n"


def init_command(
    path: Annotated[
        Path | None, typer.Argument(help="The file to write; default: the partition's name.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", help="The partition for which to write the matrix.")
    ] = None,
    command: Annotated[
        str | None, typer.Option("--command", help="Your own training command, such as 'python train.py'.")
    ] = None,
) -> int:
    """Write a matrix for a partition of the cluster (from sinfo), or for this machine.

    The matrix can be planned without changes. Without --partition, it is for the site file's partition, or
    for the first one with GPUs. The command never overwrites an existing file.
    Example: bench init --command 'python train.py'
    """
    if path is not None and path.suffix not in (".yaml", ".yml"):
        what = f"{path} is no name of a matrix, which is a .yaml file"
        program = path if path.suffix == ".py" else "train.py"
        example = f"bench init --command 'python {program}'"
        raise BenchError(what, remedy=f"give FILE.yaml; for your own training: {example}")
    own = None if command is None else _read(command)
    found, absent = _partitions_of_slurm()
    if found:
        defaults = _site_defaults()
        chosen = _choose(found, partition, preferred=defaults.get("partition"))
        return _write(path or Path(f"{chosen.name}.yaml"), cluster_matrix(chosen, own, inherited=defaults))
    if partition is not None:
        what = f"no partition {partition!r}: {absent or 'Slurm has none in service'}"
        remedy = "omit --partition, or run the command on a login node of the cluster"
        raise BenchError(what, remedy=remedy)
    note = f"the matrix is for this machine: {absent or 'no partition of Slurm is in service'}"
    return _write(path or Path("local.yaml"), local_matrix(usable_cores(), own), note=note)


def _read(command: str) -> OwnCommand:
    """Read the user's command and print notes about it."""
    from ..matrix.own_command import read_command

    own = read_command(command)
    for note in own.notes:
        say(note)
    return own


def _site_defaults() -> dict[str, Any]:
    """Return the `cluster` section of the site file, or an empty dictionary without a site file."""
    from ..matrix.load import find_site, read_site

    path = find_site()
    cluster = read_site(path).content.get("cluster") if path else None
    return cluster or {}


def _partitions_of_slurm() -> tuple[list[Partition], str]:
    """Return the cluster's partitions, or else why Slurm or its configuration is missing."""
    from ..jobs.slurm.client import Slurm, SlurmMissingError

    try:
        return partitions(Slurm().nodes()), ""
    except SlurmMissingError as error:
        return [], error.message


def _choose(found: list[Partition], name: str | None, *, preferred: str | None) -> Partition:
    """Return the partition ``name``; without a name, list all and return the preferred or the first one."""
    by_name = {partition.name: partition for partition in found}
    if name is None:
        for partition in found:
            say(str(partition))
        return by_name.get(preferred or "", found[0])
    if name not in by_name:
        raise BenchError(f"no partition {name!r} is in service", remedy=f"available: {', '.join(by_name)}")
    return by_name[name]


def _write(path: Path, text: str, *, note: str = "") -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        what = f"{path} exists and is not overwritten"
        raise BenchError(what, remedy="give another file: bench init PATH") from None
    except OSError as error:
        raise unwritable(path, error) from None
    show(path)
    if note:
        say(note)
    say(f"next: bench plan {path}")
    return 0


@dataclass(frozen=True)
class Partition:
    """A partition, described by the most common type of its nodes in service.

    ``free`` is the number of idle nodes. ``gpu_type`` is None without GPUs, or if Slurm does not
    name their type.
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
    """Return the partitions in service: first those with GPUs, then the default partition, then by size."""
    by_name: dict[str, list[NodeGroup]] = {}
    for group in groups:
        if group.available and group.in_service and group.nodes:
            by_name.setdefault(group.partition, []).append(group)
    found = [_partition(own) for own in by_name.values()]
    return sorted(found, key=lambda p: (not p.gpus, not p.default, -p.nodes, p.name))


def _partition(groups: Sequence[NodeGroup]) -> Partition:
    """Combine a partition's node groups into one Partition of the most common type, preferring GPU nodes."""
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


def cluster_matrix(
    partition: Partition, own: OwnCommand | None = None, *, inherited: Collection[str] = ()
) -> str:
    """Return a matrix for a partition: 1, 2, 4, ... nodes, strong and weak scaling.

    ``inherited`` contains the keys of ``cluster`` that a site file sets.
    """
    title = str(partition)
    if own is not None and own.is_cpu:
        partition = replace(partition, gpus=0, gpu_type=None)
    device = "cuda" if partition.gpus else "cpu"
    batch = (own and own.batch) or 32
    per_node = partition.gpus or min(8, max(1, partition.cpus // 4))
    sizes = [2**i for i in range(MOST_NODES.bit_length()) if 2**i <= min(partition.nodes, MOST_NODES)]
    ranks = sizes[-1] * per_node
    limit_s = min(TIME_LIMIT_S, partition.time_limit_s or TIME_LIMIT_S)
    gpu_line = f"  gpu_type: {partition.gpu_type}\n" if partition.gpu_type else ""
    if partition.gpus:
        gpu_line += f"  node_gpus: {partition.gpus:<16} # GPUs of a node: a whole node costs all of them\n"
    why = "set in the site file" if "account" in inherited else "if your site needs one"
    account_line = f"  # account: project         # {why}\n"
    model = "transformer, parameters: 124M, precision: bf16" if device == "cuda" else "convnet"
    backends = "[nccl]                # add gloo to compare with plain TCP" if device == "cuda" else "[gloo]"
    axis = "gpus_per_node" if device == "cuda" else "tasks_per_node"
    cores = max(1, partition.cpus // per_node)
    strong = batch * ranks
    env_line = '  # env: {NCCL_SOCKET_IFNAME: "^docker,lo"}                    # variables of the job\n'
    launcher = "[srun]            # or torchrun"
    scaling = f"""\
  - {{mode: strong, global_batch: [{strong}]}}   # the same work on more ranks: {batch} x {ranks} = {strong}
  - {{mode: weak, per_gpu_batch: [{batch}]}}      # more work on more ranks
"""
    workload = (
        f"workload: {{device: {device}, model: {model}, steps_per_epoch: 50, epochs: 3, warmup_steps: 10}}\n"
    )
    if own is not None:
        env_line = own.cluster_lines + ("" if own.env else env_line)
        launchers = {"torchrun": "[torchrun]        # or srun", "own": "[own]             # the command's"}
        launcher = launchers.get(own.launcher, launcher)
        scaling = own.scaling(scaling)
        workload = own.workload(device, steps=50)
    return f"""\
# {title}
# bench plan shows the cost and writes the scripts; then: bench submit, bench status, bench report.
cluster:
  executor: slurm
  partition: {partition.name}
{account_line}{gpu_line}  cpus_per_task: {cores}            # cores, and threads, of one rank
  time_limit: "{slurm_time(limit_s)}"      # maximum for one run
  exclusive: true             # whole nodes: no other job disturbs the measurement
  # srun_options: [--cpu-bind=cores]   # how srun places the ranks: see the recipes in docs/clusters.md
  # setup: ["module load cuda", "source .venv/bin/activate"]   # lines before the launch
{env_line}axes:                         # every combination is measured
  nodes: {sizes}
  {axis}: [{per_node}]
  backend: {backends}
  launcher: {launcher}
{"" if own else _DATA_AXIS}scaling:
{scaling}{workload}max_running: 1                # one job after another; without this line: all at once
repeats: 3                    # three runs of each cell: enough for an interval
"""


def local_matrix(cores: int, own: OwnCommand | None = None) -> str:
    """Return a matrix for this machine: 1, 2, 4, ... processes, see :func:`sizes_up_to`."""
    sizes = sizes_up_to(cores)
    strong, weak = (own.batch, own.batch) if own and own.batch else (16, 32)
    scaling = f"""\
  - {{mode: strong, global_batch: [{strong * sizes[-1]}]}}    # the same work on more processes
  - {{mode: weak, per_gpu_batch: [{weak}]}}     # more work on more processes
"""
    model = "model: mlp, parameters: 2M"
    workload = f"workload: {{device: cpu, {model}, steps_per_epoch: 20, epochs: 3, warmup_steps: 5}}\n"
    launcher = ""
    if own is not None:
        scaling = own.scaling(scaling)
        workload = own.workload("cpu", steps=20)
        is_own = own.launcher == "own"
        launcher = "own]             # the command's" if is_own else "torchrun]        # the default"
        launcher = f"  launcher: [{launcher} launcher\n"
    return f"""\
# This machine: {cores} cores, no Slurm found. Start it with: bench run this-file
cluster:
  executor: local             # this machine, one run after another
  time_limit: 5m              # maximum for one run
{own.cluster_lines if own else ""}axes:                         # every combination is measured
  tasks_per_node: {sizes}     # processes; each has one thread (cpus_per_task)
  backend: [gloo]
{launcher or _DATA_AXIS}scaling:
{scaling}{workload}repeats: 3                    # three runs of each cell: enough for an interval
"""
