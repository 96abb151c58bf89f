"""Match the cells of two studies, or of two values of a setting of one study.

Two cells match if they have equal sizes, batches and models, and are equal in every other setting
that varies within one of the studies. A setting that has one value in A and another in B is a
difference between the studies and does not prevent a match.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from analysis.data.differences import WORK
from analysis.data.load import Study
from analysis.data.settings import NOT_SET
from bench.matrix.cell import SAME_SETTING, SIZES
from bench.matrix.field_types import did_you_mean
from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.known_strategies import DEFAULT
from ddp_scaling_bench.units import listed

#: If --by varies the setting on the left, the settings on the right may differ, too.
_DEPENDENT = {
    "global_batch": ("per_gpu_batch",),
    "per_gpu_batch": ("global_batch",),
    "grad_accum": ("per_gpu_batch",),
}


@dataclass(frozen=True)
class Matching:
    """Matching cells (A, B) and unmatched cells by ``cell_id``; they agree in the settings ``compared``."""

    pairs: list[tuple[str, str]]
    only_a: list[str]
    only_b: list[str]
    compared: Collection[str]


def match_studies(a: Study, b: Study, *, ignore: Collection[str] = ()) -> Matching:
    """Match the cells of two studies; matching cells may differ in the settings ``ignore``.

    Raises:
        BenchError: no cells match, a match is ambiguous, or ``ignore`` names an unknown setting.
    """
    ignored = {SAME_SETTING.get(name, name) for name in ignore}
    if "tasks_per_node" in ignored or "nodes" in ignored:
        ignored |= {"nodes", "tasks_per_node"}  # The number of ranks still has to be equal.
    cells_a, cells_b = a.settings, b.settings
    names = _names_of([*cells_a.values(), *cells_b.values()])
    for name in sorted(ignored - set(names)):
        several = [one for one in names if len({*_values(cells_a, one), *_values(cells_b, one)}) > 1]
        remedy = (
            did_you_mean(name, several, cutoff=0.74, all_in="`bench compare A B`") if several else "omit it"
        )
        raise BenchError(f"--ignore: no cell has a setting {name!r}", remedy=remedy)
    varying = {name for name in names if max(len(_values(cells, name)) for cells in (cells_a, cells_b)) > 1}
    compared = [name for name in names if name not in ignored and name in {*SIZES, *WORK, *varying}]
    matching = _match(cells_a, cells_b, compared, ("A", "B"))
    if not matching.pairs:
        raise _nothing_in_common(a, b, compared)
    return matching


def _nothing_in_common(a: Study, b: Study, compared: Sequence[str]) -> BenchError:
    """Return the error for studies without matching cells; it names the settings to ignore if that helps."""
    text = f"studies {a.name} (A) and {b.name} (B) have no cell in common"
    remedy = "compare studies of the same work and sizes"
    values = {name: [_values(study.settings, name) for study in (a, b)] for name in compared}
    disjoint = [name for name, (in_a, in_b) in values.items() if not {*in_a} & {*in_b}]
    disjoint.sort(key=lambda name: name not in WORK)
    if not disjoint:
        disjoint = [name for name in compared if name not in SIZES and _match_without([name], a, b, compared)]
        why = "no cell of A agrees with a cell of B in all settings"
        return BenchError(f"{text}: {why}", remedy=f"give --ignore {disjoint[0]}" if disjoint else remedy)
    in_a, in_b = (listed(own, limit=2) for own in values[disjoint[0]])
    why = f"{disjoint[0]} is {in_a} in A and {in_b} in B"
    helps = "world_size" not in disjoint and _match_without(disjoint, a, b, compared)
    if others := listed(disjoint[1:], limit=8 if helps else 2):
        why += f"; {others} differ{'s' * (len(disjoint) == 2)}, too"
    if helps:
        remedy = (
            f"give {'each with --ignore' if others else f'--ignore {disjoint[0]}'}, or compare the same work"
        )
    return BenchError(f"{text}: {why}", remedy=remedy)


def _match_without(ignored: Collection[str], a: Study, b: Study, compared: Sequence[str]) -> bool:
    """Return whether cells of two studies match if some settings are ignored."""
    if {"nodes", "tasks_per_node"} & {*ignored}:
        ignored = {*ignored, "nodes", "tasks_per_node"}
    kept = [name for name in compared if name not in ignored]
    try:
        return bool(_match(a.settings, b.settings, kept, ("A", "B")).pairs)
    except BenchError:  # two cells of one study would match
        return False


def match_within(study: Study, *, key: str, base: str | None = None) -> list[tuple[str, str, Matching]]:
    """Match the cells of one study that differ only in ``key``, such as ``backend`` or ``env.NCCL_ALGO``.

    Cells with the value ``base`` (by default ``ddp``, or else the first value in the plan) are matched with
    the cells of every other value. The result contains a tuple (base, other value, matching) for each other
    value.

    Raises:
        BenchError: the setting does not vary or is a size, or no cell has the base.
    """
    name = SAME_SETTING.get(key, key)
    cells = study.settings
    names = _names_of(cells.values())
    values = list(dict.fromkeys(cell.get(name, NOT_SET) for cell in cells.values()))
    if name in ("nodes", "tasks_per_node", "world_size"):
        raise BenchError(
            f"--by {key}: sizes cannot be compared with --by",
            remedy="bench report shows speedup and efficiency by size",
        )
    if len(values) == 1:
        varying = [other for other in names if other not in SIZES and len(_values(cells, other)) > 1]
        reason = f"{name} is {values[0]} in every cell" if name in names else f"{name!r} is not a setting"
        remedy = (
            f"settings that vary: {', '.join(varying)}"
            if varying
            else "no setting varies: give a second study"
        )
        raise BenchError(f"--by {name}: {reason} of study {study.name}", remedy=remedy)
    if base is None:
        base = DEFAULT if name == "strategy" and DEFAULT in values else values[0]
    if base not in values:
        raise BenchError(
            f"--base: no cell of study {study.name} has {name} {base!r}",
            remedy=f"its values are: {', '.join(values)}",
        )
    compared = [other for other in names if other != name and other not in _DEPENDENT.get(name, ())]
    by_value = {value: {i: c for i, c in cells.items() if c.get(name, NOT_SET) == value} for value in values}
    return [
        (base, value, _match(by_value[base], by_value[value], compared, (base, value)))
        for value in values
        if value != base
    ]


def varying_settings(study: Study) -> list[str]:
    """Return the settings that vary within a study and are neither a size, a batch, the work nor the mode."""
    cells = study.settings
    names = [name for name in _names_of(cells.values()) if name not in (*SIZES, *WORK, "mode")]
    return [name for name in names if len(_values(cells, name)) > 1]


def _names_of(cells: Iterable[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell))


def _values(cells: Mapping[str, Mapping[str, str]], name: str) -> list[str]:
    # Shorter texts first: numbers are then in the order of their values.
    return sorted({cell.get(name, NOT_SET) for cell in cells.values()}, key=lambda text: (len(text), text))


def _match(
    a: Mapping[str, Mapping[str, str]],
    b: Mapping[str, Mapping[str, str]],
    compared: Sequence[str],
    labels: tuple[str, str],
) -> Matching:
    """Match the cells that agree in all settings that are ``compared``."""
    in_a, in_b = (_by_key(cells, compared, of) for cells, of in zip((a, b), labels, strict=True))
    pairs = [(cell, in_b[key]) for key, cell in in_a.items() if key in in_b]
    only_a = [cell for key, cell in in_a.items() if key not in in_b]
    only_b = [cell for key, cell in in_b.items() if key not in in_a]
    return Matching(pairs, only_a, only_b, compared)


def _by_key(
    cells: Mapping[str, Mapping[str, str]], compared: Sequence[str], label: str
) -> dict[tuple[str, ...], str]:
    found: dict[tuple[str, ...], str] = {}
    for cell_id, cell in cells.items():
        twin = found.setdefault(tuple(cell.get(name, NOT_SET) for name in compared), cell_id)
        if twin != cell_id:
            raise BenchError(
                f"cells {twin} and {cell_id} of {label} agree in all compared settings, "
                "so it is not clear which of them to compare",
                remedy="ignore fewer settings (--ignore)",
            )
    return found
