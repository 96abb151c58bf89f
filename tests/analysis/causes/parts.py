"""Studies in which one part of the step takes longer: on all ranks, on one rank, or on one node."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from analysis.causes.cells import CauseRow
from bench.matrix.cell import Cell
from tests.analysis import studies
from tests.analysis.causes import planted

#: Seconds of a step of eight ranks on four nodes; two ranks on one node communicate for 1 ms.
WORK = {"data": 0.003, "forward": 0.03, "backward": 0.06, "optimizer": 0.01, "other": 0.002}
COMMUNICATION_S, RANKS, PER_NODE = 0.004, 8, 2
PARTS = (*WORK, "transfer")
#: The late ranks by the place at fault.
LATE = {"all": range(RANKS), "rank": (5,), "node": (4, 5)}


class Case(NamedTuple):
    """A part of the step that takes ``more_s`` longer."""

    part: str
    where: str
    more_s: float


def cases() -> Iterator[Case]:
    """Yield all cases. An all-reduce is equally long on all ranks, wherever it is slow."""
    for part, where, more_s in product(PARTS, LATE, (0.01, 0.02)):
        if part != "transfer" or where == "all":
            yield Case(part, where, more_s)


class _Timing(studies.Timing):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def parts(self, cell: Cell) -> dict[str, float]:
        parts = WORK | {"exposed": 0.001, "wait": 0.0}
        if cell.nodes == 1:
            return parts
        part, where, more_s = self.case
        parts["exposed"] = COMMUNICATION_S
        late = len(LATE[where]) / RANKS
        parts["exposed" if part == "transfer" else part] += more_s * late
        parts["wait"] = more_s * (1 - late)
        parts["exposed"] += parts["wait"]
        return parts


def rows_of(path: Path, case: Case) -> list[CauseRow]:
    """Return the rows of the larger cell of a study with a planted case."""
    cells = studies.weak(sizes=(PER_NODE, RANKS), per_node=PER_NODE)
    studies.finished(path, cells, timing=_Timing(case), noise=0.01)
    ranks = LATE[case.where] if case.part != "transfer" else ()
    work = {{"data": "data_load"}.get(part, part): spent_s for part, spent_s in WORK.items()}
    studies.write_ranks(
        path,
        pattern="n4x2*",
        late=lambda run, rank: case.more_s if rank in ranks else 0.0,
        host=lambda rank: f"n{rank // PER_NODE + 1}",
        part={"data": "data_load"}.get(case.part, case.part),
        work=work,
        transfer_s=COMMUNICATION_S + (case.more_s if case.part == "transfer" else 0.0),
    )
    return planted.causes(path, "n4x2-gloo-srun-b16")


def names_it(case: Case, rows: list[CauseRow]) -> bool:
    """Return whether the first cause names the part, and the rank or node that is late."""
    first = next((row for row in rows if not row.is_rest), None)
    place = {"all": ("", None), "rank": ("n3", 5), "node": ("n3", None)}[case.where]
    return first is not None and (first.part, (first.node, first.rank)) == (case.part, place)


def not_explained(rows: list[CauseRow]) -> float:
    """Return the part of the loss that no cause explains, as a share of the step."""
    return sum(abs(row.share) for row in rows if row.is_rest)
