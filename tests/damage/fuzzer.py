"""Damage one file of a study at a time, and compare what `bench` shows before and after.

A trial is silent if a number changed and no message of the same view names the damaged file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.data.load import load_study
from analysis.stats.measured import measure
from bench.commands.options import settle_study
from bench.commands.status import add_damages, status_content
from bench.commands.verify import verify_study
from bench.errors import BenchError, inaccessible
from bench.study.layout import StudyFolder
from bench.study.plan_json import open_study

#: A trial that lasts longer hangs.
LIMIT_S = 90
_NUMBER = re.compile(rb"(?<![A-Za-z_])[0-9]+(?:\.[0-9]+)?")
#: Values of other types or sizes, as JSON.
ODD = (
    *("null", "-1", "0", "5", '"abc"', "1e400", "-1e400", "NaN", "[]", "{}", "[1]", "true", "1e-320"),
    *('"\\u001b[31m"', "99999999999999999999999", '"2026-13-45T99:99:99Z"', '""'),
)
_CELLS = ("", "abc", "1e-320", "1e400", "-1", "nan", "0", "999999999")
#: The commands that trials call.
COMMANDS = (
    *(("status", "STUDY"), ("verify", "STUDY"), ("status", "STUDY", "--json"), ("cancel", "STUDY")),
    *(("report", "STUDY"), ("compare", "STUDY", "OTHER"), ("doctor", "STUDY")),
    *(("advise", "STUDY", "--samples", "1M"), ("submit", "STUDY", "--dry-run")),
)


@dataclass
class View:
    """What one part of `bench` shows: its numbers by name, and its messages."""

    numbers: dict[str, Any] = field(default_factory=dict)
    messages: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Trial:
    """The result of one trial: ``same, error, reported, silent, traceback, hang`` or ``outside``."""

    outcome: str
    damage: str
    detail: str = ""


class _Hang(BaseException):
    pass


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise an exception that nothing handles if the block takes longer."""

    def stop(number: int, frame: object) -> None:
        raise _Hang

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


# -- damages --------------------------------------------------------------------------


def damage(path: Path, chance: random.Random) -> str:
    """Damage a file; return a description."""
    kinds: list[Callable[[Path, random.Random], str | None]] = [*_ANY]
    kinds += _CSV * 3 if path.suffix == ".csv" else []
    kinds += _JSON * 3 if path.suffix in (".json", ".jsonl") else []
    while True:
        done = chance.choice(kinds)(path, chance)
        if done is not None:
            return done


def _delete(path: Path, chance: random.Random) -> str:
    path.unlink()
    return "deleted"


def _empty(path: Path, chance: random.Random) -> str:
    path.write_bytes(b"")
    return "empty"


def _cut(path: Path, chance: random.Random) -> str | None:
    data = path.read_bytes()
    end = chance.randrange(max(1, len(data)))
    path.write_bytes(data[:end])
    return f"cut after {end} bytes"


def _garbage(path: Path, chance: random.Random) -> str:
    path.write_bytes(chance.randbytes(200))
    return "random bytes"


def _deep(path: Path, chance: random.Random) -> str:
    path.write_text("[" * 100_000 + "\n")
    return "100,000 brackets"


def _folder(path: Path, chance: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a folder"


def _loop(path: Path, chance: random.Random) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return "a link to itself"


def _fifo(path: Path, chance: random.Random) -> str:
    path.unlink()
    os.mkfifo(path)
    return "a FIFO"


def _digit(path: Path, chance: random.Random) -> str | None:
    data = path.read_bytes()
    found = list(_NUMBER.finditer(data))
    if not found:
        return None
    place = chance.choice(found)
    text = bytearray(place[0])
    at = chance.choice([i for i, byte in enumerate(text) if 48 <= byte <= 57])
    text[at] = chance.choice([byte for byte in b"0123456789" if byte != text[at]])
    path.write_bytes(data[: place.start()] + bytes(text) + data[place.end() :])
    return f"{place[0].decode()} at byte {place.start()} became {text.decode()}"


def _lines(path: Path, chance: random.Random) -> str | None:
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) < 2:
        return None
    at, kind = chance.randrange(len(lines)), chance.choice(["deleted", "doubled", "moved"])
    line = lines.pop(at)
    if kind == "doubled":
        lines[at:at] = [line, line]
    elif kind == "moved":
        lines.insert(chance.randrange(len(lines) + 1), line)
    path.write_bytes(b"".join(lines))
    return f"line {at + 1} {kind}"


