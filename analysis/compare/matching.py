"""Match the cells of two studies and list the differences in settings, software and hardware.

Two cells match if they have equal sizes, batches and models, and are equal in every other setting
that varies within one of the studies. A setting that has one value in A and another in B is a
difference between the studies and does not prevent a match.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.data.environment import FACTS, TRANSPORT, sampled, value_of
from analysis.data.load import Study
from analysis.text import clean, one_line
from bench.errors import BenchError
from bench.matrix.cell import value_text
from bench.matrix.workload import FIXED_DEFAULTS, present_names
from bench.study.conditions import objects
from bench.units import listed
from bench.words import term

#: Size and batch of a cell.
SIZES = ("nodes", "tasks_per_node", "world_size", "global_batch", "per_gpu_batch")
#: Settings that define the work of a sample: with different work, throughputs are not comparable.
WORK = ("model", "parameters", "seq_len", "image_size", "data")
#: Other names that --by and --ignore accept for a setting.
ALIASES = {"gpus_per_node": "tasks_per_node"}
#: If --by varies the setting on the left, the settings on the right may differ, too.
_DEPENDENT = {
    "global_batch": ("per_gpu_batch",),
    "per_gpu_batch": ("global_batch",),
    "grad_accum": ("per_gpu_batch",),
}
#: Environment variables that are not compared, because they always differ between runs or repeat settings.
_PER_RUN = (
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("SLURM_NNODES", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE"),
)
#: The variables of bench repeat the matrix, or describe one run.
_PER_RUN_PREFIXES = ("TORCHELASTIC_", "BENCH_")
NOT_SET = "not set"
_NOT_KNOWN = "not known"

Settings = dict[str, str]


@dataclass(frozen=True)
class Difference:
    """A setting or fact with its values in A and B, as texts."""

    what: str
    a: str
    b: str


@dataclass(frozen=True)
class Matching:
    """Matching cells (A, B) and unmatched cells by ``cell_id``; ``changes`` are differing settings."""

    pairs: list[tuple[str, str]]
    only_a: list[str]
    only_b: list[str]
    changes: list[Difference]


def settings_of(cell: Mapping[str, Any]) -> Settings:
    """Return all settings of a cell of plan.json: values as texts, by the setting's name in the matrix."""
    found = {name: spelled(cell.get(name)) for name in (*SIZES, "launcher", "backend")}
    options = FIXED_DEFAULTS | present_names(cell["workload"]) if cell.get("workload") else {}
    found |= {clean(name): spelled(value) for name, value in options.items()}
    found |= {f"env.{clean(name)}": spelled(value) for name, value in (cell.get("env") or {}).items()}
    command, name = found.get("command", NOT_SET), found.pop("command_name", None)
    if command != NOT_SET and "{model}" not in command:
        found["model"] = NOT_SET  # the default, which has no effect on a command
    if name is not None:
        found["command"] = name  # two commands with one name match; command_differences shows their texts
    # A plan made elsewhere may contain axes that are not options of the workload.
    axes = {clean(name): spelled(value) for name, value in present_names(cell.get("swept") or {}).items()}
    return {**axes, **found}


def spelled(value: Any) -> str:
    """Return the value of a setting as written in the matrix."""
    if value is None:
        return NOT_SET
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list) and any(isinstance(word, str) for word in value):
        return clean(value_text(value))  # a command as typed, without secrets
    if isinstance(value, list):
        # [4, 4], four ranks on each of two nodes, equals 4.
        parts = list(dict.fromkeys(map(str, value)))
        return parts[0] if len(parts) == 1 else "+".join(map(str, value))
    return one_line(value, limit=120)


def match_studies(a: Study, b: Study, *, ignore: Collection[str] = ()) -> Matching:
    """Match the cells of two studies; matching cells may differ in the settings ``ignore``.

    Raises:
        BenchError: no cells match, a match is ambiguous, or ``ignore`` names an unknown setting.
    """
    ignored = {ALIASES.get(name, name) for name in ignore}
    if "tasks_per_node" in ignored or "nodes" in ignored:
        ignored |= {"nodes", "tasks_per_node"}  # The number of ranks still has to be equal.
    cells_a, cells_b = _settings(a), _settings(b)
    names = list(dict.fromkeys(name for cell in (*cells_a.values(), *cells_b.values()) for name in cell))
    for name in sorted(ignored - set(names)):
        raise BenchError(f"--ignore: no cell has a setting {name!r}", remedy=f"settings: {', '.join(names)}")
    compared, changes = _compared_settings(cells_a, cells_b, names, ignored)
    changes += _command_differences(a, b)
    matching = _match(cells_a, cells_b, compared, changes, labels=("A", "B"))
    if not matching.pairs:
        raise BenchError(
            f"studies {a.name} (A) and {b.name} (B) have no cell in common: "
            + _why_none_match(cells_a, cells_b, compared),
            remedy="compare studies of the same work and sizes, or ignore a setting: --ignore KEY",
        )
    return matching


