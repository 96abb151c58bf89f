"""Read findings from env.json, plan.json and the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, get_args

from pydantic import TypeAdapter

from ddp_scaling_bench.finding import RECORDED, Finding, Recorded, Severity
from ddp_scaling_bench.measure import failures
from ddp_scaling_bench.measure import findings as findings_of_ranks
from ddp_scaling_bench.units import join_names

from ..matrix import warnings
from . import findings, reasons
from .findings import Disturbance

#: The modules that define classes of :class:`ddp_scaling_bench.finding.Recorded`, all of them: a module
#: registers its classes when it is imported, and a finding of a class that is not registered is
#: :class:`Unknown`.
DEFINED_IN = (warnings, failures, findings_of_ranks, findings, reasons)
_LONGEST = 40
#: What the values of a damaged file raise: ValidationError is a ValueError.
_DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Unknown(Finding, kind="unknown"):
    """A finding of another version or a damaged file; its message lists the values, shortened."""

    name: str
    content: Mapping[str, Any]

    @property
    def heading(self) -> str:  # type: ignore[override]
        """The name of its kind."""
        return self.name

    def _message(self) -> str:
        return join_names([f"{_short(name)} {_short(value)}" for name, value in self.content.items()])

    def as_json(self) -> dict[str, Any]:
        """Return the finding as it was read."""
        rest = {"values": dict(self.content), "severity": self.severity}
        return {"kind": self.name, "subject": list(self.subject), **rest}


def read_findings(entries: Any) -> Iterator[Finding]:
    """Yield the findings in a list of a JSON file; what is not a finding is left out."""
    for entry in entries if isinstance(entries, list | tuple) else ():
        match entry:
            case {"kind": str(kind), "subject": list(subject), "values": dict(values), "severity": severity}:
                if severity in get_args(Severity):
                    yield _finding(kind, tuple(map(str, subject)), values, severity)


def findings_of_env(env: Any) -> list[Finding]:
    """Return the findings in the content of an env.json."""
    return list(read_findings(env.get("facts"))) if isinstance(env, Mapping) else []


def read_disturbances(entries: Any) -> tuple[Disturbance, ...] | None:
    """Return the disturbances in a line of the ledger, or None if they are not known.

    If the values of a disturbance are damaged, they are left out: the run was disturbed nevertheless.
    """
    if not isinstance(entries, list | tuple):
        return None
    return tuple(filter(None, map(_disturbance, read_findings(entries))))


def _disturbance(found: Finding) -> Disturbance | None:
    if isinstance(found, Unknown):
        kind = RECORDED.get(found.name, Recorded)
        found = (
            kind(subject=found.subject, severity=found.severity) if issubclass(kind, Disturbance) else found
        )
    return found if isinstance(found, Disturbance) else None


def _finding(kind: str, subject: tuple[str, ...], values: dict[str, Any], severity: Severity) -> Finding:
    shared: dict[str, Any] = {"subject": subject, "severity": severity}
    with suppress(*_DAMAGED):
        found = _adapter(kind).validate_json(json.dumps({**values, **shared}))
        _ = found.message, found.remedy  # values of a damaged file may fit the types, but not each other
        return found
    return Unknown(name=kind, content=values, **shared)


@cache
def _adapter(kind: str) -> TypeAdapter[Recorded]:
    return TypeAdapter(RECORDED[kind])


def _short(value: Any) -> str:
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
