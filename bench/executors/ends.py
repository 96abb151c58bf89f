"""The ends of attempts that one look at Slurm finds, written down together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.errors import UnwritableError
from bench.executors.base import Outcome, PlannedStudy, settled
from bench.files import read_json, write_atomically, write_json
from bench.ledger import RunRecord, RunState


@dataclass
class Ends:
    """The ends that one look finds; where they cannot be written down, the records still have them.

    Several threads may add to it, each the end of another run.
    """

    study: PlannedStudy
    _found: dict[str, tuple[RunRecord, dict[str, Any]]] = field(default_factory=dict)

    def add(
        self,
        record: RunRecord,
        outcome: Outcome,
        *,
        ended_at: str,
        event: str = "ended",
        table: str = "",
        accounted: bool = True,
    ) -> None:
        """Note how an attempt ended; ``table`` is its accounting, ``accounted`` false where that is owed."""
        folder = self.study.folder.attempt(record.run_id, record.attempt)
        try:
            noted = settled(self.study, record, outcome, ended_at=ended_at, event=event)
            if table and folder.path.is_dir():
                write_atomically(folder.sacct_summary, table)
        except UnwritableError as full:
            record.reason = "; ".join(filter(None, (record.reason, f"not saved: {full.message}")))
            return
        self._found[record.run_id] = (record, {**noted, "accounted": accounted})

    def withdraw(self, record: RunRecord, reason: str) -> None:
        """Note that nothing came of an attempt: the next submission starts the run, as another one."""
        record.state, record.reason = RunState.PLANNED, reason
        end = {"state": str(record.state), "reason": reason}
        try:
            run_json = self.study.folder.attempt(record.run_id, record.attempt).run_json
            write_json(run_json, {**(read_json(run_json) or {}), **end})
        except UnwritableError as full:
            record.reason = f"{reason}; not saved: {full.message}"
            return
        event = {"event": "withdrawn", "run_id": record.run_id, "attempt": record.attempt}
        self._found[record.run_id] = (record, {**event, "reason": reason, "refused": False})

    def write(self) -> None:
        """Write all of them into the ledger in the planned order, at once: durable writing is slow."""
        found = [self._found[run.run_id] for run in self.study.runs if run.run_id in self._found]
        try:
            self.study.ledger.append_all([event for _, event in found])
        except UnwritableError as full:
            for record, _ in found:
                record.reason = "; ".join(filter(None, (record.reason, f"not saved: {full.message}")))
