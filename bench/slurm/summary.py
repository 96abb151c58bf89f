"""Slurm's accounting of a job as a table that people read: what sacct_summary.txt holds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from bench.slurm.parsing import AccountingRow

_HEADINGS = (
    "JobID",
    "State",
    "ExitCode",
    "Start (UTC)",
    "End (UTC)",
    "Elapsed",
    "MaxRSS",
    "NodeList",
    "Name",
)


def accounting_table(rows: Sequence[AccountingRow]) -> str:
    """Return one line per job and step, in aligned columns under a heading."""
    table = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(_HEADINGS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _cells(row: AccountingRow) -> tuple[str, ...]:
    key = row.key
    component = "" if key.component is None else f"+{key.component}"
    step = "" if key.step is None else f".{key.step}"
    exits = "" if row.exit_code is None else f"{row.exit_code}:{row.signal or 0}"
    times = (_clock(row.started), _clock(row.ended))
    shown = f"{key.job}{component}{step}"
    return (shown, row.state, exits, *times, row.elapsed, row.max_rss, row.hosts, row.name)


def _clock(time: datetime | None) -> str:
    return "-" if time is None else time.replace(tzinfo=None).isoformat(" ", "seconds")
