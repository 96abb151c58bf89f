"""Find warnings that explain why a successful run is slow.

Almost all logs contain no such warning. Therefore only the start and the end of a log are read, and the
catalogue is applied only if these parts contain all words of a message about a slow job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.doctor.catalogue import SLOW, load
from bench.doctor.diagnosis import Cause, diagnose
from bench.doctor.scan import BLOCK_BYTES, as_words
from bench.study.conditions import idle_cores
from bench.study.layout import RunFolder

#: Most warnings appear in the first steps.
HEAD_BYTES, TAIL_BYTES = 256 * 1024, 64 * 1024
#: Name of a fact that no program logs: :func:`find_warnings` adds it from the conditions of the run.
IDLE_CORES = "idle-cores"


def find_warnings(folder: RunFolder) -> list[Cause]:
    """Return the causes of severity "slow" in a run's logs; logs that cannot be read are left out."""
    logs = {path.name: _Ends.read(path) for path in (folder.err, folder.out)}
    words = [as_words(log.text) for log in logs.values() if log.text]
    found = {
        name for name, needed in _messages() if any(all(one in text for one in needed) for text in words)
    }
    if not found:
        return []
    sources = {name: [log.text] for name, log in logs.items() if log.text}
    if idle := idle_cores(folder):
        sources["conditions.json"] = [f"bench: {idle}".encode()]
    elif found <= _needing_idle_cores():
        return []
    slow = [cause for cause in diagnose(sources).causes if cause.severity == SLOW]
    return [logs[cause.path].located(cause) for cause in slow if cause.path in logs]


@cache
def _messages() -> tuple[tuple[str, tuple[bytes, ...]], ...]:
    """Return the name of each message about a slow job with its words, the longest (rarest) word first."""
    return tuple(
        (one.name, tuple(sorted(words, key=len, reverse=True)))
        for one in load().signatures
        if one.severity == SLOW
        for words in one.words
    )


@cache
def _needing_idle_cores() -> frozenset[str]:
    return frozenset(one.name for one in load().signatures if IDLE_CORES in one.needs)


@dataclass(frozen=True)
class _Ends:
    """The start and the end of a log; ``omitted`` is the number of bytes in between, after ``head`` bytes."""

    path: Path
    text: bytes
    head: int
    omitted: int

    @classmethod
    def read(cls, path: Path) -> _Ends:
        try:
            with open(path, "rb", buffering=0) as file:
                text = file.read(HEAD_BYTES)
                if len(text) < HEAD_BYTES:  # the whole log, as almost always
                    return cls(path, text, len(text), 0)
                head, size = len(text), file.seek(0, 2)
                omitted = max(0, size - head - TAIL_BYTES)
                file.seek(head + omitted)
                return cls(path, text + file.read(TAIL_BYTES), head, omitted)
        except OSError:
            return cls(path, b"", 0, 0)

    def located(self, cause: Cause) -> Cause:
        """Return a cause with its line number in the whole log."""
        assert cause.line is not None, "a cause of a log has a line"
        if not self.omitted or cause.line <= self.text.count(b"\n", 0, self.head) + 1:
            return cause
        with self.path.open("rb") as file:
            file.seek(self.head)
            left, lines = self.omitted, 0
            while left and (block := file.read(min(left, BLOCK_BYTES))):
                left, lines = left - len(block), lines + block.count(b"\n")
            return replace(cause, line=cause.line + lines)