def match_within(study: Study, *, key: str, base: str | None = None) -> list[tuple[str, str, Matching]]:
    """Match the cells of one study that differ only in ``key``, such as ``backend`` or ``env.NCCL_ALGO``.

    Cells with the value ``base`` (by default the first value in the plan) are matched with the cells of every
    other value. The result contains a tuple (base, other value, matching) for each other value.

    Raises:
        BenchError: the setting does not vary or is a size, or no cell has the base.
    """
    name = ALIASES.get(key, key)
    cells = _settings(study)
    values = list(dict.fromkeys(cell.get(name, NOT_SET) for cell in cells.values()))
    _check_key(study, cells, name, values)
    base = values[0] if base is None else base
    if base not in values:
        raise BenchError(
            f"--base: no cell of study {study.name} has {name} {base!r}",
            remedy=f"its values are: {', '.join(values)}",
        )
    names = list(dict.fromkeys(other for cell in cells.values() for other in cell))
    compared = [other for other in names if other != name and other not in _DEPENDENT.get(name, ())]
    by_value = {value: {i: c for i, c in cells.items() if c.get(name, NOT_SET) == value} for value in values}
    return [
        (base, value, _match(by_value[base], by_value[value], compared, [], labels=(base, value)))
        for value in values
        if value != base
    ]


def _check_key(study: Study, cells: Mapping[str, Settings], name: str, values: Sequence[str]) -> None:
    if name in ("nodes", "tasks_per_node", "world_size"):
        raise BenchError(
            f"--by {name}: sizes cannot be compared with --by",
            remedy="bench report shows speedup and efficiency by size",
        )
    if len(values) > 1:
        return
    names = list(dict.fromkeys(other for cell in cells.values() for other in cell))
    varying = [other for other in names if other not in SIZES and len(_values(cells, other)) > 1]
    reason = f"{name} is {values[0]} in every cell" if name in names else f"no cell has a setting {name!r}"
    remedy = f"settings that vary: {', '.join(varying)}" if varying else "give a second study instead"
    raise BenchError(f"--by {name}: {reason} of study {study.name}", remedy=remedy)


def _settings(study: Study) -> dict[str, Settings]:
    return {clean(cell["cell_id"]): settings_of(cell) for cell in study.plan["cells"]}


def _compared_settings(
    a: Mapping[str, Settings], b: Mapping[str, Settings], names: Iterable[str], ignored: Collection[str]
) -> tuple[list[str], list[Difference]]:
    """Return the settings that must be equal in matching cells, and the other settings that differ."""
    compared, changes = [], []
    for name in names:
        values_a, values_b = _values(a, name), _values(b, name)
        fixed = name in SIZES or name in WORK
        varies = len(values_a) > 1 or len(values_b) > 1
        if name not in ignored and (fixed or varies):
            compared.append(name)
        elif values_a != values_b:
            changes.append(Difference(name, listed(values_a, limit=4), listed(values_b, limit=4)))
    return compared, changes


def _command_differences(a: Study, b: Study) -> list[Difference]:
    """Return the named commands that A and B define differently."""
    texts_a, texts_b = _named_commands(a), _named_commands(b)
    return [
        Difference(f"command {name}", text, texts_b[name])
        for name, text in texts_a.items()
        if texts_b.get(name, text) != text
    ]


def _named_commands(study: Study) -> dict[str, str]:
    workloads = [cell.get("workload") or {} for cell in study.plan["cells"]]
    named = [one for one in workloads if one.get("command_name")]
    return {clean(one["command_name"]): spelled(one.get("command")) for one in named}


def _values(cells: Mapping[str, Settings], name: str) -> list[str]:
    # Shorter texts first: numbers are then in the order of their values.
    return sorted({cell.get(name, NOT_SET) for cell in cells.values()}, key=lambda text: (len(text), text))


