"""Read which ranks a command started, and compare them with the plan.

:mod:`bench.measure.process_watch` writes one file per node, and defines which processes are ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from .conditions import objects
from .files import read_json
from .reasons import OtherRank, WrongRanks, sizes_named

#: File of the ranks of a node, in the run's folder.
RANKS_SEEN = "processes.{}.json"


@dataclass(frozen=True, order=True)
class SeenRank:
    """A rank, and the first and last time (seconds since 1970) it was seen."""

    rank: int
    world_size: int
    first: float
    last: float
    pid: int
    task: int
    """The process that bench started for one rank, on the same node: the rank itself, or one above it."""
    node: str
    command: str

    @property
    def place(self) -> str:
        """Command, process and node in words."""
        return f"`{self.command}` (process {self.pid} on {self.node})"


_RANK = TypeAdapter(SeenRank)


class StartedRanks(NamedTuple):
    """The ranks that a command started, compared with the plan.

    ``as_planned`` is None if not every planned rank was seen. Otherwise it is true if each process that bench
    started for one rank had one of the planned ranks, once or several times in succession.
    """

    as_planned: bool | None
    seen: list[SeenRank]
    planned: int

    @property
    def found(self) -> str:
        """The ranks in words, such as ``4 processes with WORLD_SIZE 2``, or ``""`` if none was seen."""
        return sizes_named(self.sizes)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """The values of WORLD_SIZE, each with its number of processes."""
        return tuple(sorted(Counter(one.world_size for one in self.seen).items()))

    @property
    def error(self) -> WrongRanks | None:
        """The difference from the plan, or None if the command started the planned ranks."""
        if self.as_planned is not False:
            return None
        wrong = next((one for one in self.seen if one.world_size != self.planned), None)
        pair = (wrong,) if wrong is not None else next(_doubles(self.seen))
        examples = tuple(OtherRank(one.rank, one.world_size, one.place) for one in pair)
        return WrongRanks(sizes=self.sizes, planned=self.planned, examples=examples)


def started_ranks(folder: Path, planned: int) -> StartedRanks:
    """Compare the ranks that were seen on the run's nodes with the ``planned`` number of ranks."""
    seen = sorted(_seen(folder))
    if any(one.world_size != planned for one in seen) or any(_doubles(seen)):
        return StartedRanks(False, seen, planned)
    is_complete = {one.rank for one in seen} == set(range(planned))
    return StartedRanks(True if is_complete else None, seen, planned)


def _seen(folder: Path) -> Iterator[SeenRank]:
    before, after = RANKS_SEEN.split("{}")
    for path in sorted(folder.glob(RANKS_SEEN.format("*"))):
        node = path.name.removeprefix(before).removesuffix(after)
        for one in objects((read_json(path) or {}).get("ranks")):
            own = {"node": node, "command": str(one.get("command") or "a program")}
            with suppress(ValidationError):
                yield _RANK.validate_python(one | own)


def _doubles(seen: Sequence[SeenRank]) -> Iterator[tuple[SeenRank, SeenRank]]:
    """Yield ranks of which one is too many.

    Two processes have the same rank at the same time or from different tasks, or one task started two ranks.
    """
    for _, of_rank in groupby(sorted(seen), key=lambda one: one.rank):
        for a, b in combinations(of_rank, 2):
            if _task(a) != _task(b) or max(a.first, b.first) <= min(a.last, b.last):
                yield a, b
    for _, of_task in groupby(sorted(seen, key=_task), key=_task):
        first, *others = of_task
        for other in others:
            if other.rank != first.rank:
                yield first, other


def _task(one: SeenRank) -> tuple[str, int]:
    return one.node, one.task
