"""Check a matrix as a whole: find combinations that cannot run, and settings that deserve a warning."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp_scaling_bench.known_models import models_using
from ddp_scaling_bench.known_strategies import DEFAULT as DEFAULT_STRATEGY
from ddp_scaling_bench.known_strategies import STRATEGIES, on_hosts, strategies_using, wire_problem
from ddp_scaling_bench.train.options import OPTIONS, device_problem
from ddp_scaling_bench.units import count, short_name

from . import warnings
from .cell import PER_NODE, Cell, Command, Point, shown_command, value_text
from .document import Document, Place
from .field_types import MAX_BATCH, MAX_NODES, MAX_TASKS_PER_NODE
from .launchers import LaunchLine, read_launch
from .schedulers import DEFAULT
from .schema import BATCH_KEYS, Container, Matrix
from .warnings import PlanWarning
from .workload import COMMON_OPTIONS, INTERPRETER, names_in, says_flops, says_one_rank, says_tokens

#: A text that needs no quotes in a matrix.
_PLAIN_YAML = re.compile(r"[\w./](?:[\w@%+=,./{}' -]|:(?=\S))*")
#: A container that is an image, not a program.
_IMAGE = re.compile(r"\.(?:sif|sqsh|img)$|://")
#: An option for a folder or a file that a program writes, and values that name neither.
_OUTPUT = re.compile(
    r"-{0,2}(?:\w+\.)*(?:(?:out(?:put)?|save|checkpoints?|ckpt|snapshot|results?|work|run|exp)[_-]?"
    r"(?:dir|directory|folder|path|root|to)|out(?:put)?(?:[_-]?file)?)",
    re.IGNORECASE,
)
_NO_OUTPUT = re.compile(r"-.*|\d[\d.]*|none|null|true|false|/dev/.*|", re.IGNORECASE)


def check_node_gpus(point: Point, matrix: Matrix, document: Document) -> None:
    """Record a problem if a point needs more GPUs on a node than `cluster.node_gpus` says there are."""
    has, per_node = matrix.cluster.node_gpus, point.values[PER_NODE]
    most = max(per_node) if isinstance(per_node, list) else per_node
    if has is not None and matrix.workload.device == "cuda" and most > has:
        what = f"gpus_per_node {most}: cluster.node_gpus says that a node has {count(has, 'GPU')}"
        document.add_problem(("axes", "gpus_per_node"), what, "correct one of these numbers")


def check_directives(matrix: Matrix, document: Document) -> None:
    """Record a problem for each directive that max_running or cluster.mem excludes."""
    for index, line in enumerate(matrix.cluster.directives):
        if matrix.cluster.mem and (
            own := next((one for one in line.split() if one.startswith("--mem-")), "")
        ):
            what = f"sbatch does not accept {own.partition('=')[0]} with cluster.mem, which is --mem"
            document.add_problem(("cluster", "directives", index), what, "remove one of these settings")
        if matrix.max_running and any(word.startswith(("-d", "--dep")) for word in line.split()):
            what = f"{line!r} has no effect with max_running, which sets the dependency of each job"
            document.add_problem(("cluster", "directives", index), what, "remove one of these settings")


def sharing_warnings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning if jobs of others can share nodes, and one if runs of the study disturb each other."""
    if "exclusive" not in matrix.cluster.scheduler.keys:
        return
    shared = [cell for cell in cells if not cell.resources.exclusive]
    if shared:
        names = tuple(cell.cell_id for cell in shared) if len(shared) < len(cells) else ()
        if document.site is not None and document.inherited("cluster.exclusive"):
            yield warnings.SharedNodes(cells=names, path=document.site.path)
        else:
            yield warnings.SharedNodes(cells=names, **_at(document, "cluster", "exclusive"))
    if matrix.max_running is None:
        runs = sum(cell.repeats for cell in cells if cell.nodes > 1)
        meeting = tuple(_cells_that_meet(shared, node_gpus=matrix.cluster.node_gpus))
        if runs > 1 or meeting:
            yield warnings.SideBySide(runs=runs if runs > 1 else 0, cells=meeting)


def _cells_that_meet(cells: Sequence[Cell], *, node_gpus: int | None) -> Iterator[str]:
    """Yield the cells whose runs fit on a node together with another run of the study.

    Only GPUs are counted, because the plan does not know the cores and the memory of a node.
    """
    # The two runs with the fewest GPUs per node: a run cannot share a node with itself.
    fewest = sorted(cell.requested_gpus for cell in cells for _ in range(min(cell.repeats, 2)))[:2]
    for cell in cells if len(fewest) == 2 else ():
        both = cell.requested_gpus + fewest[cell.requested_gpus == fewest[0]]
        if node_gpus is None or both <= node_gpus:
            yield cell.cell_id