def _match(
    a: Mapping[str, Settings],
    b: Mapping[str, Settings],
    compared: Sequence[str],
    changes: list[Difference],
    *,
    labels: tuple[str, str],
) -> Matching:
    def key_of(cell: Settings) -> tuple[str, ...]:
        return tuple(cell.get(name, NOT_SET) for name in compared)

    by_key_a, by_key_b = _by_unique_key(a, key_of, labels[0]), _by_unique_key(b, key_of, labels[1])
    pairs = [(cell, by_key_b[key]) for key, cell in by_key_a.items() if key in by_key_b]
    only_a = [cell for key, cell in by_key_a.items() if key not in by_key_b]
    only_b = [cell for key, cell in by_key_b.items() if key not in by_key_a]
    return Matching(pairs, only_a, only_b, changes)


def _by_unique_key(
    cells: Mapping[str, Settings], key_of: Callable[[Settings], tuple[str, ...]], label: str
) -> dict[tuple[str, ...], str]:
    found: dict[tuple[str, ...], str] = {}
    for cell_id, cell in cells.items():
        twin = found.setdefault(key_of(cell), cell_id)
        if twin != cell_id:
            raise BenchError(
                f"cells {twin} and {cell_id} of {label} agree in all compared settings, "
                "so it is not clear which of them to compare",
                remedy="ignore fewer settings (--ignore)",
            )
    return found


def _why_none_match(a: Mapping[str, Settings], b: Mapping[str, Settings], names: Iterable[str]) -> str:
    values = [(name, _values(a, name), _values(b, name)) for name in names]
    disjoint = [
        f"{name} is {listed(in_a, limit=4)} in A and {listed(in_b, limit=4)} in B"
        for name, in_a, in_b in values
        if not set(in_a) & set(in_b)
    ]
    return "; ".join(disjoint[:4]) if disjoint else "no cell of A agrees with a cell of B in all settings"


def environment_differences(
    a: Study, b: Study, *, runs_a: Iterable[str], runs_b: Iterable[str]
) -> list[Difference]:
    """Return the facts of env.json that differ between the runs ``runs_a`` of A and ``runs_b`` of B.

    Runs are given by ``run_id``. If a fact has several values in a study, the sets of values are compared. Of
    many runs, only a sample is read.
    """
    facts_a, facts_b = _facts(a, runs_a), _facts(b, runs_b)

    def text(key: tuple[str, str], facts: Mapping[tuple[str, str], list[str]]) -> str:
        missing = NOT_SET if key[0] == "variable" else _NOT_KNOWN
        return listed(facts[key], limit=4) if facts.get(key) else missing

    return [
        Difference(key[1] if key[0] == "variable" else term(*key), text(key, facts_a), text(key, facts_b))
        for key in dict.fromkeys((*facts_a, *facts_b))
        if facts_a.get(key, []) != facts_b.get(key, [])
    ]


def _facts(study: Study, run_ids: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """Return, for each kind and name of a fact of env.json, its sorted values in the given runs."""
    wanted = set(run_ids)
    places = [place for place, run_id in enumerate(study.runs["run_id"]) if run_id in wanted]
    chosen = study.runs["run_id"].iloc[sampled(study, places)]
    found: dict[tuple[str, str], set[str]] = {}
    for env in study.envs_of(chosen).values():
        for kind, name, value in _facts_of_run(env):
            found.setdefault((kind, name), set()).add(value)
    return {key: sorted(values) for key, values in found.items()}


def _facts_of_run(env: dict[str, Any]) -> Iterable[tuple[str, str, str]]:
    transport = env.get("transport")
    # Backend and launcher are compared as settings, and so is the strategy of the built-in training.
    settings = ("backend", "launcher", *(["strategy"] if "workload" in env else []))
    own = [(name, value_of(env, name)) for name in FACTS if name not in settings]
    own += [(name, value_of(transport, name)) for name in TRANSPORT if isinstance(transport, dict)]
    yield from (("environment", name, value) for name, value in own if value)
    for host in objects(env.get("hosts")):
        yield "environment", "hosts", one_line(host.get("host"), limit=80)
        yield "environment", "cpu", one_line(host.get("cpu_model"), limit=80) or _NOT_KNOWN
        yield "environment", "cores", one_line(host.get("cores"), limit=10) or _NOT_KNOWN
    for section in ("env", "slurm"):
        variables = env.get(section)
        for name, value in variables.items() if isinstance(variables, dict) else ():
            if name not in _PER_RUN and not name.startswith(_PER_RUN_PREFIXES):
                yield "variable", one_line(name, limit=80), one_line(value, limit=160)
