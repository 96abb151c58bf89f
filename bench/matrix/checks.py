"""Check a matrix as a whole: find combinations that cannot run, and settings that deserve a warning."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddp_scaling_bench.known_models import models_using
from ddp_scaling_bench.known_strategies import DEFAULT as DEFAULT_STRATEGY
from ddp_scaling_bench.known_strategies import STRATEGIES, on_hosts, strategies_using, wire_problem
from ddp_scaling_bench.train.options import OPTIONS, device_problem
from ddp_scaling_bench.units import count

from .cell import PER_NODE, Cell, Command, Point
from .document import Document, Place
from .launchers import read_launch
from .schedulers import DEFAULT
from .schema import Matrix
from .warnings import (
    BatchNotNamed,
    DataNotMounted,
    FewRepeats,
    IgnoredOption,
    IgnoredSetting,
    ImageSizeIgnored,
    LiteralDollar,
    MixedNodes,
    NestedLaunch,
    NotInCommand,
    OneNodeCount,
    OneSize,
    PlanWarning,
    RootOnly,
    RunsAs,
    SharedNetwork,
    SharedNodes,
    SharedOutput,
)
from .workload import COMMON_OPTIONS, names_in

#: A word that needs no quotes, placeholders included.
_PLAIN = re.compile(r"[\w@%+=:,./{}-]+")
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


def check_dependency(matrix: Matrix, document: Document) -> None:
    """Record a problem if cluster.directives sets a dependency, which max_running would replace."""
    if matrix.max_running is None:
        return
    for index, line in enumerate(matrix.cluster.directives):
        if any(word.startswith(("-d", "--dep")) for word in line.split()):
            what = f"{line!r} has no effect with max_running, which sets the dependency of each job"
            document.add_problem(("cluster", "directives", index), what, "remove one of these settings")


def idle_gpus(cell: Cell, *, node_gpus: int | None) -> int:
    """Return the number of GPUs that a run reserves but does not use.

    ``node_gpus`` is the number of GPUs of a node if the run has whole nodes, otherwise None.
    """
    used = cell.world_size if cell.device == "cuda" else 0
    return cell.reserved_gpus(node_gpus=node_gpus) - used


def sharing_warnings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning if jobs can share nodes, and one if runs can share the network between nodes."""
    cluster = matrix.cluster
    if "exclusive" not in cluster.scheduler.keys:
        return
    if not cluster.exclusive:
        yield _shared_nodes(matrix, document, cells)
    runs = sum(cell.nodes > 1 for cell in cells) * matrix.repeats
    if runs > 1 and matrix.max_running is None:
        yield SharedNetwork(runs=runs)


