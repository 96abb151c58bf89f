"""Read facts of env.json and run.json, and events of the ledger, also in the forms of older versions.

A fact that is read from a sentence has the sentence as its value ``text``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from ..facts import OLDER_WARNING, Fact

_SHARED = re.compile(
    r"(?:(?P<threads>[0-9]{1,9}) threads of )?(?P<ranks>[0-9]{1,9}) ranks? share (?P<cores>[0-9]{1,9}) cores?"
    r"(?: \(.*?\) on (?P<each>each of )?(?P<hosts>.+?): )?"
)
_NOT_STABLE = re.compile(r"the step time was not yet stable(?: after (?P<steps>[0-9]{1,9}) warm-up steps)?")
#: The kind of a fact before its sentence, and the beginning of a sentence without its kind.
_KIND = re.compile(r"(?P<kind>shared-cores|unequal-nodes|threads-differ|script-changed): ")
_NO_WINDOW = "no window was recorded"
_JOB = re.compile("job ([^, ]+)")
_MORE_JOBS = re.compile(r" and ([0-9]{1,9}) more$")
_CANCELLED = ("cancelled by bench cancel", "marked as cancelled by bench cancel")
_UNFIT = re.compile(r"needs [0-9]+ nodes, but too few are fit \(unfit: ([^)]+)\)")
#: Kinds that older versions wrote both as a fact and as a sentence.
_BOTH = ("values-left-out: ", "repeated-matches: ")


def facts_of_env(env: Any) -> list[Fact]:
    """Return the facts in the content of an env.json; what is not a fact is left out."""
    if not isinstance(env, Mapping):
        return []
    texts = env.get("warnings")
    older = texts if isinstance(texts, list) else []
    own = facts_in(env.get("facts"))
    return [*own, *(_from_sentence(text) for text in map(str, older) if not text.startswith(_BOTH))]


def values_of_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ledger event; older versions wrote some of them into ``reason`` only."""
    kind, reason = event.get("event"), event.get("reason") or ""
    own: dict[str, Any] = {}
    if kind == "ended" and reason.startswith(_CANCELLED):
        own = {"by_bench": True}
    elif kind == "held" and (unfit := _UNFIT.fullmatch(reason)):
        own = {"unfit_nodes": unfit[1].split(", ")}
    return own | dict(event)


def facts_in(entries: Any) -> Iterator[Fact]:
    """Yield the facts in a list of env.json or run.json; what is not a fact is left out."""
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {"reason": str(reason)}:
                yield _from_disturbance(reason, entry)
            case {"subject": str(subject)}:
                entry = {**entry, "subject": [subject]}
        with suppress(ValueError):
            yield Fact.from_json(entry)


def _from_disturbance(reason: str, entry: Mapping[str, Any]) -> Fact:
    """Return the fact of a disturbance with ``reason, node, start, end, value, limit``."""
    own: dict[str, Any] = {}
    match entry.get("value"):
        case str(value) if reason == "gpu-slowdown":
            own = {"slowdowns": value.split(", ")}
        case str(value) if jobs := _JOB.findall(value):
            more = _MORE_JOBS.search(value)
            own = {"jobs": jobs, **({"more_jobs": int(more[1])} if more else {})}
        case str() | int() | float() as value:
            own = {"share" if reason == "foreign-cpu" else "errors": value}
    own |= {"limit": limit} if isinstance(limit := entry.get("limit"), int | float) else {}
    times = {name: entry[name] for name in ("start", "end") if isinstance(entry.get(name), str)}
    node = entry.get("node")
    return Fact(reason, (node,) if isinstance(node, str) else (), {**times, **own})


def _from_sentence(written: str) -> Fact:
    kind = _KIND.match(written)
    text = written[kind.end() :] if kind else written
    if match := _SHARED.match(text):
        ranks, hosts = int(match["ranks"]), re.split(", | and [0-9]+ more$", match["hosts"] or "")
        names = [name for name in hosts if name]
        values: dict[str, Any] = {
            "ranks": ranks,
            "threads": int(match["threads"] or ranks),
            "cores": int(match["cores"]),
            "machines": [[name] for name in names] if match["each"] else [names],
        }
        return Fact("shared-cores", values={**values, "text": text})
    if match := _NOT_STABLE.match(text):
        return Fact("not-stable", values={"steps": match["steps"] and int(match["steps"]), "text": text})
    if text.startswith(_NO_WINDOW):
        return Fact("no-window", values={"text": text})
    return Fact(kind["kind"] if kind else OLDER_WARNING, values={"text": text})