def check_hosts(matrix: Matrix, document: Document) -> None:
    """Raise InputError if the executor lacks hosts, because the other checks depend on them."""
    cluster = matrix.cluster
    if "hosts" in cluster.scheduler.keys and not cluster.hosts:
        remedy = "add cluster.hosts: [gpu1, gpu2], with host names that ssh accepts"
        document.add_problem(
            ("cluster", "executor"), f"executor {cluster.executor} needs cluster.hosts", remedy
        )
        document.raise_problems()


def check_device(matrix: Matrix, document: Document) -> None:
    """Raise InputError if a command has no device, because the other checks depend on it."""
    commands = _commands(matrix)
    if commands and "device" not in matrix.workload.model_fields_set:
        what = "workload.device is not set, and a command has no default for it"
        remedy = "add `device: cuda` or `device: cpu` to workload: the device that the command uses"
        document.add_problem(commands[0][0], what, remedy)
        document.raise_problems()


def runnable_points(points: Sequence[Point], matrix: Matrix, document: Document) -> list[Point]:
    """Return the points that can run; record a problem for each other point."""
    multiples: dict[int, int] = {}  # by global batch: the least common multiple of all ranks
    for point in points:
        if point.mode == "strong" and point.ranks % point.values["model_parallel"] == 0:
            divisor = point.replicas * _accumulation(point, matrix)
            multiples[point.batch] = math.lcm(multiples.get(point.batch, 1), divisor)
    strong = math.gcd(*(point.batch for point in points if point.mode == "strong"))
    runnable, is_built_in = [], not _commands(matrix)
    for point in points:
        before, is_whole = len(document.problems), point.ranks % point.values["model_parallel"] == 0
        _check_placement(point, matrix, document)
        if len(document.problems) == before:
            _check_layout(point, matrix, document)
            _check_launcher(point, matrix, document)
            _check_replicas(point, matrix, document, batch=strong)
            _check_device_of(point, matrix, document, is_built_in=is_built_in)
            if is_built_in:
                _check_options(point, matrix, document)
            check_node_gpus(point, matrix, document)
        if is_whole and point.mode == "strong" and len(document.problems) == before:
            _check_division(point, matrix, document, every_size=multiples[point.batch])
        if len(document.problems) == before:
            runnable.append(point)
    return runnable


def _accumulation(point: Point, matrix: Matrix) -> int:
    return int(point.values.get("grad_accum", matrix.workload.grad_accum))


def _check_layout(point: Point, matrix: Matrix, document: Document) -> None:
    nodes, per_node = point.values["nodes"], point.values[PER_NODE]
    if not isinstance(per_node, list):
        return
    axis = matrix.size_axis
    if len(per_node) != nodes:
        what = f"{axis} {per_node} is for {len(per_node)} nodes, but is combined with nodes {nodes}"
        remedy = f"exclude {{nodes: {nodes}, {axis}: {per_node}}}, or change axes.nodes"
        document.add_problem(("axes", axis), what, remedy)
    if point.values["launcher"] != "torchrun":
        what = f"{axis} {per_node} differs per node, which only launcher torchrun supports"
        document.add_problem(("axes", axis), what, "use launcher [torchrun] for mixed nodes")


def _check_launcher(point: Point, matrix: Matrix, document: Document) -> None:
    """Record a problem if a launcher in the command does not fit the launcher of the matrix."""
    launcher, per = point.values["launcher"], matrix.workload.command_per
    command: Command | None = point.values.get("command", matrix.workload.command)
    if command is None:
        if launcher == "own":
            remedy = f"set workload.command, or use launcher [{matrix.cluster.scheduler.launchers[0]}]"
            document.add_problem(
                ("axes", "launcher"), "launcher own needs a command, which starts ranks", remedy
            )
        return
    launch = read_launch(command.words)
    if launch is None or (
        launcher == "own" and per in launch.launcher.starts and not launch.launcher.refusal
    ):
        return
    place = next(
        (place for place, words in _commands(matrix) if words == command.words), ("workload", "command")
    )
    name, where = launch.launcher.name, f"command_per: {per}" if launcher == "own" else f"launcher {launcher}"
    if reason := launch.launcher.refusal:
        document.add_problem(
            place, f"the command contains {name}: {reason}", "give the command of the program"
        )
        return
    how = {"own": f"once per {per}"}.get(launcher, "once per rank")
    what = f"{where} starts the command {how}, and {name} starts ranks again"
    document.add_problem(place, what, f"use {' and '.join(_lines_for(launch, launcher, matrix))}")


