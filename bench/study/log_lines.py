"""Find the values that a pattern matches in a log, and the lines that count.

Programs print a rate as ``2.00it/s`` or ``0.50s/it``, and large numbers as ``1.24k`` or ``1,240``. They are
read as what they mean, or refused with their line. A carriage return, with which a progress bar redraws
itself, begins a new text of the same line.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property

from ddp_scaling_bench.finding import Recorded

from ..matrix.cell import Cell
from .findings import LineForm, LineForms, LinesLeftOut

_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
#: The k of 1.24k, 1.24kit/s and 1.24 k samples/s, but not that of 1.24 km.
_SUFFIX = r"(\s?)([kKMG])(?:(?<!\s.)(?![A-Za-z_=])|(?=it|img|samp|tok|ex|step|seq)|(?=\s[a-z]+/|/|$))"
_WITH_SUFFIX = re.compile(rf"(?<![0-9.,A-Za-z])([0-9]+(?:\.[0-9]+)?){_SUFFIX}")
_POWERS = {"k": 3, "K": 3, "M": 6, "G": 9}
#: A suffix that the pattern contains, or letters of another unit, as in 5MB.
_OTHER_SUFFIX = re.compile(rf"{_SUFFIX}|[kKMGT][A-Za-z]")
_THOUSANDS = re.compile(r"[-+]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?")
#: A comma beside the group of a pattern separates values.
_COMMA_IN_PATTERN = re.compile(r",(?:\\s[*+?]?|\s)*\(|\)(?:\\s[*+?]?|\s)*,")
#: ``it/s`` in a pattern (also ``it\/s``); the letter of ``\s`` is not part of the unit.
_RATE = re.compile(r"(?:(?<![A-Za-z\\])|(?<=\\[A-Za-z]))([A-Za-z]+)(\\?/)([A-Za-z]+)(?![A-Za-z])")
#: ``it/s`` after a number; with a number behind it, it can be the name of that number: ``time 0.25 it/s 4``.
_RATE_HERE = re.compile(r"(\s*)([A-Za-z]+)/([A-Za-z]+)(?![A-Za-z])(\s*[:=]?\s*[0-9])?")
_UNIT = re.compile(r"\s?[A-Za-z]+/[A-Za-z]+|[A-Za-zµ%]*")
#: A progress bar, and the place in it: ``45%|████     | 9/20``.
_BAR = re.compile(r"(?:%\|[^|]*\||[━─╸╺]{2,})\s*([0-9.]+[kKMG]?)/([0-9.]+[kKMG]?)")
_EVALUATION = re.compile(
    r"(?<![A-Za-z])(?<!best[_ ])(?:eval[a-z]*|valid[a-z]*|val|test(?:ing)?|sanity)(?![A-Za-z])", re.I
)
#: The rest of a name, up to its value.
_NAME = re.compile(r"""((?:[_/.-]\w+)?)(?:[_/.-]\w+|\s[A-Za-z]\w*)*['"]?\s*[=:]?\s*['"]?""")
_DECIMAL = re.compile(r"(?<![0-9:.])[0-9]+\.[0-9]")
#: Not the parts of a date, a time or a decimal number.
_INTEGER = re.compile(r"(?<![0-9.])(?<![0-9][:,-])[0-9]+(?![0-9]*[.:,-][0-9])")
_EPOCH = re.compile(r"epoch\W{0,12}([0-9]+)", re.I)
_RANK = re.compile(r"(?:(?<![A-Za-z_])|(?<=global_))rank\W{0,2}([0-9]+)", re.I)
#: The prefix of ``srun --label``.
_LABEL = re.compile(r"^ *([0-9]+): ")
#: The local rank, also in the prefix of torchrun.
_LOCAL_RANK = re.compile(r"(?:^\[default|(?<![A-Za-z])(?:gpu|cuda|local_rank)\W{0,2})([0-9]+)", re.I)
#: The smallest share of lines with a label in an output with labels; Slurm's own messages have none.
_LABELLED = 0.9
#: Other forms of lines with a smaller share need no warning.
_FEW = 0.05
#: A larger share of values in lines with several is not by chance.
_FEW_SEVERAL = 0.2
#: Progress bars with a smaller share of the values do not count.
_FEW_OF_BARS = 0.25
#: The least share of lines that occur once per rank, if all ranks print: the first can be those of one rank.
_MOST = 0.9
_FORMS_SHOWN = 5
_LONGEST_FORM = 160

#: The texts of a log, each with the number of its line.
Texts = Sequence[tuple[int, str]]


class UnreadableError(Exception):
    """The command's metrics are missing or invalid; the message names the file, the line and the problem."""


