"""Compare what `bench` says about the frozen studies with the expected values.

    python tests/freeze/compare.py [--write] [STUDY ...]

The archives in ``studies/`` are real studies as `bench` left them. Of each, plan.json, ledger.jsonl and
runs/ are unpacked into a temporary folder, where `bench status`, `verify` and `report` are called: they need
nothing else. Each difference is one line
with study, file, row, column, expected and actual value; the exit code is then 1. ``--write`` writes
the expected values anew.
"""

import argparse
import csv
import io
import json
import math
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.analysis.figures import no_figure  # noqa: E402
from tests.commands import command_line  # noqa: E402

HERE = Path(__file__).parent
STUDIES = sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("studies/*.tar.xz"))
TOLERANCE = 1e-9
#: The parts of a study from which everything else can be computed again.
SOURCES = ("plan.json", "ledger.jsonl", "runs")
#: Tables with more rows are compared by the sums of each cell.
MAX_ROWS = 500
MAX_TEXTS = 5

Row = dict[str, str]
Tables = dict[str, list[Row]]
Answer = dict[str, Any]


def actual(study: str, folder: Path, *words: str) -> tuple[Tables, Answer]:
    """Unpack a study into ``folder``, and return the tables that `bench` makes of it, and the report's JSON.

    ``words`` are further words for `bench report`.
    """
    unpack(study, folder)
    if (table := folder / f"{study}.csv").exists():
        return _report(table, folder, folder / f"{study}-report", words)
    tables = {
        "states.csv": [
            _row(run, "run_id", "state", "failure_class") for run in _ask("status", study, folder)
        ],
        "verify.csv": [_row(run, "run_id", "passed") for run in _ask("verify", study, folder)],
    }
    reported, said = _report(folder / study, folder, folder / study / "report", words)
    tables |= reported
    return {name: _sums(rows) if len(rows) > MAX_ROWS else rows for name, rows in tables.items()}, said


def unpack(study: str, folder: Path) -> None:
    """Unpack the :data:`SOURCES` of a study, or its table, into ``folder``."""
    with tarfile.open(HERE / f"studies/{study}.tar.xz") as archive:
        sources = [one for one in archive if not {*one.name.split("/")[1:2]} - {*SOURCES}]
        # Other filters ask the file system about each part of each path, six times as long as the rest takes.
        archive.extractall(folder, sources, filter="fully_trusted")


def _bench(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = command_line.bench(*words, cwd=cwd, BENCH_SITE="", BENCH_RESULTS=str(cwd))
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"bench {' '.join(words)}: {done.returncode}: {done.stderr}")
    return done


def _ask(command: str, study: str, folder: Path) -> list[Mapping[str, object]]:
    content = json.loads(_bench(command, f"./{study}", "--json", cwd=folder).stdout)
    return list(content["runs"])


def _row(content: Mapping[str, object], *names: str) -> Row:
    return {name: _text(content[name]) for name in names}


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _report(source: Path, folder: Path, report: Path, words: Sequence[str]) -> tuple[Tables, Answer]:
    """Write a report without figures, and return its tables, verdicts and validity, and its JSON."""
    with no_figure():
        said = json.loads(_bench("report", f"./{source.name}", "--json", *words, cwd=folder).stdout)
    tables = {
        name: _read(report / name)
        for name in ("scaling.csv", "runs.csv", "causes.csv")
        if (report / name).exists()
    }
    rows = [("validity", one["code"], one["severity"]) for one in said["validity"]]
    for one in said["verdicts"]:
        told = [_text(one[name]) for name in ("verdict", "reason", "more_runs")]
        rows.append(("verdict", f"{one['series']} {one['cell_id']}", "; ".join(filter(None, told))))
    rows += [("recommended", _name(one), json.dumps(one, sort_keys=True)) for one in said["recommended"]]
    tables["report.csv"] = [dict(zip(("item", "subject", "value"), row, strict=True)) for row in rows]
    return tables, said


def _name(recommended: object) -> str:
    return str(recommended.get("series", "")) if isinstance(recommended, dict) else str(recommended)


def _sums(rows: Sequence[Row]) -> list[Row]:
    """Return one row per cell: the sums of its numbers, and how often each of its texts occurs."""
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(row["run_id"].rpartition("-r")[0], []).append(row)
    return [
        {"run_id": cell} | {name: _sum([row[name] for row in own]) for name in own[0] if name != "run_id"}
        for cell, own in cells.items()
    ]


def _sum(values: Sequence[str]) -> str:
    numbers = [_number(value) for value in values if value]
    if numbers and None not in numbers:
        return repr(math.fsum(number for number in numbers if number is not None))
    counts = Counter(values)
    if len(counts) > MAX_TEXTS:
        return f"{len(counts)} texts"
    return "; ".join(f"{number} {value}" for value, number in sorted(counts.items()) if value)


def _read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def differences(study: str, tables: Tables) -> Iterator[str]:
    """Yield a line for each difference of a study's tables from its expected values."""
    expected = {path.name: _read(path) for path in sorted((HERE / "expected" / study).glob("*.csv"))}
    for name in sorted({*expected, *tables}):
        if name not in tables or name not in expected:
            yield f"{study} {name}: {'an additional' if name in tables else 'a missing'} file"
        else:
            yield from (f"{study} {name}: {line}" for line in _compare(expected[name], tables[name]))


def _compare(expected: Sequence[Row], found: Sequence[Row]) -> Iterator[str]:
    none: Row = {}
    for line, (before, after) in enumerate(zip_longest(expected, found, fillvalue=none), 2):
        for column in {**before, **after}:
            values = before.get(column, "nothing"), after.get(column, "nothing")
            if not _same(*values):
                yield f"line {line}, column {column}: expected {values[0]!r}, actual {values[1]!r}"


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    numbers = _number(one), _number(other)
    return None not in numbers and math.isclose(*numbers, rel_tol=TOLERANCE)  # type: ignore[arg-type]


def write(study: str, tables: Tables) -> None:
    """Write the expected values of a study anew."""
    shutil.rmtree(HERE / "expected" / study, ignore_errors=True)
    for name, rows in tables.items():
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, rows[0] if rows else (), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        _put(HERE / "expected" / study / name, text.getvalue())


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main() -> int:
    """Compare or write the named studies, by default all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("--write", action="store_true", help="write the expected values anew")
    given = parser.parse_args()
    found = 0
    for study in given.studies or STUDIES:
        with tempfile.TemporaryDirectory() as folder:
            tables, _ = actual(study, Path(folder).resolve())
        if given.write:
            write(study, tables)
            continue
        for line in differences(study, tables):
            print(line)
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
