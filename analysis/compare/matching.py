"""Which cells of two studies are the same physical configuration.

Two cells match if they agree in every setting that is compared: size, batch and the work
always; anything else (backend, precision, an environment variable) where it varies within
one of the studies. A setting that has one value throughout A and another throughout B is
the change between the studies, and is told instead of matched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.data.load import Study
from analysis.text import clean, listed, one_line
from bench.errors import BenchError

#: Size and batch of a cell.
SIZES = ("nodes", "tasks_per_node", "world_size", "global_batch", "per_gpu_batch")
#: What a sample is and costs: throughputs of different work cannot be compared.
WORK = ("model", "parameters", "seq_len", "image_size", "data")
#: The name that an axis has on GPUs.
ALIASES = {"gpus_per_node": "tasks_per_node"}
#: What follows from a batch, and cannot stay the same when it changes.
_FOLLOWS = {
    "global_batch": ("per_gpu_batch",),
    "per_gpu_batch": ("global_batch",),
    "grad_accum": ("per_gpu_batch",),
}
NOT_SET = "not set"

Settings = dict[str, str]


@dataclass(frozen=True)
class Difference:
    """A setting or a fact that is not the same on both sides, as texts."""

    what: str
    a: str
    b: str


@dataclass(frozen=True)
class Matching:
    """Pairs of ``cell_id`` of A and B, the cells of one side alone, and what changed between the sides."""

    pairs: list[tuple[str, str]]
    only_a: list[str]
    only_b: list[str]
    changes: list[Difference]


def settings_of(cell: Mapping[str, Any]) -> Settings:
    """Return every setting of a cell of plan.json by its name in the matrix."""
    found = {name: spelled(cell.get(name)) for name in (*SIZES, "launcher", "backend")}
    found |= {clean(name): spelled(value) for name, value in (cell.get("workload") or {}).items()}
    found |= {f"env.{clean(name)}": spelled(value) for name, value in (cell.get("env") or {}).items()}
    # A plan made elsewhere may name an axis without resolving it into an option.
    axes = {clean(name): spelled(value) for name, value in (cell.get("swept") or {}).items()}
    return {**axes, **found}


def spelled(value: Any) -> str:
    """Return a setting's value as the matrix spells it."""
    if value is None:
        return NOT_SET
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        # Four ranks on each of two nodes, given one by one, are 4.
        parts = list(dict.fromkeys(map(str, value)))
        return parts[0] if len(parts) == 1 else "+".join(map(str, value))
    return one_line(value, limit=120)


def match_studies(a: Study, b: Study, *, ignore: Collection[str] = ()) -> Matching:
    """Return which cells of two studies are the same configuration.

    Args:
        a: one study.
        b: the other.
        ignore: settings that cells need not agree in.

    Raises:
        BenchError: no cells match, two cells of one study would match the same, or a setting
            to be ignored is none.
    """
    ignored = {ALIASES.get(name, name) for name in ignore}
    if "tasks_per_node" in ignored or "nodes" in ignored:
        ignored |= {"nodes", "tasks_per_node"}  # the ranks still agree
    cells_a, cells_b = _settings(a), _settings(b)
    names = list(dict.fromkeys(name for one in (*cells_a.values(), *cells_b.values()) for name in one))
    for name in sorted(ignored - set(names)):
        raise BenchError(f"--ignore: no cell has a setting {name!r}", remedy=f"there are: {', '.join(names)}")
    compared, changes = _compared(cells_a, cells_b, names, ignored)
    matching = _match(cells_a, cells_b, compared, changes, where=("A", "B"))
    if not matching.pairs:
        raise BenchError(_nothing_in_common(a, b, cells_a, cells_b, compared), remedy=_NOTHING_REMEDY)
    return matching


_NOTHING_REMEDY = "compare studies of the same work and sizes, or leave a setting out: --ignore KEY"


def match_within(study: Study, *, key: str, base: str | None = None) -> list[tuple[str, str, Matching]]:
    """Return, for each other value of ``key`` in one study, its name, the base's and the matching cells.

    Args:
        study: the study.
        key: a setting that varies in it, such as ``backend`` or ``env.NCCL_ALGO``.
        base: the value that the others are compared to; by default the plan's first.

    Raises:
        BenchError: the setting does not vary or is a size, or no cell has the base.
    """
    name = ALIASES.get(key, key)
    cells = _settings(study)
    values = list(dict.fromkeys(cell.get(name, NOT_SET) for cell in cells.values()))
    _check_key(study, cells, name, values)
    first = values[0] if base is None else base
    if first not in values:
        raise BenchError(
            f"--base: no cell of study {study.name} has {name} {first!r}",
            remedy=f"there are: {', '.join(values)}",
        )
    names = list(dict.fromkeys(one for cell in cells.values() for one in cell))
    compared = [one for one in names if one != name and one not in _FOLLOWS.get(name, ())]
    sides = {value: {i: c for i, c in cells.items() if c.get(name, NOT_SET) == value} for value in values}
    return [
        (first, value, _match(sides[first], sides[value], compared, [], where=(first, value)))
        for value in values
        if value != first
    ]