@dataclass(frozen=True)
class Value:
    """A reported value and the unit of its last digit.

    ``line`` is the number of its line. In a log, ``place`` is the number of its text; the value is in
    ``text[start:end]``.
    """

    value: float
    last_digit: float
    line: int
    place: int
    text: str = ""
    start: int = 0
    end: int = 0

    @cached_property
    def bar(self) -> re.Match[str] | None:
        """The progress bar before the value."""
        return _BAR.search(self.text, 0, self.start)

    @cached_property
    def head(self) -> str:
        """The text before the value, without the progress bar and what follows it."""
        return self.text[: self.bar.start() if self.bar else self.start]

    @cached_property
    def words(self) -> str:
        """The words before the value; of a bar without words, its total number."""
        return " ".join(re.findall("[A-Za-z]+", self.head)) or (f"of {self.bar[2]}" if self.bar else "")

    @property
    def form(self) -> str:
        """The words before the value, and its unit."""
        unit = found[0].strip() if (found := _UNIT.match(self.text, self.end)) else ""
        return f"{self.words} {_turned(unit) if unit.startswith('s/') else unit}"

    @property
    def shape(self) -> str:
        """The text with ``#`` for numbers, for people."""
        text = re.sub(r"[0-9]+(?:[.,:][0-9]+)*(?:[eE][-+]?[0-9]+)?", "#", self.text)
        text = " ".join(re.sub(r"%\|[^|]*\|", "%|#|", text).split())
        text += f" ({self.words})" if self.words.startswith("of ") and self.bar else ""
        return text if len(text) <= _LONGEST_FORM else f"{text[: _LONGEST_FORM - 1]}…"

    @cached_property
    def is_of_evaluation(self) -> bool:
        """Whether words before the value say so, as in ``eval step 5 time 0.1`` and ``Validation: 10%``.

        ``val_loss 0.4`` (after another decimal number also ``val loss 0.4``) is a result that a line of the
        training repeats.
        """
        head = self.head
        for word in _EVALUATION.finditer(head):
            if (name := _NAME.match(head, word.end())) and name.end() == len(head):
                return True
            is_result = name and name[1] and _DECIMAL.match(head, name.end())
            if not (is_result or _DECIMAL.search(head, 0, word.start())):
                return True
        return False

    def redraws(self, last: Value | None) -> bool:
        """Return whether a progress bar stands where it stood in the ``last`` text."""
        at = [(one.head, one.bar.groups()) for one in (self, last) if one and one.bar]
        return len(at) == 2 and at[0] == at[1] and last is not None and last.place != self.place


def split_log(log: str) -> Texts:
    """Return the texts of a log, without colours."""
    lines = enumerate((_COLOUR.sub("", log) if "\x1b" in log else log).split("\n"), start=1)
    return [(number, text) for number, line in lines for text in line.split("\r") if text]


# -- values ---------------------------------------------------------------------------


def read_number(text: str, where: str) -> tuple[float, float]:
    """Return a number and the unit of its last digit, 0.01 for ``3.14``; 0 if it is not finite.

    Raises:
        UnreadableError: the text, found ``where``, is not a number, or has a decimal comma.
    """
    digits = text.strip().rstrip(",")
    if re.fullmatch(r"[-+]?[0-9.]*,[0-9.,eE+-]*", digits) and not _THOUSANDS.fullmatch(digits):
        what = "in which the comma does not separate thousands; let the program print a point"
        raise UnreadableError(f"{where} {text!r}, {what}")
    try:
        number = Decimal(digits.replace(",", ""))
        exponent = number.as_tuple().exponent
        return float(number), 10.0**exponent if isinstance(exponent, int) else 0.0
    except (ArithmeticError, ValueError):
        raise UnreadableError(f"{where} {text!r}, which is not a number") from None


def find_values(quantity: str, pattern: str, texts: Texts, source: str) -> Iterator[Value]:
    """Yield the values that a pattern matches in the log ``source``.

    Suffixes are written out first. A text that does not match is read with ``s/it`` in place of ``it/s`` in
    the pattern, or the other way round.

    Raises:
        UnreadableError: a match is not a number, or only a part of one.
    """
    regexes = [re.compile(own) for own in dict.fromkeys((pattern, _turned(pattern)))]
    separated = _COMMA_IN_PATTERN.search(pattern) is not None
    for place, (line, text) in enumerate(texts):
        has_suffix = any(letter in text for letter in _POWERS)
        versions = dict.fromkeys((_WITH_SUFFIX.sub(_written_out, text), text)) if has_suffix else (text,)
        tries = ([*regex.finditer(own)] for regex in regexes for own in versions)
        for match in next(filter(None, tries), ()):
            where = f"{source}:{line}: workload.metrics.output.{quantity} found"
            value, last_digit = _read(match, quantity, where, separated=separated)
            yield Value(value, last_digit, line, place, match.string, match.start(1), match.end(1))


