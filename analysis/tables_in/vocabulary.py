"""The names of columns and the forms of numbers in tables of other people.

A name is reduced to words: in lower case, with one word for each idea (``tok``, ``tokens``), and without
words that say nothing (``num``, ``avg``). :data:`COLUMNS` matches these words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ddp_scaling_bench.units import parse_duration_s

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_MULTIPLES = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
_SYNONYMS = {
    "": "num number n no of count avg average mean the",
    "gpus": "gpu gcd gcds tile tiles device devices accelerator accelerators rank ranks process processes",
    "workers": "worker",
    "nodes": "node host hosts",
    "tokens": "tok toks token",
    "samples": "sample img imgs image images seq seqs sequence sequences example examples",
    "steps": "step it its iter iters iteration iterations",
    "epoch": "epochs",
    "us": "µs microsecond microseconds",
    "ms": "msec millisecond milliseconds",
    "s": "sec secs second seconds",
    "min": "mins minute minutes",
    "h": "hr hrs hour hours",
    "tokens per s": "tps",
}
_WORDS = {word: idea for idea, words in _SYNONYMS.items() for word in words.split()}

_TIME, _EACH = f"(?: (?:{'|'.join(_SECONDS)}))", "(?: per gpus)?"
_RATE = rf"(?:throughput )?(?:[km] )?{{}}{_EACH}(?: per)?{_TIME}{_EACH}(?: throughput)?"
#: Columns by the words of their names. The rates are in the order in which one of several is used.
COLUMNS = {
    "tokens/s": _RATE.format("tokens"),
    "throughput": rf"(?:total )?throughput{_EACH}|{_RATE.format('samples')}",
    "steps/s": rf"(?:throughput )?steps per{_TIME}",
    "time": rf"(?:steps time|time per steps|time){_TIME}?|steps{_TIME}|(?:ms|s|min) per steps(?: time)?",
    "epoch_time": rf"(?:epoch time|time per epoch|runtime|walltime|elapsed){_TIME}?|epoch{_TIME}"
    rf"|(?:s|min|h) per epoch|(?:wall|total|train|training|run|elapsed)(?: clock)?(?: time{_TIME}?|{_TIME})",
    "mfu": r"mfu|t?flops?(?: per s)? per gpus",
    "nodes": r"(?:total )?nodes",
    "gpus": r"(?:total )?gpus|world size|workers",
    "gpus_per_node": r"gpus per nodes",
    "global_batch": r"(?:global|total|effective) batch(?: size)?",
    "per_gpu_batch": r"(?:per gpus|gpus|local|micro) batch(?: size)?"
    r"|(?:local |micro )?batch(?: size)? per (?:gpus|workers)",
    "samples_per_epoch": r"samples(?: per epoch)?|(?:dataset|data set|input|problem) size",
    "tokens_per_sample": r"tokens per samples|samples len(?:gth)?|context(?: len(?:gth)?)?",
    "tp": r"tp|tensor(?: model)? parallel(?: degree)?",
    "pp": r"pp|pipeline(?: model)? parallel(?: degree)?",
    "cp": r"cp|context parallel(?: degree)?",
    "model": r"model(?: name)?|network|architecture",
    "params": r"(?:model )?(?:params|parameters)|model size",
    "series": r"series",
    "mode": r"mode|regime",
    "repeat": r"repeat|repetition|run|trial|seed",
    "epoch": r"epoch",
}
#: What a rate counts, if that is known, and the mode that is assumed if there is neither a batch nor a label.
#: None is assumed if the efficiency depends on it.
RATES = {
    "tokens/s": ("tokens", "weak"),
    "throughput": ("samples", "weak"),
    "steps/s": ("steps", None),
    "time": ("steps", None),
    "epoch_time": ("", "strong"),
    "mfu": ("", "weak"),
}
TIMES = ("time", "epoch_time")
SIZES, LAYOUT = ("nodes", "gpus", "gpus_per_node"), ("tp", "pp", "cp")
TEXTS = ("model", "params", "series", "mode", "repeat", "epoch")
#: Rows that differ in one of these columns belong to different series.
DISTINCT = ("series", "model", "params", *LAYOUT)

_LONGEST = 60  # characters of a number
_NUMBER = re.compile(r"[~≈]?\s*(?P<digits>[+-]?[\d.,'_\s]*\d\.?(?:e[+-]?\d+)?)\s*(?P<unit>[a-zµ%]*)", re.I)
_SPREAD = re.compile(r"\s*(?:±|\+/-).*")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:([,.'_\s])\d{3})(?:\1\d{3})*(?:[.,]\d+)?")
_DECIMAL_COMMA = re.compile(r"[~≈ ]*(?:0,\d+|\d+,(?:\d{1,2}|\d{4,})|\d{1,3}(?:\.\d{3})+,\d+)")


@dataclass(frozen=True)
class Heading:
    """The meaning of a column: canonical name, factor to seconds or to a rate per second, and scope."""

    column: str
    factor: float = 1.0
    per_gpu: bool = False

    def number(self, text: str, *, decimal_comma: bool) -> float | None:
        """Return a number of the column, of a rate always per second; None for a missing value.

        Raises:
            ValueError: the text is not such a number, with the reason.
        """
        if text.lower() in ("", "-", "–", "—", "n/a", "nan"):
            return None
        is_whole = self.column in (*SIZES, *LAYOUT)
        try:
            short = _SPREAD.sub("", text[:_LONGEST])
            value = math.nan if text[_LONGEST:] else self._value(short, decimal_comma=decimal_comma)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf or (is_whole and value != round(value)):
            raise ValueError("a whole number of at least 1" if is_whole else "a number above 0")
        return 1 / value if self.column in TIMES else value

    def _value(self, text: str, *, decimal_comma: bool) -> float:
        if not (found := _NUMBER.fullmatch(text)):
            return float(parse_duration_s(text)) if self.column in TIMES else math.nan
        digits, unit, point = found["digits"], found["unit"].lower(), "," if decimal_comma else "."
        if (grouped := _GROUPED.fullmatch(digits)) and grouped[1] != point:
            digits = digits.replace(grouped[1], "")
        value = float(digits.replace(",", ".") if decimal_comma else digits)
        if self.column in TIMES:
            factor = _SECONDS.get("min" if unit == "m" else _words(unit), math.nan)
            return value * (factor if unit else self.factor)
        if self.column in SIZES and unit:
            return value if size_column(f"1{unit}") == self.column else math.nan
        return value * self.factor * (_MULTIPLES.get(unit, math.nan) if unit.strip("%") else 1)


def heading(name: str) -> Heading | None:
    """Return the meaning of a name, or None if it is not known."""
    words = _words(name)
    column = next((one for one, pattern in COLUMNS.items() if re.fullmatch(pattern, words)), None)
    if column not in RATES:
        return Heading(column) if column else None
    parts = words.split()
    unit = next((_SECONDS[part] for part in parts if part in _SECONDS), 1.0)
    multiple = next((_MULTIPLES[part] for part in parts if part in ("k", "m")), 1.0)
    return Heading(column, unit if column in TIMES else multiple / unit, column == "mfu" or "gpus" in parts)


def _words(name: str) -> str:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("/", " per ").lower()
    words = (_WORDS.get(word, word) for word in re.findall(r"[a-zµ0-9]+", spaced))
    return " ".join(filter(None, words))


def size_column(name: str) -> str | None:
    """Return the column of sizes for a name such as ``4 nodes`` or ``8 GPUs``, empty for ``4``, else None."""
    if not (found := re.fullmatch(r"\d+\s*([a-zA-Z]*)", name.strip())):
        return None
    known = heading("nodes" if found[1].lower() == "n" else found[1])
    return "" if not found[1] else known.column if known and known.column in SIZES else None


def has_decimal_comma(texts: Iterable[str], *, semicolons: bool) -> bool:
    """Return whether numbers have a decimal comma, so that a point separates thousands."""
    return any("," in text if semicolons else _DECIMAL_COMMA.fullmatch(text[:_LONGEST]) for text in texts)
