"""Read sampled_step.json: the slowest calls of one training step on each rank, which the recorder writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from bench.study.files import read_json
from bench.study.layout import RunFolder


@dataclass(frozen=True)
class SlowCall:
    """All calls of one function from one line of the user's code.

    Attributes:
        path: the user's source file.
        line: its line.
        function: the function that the line calls.
        calls: number of calls in the step.
        seconds: time of these calls together, without the time of other calls that the user's code makes
            within them.
        part: the part of the step whose timer covers the call; None if no timer does.
        bytes: size of the tensors that are passed to a function of torch.distributed.
    """

    path: str
    line: int
    function: str
    calls: int
    seconds: float
    part: str | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class SampledStep:
    """The sampled step of one rank: its duration, its collectives (None if unknown) and its slowest calls."""

    rank: int
    step_s: float
    collectives: int | None
    slow_calls: list[SlowCall]


def read_sampled_step(folder: RunFolder) -> list[SampledStep]:
    """Return the sampled step of each rank; empty without the file. Malformed entries are left out."""
    content = read_json(folder.sampled_step)
    return list(_steps(content)) if content is not None and content.get("schema") == 1 else []


def _steps(content: Mapping[str, Any]) -> Iterator[SampledStep]:
    names = [field.name for field in fields(SlowCall)]
    for rank in content.get("ranks") or ():
        try:
            calls = [SlowCall(**{name: call[name] for name in names}) for call in rank["slow_calls"]]
            yield SampledStep(int(rank["rank"]), float(rank["step_s"]), rank["collectives"], calls)
        except (KeyError, TypeError, ValueError):
            continue
