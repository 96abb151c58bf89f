"""Read the facts of env.json, also those that older versions wrote as sentences in ``warnings``.

A fact that is read from a sentence has the sentence as its value ``text``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..facts import OLDER_WARNING, Fact
from .conditions import objects

_SHARED = re.compile(
    r"(?:(?P<threads>[0-9]{1,9}) threads of )?(?P<ranks>[0-9]{1,9}) ranks? share (?P<cores>[0-9]{1,9}) cores?"
    r"(?: \(.*?\) on (?P<each>each of )?(?P<hosts>.+?): )?"
)
_NOT_STABLE = re.compile(r"the step time was not yet stable(?: after (?P<steps>[0-9]{1,9}) warm-up steps)?")
#: The kind of a fact before its sentence, and the beginning of a sentence without its kind.
_KIND = re.compile(r"(?P<kind>shared-cores|unequal-nodes|threads-differ|script-changed): ")
_NO_WINDOW = "no window was recorded"
#: Kinds that older versions wrote both as a fact and as a sentence.
_BOTH = ("values-left-out: ", "repeated-matches: ")


def facts_of_env(env: Any) -> list[Fact]:
    """Return the facts in the content of an env.json; what is not a fact is left out."""
    if not isinstance(env, Mapping):
        return []
    texts = env.get("warnings")
    older = texts if isinstance(texts, list) else []
    return [*_stored(env), *(_from_sentence(text) for text in map(str, older) if not text.startswith(_BOTH))]


def _stored(env: Mapping[str, Any]) -> Iterator[Fact]:
    for entry in objects(env.get("facts")):
        subject = entry.get("subject")
        try:
            yield Fact.from_json({**entry, "subject": [subject]} if isinstance(subject, str) else entry)
        except ValueError:
            continue


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
