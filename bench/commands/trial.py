"""Try a command once on this machine, and find the rate or step time in its output."""

from __future__ import annotations

import re
import shlex
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import BenchError
from ..jobs.local.scheduler import try_command
from ..units import human_duration
from .console import say

#: The number of lines of a command's output that are shown.
SHOWN_LINES = 12
#: A line recurs if its text, apart from numbers, is printed this often.
FEWEST_LINES = 3
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
#: A number and one of the units in docs/matrix.md. Seconds are left out: most are elapsed times.
_WITH_UNIT = re.compile(rf"(?<![\w.,+-]){_NUMBER}( ?)(samples/s|samples/sec|it/s|ms|us)(?![\w/])")
_QUANTITIES = {
    "samples/s": ("throughput", "samples/s"),
    "samples/sec": ("throughput", "samples/s"),
    "it/s": ("throughput", "it/s"),
    "ms": ("step_time", "ms"),
    "us": ("step_time", "us"),
}
#: The key in the last line of HuggingFace's Trainer: an average over the whole run.
_TRAINER_SUMMARY = "'train_samples_per_second': '?([0-9.e+]+)"


class TrialError(BenchError):
    """The command failed."""

    exit_code = 1


@dataclass(frozen=True)
class Reading:
    """A pattern for `metrics: output`, and a line that it matches."""

    quantity: str
    pattern: str
    unit: str
    line: str
    is_average: bool = False
    """One value for the whole run."""


def try_once(words: Sequence[str], env: Mapping[str, str], limit_s: int) -> list[str]:
    """Execute a command as one process, show its last lines, and return all lines of its output.

    Raises:
        TrialError: the command failed, or could not be started.
    """
    say(f"trying once, for at most {human_duration(limit_s)}: {shlex.join(words)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-try-") as folder:
        output = Path(folder, "output")
        filled = [word.replace("{run_dir}", folder) for word in words]
        try:
            code = try_command(filled, output, env=env, limit_s=limit_s)
        except OSError as error:
            raise TrialError(f"{words[0]} cannot be started: {error.strerror}") from None
        lines = re.split(r"\r\n|\n|\r", output.read_text(encoding="utf-8", errors="replace"))
    lines = [line for line in lines if line.strip()]
    for line in lines[-SHOWN_LINES:]:
        say(f"  | {line}")
    took = human_duration(time.monotonic() - began)
    if code:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        remedy = "correct the command, or call bench init without --try"
        raise TrialError(f"the command failed with {how} after {took}", remedy=remedy)
    say(f"ended at the limit of {human_duration(limit_s)}" if code is None else f"completed in {took}")
    return lines


def find_reading(lines: Sequence[str]) -> Reading | None:
    """Return the pattern for a command's metrics if the output shows only one, else None."""
    for line in reversed(lines):
        if re.search(_TRAINER_SUMMARY, line):
            return Reading("throughput", _TRAINER_SUMMARY, "samples/s", line, is_average=True)
    shapes: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        if _WITH_UNIT.search(line):
            shapes[re.sub(_NUMBER, "0", line)].append(line)
    recurring = [same for same in shapes.values() if len(same) >= FEWEST_LINES]
    found = [(match, same) for same in recurring for match in _WITH_UNIT.finditer(same[0])]
    if len(found) != 1:
        return None
    match, same = found[0]
    before = re.split(_NUMBER, match.string[: match.start()])[-1].lstrip(" ,:;|()[]")
    pattern = f"{_escaped(before)}([0-9.]+){match[1]}{match[2]}"
    if [line for line in lines if re.search(pattern, line)] != same:
        return None
    quantity, unit = _QUANTITIES[match[2]]
    return Reading(quantity, pattern, unit, same[0])


def _escaped(text: str) -> str:
    """Escape the characters of ``text`` that a regular expression interprets, and only these."""
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)