def _turned(text: str) -> str:
    """Return a pattern or a unit with ``s/it`` in place of ``it/s`` and the other way round."""
    return _RATE.sub(lambda rate: rate[3] + rate[2] + rate[1] if "s" in (rate[1], rate[3]) else rate[0], text)


def _written_out(number: re.Match[str]) -> str:
    """Return ``1240`` for ``1.24k``; the space of ``1.24 kimg`` stays."""
    following = number.string[number.end() : number.end() + 1]
    return f"{Decimal(number[1]).scaleb(_POWERS[number[3]]):f}{number[2] if following.isalpha() else ''}"


def _read(match: re.Match[str], quantity: str, where: str, *, separated: bool) -> tuple[float, float]:
    """Return the value of a match, per second if its unit says so, and the unit of its last digit."""
    text, end = match[1] or "", match.end(1)
    if (whole := _whole_number(match, separated=separated)) != text:
        what = f"which is only a part of {whole}; let the pattern match the whole number"
        raise UnreadableError(f"{where} {text!r}, {what}, for example with ([0-9.,e+-]+)")
    other = _OTHER_SUFFIX.match(match.string, end) if text[-1:].isdigit() else None
    if other and (other[2] or match.end() == end):
        raise UnreadableError(
            f"{where} {text!r} before {other[0]!r}; let the pattern contain the unit, without k or M"
        )
    value, last_digit = read_number(text, where)
    if (rate := _RATE_HERE.match(match.string, end)) and not (rate[1] and rate[4]):
        in_seconds, per_second = rate[2] == "s" != rate[3], rate[3] == "s" != rate[2]
        if value and (in_seconds if quantity == "throughput" else per_second and quantity == "step_time"):
            value = 1 / value
    return value, last_digit


def _whole_number(match: re.Match[str], *, separated: bool) -> str:
    """Return the number of which a pattern matches a part, such as 1.2e+04 for 1.2; else the matched text."""
    text = match[1] or ""
    if not (digits := re.fullmatch(r"[-+]?([0-9]+)(\.[0-9]*)?", text)):
        return text
    after = "." if separated or digits[2] else ".,"
    before = "." if separated or (digits[2] and len(digits[1]) != 3) else ".,"
    start = match.start(1)
    left = re.search(
        rf"(?:[0-9][0-9{before}]*|[0-9]\.?[eE][-+]?)?$", match.string[max(0, start - 40) : start]
    )
    right = re.match(rf"(?:[{after}]?[0-9]+)*(?:[eE][-+]?[0-9]+)?", match.string[match.end(1) :][:40])
    return f"{left[0] if left and text[0].isdigit() else ''}{text}{right[0] if right else ''}"


# -- lines that count -----------------------------------------------------------------


def lines_that_count(
    values: Sequence[Value], quantity: str, texts: Texts, cell: Cell, source: str
) -> tuple[Sequence[Value], list[Recorded]]:
    """Return the values in the lines that count, and findings about these and the other lines.

    The lines of an evaluation do not count, unless the pattern says so, nor a few lines of another progress
    bar. Of several ranks, the lines of one count. A progress bar that is drawn again at the same place counts
    once.

    Raises:
        UnreadableError: each line occurs once per rank, but does not name its rank, or has several values.
    """
    findings: list[Recorded] = []
    rank: int | None = None
    pattern = cell.metrics["output"][quantity]
    others = [] if _EVALUATION.search(pattern) else [one for one in values if one.is_of_evaluation]
    if others and len(others) < len(values):
        values = [one for one in values if not one.is_of_evaluation]
        findings.append(lines_left_out(others, "evaluation", quantity=quantity, source=source))
    if quantity != "loss" and not cell.is_average and (several := _several_in_a_text(values, source)):
        values = [one for one in values if one not in several]
        findings.append(lines_left_out(several, "several values", quantity=quantity, source=source))
    is_one_rank = not cell.is_average and cell.metrics.get("ranks") != "all"
    if is_one_rank:
        rank, values = _of_one_rank(values, texts, cell)
    if not cell.is_average:
        values = [one for last, one in zip([None, *values], values, strict=False) if not one.redraws(last)]
    if others := _of_other_bars(values):
        values = [one for one in values if one not in others]
        findings.append(lines_left_out(others, "another progress bar", quantity=quantity, source=source))
    if is_one_rank and quantity != "loss":
        _check_repeated(values, texts, cell.world_size, source)
    if values:
        findings.append(_forms(values, quantity, source, rank))
    return values, findings


