"""Where the numbers of a command come from: the recorder, a file it writes, or its output."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from bench.matrix.field_types import Section

# What a command's own output may tell, and in which units.

Quantity = Literal["throughput", "step_time", "loss"]
#: Units of each quantity, the default first.
UNITS: dict[str, tuple[str, ...]] = {
    "throughput": ("samples/s", "it/s"),
    "step_time": ("s", "ms", "us"),
}


def _pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    if groups != 1:
        raise ValueError(
            f"{text!r} has {groups} groups; put ( ) around the number, and write (?: ) for any other"
        )
    return text


def _path(text: str) -> str:
    if "\0" in text or "\n" in text:
        raise ValueError(f"{text!r} is no path")
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
Path = Annotated[str, Field(min_length=1), AfterValidator(_path)]


class Metrics(Section):
    """Where the numbers of a command come from, and what they mean."""

    source: Literal["recorder", "none"] | None = None
    """recorder: the command uses bench.record; none: nothing is measured."""
    csv: Path | None = None
    """A CSV file with a header that the command writes; relative to the run's folder."""
    jsonl: Path | None = None
    """A file with one JSON object a line; relative to the run's folder."""
    columns: dict[Quantity, Annotated[str, Field(min_length=1)]] | None = None
    """Which column or key holds throughput, step_time, loss."""
    output: dict[Quantity, Pattern] | None = None
    """Regular expressions with one group, searched in each line of the command's output."""
    units: dict[Literal["throughput", "step_time"], str] = Field(default={})
    """throughput: samples/s or it/s; step_time: s, ms or us."""
    scope: Literal["global", "per_gpu"] = "global"
    """Whether samples/s are of all ranks together or of one."""
    skip: Annotated[int, Field(strict=True, ge=0, le=10**9)] = 0
    """Values at the beginning that do not count (warm-up)."""

    @model_validator(mode="after")
    def _fits_together(self) -> Metrics:
        given = [name for name in ("source", "csv", "jsonl", "output") if getattr(self, name) is not None]
        if len(given) != 1:
            named = " and ".join(given) if given else "none of them"
            raise ValueError(
                f"one of csv, jsonl and output says where the numbers are, not {named}; "
                "or write recorder, or none"
            )
        is_file = self.csv is not None or self.jsonl is not None
        if is_file != (self.columns is not None):
            raise ValueError(
                "columns names the columns of csv or the keys of jsonl: "
                + ("add columns: {throughput: NAME}" if is_file else "remove it")
            )
        named_quantities = self.columns or self.output
        if named_quantities is not None and not {"throughput", "step_time"} & set(named_quantities):
            raise ValueError("neither throughput nor step_time is named; name the one that the command tells")
        for quantity, unit in self.units.items():
            if unit not in UNITS[quantity]:
                raise ValueError(
                    f"units.{quantity} cannot be {unit!r}; allowed: {', '.join(UNITS[quantity])}"
                )
        return self

    @model_validator(mode="after")
    def _means_something(self) -> Metrics:
        read = self.columns or self.output or {}
        for quantity in self.units.keys() - read.keys():
            raise ValueError(
                f"units.{quantity} has no effect: {quantity} is not read; name it, or remove its unit"
            )
        rate_is_read = "throughput" in read and self.units.get("throughput") != "it/s"
        if self.scope == "per_gpu" and not rate_is_read:
            raise ValueError("scope per_gpu has no effect: no throughput in samples/s is read; remove it")
        if self.skip and not read:
            raise ValueError(
                "skip has no effect: no values are read; remove it (the recorder has warmup_steps)"
            )
        return self

    def as_json(self) -> dict[str, Any]:
        """Return what plan.json and run.json keep: what was given, and nothing that is a default."""
        return self.model_dump(exclude_none=True, exclude_defaults=True)


def _word(value: Any) -> Any:
    if isinstance(value, str):
        if value not in ("recorder", "none"):
            raise ValueError(f"{value!r} is no source of numbers; allowed: recorder, none, or a mapping")
        return {"source": value}
    return value


#: ``recorder``, ``none``, or a mapping.
MetricsOption = Annotated[
    Metrics,
    BeforeValidator(_word),
    WithJsonSchema({"anyOf": [{"enum": ["recorder", "none"]}, Metrics.model_json_schema()]}),
]
RECORDER = Metrics(source="recorder")
