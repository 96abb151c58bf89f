"""What a run's name or a job's id stands for, among all studies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.errors import BenchError
from bench.executors.base import PlannedStudy, open_study
from bench.layout import latest_first


def attempts_meant(target: str, root: Path) -> Iterator[tuple[PlannedStudy, list[tuple[str, int]]]]:
    """Yield the studies below ``root`` that know ``target``, the one planned last first.

    With each come run and attempt of what is meant: of a run's name the latest attempt (0 where it
    was never started), of a job's id all that the job ran, older attempts included.
    """
    for folder in latest_first(root):
        try:
            planned = open_study(folder)
        except BenchError:  # another version's: what is meant may be elsewhere
            continue
        records = planned.records()
        if target in records:
            yield planned, [(target, records[target].attempt)]
        elif of_job := [one for one in planned.ledger.attempts_of_job(target) if one[0] in records]:
            yield planned, of_job