def _cell(path: Path, chance: random.Random) -> str | None:
    lines = path.read_text().splitlines()
    if len(lines) < 2:
        return None
    at = chance.randrange(1, len(lines))
    cells = lines[at].split(",")
    column = chance.choice([i for i, cell in enumerate(cells) if cell] or [0])
    new = chance.choice([*_CELLS, _scaled(cells[column], chance)])
    what = f"line {at + 1}, {lines[0].split(',')[column]}: {cells[column]!r} became {new!r}"
    cells[column] = new
    lines[at] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n")
    return what


def _scaled(text: str, chance: random.Random) -> str:
    try:
        return format(float(text) * chance.choice([0.5, 0.9, 1.1, 2, 10]), ".12g")
    except ValueError:
        return "x"


def _json_value(path: Path, chance: random.Random) -> str | None:
    """Replace or remove one value of a JSON object; in a ledger, of one line."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    at = chance.randrange(len(lines)) if lines else 0
    try:
        content = json.loads(lines[at])
    except (ValueError, IndexError):
        return None
    holders = list(_holders(content))
    if not holders:
        return None
    holder, key = chance.choice(holders)
    before = json.dumps(holder[key])[:40]
    if chance.random() < 0.3 and isinstance(holder, dict):
        del holder[key]
        new = "nothing"
    else:
        new = chance.choice(ODD)
        holder[key] = "@"
    lines[at] = json.dumps(content, indent=1 if path.suffix == ".json" else None).replace('"@"', new)
    path.write_text("\n".join(lines) + "\n")
    return f"{key!r} {before} became {new}" + (f" in line {at + 1}" if path.suffix == ".jsonl" else "")


def _holders(content: Any) -> Iterator[tuple[Any, Any]]:
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield content, key
        if isinstance(value, dict | list):
            yield from _holders(value)


_ANY = [_delete, _empty, _cut, _garbage, _deep, _folder, _loop, _fifo, _digit, _digit, _lines, _lines]
_CSV = [_cell, _cell, _lines]
_JSON = [_json_value, _json_value, _json_value]


# -- views ----------------------------------------------------------------------------


def views(study: Path) -> dict[str, View]:
    """Return what status, verify and the tables show."""
    spoken = io.StringIO()
    with contextlib.redirect_stderr(spoken):
        records = settle_study(StudyFolder(study))
        planned = open_study(StudyFolder(study))
        status = View()
        add_damages(planned, records)
        content = status_content(planned, records)
        for run in content["runs"]:
            names = ("attempt", "state", "exit_code", "failure_class")
            status.numbers |= {f"{run['run_id']} {name}": run[name] for name in names}
            status.messages.add(f"{run['run_id']}: {run['reason']}")
        status.messages |= {f"{run['run_id']}: {fact}" for run in content["runs"] for fact in run["damages"]}
    status.messages |= set(content["damages"])
    status.messages |= set(spoken.getvalue().splitlines())
    verify = View()
    for verdict in verify_study(planned, records):
        verify.numbers[verdict.run_id] = verdict.passed
        verify.messages |= {f"{verdict.run_id}: {check}" for check in verdict.failures}
    tables = View()
    loaded = load_study(study, records=records)
    frames = measure(loaded)
    names = ["run_id", "rate", "wall_s", "measured", "state", "exit_code", "mfu", "val_loss"]
    tables.numbers |= _numbers(frames.runs[names], ["run_id"])
    tables.messages |= {f"{row.run_id}: {row.reason}" for row in frames.runs.itertuples()}
    tables.messages |= set(loaded.remarks)
    return {"status": status, "verify": verify, "tables": tables}


def _numbers(frame: pd.DataFrame, keys: list[str]) -> dict[str, Any]:
    found = {}
    for row in frame.to_dict("records"):
        key = " ".join(str(row[name]) for name in keys)
        found |= {f"{key} {name}": _plain(v) for name, v in row.items() if isinstance(v, int | float | str)}
    return {name: value for name, value in found.items() if not name.endswith((" reason", " remark"))}


def _plain(value: Any) -> Any:
    return format(value, ".9g") if isinstance(value, float) else value


# -- trials ---------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return kind, size and time of change of all files and links below a folder, by their relative paths."""
    found: dict[str, tuple[int, ...]] = {}
    open_folders = [str(folder)]
    while open_folders:
        for entry in os.scandir(open_folders.pop()):
            state = entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                open_folders.append(entry.path)
                state_of = (state.st_mode,)
            else:
                state_of = (state.st_mode, state.st_size, state.st_mtime_ns, state.st_ino)
            found[os.path.relpath(entry.path, folder)] = state_of
    return found


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        path.unlink()