def _lines_for(launch: LaunchLine, now: str, matrix: Matrix) -> Iterator[str]:
    """Yield the lines of a matrix that start the ranks of a command that contains a launcher."""
    launcher, known, words = launch.launcher.replacement, matrix.cluster.scheduler.launchers, launch.program
    if not launcher or not words:
        launcher, words = "own", launch.for_sizes()
    elif launcher not in known:
        launcher = known[0]
    if launcher != now or len(matrix.axes.given.get("launcher", ())) > 1:
        yield f"`launcher: [{launcher}]` (in axes)"
    if launcher == "own" and launch.launcher.starts[0] != matrix.workload.command_per:
        yield f"`command_per: {launch.launcher.starts[0]}`"
    text = shown_command([*launch.wrapper, *words] if launcher != "own" else words)
    yield f"`command: {text if _PLAIN_YAML.fullmatch(text) else json.dumps(text)}`"


def _check_replicas(point: Point, matrix: Matrix, document: Document, *, batch: int) -> None:
    """Record a problem if the ranks of a point are no whole number of replicas; suggest sizes that fit.

    ``batch`` is the greatest common divisor of all global batches, or 0.
    """
    size, ranks, cluster = point.values["model_parallel"], point.ranks, matrix.cluster
    place: Place = ("axes", "model_parallel") if "model_parallel" in matrix.axes.given else ("include",)
    if size > 1 and not point.values.get("command", matrix.workload.command):
        what = f"model_parallel {size}: the built-in training has one replica per rank"
        document.add_problem(place, what, "set workload.command, or remove model_parallel")
    elif ranks % size:
        what = f"model_parallel {size} does not divide {count(ranks, 'rank')} ({_size(point, matrix)})"
        remedy = _excluding(point, matrix, ("nodes", matrix.size_axis, "model_parallel"))
        axis, most = "nodes", len(cluster.hosts or []) or MAX_NODES
        now, factor = point.values["nodes"], point.values[PER_NODE]
        if cluster.scheduler.one_node:
            axis, most, now, factor = matrix.size_axis, MAX_TASKS_PER_NODE, factor, now
        if isinstance(factor, int):
            step = size // math.gcd(size, factor)
            ranges = (range(now // step * step, 0, -step), range(now // step * step + step, most + 1, step))
            replicas = _accumulation(point, matrix) * factor  # per ``size`` nodes
            whole = [(n for n in near[:1000] if batch % (n * replicas // size) == 0) for near in ranges]
            fitting = [str(n) for n in (next(numbers, None) for numbers in whole) if n]
            remedy += f", or use {axis} {' or '.join(fitting)}" if fitting else ""
        document.add_problem(place, what, remedy)


def _size(point: Point, matrix: Matrix) -> str:
    return f"nodes {point.values['nodes']} x {matrix.size_axis} {point.values[PER_NODE]}"


def _check_device_of(point: Point, matrix: Matrix, document: Document, *, is_built_in: bool) -> None:
    """Record a problem if the device does not support the backend, or the precision of the training."""
    values = dict(matrix.workload) | point.values
    option, what, remedy = device_problem(values, values["backend"]) or ("", "", "")
    if option == "backend":
        backends = matrix.axes.given.get("backend") or []
        place: Place = ("axes", "backend", backends.index("nccl")) if "nccl" in backends else ("include",)
        document.add_problem(place, what, remedy)
    elif option and is_built_in:
        document.add_problem(_place(option, matrix), what, remedy)


def _check_options(point: Point, matrix: Matrix, document: Document) -> None:
    """Record a problem for each option with which the built-in training cannot train a point."""
    values = dict(matrix.workload) | point.values
    planned, per_node, sizes = values["strategy"], values[PER_NODE], ("nodes", matrix.size_axis)
    name = on_hosts(planned, per_node if isinstance(per_node, list) else [per_node] * values["nodes"])
    found = []
    if wire := wire_problem(values | {"strategy": name}, values["backend"]):
        (option, *others), what, remedy = wire
        if name != planned:
            what += f" ({planned} runs as {name} on {count(values['nodes'], 'node')})"
        if len(matrix.axes.given.get(option, ())) > 1:
            size = sizes if name != planned else ()
            remedy = _excluding(point, matrix, (*size, "strategy", option, *others))
        found.append((option, what, remedy))
    if STRATEGIES[name].within_hosts and isinstance(per_node, list) and len({*per_node}) > 1:
        what = f"strategy {name} needs the same number of ranks on every node, not {per_node}"
        found.append(("strategy", what, "use strategy fsdp"))
    if STRATEGIES[name].one_rank and point.ranks > 1:
        what = f"strategy {name} does not exchange gradients, so it needs one rank, not {point.ranks}"
        given = [matrix.axes.given.get(axis) or [1] for axis in sizes]
        has_other = all(1 in values for values in given) or len(matrix.axes.given.get("strategy", ())) > 1
        excluded = f"{_excluding(point, matrix, (*sizes, 'strategy'))}, or " if has_other else ""
        remedy = f"{excluded}use {DEFAULT_STRATEGY}"
        found.append(("strategy", what, remedy))
    for option, what, remedy in found:
        document.add_problem(_place(option, matrix), what, remedy)


def _excluding(point: Point, matrix: Matrix, names: Sequence[str]) -> str:
    """Return the entry of `exclude` with a point's values of those of the named axes that the matrix has."""
    values = point.values | {matrix.size_axis: point.values[PER_NODE]}
    given = {"nodes", matrix.size_axis, *matrix.axes.given}
    return f"exclude {{{', '.join(f'{name}: {values[name]}' for name in names if name in given)}}}"


def _place(option: str, matrix: Matrix) -> tuple[str, str]:
    """Return the place of a workload option that can also be an axis."""
    return ("axes" if option in matrix.axes.given else "workload", option)


def _check_placement(point: Point, matrix: Matrix, document: Document) -> None:
    """Record a problem if the scheduler cannot place a point: its launcher, nodes, or ranks per host."""
    cluster, nodes, launcher = matrix.cluster, point.values["nodes"], point.values["launcher"]
    known = cluster.scheduler.launchers
    if launcher not in known:
        what = f"launcher {launcher}: executor {cluster.executor} starts ranks with {' or '.join(known)}"
        document.add_problem(("axes", "launcher"), what, f"use launcher [{known[0]}]")
    if cluster.scheduler.one_node and nodes != 1:
        what = f"nodes {nodes}: executor {cluster.executor} runs on one node, this machine"
        remedy = f"use nodes [1] and vary {matrix.size_axis}, or use executor {DEFAULT}"
        document.add_problem(("axes", "nodes"), what, remedy)
    if "hosts" in cluster.scheduler.keys:
        _check_ranks_of_hosts(point, matrix, document)


def _check_ranks_of_hosts(point: Point, matrix: Matrix, document: Document) -> None:
    hosts, nodes = matrix.cluster.hosts or [], point.values["nodes"]
    if nodes > len(hosts):
        what = f"nodes {nodes}: cluster.hosts has {count(len(hosts), 'host')}"
        remedy = f"add hosts, or use nodes up to {len(hosts)}"
        document.add_problem(("axes", "nodes"), what, remedy)
        return
    per_node, axis = point.values[PER_NODE], matrix.size_axis
    ranks = per_node if isinstance(per_node, list) else [per_node] * nodes
    for host, wanted in zip(hosts, ranks, strict=False):
        if host.processes is not None and wanted > host.processes:
            what = f"{axis} {per_node}: host {host.host} allows {host.processes} processes, not {wanted}"
            remedy = f"lower {axis}, or omit it: each host then starts as many ranks as its `processes`"
            document.add_problem(("axes", axis), what, remedy)


def _check_division(point: Point, matrix: Matrix, document: Document, *, every_size: int) -> None:
    """Record a problem if the replicas do not divide a global batch; suggest the nearest batches that fit."""
    accumulation, per_replica = _accumulation(point, matrix), point.values["model_parallel"]
    batch, size = point.batch, _size(point, matrix)
    step = point.replicas * accumulation
    if batch % step == 0:
        return
    what = f"global_batch {batch} is not divisible by {point.ranks} ranks ({size})"
    if per_replica > 1:
        replicas = count(point.replicas, "replica")
        what = f"global_batch {batch} is not divisible by {replicas} ({size} / model_parallel {per_replica})"
    if accumulation > 1:
        what += f" x grad_accum {accumulation}"
    if every_size <= 100 * batch:  # otherwise no nearby batch is divisible at every size
        step = every_size
    below = batch // step * step
    fitting = [str(near) for near in (below, below + step) if 0 < near <= MAX_BATCH]
    remedy = f"try {' or '.join(fitting)}"
    if accumulation > 1:
        fits = [one for one in range(1, 2 * accumulation) if batch % (point.replicas * one) == 0]
        near = sorted(sorted(fits, key=lambda one: abs(one - accumulation))[:2])
        remedy += f", or grad_accum {' or '.join(map(str, near))}" if near else ""
    document.add_problem(point.place, what, remedy)


def check_commands(matrix: Matrix, document: Document) -> None:
    """Record a problem for each placeholder of a command that has no value."""
    given, cluster = matrix.axes.given, matrix.cluster
    env = {*cluster.env, *(name.removeprefix("env.") for name in given if name.startswith("env."))}
    for name in cluster.env_from:
        if f"env.{name}" in given:
            document.add_problem(
                ("axes", f"env.{name}"), f"{name} is in cluster.env_from, too", "keep one of them"
            )
    if cluster.stop_after_measurement and matrix.workload.metrics.source != "recorder":
        place: Place = ("cluster", "stop_after_measurement")
        if place in document.lines and _commands(matrix):  # of a site file, it is ignored
            what = "stop_after_measurement needs the recorder, which knows when all windows are measured"
            document.add_problem(place, what, "remove it, or set metrics: recorder")
    if matrix.workload.exchange and (not _commands(matrix) or matrix.workload.metrics.source == "none"):
        what = "workload.exchange is for a command whose metrics are measured"
        document.add_problem(("workload", "exchange"), what, "remove it, or set workload.metrics")
    _check_tokens(matrix, document)
    commands, sets_master = _commands(matrix), cluster.scheduler.sets_master
    launchers = {*(given.get("launcher") or [cluster.scheduler.launchers[0]])}
    launchers |= {entry.given["launcher"] for entry in matrix.include if "launcher" in entry.given}
    if "command_per" in _given(matrix, "workload") and "own" not in launchers:
        what = "command_per has an effect with launcher own only"
        document.add_problem(
            ("workload", "command_per"), what, "use `launcher: [own]`, or remove command_per"
        )
    used = {name for _, words in commands for name in names_in(words)}
    for name in given:
        if name.startswith("args.") and name not in used:
            remedy = "add it to the command, or remove the axis"
            document.add_problem(("axes", name), f"no command contains {{{name}}}", remedy)
    for place, words in commands:
        for name in names_in(words):
            if name.startswith("args.") and name not in given:
                what = f"the command contains {{{name}}}, which is not an axis"
                document.add_problem(place, what, f"add `{name}: [VALUE]` below `axes:`")
            elif name.startswith("env.") and name.removeprefix("env.") not in env:
                what = f"the command contains {{{name}}}, which neither cluster.env nor an axis sets"
                known = ", ".join(sorted(env)) or "nothing"
                document.add_problem(place, what, f"set it in cluster.env or in axes (now set: {known})")
            elif name == "node_rank" and (launchers != {"own"} or matrix.workload.command_per == "job"):
                what = (
                    f"the command contains {{{name}}}, which is known with launcher own and command_per: node"
                )
                document.add_problem(place, what, "use `launcher: [own]`, or read the launcher's variable")
            elif name in ("master_addr", "master_port") and not (sets_master or launchers == {"own"}):
                what = f"the command contains {{{name}}}, which executor {cluster.executor} does not set"
                document.add_problem(place, what, f"read ${name.upper()}, which torchrun sets for each rank")
            elif name not in given and getattr(matrix.workload, name, "") is None:
                what = f"the command contains {{{name}}}, which has no value"
                document.add_problem(place, what, f"set workload.{name} or axes.{name}")


def _check_tokens(matrix: Matrix, document: Document) -> None:
    """Record a problem if a rate of tokens has no unit, or if the number of tokens of a sample is unknown."""
    metrics, place = matrix.workload.metrics, ("workload", "metrics")
    known = metrics.tokens_per_sample or "seq_len" in {*_given(matrix, "workload"), *matrix.axes.given}
    if metrics.counts_tokens and not known:
        what = f"{metrics.units['throughput']}: the number of tokens of a sample is unknown"
        remedy = "add tokens_per_sample: N to workload.metrics, or seq_len: N to workload"
        document.add_problem((*place, "units", "throughput"), what, remedy)
    if metrics.tokens_per_sample and "seq_len" in matrix.axes.given:
        what = "tokens_per_sample is one number, but seq_len varies"
        document.add_problem((*place, "tokens_per_sample"), what, "remove it: seq_len counts")
    unit = metrics.units.get("throughput", "")
    for section in ("output", "columns"):
        text = (getattr(metrics, section) or {}).get("throughput", "")
        where, short = (*place, section, "throughput"), short_name(text)
        if says_flops(text):
            what = f"{short!r} says that the value is one of FLOP/s, which is no throughput of samples"
            document.add_problem(where, what, "read samples/s, tokens/s or the time per step")
        if says_one_rank(text) and not unit.endswith("/GPU") and "scope" not in metrics.model_fields_set:
            what = f"{short!r} says that the throughput is that of one rank, but it would be read as the sum"
            document.add_problem(
                where, what, f"add `units: {{throughput: {unit or 'samples/s'}/GPU}}`, or a scope"
            )
        if "throughput" not in metrics.units and says_tokens(text):
            what = f"{short!r} says tokens, but it would be read as samples/s"
            remedy = "add `units: {throughput: tokens/s}` (or tokens/s/GPU) and `tokens_per_sample: N`"
            document.add_problem((*place, section, "throughput"), what, remedy)


def _commands(matrix: Matrix) -> list[tuple[Place, Sequence[str]]]:
    """Return every command of a matrix with its place."""
    axis: list[Command] = matrix.axes.given.get("command") or []
    found: list[tuple[Place, Sequence[str]]] = [
        (("axes", "command", i), command.words) for i, command in enumerate(axis)
    ]
    if matrix.workload.command is not None and not found:
        found.append((("workload", "command"), matrix.workload.command.words))
    for section in ("include", "exclude"):
        for i, entry in enumerate(getattr(matrix, section)):
            if (command := entry.given.get("command")) and variant_of(command, axis) is None:
                found.append(((section, i, "command"), command.words))
    return found


def variant_of(command: Command, axis: Sequence[Command]) -> Command | None:
    """Return the value of axes.command that a command in exclude or include means, by its words or name."""
    same = next((variant for variant in axis if variant.words == command.words), None)
    return same or next((variant for variant in axis if command.words == (variant.name,)), None)


#: The minimum number of repeats for a confidence interval.
INTERVAL_REPEATS = 3

_BASELINES = {name for name, strategy in STRATEGIES.items() if strategy.one_rank}
#: Keys of `cluster` that every executor uses.
_FOR_ALL_EXECUTORS = {
    *("executor", "cpus_per_task", "time_limit", "stop_after_measurement", "setup", "env", "env_from")
}


def plan_warnings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> list[PlanWarning]:
    """Return warnings about unanswerable questions, surprising settings, and settings without effect."""
    return [
        *_missing_answers(matrix, cells),
        *_unused_targets(matrix, document, cells),
        *_surprising_settings(matrix, document, cells),
        *sharing_warnings(matrix, document, cells),
        *_command_warnings(matrix, document, cells),
        *_ignored_settings(matrix, document, cells),
    ]


def _missing_answers(matrix: Matrix, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each question that the study cannot answer as planned."""
    sizes: dict[str, set[int]] = {}
    for cell in cells:
        for member in cell.series:
            sizes.setdefault(member.series, set()).add(cell.world_size)
    single = [series for series, found in sizes.items() if len(found) == 1]
    if single or not sizes:
        yield warnings.OneSize(series=tuple(single), of_all=len(single) == len(sizes))
    if few := [cell for cell in cells if cell.repeats < INTERVAL_REPEATS]:
        names = tuple(cell.cell_id for cell in few) if len(few) < len(cells) else ()
        yield warnings.FewRepeats(
            repeats=min(cell.repeats for cell in few), needed=INTERVAL_REPEATS, cells=names
        )
    if len({cell.nodes for cell in cells}) == 1 and len(single) < len(sizes):
        yield warnings.OneNodeCount(nodes=cells[0].nodes)


def _unused_targets(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each target that is for no cell."""
    members = [(cell, member) for cell in cells for member in cell.series]
    sizes: dict[str, list[int]] = {}
    for cell, member in members:
        sizes.setdefault(member.series, []).append(cell.world_size)
    # Of several layouts of the smallest size, one is the baseline, and the others have an efficiency.
    bases = {series: min(own) for series, own in sizes.items() if own.count(min(own)) == 1}
    for place, target in enumerate(matrix.targets):
        found = [one for one in members if target.is_for(one[0].settings | {"mode": one[1].mode})]
        are_bases = all(cell.world_size == bases.get(member.series) for cell, member in found)
        if not found or (target.limited == "efficiency" and are_bases):
            texts = [f"{name} {' or '.join(map(value_text, own))}" for name, own in target.matched.items()]
            yield warnings.UnusedTarget(
                limited=target.limited,
                cells=", ".join(texts),
                only_base=bool(found),
                **_at(document, "targets", place),
            )


def _surprising_settings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each setting that does something other than people expect."""
    cluster = matrix.cluster
    for name, value in cluster.env.items():
        if "$" in value and not document.inherited(f"cluster.env.{name}"):
            yield warnings.LiteralDollar(variable=name, **_at(document, "cluster", "env", name))
    container = cluster.container
    if isinstance(container, Container) and matrix.workload.data != "synthetic" and not container.mounts:
        yield warnings.DataNotMounted(**_at(document, "workload", "data"))
    on_gpus = "gpu_request" in cluster.scheduler.keys and matrix.workload.device == "cuda"
    if isinstance(container, list) and len(container) == 1 and _IMAGE.search(container[0]):
        yield warnings.ContainerProgram(program=container[0], **_at(document, "cluster", "container"))
    if not (container or cluster.hosts or _commands(matrix)):
        for folder in sorted({str(cell.workload["data"]) for cell in cells} - {"synthetic"}):
            if not os.path.isdir(folder):  # noqa: PTH112 (False if it cannot be read)
                yield warnings.MissingData(folder=folder, **_at(document, *_place("data", matrix)))
    cores, place = cluster.cpus_per_task, _at(document, "cluster", "cpus_per_task")
    workers = max(cell.workload.get("num_workers", 0) for cell in cells)
    if on_gpus and cores in (None, 1):
        yield warnings.OneCore(num_workers=workers, is_set=cores == 1, **place)
    elif cores is not None and workers > cores:
        yield warnings.MoreWorkers(num_workers=workers, cores=cores, **place)


def _command_warnings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each launcher or shared output in a command, and each setting that none uses."""
    if not (commands := _commands(matrix)):
        return
    yield from _own_launches(matrix, document, cells)
    yield from _missing_scripts(matrix, document)
    yield from _literal_words(matrix, document)
    if sum(cell.repeats for cell in cells) > 1:
        yield from _shared_outputs(matrix, document, cells)
    named = {name for _, words in commands for name in names_in(words)}
    if not named & BATCH_KEYS.keys():
        yield warnings.BatchNotNamed(**_at(document, *commands[0][0]))
    if matrix.workload.metrics.source is None and "parameters" not in matrix.axes.given:
        named.add("parameters")  # their bytes are compared with those that the nodes sent
    if matrix.workload.metrics.counts_tokens and "seq_len" not in matrix.axes.given:
        named.add("seq_len")
    options = OPTIONS.keys() - set(COMMON_OPTIONS)
    for section in ("axes", "workload"):
        if names := tuple(sorted(options & _given(matrix, section) - named)):
            yield warnings.NotInCommand(section=section, names=names, **_at(document, section, names[0]))


def _missing_scripts(matrix: Matrix, document: Document) -> Iterator[PlanWarning]:
    """Yield a warning for each script of a command that is not where the command will look for it.

    Where a container or a line of setup may change the folder, or on hosts of ssh, this is not known.
    """
    cluster = matrix.cluster
    if cluster.container or cluster.hosts or any("cd " in line for line in cluster.setup):
        return
    scripts: dict[str, Place] = {}
    for place, words in _commands(matrix):
        named = (word for word in words if word.endswith((".py", ".sh")))
        script = next((word for word in named if not names_in([word])), "")
        if script and not script.startswith(("$", "~")) and not Path(script).is_file():
            scripts.setdefault(script, place)
    for script, place in scripts.items():
        yield warnings.MissingScript(script=script, **_at(document, *place))


def _literal_words(matrix: Matrix, document: Document) -> Iterator[PlanWarning]:
    """Yield a warning for each variable and each quotation mark that stays as it is."""
    for place, words in _commands(matrix):
        if quoted := next((word for word in words if re.search("[\u2018-\u201f]", word)), ""):
            yield warnings.TypographicQuote(word=quoted, **_at(document, *place))
        if not any(INTERPRETER.fullmatch(Path(word).name) and "python" not in word for word in words):
            text = " ".join(words).replace("{{", "{").replace("}}", "}")
            for variable in re.findall(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})", text):
                yield warnings.ShellVariable(variable=variable, **_at(document, *place))


def _shared_outputs(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each option of a command that names an output, but not the run."""
    of_run = {"run_dir"} if any(cell.repeats > 1 for cell in cells) else {"run_dir", "cell_id"}
    for place, words in _commands(matrix):
        for word, following in zip(words, [*words[1:], ""], strict=True):
            option, equals, value = word.partition("=")
            value = value if equals else following
            is_output = _OUTPUT.fullmatch(option) and (equals or option.startswith("-"))
            if not is_output or _NO_OUTPUT.fullmatch(value) or of_run & {*names_in([value])}:
                continue
            if not Path(value).is_file():
                yield warnings.SharedOutput(option=option, value=value, **_at(document, *place))


def _own_launches(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each command that may not start its ranks on all nodes, or may not end them."""
    several = [cell for cell in cells if cell.launcher == "own" and cell.nodes > 1]
    if matrix.cluster.stop_after_measurement and any(cell.command_per == "job" for cell in several):
        line = document.line(("cluster", "stop_after_measurement"))
        yield warnings.RanksGoOn(path=document.path, line=line)
    planned = {tuple(cell.argv) for cell in several if cell.command_per == "node"}
    for place, words in _commands(matrix):
        if tuple(words) not in planned:
            continue
        launch, line = read_launch(words), document.line(place)
        if launch is not None and (lacking := [*launch.missing, *launch.fixed]):
            name, missing = launch.launcher.name, tuple(lacking)
            yield warnings.NodesNotNamed(launcher=name, missing=missing, path=document.path, line=line)
        elif launch is None and not {"node_rank", "master_addr", "hosts", "hostfile"} & {*names_in(words)}:
            yield warnings.NodesNotNamed(path=document.path, line=line)


def _ignored_settings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each setting that another one makes ineffective."""
    keys, executor = matrix.cluster.scheduler.keys, matrix.cluster.executor
    both = sorted(_given(matrix, "workload") & _given(matrix, "axes"))
    others = sorted(matrix.cluster.model_fields_set - _FOR_ALL_EXECUTORS - keys)
    ignored = [("cluster", name, f"executor {executor}") for name in others]
    ignored += [("workload", name, f"axes.{name}") for name in both]
    if matrix.workload.device == "cpu":
        of_gpus = ("gpu_type", "gpu_request") if "gpu_request" in keys else ()
        ignored += [("cluster", name, "device cpu") for name in of_gpus]
        ignored += [(section, "pin_memory", "device cpu") for section in ("workload", "axes")]
    if not _commands(matrix):  # _command_warnings checks the options of commands
        of_commands = (("workload", "metrics"), ("cluster", "stop_after_measurement"))
        ignored += [(*place, "the built-in training (there is no command)") for place in of_commands]
        if matrix.workload.data != "synthetic":
            by = "workload.data (images of a folder keep their size)"
            ignored.append((*_place("image_size", matrix), by))
    places: dict[str, list[tuple[str, str]]] = {}
    for section, name, by in ignored:
        if name in _given(matrix, section) and not document.inherited(f"{section}.{name}"):
            places.setdefault(by, []).append((section, name))
    for by, own in places.items():
        settings = tuple(f"{section}.{name}" for section, name in own)
        yield warnings.IgnoredSetting(settings=settings, by=by, **_at(document, *own[0]))
    if not _commands(matrix):
        yield from _ignored_options(matrix, document, cells)
        yield from _odd_strategies(matrix, document, cells)


def _ignored_options(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each option that some of the planned models or strategies do not use."""
    for kind, users_of in (("model", models_using), ("strategy", strategies_using)):
        used = [_used_strategy(one) if kind == "strategy" else (one.workload[kind],) * 2 for one in cells]
        for name in OPTIONS:
            place, users = _place(name, matrix), users_of(name)
            if not users or name not in _given(matrix, place[0]):
                continue
            others = [one for one in dict.fromkeys(used) if one[1] not in users]
            if varies := len(matrix.axes.given.get(name, ())) > 1:
                values = {(own, cell.workload[name]) for own, cell in zip(used, cells, strict=True)}
                others = [one for one in others if sum(one == own for own, _ in values) > 1]
            elif any(one not in _BASELINES for _, one in used):
                # A single rank without a wrapper is a baseline, which has nothing to set.
                others = [one for one in others if one[1] not in _BASELINES]
            if others:
                yield warnings.IgnoredOption(
                    option=name,
                    by=tuple(others),
                    users=tuple(users),
                    is_repeated=varies,
                    path=document.path,
                    line=document.line(place),
                )


def _used_strategy(cell: Cell) -> tuple[str, str]:
    """Return the strategy of a cell, and the one that it uses at its size."""
    planned = cell.workload["strategy"]
    return planned, on_hosts(planned, cell.ranks_per_node)


def _odd_strategies(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each strategy that does not do what its name says."""
    cells_by_pair: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        cells_by_pair.setdefault(_used_strategy(cell), []).append(cell.cell_id)
    for (planned, other), names in cells_by_pair.items():
        if planned != other:
            place = _at(document, *_place("strategy", matrix))
            yield warnings.RunsAs(strategy=planned, other=other, cells=tuple(names), **place)


def _at(document: Document, *place: str | int) -> dict[str, Any]:
    """Return path and line of a place, for a warning."""
    return {"path": document.path, "line": document.line(place)}


def _given(matrix: Matrix, section: str) -> set[str]:
    return set(matrix.axes.given) if section == "axes" else getattr(matrix, section).model_fields_set