def lines_left_out(values: Sequence[Value], why: str, *, quantity: str, source: str) -> LinesLeftOut:
    """Return the finding about lines that do not count."""
    lines, example = tuple(one.line for one in values), values[0].shape
    return LinesLeftOut(
        subject=(quantity,), quantity=quantity, source=source, why=why, lines=lines, example=example
    )


def _several_in_a_text(values: Sequence[Value], source: str) -> list[Value]:
    """Return the values of texts with several, if these are few: two ranks can print into one line.

    Raises:
        UnreadableError: many texts have several values, such as a rate and its running average.
    """
    times = Counter(one.place for one in values)
    several = [one for one in values if times[one.place] > 1]
    if len(several) > _FEW_SEVERAL * len(values):
        first = several[0]
        what = f"{source}:{first.line}: the pattern matches {times[first.place]} times in {first.shape!r}"
        raise UnreadableError(f"{what}; let it match once, such as with the words before the value")
    return several


def _of_other_bars(values: Sequence[Value]) -> list[Value]:
    """Return the values of bars with other words that are few: ``Loading weights``, or that of the epochs."""
    bars = Counter(one.words for one in values if one.bar)
    return [one for one in values if one.bar and bars[one.words] < _FEW_OF_BARS * len(values)]


def _forms(values: Sequence[Value], quantity: str, source: str, rank: int | None) -> LineForms:
    by_form: dict[str, list[Value]] = {}
    for value in values:
        by_form.setdefault(value.form, []).append(value)
    ranked = sorted(by_form.values(), key=len, reverse=True)
    is_mixed = len(ranked) > 1 and len(ranked[1]) > _FEW * len(values)
    return LineForms(
        subject=(quantity,),
        severity="warning" if is_mixed else "info",
        quantity=quantity,
        source=source,
        forms=tuple(LineForm(own[0].shape, len(own), own[0].line) for own in ranked[:_FORMS_SHOWN]),
        first=f"{values[0].value:.6g}",
        last=f"{values[-1].value:.6g}",
        rank=rank,
    )


def _of_one_rank(values: Sequence[Value], texts: Texts, cell: Cell) -> tuple[int | None, Sequence[Value]]:
    """Return the rank with the most lines, of several the lowest, and its values, if lines name their ranks.

    Programs also begin lines with the number of a step. A prefix is therefore a rank only if all lines have
    one, and each rank has as many as the others.
    """
    first = dict(reversed(texts))  # a bar is redrawn without the prefix of its line
    for way in (_RANK, _LABEL, *([_LOCAL_RANK] if cell.nodes == 1 else [])):
        found = {one.place: way.search(one.text) or way.search(first[one.line]) for one in values}
        ranks = {place: int(match[1]) for place, match in found.items() if match}
        lines = Counter(ranks.values())
        if len(lines) < 2 or max(lines) >= cell.world_size:
            continue
        is_even = len(ranks) == len(found) and 1 < min(lines.values()) >= max(lines.values()) - 1
        labelled = (
            sum(_LABEL.match(line) is not None for line in first.values()) if way is _LABEL else math.inf
        )
        if way is _RANK or (is_even and labelled >= _LABELLED * len(first)):
            rank = min(lines, key=lambda rank: (-lines[rank], rank))
            return rank, [one for one in values if ranks.get(one.place, rank) == rank]
    return None, values


def _check_repeated(values: Sequence[Value], texts: Texts, world_size: int, source: str) -> None:
    """Refuse lines that occur once per rank, with the same words and integers before the value."""
    before = [_INTEGER.findall(_LOCAL_RANK.sub("", one.text[: one.start])) for one in values]
    if world_size < 2 or not values or not all(before) or any(one.bar for one in values):
        return
    keys = [(one.form, *integers) for one, integers in zip(values, before, strict=True)]
    # Steps can be counted anew in each epoch, which the line or one above it names.
    places: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for place, key in enumerate(zip(_epochs(values, texts), keys, strict=True)):
        places.setdefault(key, []).append(place)
    if sum(len(own) == world_size for own in places.values()) < _MOST * len(places):
        return
    # Ranks print the same step at about the same time; another epoch prints it when all steps have come.
    spans = sorted(own[-1] - own[0] for own in places.values())
    if spans[len(spans) // 2] >= max(world_size, len(values) / (2 * world_size)):
        return
    raise UnreadableError(
        f"{source}:{values[0].line}: lines such as {values[0].shape!r} occur {world_size} times each, but do "
        "not name their rank; let only rank 0 print them, let them name it ([rank 3]), or count them all "
        "with ranks: all in workload.metrics"
    )


def _epochs(values: Sequence[Value], texts: Texts) -> Iterator[str]:
    epoch, place = "", 0
    for value in values:
        for _, text in texts[place : value.place + 1]:
            epoch = named[1] if (named := _EPOCH.search(text)) else epoch
        place = value.place + 1
        yield epoch