def targets(study: Path) -> list[Path]:
    """Return the files that trials damage, relative to the study."""
    files = [path.relative_to(study) for path in sorted(study.rglob("*")) if path.is_file()]
    return [path for path in files if path.suffix in (".json", ".jsonl", ".csv", ".err", ".out")]


class Fuzzer:
    """Run trials on copies of ``studies`` in the folder ``root``."""

    def __init__(self, root: Path, studies: list[Path]) -> None:
        self.root, self.studies = root, studies
        self.before = {}
        self._whole: dict[Path, dict[str, Any]] = {}
        self._outside = {study: snapshot(study) for study in studies}
        for study in studies:
            copy = self._restore(study)
            self.before[study] = views(copy)
        self.counts: Counter[str] = Counter()
        self.bad: list[Trial] = []

    def _restore(self, study: Path) -> Path:
        """Return a copy of a study; a file that an earlier trial changed is copied again."""
        copy = self.root / "trial" / study.name
        if not copy.exists():
            shutil.copytree(study, copy)
            self._whole[study] = snapshot(copy)
        whole, present = self._whole[study], snapshot(copy)
        for path in present.keys() - whole.keys():
            _remove(copy / path)
        for path in [path for path, state in whole.items() if present.get(path) != state]:
            _remove(copy / path)
            shutil.copy2(study / path, copy / path)
        self._whole[study] = snapshot(copy)
        return copy

    def run(self, trials: int, *, seed: int) -> None:
        """Run ``trials`` trials, count their outcomes, and collect the bad ones."""
        chance = random.Random(seed)
        for _ in range(trials):
            trial = self.trial(chance)
            self.counts[trial.outcome] += 1
            if trial.outcome not in ("same", "error", "reported"):
                self.bad.append(trial)

    def damaged(self, chance: random.Random) -> tuple[Path, Path, str]:
        """Return a study of which one file is damaged, this file, and the damage."""
        study = chance.choice(self.studies)
        copy = self._restore(study)
        target = _choice_by_kind(targets(copy), chance)
        return copy, target, f"{study.name}/{target}: {damage(copy / target, chance)}"

    def trial(self, chance: random.Random) -> Trial:
        """Damage one file of one study; return what happened."""
        copy, target, what = self.damaged(chance)
        study = next(one for one in self.studies if one.name == copy.name)
        try:
            with time_limit(LIMIT_S):
                after = views(copy)
        except _Hang:
            return Trial("hang", what)
        except BenchError as error:
            named = target.name in str(error)
            return Trial("error" if named else "silent", what, f"error without the file: {error}"[:400])
        except OSError as raised:
            error = inaccessible(raised)
            if error is not None and target.name in str(error):
                return Trial("error", what)
            return Trial("traceback", what, traceback.format_exc())
        except Exception:
            return Trial("traceback", what, traceback.format_exc())
        if any(snapshot(path) != before for path, before in self._outside.items()):
            return Trial("outside", what)
        return self._compare(study, after, what, target)

    def _compare(self, study: Path, after: dict[str, View], what: str, target: Path) -> Trial:
        outcome = "same"
        for name, view in after.items():
            before = self.before[study][name]
            changed = [
                f"{key}: {before.numbers.get(key)} -> {view.numbers.get(key)}"
                for key in {**before.numbers, **view.numbers}
                if before.numbers.get(key) != view.numbers.get(key)
            ]
            if not changed:
                continue
            new = view.messages - before.messages
            if not any(target.name in message for message in new) and not (name == "verify" and new):
                return Trial("silent", what, f"{name}: {changed[:4]} {sorted(new)[:3]}")
            outcome = "reported"
        return Trial(outcome, what)


def _choice_by_kind(files: list[Path], chance: random.Random) -> Path:
    names = sorted({path.name for path in files})
    name = chance.choice(names)
    return chance.choice([path for path in files if path.name == name])