def _shared_nodes(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> SharedNodes:
    """Return the warning about `exclusive: false`, which names the cells whose runs can share a node."""
    key = ("cluster", "exclusive")
    meeting = () if matrix.max_running else (cell.cell_id for cell in _cells_that_meet(matrix, cells))
    if document.site is not None and document.inherited("cluster.exclusive"):
        return SharedNodes(cells=tuple(meeting), path=document.site.path)
    of_plan = key not in document.lines  # the value comes from the study's plan.json
    return SharedNodes(cells=tuple(meeting), of_plan=of_plan, path=document.path, line=document.line(key))


def _cells_that_meet(matrix: Matrix, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells whose runs fit on a node together with another run of the study.

    Only GPUs are counted, because the plan does not know the cores and the memory of a node.
    """
    node_gpus = matrix.cluster.node_gpus
    # The two runs with the fewest GPUs per node: a run cannot share a node with itself.
    runs = [cell for cell in cells for _ in range(min(matrix.repeats, 2))]
    fewest = sorted(runs, key=lambda cell: cell.requested_gpus)[:2]
    if len(fewest) < 2:
        return []
    found = []
    for cell in cells:
        other = fewest[1] if cell is fewest[0] else fewest[0]
        if node_gpus is None or cell.requested_gpus + other.requested_gpus <= node_gpus:
            found.append(cell)
    return found


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
        if point.mode == "strong":
            divisor = point.ranks * _accumulation(point, matrix)
            multiples[point.batch] = math.lcm(multiples.get(point.batch, 1), divisor)
    runnable, is_built_in = [], not _commands(matrix)
    for point in points:
        before = len(document.problems)
        _check_placement(point, matrix, document)
        if len(document.problems) == before:
            _check_layout(point, matrix, document)
            _check_device_of(point, matrix, document, is_built_in=is_built_in)
            if is_built_in:
                _check_options(point, matrix, document)
            check_node_gpus(point, matrix, document)
        if point.mode == "strong" and len(document.problems) == before:
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
    if point.values["launcher"] == "srun":
        what = f"{axis} {per_node} differs per node, which launcher srun does not support"
        document.add_problem(("axes", axis), what, "use launcher [torchrun] for mixed nodes")


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
        remedy = f"{_excluding(point, matrix, (*sizes, 'strategy'))}, or use {DEFAULT_STRATEGY}"
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
    """Record a problem if the ranks do not divide a global batch; suggest the nearest batches that fit."""
    accumulation = _accumulation(point, matrix)
    ranks, batch = point.ranks, point.batch
    step = ranks * accumulation
    if batch % step == 0:
        return
    size = f"nodes {point.values['nodes']} x {matrix.size_axis} {point.values[PER_NODE]}"
    what = f"global_batch {batch} is not divisible by {ranks} ranks ({size})"
    if accumulation > 1:
        what += f" x grad_accum {accumulation}"
    if every_size <= 100 * batch:  # otherwise no nearby batch is divisible at every size
        step = every_size
    below = batch // step * step
    document.add_problem(point.place, what, f"try {below} or {below + step}" if below else f"try {step}")


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
    for place, words in _commands(matrix):
        for name in names_in(words):
            if name.startswith("env.") and name.removeprefix("env.") not in env:
                what = f"the command contains {{{name}}}, which neither cluster.env nor an axis sets"
                known = ", ".join(sorted(env)) or "nothing"
                document.add_problem(place, what, f"set it in cluster.env or in axes (now set: {known})")
            elif name in ("master_addr", "master_port") and not cluster.scheduler.sets_master:
                what = f"the command contains {{{name}}}, which executor {cluster.executor} does not set"
                document.add_problem(place, what, f"read ${name.upper()}, which torchrun sets for each rank")
            elif name not in given and getattr(matrix.workload, name, "") is None:
                what = f"the command contains {{{name}}}, which has no value"
                document.add_problem(place, what, f"set workload.{name} or axes.{name}")


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
        yield OneSize(series=tuple(single), of_all=len(single) == len(sizes))
    if matrix.repeats < INTERVAL_REPEATS:
        yield FewRepeats(repeats=matrix.repeats, needed=INTERVAL_REPEATS)
    if len({cell.nodes for cell in cells}) == 1:
        yield OneNodeCount(nodes=cells[0].nodes)


def _surprising_settings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each setting that does something other than people expect."""
    cluster = matrix.cluster
    for name, value in cluster.env.items():
        if "$" in value and not document.inherited(f"cluster.env.{name}"):
            line = document.line(("cluster", "env", name))
            yield LiteralDollar(variable=name, path=document.path, line=line)
    if cluster.container and matrix.workload.data != "synthetic" and not cluster.container.mounts:
        yield DataNotMounted(path=document.path, line=document.line(("workload", "data")))
    if "gpu_request" in cluster.scheduler.keys and matrix.workload.device == "cuda":
        for per_node in {tuple(c.tasks_per_node) for c in cells if isinstance(c.tasks_per_node, list)}:
            yield MixedNodes(ranks_per_node=per_node)


def _command_warnings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each launcher or shared output in a command, and each setting that none uses."""
    commands = _commands(matrix)
    if not commands:
        for section, name in (("workload", "metrics"), ("cluster", "stop_after_measurement")):
            if name in _given(matrix, section) and not document.inherited(f"{section}.{name}"):
                line = document.line((section, name))
                yield IgnoredSetting(setting=f"{section}.{name}", path=document.path, line=line)
        return
    for place, words in commands:
        yield from _nested_launch(matrix, words, path=document.path, line=document.line(place))
    if len(cells) * matrix.repeats > 1:
        yield from _shared_outputs(matrix, document)
    named = {name for _, words in commands for name in names_in(words)}
    if not named & {"per_gpu_batch", "global_batch"}:
        yield BatchNotNamed(path=document.path, line=document.line(commands[0][0]))
    if matrix.workload.metrics.source is None and "parameters" not in matrix.axes.given:
        named.add("parameters")  # their bytes are compared with those that the nodes sent
    options = OPTIONS.keys() - set(COMMON_OPTIONS)
    for section in ("axes", "workload"):
        for name in sorted(options & _given(matrix, section) - named):
            line = document.line((section, name))
            yield NotInCommand(section=section, name=name, path=document.path, line=line)


def _shared_outputs(matrix: Matrix, document: Document) -> Iterator[PlanWarning]:
    """Yield a warning for each option of a command that names an output, but not the run."""
    of_run = {"run_dir"} if matrix.repeats > 1 else {"run_dir", "cell_id"}
    for place, words in _commands(matrix):
        for word, following in zip(words, [*words[1:], ""], strict=True):
            option, equals, value = word.partition("=")
            value = value if equals else following
            is_output = _OUTPUT.fullmatch(option) and (equals or option.startswith("-"))
            if not is_output or _NO_OUTPUT.fullmatch(value) or of_run & {*names_in([value])}:
                continue
            if not Path(value).is_file():
                line = document.line(place)
                yield SharedOutput(option=option, value=value, path=document.path, line=line)


def _nested_launch(matrix: Matrix, words: Sequence[str], *, path: str, line: int) -> Iterator[PlanWarning]:
    """Yield a warning if the command is a launcher, of which each rank would start one."""
    launch = read_launch(words)
    if launch is None:
        return
    launcher = launch.launcher.replacement
    axis = "" if matrix.axes.given.get("launcher") == [launcher] else launcher
    own = " ".join(
        word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in [*launch.wrapper, *launch.program]
    )
    program = own if launch.program else ""
    yield NestedLaunch(launcher=launch.launcher.name, axis=axis, program=program, path=path, line=line)


def _ignored_settings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each setting that has no effect with this executor, device, model or strategy."""
    keys, executor = matrix.cluster.scheduler.keys, matrix.cluster.executor
    others = sorted(matrix.cluster.model_fields_set - _FOR_ALL_EXECUTORS - keys)
    ignored = [("cluster", name, (executor, "")) for name in others]
    if matrix.workload.device == "cpu":
        of_gpus = ("gpu_type", "gpu_request") if "gpu_request" in keys else ()
        ignored += [("cluster", name, ("", "cpu")) for name in of_gpus]
        ignored += [(section, "pin_memory", ("", "cpu")) for section in ("workload", "axes")]
    for section, name, (by, device) in ignored:
        if name in _given(matrix, section) and not document.inherited(f"{section}.{name}"):
            line = document.line((section, name))
            setting = f"{section}.{name}"
            path = document.path
            yield IgnoredSetting(setting=setting, executor=by, device=device, path=path, line=line)
    if not _commands(matrix):  # _command_warnings checks the options of commands
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
                yield IgnoredOption(
                    option=name,
                    by=tuple(others),
                    users=tuple(users),
                    is_repeated=varies,
                    path=document.path,
                    line=document.line(place),
                )
    place = _place("image_size", matrix)
    if matrix.workload.data != "synthetic" and "image_size" in _given(matrix, place[0]):
        yield ImageSizeIgnored(path=document.path, line=document.line(place))


def _used_strategy(cell: Cell) -> tuple[str, str]:
    """Return the strategy of a cell, and the one that it uses at its size."""
    planned = cell.workload["strategy"]
    return planned, on_hosts(planned, cell.ranks_per_node)


def _odd_strategies(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> Iterator[PlanWarning]:
    """Yield a warning for each strategy that does not do what its name says."""
    used, wrapping = [_used_strategy(cell) for cell in cells], strategies_using("fsdp_wrap")
    pairs = zip(cells, used, strict=True)
    if any(own in wrapping and cell.workload["fsdp_wrap"] == "root" for cell, (_, own) in pairs):
        yield RootOnly(path=document.path, line=document.line(_place("fsdp_wrap", matrix)))
    line = document.line(_place("strategy", matrix))
    for planned, other in dict.fromkeys(pair for pair in used if pair[0] != pair[1]):
        own = (cell.cell_id for cell, pair in zip(cells, used, strict=True) if pair == (planned, other))
        yield RunsAs(strategy=planned, other=other, cells=tuple(own), path=document.path, line=line)


def _given(matrix: Matrix, section: str) -> set[str]:
    return set(matrix.axes.given) if section == "axes" else getattr(matrix, section).model_fields_set
