"""The sentences about facts, from words.toml. Nothing else reads or compares them."""

from __future__ import annotations

import string
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from .facts import OLDER_WARNING, Fact
from .units import count, join_names, number_ranges

#: Number of names in a list that are written.
_MOST = 4


def sentence(fact: Fact) -> str:
    """Return the fact in words, after its kind: ``not-stable: the step time was not yet stable ...``."""
    return words(fact) if fact.kind == OLDER_WARNING else f"{fact.kind}: {words(fact)}"


def words(fact: Fact) -> str:
    """Return the fact in words.

    The fact of an older version is written in the words of that version. A kind of a later version has no
    words, and the values of a damaged file do not fit into them; the values are then written as they are.
    """
    if "text" in fact.values:
        return str(fact.values["text"])
    texts = _words().get(fact.kind)
    if texts is not None:
        with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return _Writer(texts).first("says", fact.values)
    return ", ".join(f"{name} {value}" for name, value in fact.values.items())


@cache
def _words() -> Mapping[str, Mapping[str, Sequence[str]]]:
    return tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


class _Writer(string.Formatter):
    """Write the texts of one kind."""

    def __init__(self, texts: Mapping[str, Sequence[str]]) -> None:
        self._texts = texts

    def first(self, name: str, values: Mapping[str, Any]) -> str:
        """Return the first text ``name`` whose values are all known.

        Raises:
            LookupError: no text has only known values.
        """
        known = {name: value for name, value in values.items() if value is not None}
        for text in self._texts[name]:
            if all(field is None or field in known for _, field, _, _ in self.parse(text)):
                return self.vformat(text, (), known)
        raise LookupError(name)

    def format_field(self, value: Any, form: str) -> str:
        """Return a value in the form that follows the colon of its placeholder."""
        if form in self._texts:
            return "; ".join(self.first(form, entry) for entry in value)
        if form == "names":
            return join_names([str(name) for name in value], most=_MOST)
        if form == "machines":
            each = "each of " if len(value) > 1 else ""
            return each + join_names([join_names(hosts, most=_MOST) for hosts in value], most=_MOST)
        if form == "ranges":
            return number_ranges(value)
        if form == "ranks":
            return f"rank{'s' if len(value) > 1 else ''} {number_ranges(value)}"
        if form == "or":
            return " or ".join(map(str, value))
        return format(value, form) if form == "g" or form[:1] in ("", ".") else count(value, form)
