"""The sentences about facts, from words.toml. Nothing else reads or compares them."""

from __future__ import annotations

import string
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from .facts import Fact
from .units import count, fraction, join_names, listed, number, number_ranges, seconds, short_percent

#: Number of names in a list that are written, with ``all``, and of the texts of a list.
_MOST, _MOST_ALL, _MOST_TEXTS = 4, 10, 5
_LONGEST_NAME = 60


def sentence(fact: Fact) -> str:
    """Return the fact in words, after its kind: ``not-stable: the step time was not yet stable ...``."""
    return f"{fact.kind}: {words(fact)}"


def sentences(facts: Iterable[Fact]) -> str:
    """Return some facts in words, joined by semicolons."""
    return "; ".join(map(words, facts))


def words(fact: Fact) -> str:
    """Return the fact in words.

    If the kind has no words, or the values of a damaged file do not fit into them, the values are listed,
    shortened.
    """
    if "text" in fact.values:
        return str(fact.values["text"])
    texts = {**_words()["shared"], **_words().get(fact.kind, {})}
    with suppress(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return _Writer(texts, {"subject": fact.subject, **fact.values}).first("says").strip()
    return join_names([f"{_name(name)} {_short(value)}" for name, value in fact.values.items()])


def remedy(fact: Fact) -> str:
    """Return what to change because of a fact; empty if there is no advice."""
    texts = {**_words()["shared"], **_words().get(fact.kind, {})}
    with suppress(LookupError):
        return _Writer(texts, {"subject": fact.subject, **fact.values, "text": None}).first("remedy")
    return ""


def heading(kind: str) -> str:
    """Return the heading of a kind of facts."""
    return str(_words().get(kind, {}).get("heading", kind))


def about(causes: Iterable[str], what: str) -> str:
    """Return the ``title``, ``meaning`` or ``remedy`` of a row of causes.csv; empty if it has none."""
    texts = [_words()["causes"][cause].get(what, "") for cause in causes]
    return (" or " if what == "title" else " ").join(texts)


def term(table: str, name: Any) -> str:
    """Return the words for a name, from a table of terms such as ``part``."""
    return str(_words()["terms"][table].get(str(name), name))


@cache
def _words() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


def _name(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"


def _short(value: Any) -> str:
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _texts(values: Any) -> list[str]:
    if isinstance(values, str):
        raise TypeError("a text instead of a list")
    return [_name(value) for value in values]


def _machines(machines: Sequence[Any]) -> str:
    each = "each of " if len(machines) > 1 else ""
    return each + listed([join_names(_texts(hosts)) for hosts in machines], limit=_MOST)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {number_ranges(ranks)}"


#: The forms of values, by the name that follows the colon.
_FORMS: Mapping[str, Callable[[Any], str]] = {
    "all": lambda values: join_names(_texts(values), most=_MOST_ALL),
    "facts": lambda facts: sentences(map(Fact.from_json, facts)),
    "fraction": fraction,
    "heading": heading,
    "machines": _machines,
    "name": _name,
    "names": lambda values: listed(_texts(values), limit=_MOST),
    "number": number,
    "or": lambda values: " or ".join(map(str, values)),
    "percent": short_percent,
    "ranges": number_ranges,
    "short": _short,
    "ranks": _ranks,
    "seconds": seconds,
    "signed": lambda change: f"{'-' if change < 0 else '+'}{short_percent(abs(change))}",
    "to": lambda values: " to ".join(map(str, values)),
}


class _Writer(string.Formatter):
    """Write the texts of one kind with some values."""

    def __init__(self, texts: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self._texts = texts
        self._values = {name: value for name, value in values.items() if value not in (None, "", [], (), {})}

    def first(self, name: str) -> str:
        """Return the first text ``name`` whose values are all known.

        Raises:
            LookupError: no text has only known values.
        """
        if "text" in self._values:
            return str(self._values["text"])
        text: str
        for text in self._texts[name]:
            fields = [field.partition("[")[0] for _, field, _, _ in self.parse(text) if field]
            if self._values.keys() >= set(fields):
                return self.vformat(text, (), self._values)
        raise LookupError(name)

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the value of a placeholder; the placeholder of a text has no name."""
        return self if isinstance(key, int) else kwargs[key]

    def format_field(self, value: Any, form: str) -> str:
        """Return a value in the form that follows the colon of its placeholder."""
        if isinstance(value, _Writer):
            with suppress(LookupError):
                return value.first(form)
            return ""
        if form == "text":
            return self.first(value)
        name, _, most = form.rpartition(" ")
        name, limit = (name, int(most)) if most.isdigit() else (form, 0)
        if name in self._texts:
            return self._each(value, name, limit)
        if form in _words()["terms"]:
            return listed([term(form, one) for one in ([value] if isinstance(value, str) else value)])
        if form in _FORMS:
            return _FORMS[form](value)
        if "|" in form:
            one, several = form.split("|")
            return one if (len(value) if isinstance(value, list) else value) == 1 else several
        return format(value, form) if form[:1] in ("", "g", ".", ",", "#") else count(value, form)

    def _each(self, entries: Any, name: str, limit: int) -> str:
        if isinstance(entries, Mapping):
            pairs = [({"name": key, "value": own}, own) for key, own in entries.items()]
            entries = [{**entry, **own} if isinstance(own, Mapping) else entry for entry, own in pairs]
        texts = [_Writer(self._texts, entry).first(name) for entry in entries]
        if limit:
            return listed(texts, limit=limit)
        more = [f"and {len(texts) - _MOST_TEXTS} more"] if len(texts) > _MOST_TEXTS else []
        return "; ".join([*texts[:_MOST_TEXTS], *more])
