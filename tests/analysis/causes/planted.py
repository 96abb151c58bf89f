"""Made-up studies in whose runs a cause is planted, with all files as the harness writes them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.causes.cells import CauseRow
from analysis.causes.table import study_causes
from analysis.data.load import load_study
from bench.matrix.cell import Cell
from ddp_scaling_bench.run_folder import RunFolder
from tests.analysis import studies

#: Seconds of a step of one rank without any loss.
FORWARD, BACKWARD, OPTIMIZER = 0.03, 0.06, 0.01


class Planted(studies.Timing):
    """Weak scaling without loss, except for ``more``: seconds by part, added on more than one node."""

    def __init__(self, more: dict[str, float], *, everywhere: bool = False) -> None:
        super().__init__()
        self.more, self.everywhere = more, everywhere

    def parts(self, cell: Cell) -> dict[str, float]:
        parts = dict.fromkeys(("data", "exposed", "wait", "other"), 0.0)
        parts |= {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}
        if cell.nodes > 1 or self.everywhere:
            for part, seconds in self.more.items():
                parts[part] += seconds
        return parts


def step_s(more: dict[str, float]) -> float:
    """Return the step time of a disturbed cell; waiting is part of the exposed communication."""
    return FORWARD + BACKWARD + OPTIMIZER + sum(value for part, value in more.items() if part != "wait")


def plant(
    path: Path,
    more: dict[str, float] | None = None,
    *,
    everywhere: bool = False,
    noise: float = 0.003,
    env: Callable[[Cell], dict[str, Any]] | None = None,
) -> Path:
    """Write a weak series of one and of four nodes; ``more`` are seconds by part on four nodes."""
    timing = Planted(more or {}, everywhere=everywhere)
    return studies.finished(path, studies.weak(sizes=(1, 4)), timing=timing, noise=noise, env=env)


def attempts(path: Path, pattern: str = "n4x1*") -> list[RunFolder]:
    """Return the attempts of some cells."""
    return [RunFolder(folder) for folder in sorted(path.glob(f"runs/{pattern}/attempt-1"))]


def conditions(
    folder: RunFolder,
    *,
    ranks: int,
    rank: Mapping[str, Any] | None = None,
    node: Mapping[str, Any] | None = None,
) -> None:
    """Write conditions.json with one window; ``rank`` and ``node`` are values of all ranks and nodes."""
    window = {
        "epoch": 1,
        "start": "2026-01-02T03:05:00.000Z",
        "end": "2026-01-02T03:05:10.000Z",
        "nodes": [{"node": f"n{n + 1}", "throttled_s": 0.0, **(node or {})} for n in range(ranks)],
        "ranks": [{"rank": one, "threads": 1, **(rank or {})} for one in range(ranks)],
    }
    folder.conditions.write_text(json.dumps({"schema": 1, "windows": [window]}))


def late(path: Path, rank: int, seconds: float, *, part: str = "backward") -> None:
    """Write ranks.csv of the larger cells: one rank takes longer in one part, and the others wait."""
    late_on(path, (rank,), seconds, part=part)


def late_on(
    path: Path, ranks: Sequence[int], seconds: float, *, part: str, pattern: str = "n4x1*", per_node: int = 1
) -> None:
    """Write ranks.csv of some cells: some ranks take longer in one part, and the others wait."""
    studies.write_ranks(
        path,
        pattern=pattern,
        late=lambda run, one: seconds if one in ranks else 0.0,
        host=lambda one: f"n{one // per_node + 1}",
        part={"data": "data_load"}.get(part, part),
        work=studies.WORK
        | {"data_load": 0, "forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER},
        transfer_s=0.0,
    )


def late_parts(seconds: float, *, part: str = "backward") -> dict[str, float]:
    """Return the means over four ranks, of which one is late."""
    waiting = seconds * 3 / 4
    return {part: seconds / 4, "wait": waiting, "exposed": waiting}


def sampled_step(
    folder: RunFolder, step: float, *calls: dict[str, Any], ranks: Sequence[int] = (0, 1, 2, 3)
) -> None:
    """Write sampled_step.json: all ``ranks`` make the same calls."""
    full = [{"path": "/home/me/train.py", "calls": 1, "part": None, **call} for call in calls]
    steps = [
        {"rank": r, "step_s": step, "collectives": None, "slow_calls": full if r in ranks else []}
        for r in range(4)
    ]
    folder.sampled_step.write_text(json.dumps({"schema": 1, "ranks": steps}))


def causes(path: Path, cell: str = "n4x1-gloo-srun-b16") -> list[CauseRow]:
    """Return the rows of causes.csv of one cell, also if its values are not valid."""
    return [row for row in study_causes(load_study(path), also_invalid=True) if row.cell_id == cell]
