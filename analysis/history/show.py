"""The history as rows of a table and as sentences."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.history.change import FOLDER
from analysis.history.series import Change, History, Series
from ddp_scaling_bench.units import count, names, number

HEADINGS = ("series", "studies", "last", "", "change")
_BARS = "▁▂▃▄▅▆▇█"
#: The number of studies in a sparkline, and the least part of its middle that its height shows.
_LAST, _LEAST_RANGE = 16, 0.1
#: The number of reasons for leaving out studies that are shown.
_MOST_REASONS = 6


def table_rows(history: History) -> list[tuple[str, ...]]:
    """Return a row for each series."""
    return [
        (one.label, str(len(one.points)), number(one.points[-1].rate), sparkline(one), change_text(one))
        for one in history.series
    ]


def title(history: History) -> str:
    """Return the title of the table, with the units of the throughputs."""
    units = dict.fromkeys(point.unit for one in history.series for point in one.points)
    return f"Throughput ({' or '.join(units)}) of the last study"


def sparkline(series: Series) -> str:
    """Return the throughputs of the last studies as bars."""
    rates = [point.rate for point in series.points[-_LAST:]]
    middle = (min(rates) + max(rates)) / 2
    height = max(max(rates) - min(rates), _LEAST_RANGE * middle)
    return "".join(_BARS[min(7, int(8 * (0.5 + (rate - middle) / height)))] for rate in rates)


def change_text(series: Series) -> str:
    """Return the last change of a series in words, or why there is none."""
    texts = ["none"]
    if series.changes:
        last = series.changes[-1]
        also = names([f"{one.name} {one.before} → {one.after}" for one in last.differences], limit=3)
        since = f"since {series.points[last.at].date[:10]}"
        texts = [f"{'new: ' * last.is_new}{size_text(last)} {since}{f' ({also})' * bool(also)}"]
        texts += [count(len(series.changes) - 1, "earlier change")] * (len(series.changes) > 1)
    elif series.lacking:
        texts = [f"{count(series.lacking, 'more study', 'more studies')} needed"]
    if series.deviation:
        level = "low" if series.deviation < 1 else "high"
        texts.append(f"last study {level} ({_percent(series.deviation)} %), not confirmed")
    return "; ".join(texts)


def size_text(change: Change) -> str:
    """Return ``-12.1 % [-13.0, -11.2]``."""
    return f"{_percent(change.ratio)} % [{_percent(change.low)}, {_percent(change.high)}]"


def _percent(ratio: float) -> str:
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f}"  # + 0.0: no "-0.0"


def summary(history: History) -> str:
    """Return the numbers of studies and series, and which series are newly slower."""
    studies = {point.study for one in history.series for point in one.points}
    slower = names([one.label for one in history.series if one.regression])
    text = f"{count(len(studies), 'study', 'studies')}, {count(len(history.series), 'series', 'series')}"
    return f"{text} of equal cells; {f'newly slower: {slower}' if slower else 'no series is newly slower'}"


def remarks(history: History) -> Iterator[str]:
    """Yield what is left out, and whether there are too many series."""
    reasons: dict[str, list[str]] = {}
    for name, reason in history.left_out:
        reasons.setdefault(reason, []).append(name)
    lines = [f"left out: {names(own)} ({reason})" for reason, own in reasons.items()]
    yield from lines[:_MOST_REASONS]
    if (more := len(lines) - _MOST_REASONS) > 0:
        yield f"left out for {count(more, 'more reason')}; --json lists all"
    if history.searched > FOLDER:
        yield f"false alarms are rare in at most {FOLDER} series, these are {history.searched}: give fewer"