def _check_key(study: Study, cells: Mapping[str, Settings], name: str, values: Sequence[str]) -> None:
    if name in ("nodes", "tasks_per_node", "world_size"):
        raise BenchError(
            f"--by {name}: sizes scale, and are not compared like this",
            remedy="bench report shows speedup and efficiency over sizes",
        )
    if len(values) > 1:
        return
    names = list(dict.fromkeys(one for cell in cells.values() for one in cell))
    varying = [
        one
        for one in names
        if one not in SIZES and len({cell.get(one, NOT_SET) for cell in cells.values()}) > 1
    ]
    told = f"{name} is {values[0]} in every cell" if name in names else f"no cell has a setting {name!r}"
    remedy = f"those that vary: {', '.join(varying)}" if varying else "give a second study instead"
    raise BenchError(f"--by {name}: {told} of study {study.name}", remedy=remedy)


def _settings(study: Study) -> dict[str, Settings]:
    return {clean(cell["cell_id"]): settings_of(cell) for cell in study.plan["cells"]}


def _compared(
    a: Mapping[str, Settings], b: Mapping[str, Settings], names: Iterable[str], ignored: Collection[str]
) -> tuple[list[str], list[Difference]]:
    """Return the settings that cells must agree in, and those that tell A from B as a whole."""
    compared, changes = [], []
    for name in names:
        values_a, values_b = _values(a, name), _values(b, name)
        fixed = name in SIZES or name in WORK
        varies = len(values_a) > 1 or len(values_b) > 1
        if name not in ignored and (fixed or varies):
            compared.append(name)
        elif values_a != values_b:
            changes.append(Difference(name, _some(values_a), _some(values_b)))
    return compared, changes


def _values(cells: Mapping[str, Settings], name: str) -> list[str]:
    return sorted({cell.get(name, NOT_SET) for cell in cells.values()})


def _some(values: Sequence[str]) -> str:
    return listed(list(values), limit=4)


def _match(
    a: Mapping[str, Settings],
    b: Mapping[str, Settings],
    compared: Sequence[str],
    changes: list[Difference],
    *,
    where: tuple[str, str],
) -> Matching:
    def key_of(cell: Settings) -> tuple[str, ...]:
        return tuple(cell.get(name, NOT_SET) for name in compared)

    by_key_a, by_key_b = _unique(a, key_of, where[0]), _unique(b, key_of, where[1])
    pairs = [(cell, by_key_b[key]) for key, cell in by_key_a.items() if key in by_key_b]
    only_a = [cell for key, cell in by_key_a.items() if key not in by_key_b]
    only_b = [cell for key, cell in by_key_b.items() if key not in by_key_a]
    return Matching(pairs, only_a, only_b, changes)


def _unique(
    cells: Mapping[str, Settings], key_of: Callable[[Settings], tuple[str, ...]], where: str
) -> dict[tuple[str, ...], str]:
    found: dict[tuple[str, ...], str] = {}
    for cell_id, cell in cells.items():
        twin = found.setdefault(key_of(cell), cell_id)
        if twin != cell_id:
            raise BenchError(
                f"cells {twin} and {cell_id} of {where} agree in all that is compared: "
                "it is open which one is meant",
                remedy="leave fewer settings out (--ignore)",
            )
    return found


def _nothing_in_common(
    a: Study, b: Study, cells_a: Mapping[str, Settings], cells_b: Mapping[str, Settings], names: Iterable[str]
) -> str:
    apart = []
    for name in names:
        values_a, values_b = _values(cells_a, name), _values(cells_b, name)
        if not set(values_a) & set(values_b):
            apart.append(f"{name} is {_some(values_a)} in A and {_some(values_b)} in B")
    why = "; ".join(apart[:4]) if apart else "no cell agrees in all settings at once"
    return f"studies {a.name} (A) and {b.name} (B) have no cell in common: {why}"
