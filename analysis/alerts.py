"""What a reader must know of a study before looking at a number."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from analysis.environment import Crowding, Environment
from analysis.listing import states
from analysis.measured import Frames
from analysis.stragglers import LateNodes, others_wait
from analysis.wording import count, listed, one_line

#: A heading and words.
Alert = tuple[str, str]


def alerts(
    rows: pd.DataFrame, frames: Frames, environment: Environment, *, late: LateNodes, slow: pd.DataFrame
) -> Iterator[Alert]:
    """Yield what stands on top of the page.

    Args:
        rows: from :func:`analysis.scaling.scale`.
        frames: what that was made from.
        environment: what the runs ran on.
        late: the nodes that the others wait for.
        slow: those of them that are slow by their own work, too (:func:`analysis.slow_nodes.slow_nodes`).
    """
    if environment.crowding is not None:
        yield _crowded(environment.crowding)
    yield from _without_a_number(frames.runs)
    mixed = rows[rows["other_unit"]].drop_duplicates("cell_id")
    if len(mixed):
        cells = listed([one_line(name, limit=60) for name in mixed["cell_id"]], limit=4)
        words = f"{cells}: counted in another unit than the plan's samples or the baseline; no efficiency."
        yield "Two units of work", words
    if environment.differing:
        words = f"Not all runs had the same {listed(environment.differing)}: see the environment below."
        yield "Runs differ", words
    if late.sentences:
        yield others_wait(late, slow=slow)


def _crowded(crowding: Crowding) -> Alert:
    sizes = listed([str(size) for size in crowding.sizes], limit=8)
    concerned = f". Sizes concerned: {sizes} ranks" if sizes else ""
    return "Ranks outnumber cores", f"{crowding}{concerned}."


def _without_a_number(runs: pd.DataFrame) -> Iterator[Alert]:
    missing = runs[~runs["measured"]]
    if len(missing) == len(runs):
        told = f": {states(runs)}" if len(runs) else ""
        yield "Nothing to compare", f"None of the {count(len(runs), 'planned run')} gave a number{told}."
    elif len(missing):
        words = f"{len(missing):,} of {count(len(runs), 'run')} do not count: {states(missing)}."
        yield "Incomplete", words
