"""Write history.html: one file without scripts, with a curve for each series."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from math import exp, floor, log10
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup

from analysis.history.change import FOLDER, LEAST, WINDOW
from analysis.history.series import History, Series
from analysis.history.show import change_text, remarks, size_text, summary
from analysis.text import clean
from ddp_scaling_bench.errors import UnwritableError
from ddp_scaling_bench.files import write_atomically
from ddp_scaling_bench.units import capital, fraction, human_bytes, interval, number, percent

#: Series with a curve; the others are in the table only.
_MOST_SERIES = 60
#: The size of a curve with its margins: left, top, right, bottom.
_WIDTH, _HEIGHT, _MARGINS = 480, 170, (58, 18, 12, 24)
#: Studies are not connected if the time between them is more than this multiple of the median.
_GAP = 5


def write_page(history: History, root: Path, *, private: bool, say: Callable[[str], None]) -> Path | None:
    """Write the page to the folder ``root`` and return its path, or None if that is not possible."""
    templates = Path(__file__).parents[1] / "report/template"
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        finalize=_cleaned,
    )
    environment.filters.update(
        number=number, fraction=fraction, percent=percent, bytes=human_bytes, capital=capital
    )
    text = environment.get_template(
        "history.html.j2"
    ).render(
        style=Markup((templates / "page.css").read_text(encoding="utf-8")),  # noqa: S704 (our own file)
        summary=summary(history),
        remarks=[*remarks(history)],
        series=history.series,
        curves=[*map(curve, history.series[:_MOST_SERIES])],
        texts={"change": change_text, "size": size_text, "interval": interval},
        limits={"least": LEAST, "window": WINDOW, "folder": FOLDER},
    )
    try:
        write_atomically(root / "history.html", text, private=private)
    except UnwritableError as error:
        say(f"no page is written: {error}")
        return None
    return root / "history.html"


def _cleaned(value: Any) -> Any:
    return value if isinstance(value, Markup) else clean(value)


def curve(series: Series) -> dict[str, Any]:
    """Return the SVG paths of a curve, and (place, text) of its ticks and changes."""
    points, (left, top, right, bottom) = series.points, _MARGINS
    times = [datetime.fromisoformat(point.date).timestamp() for point in points]
    ends = [(point.low or point.rate, point.high or point.rate) for point in points]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    low, high = low - 0.05 * (high - low or low), high + 0.05 * (high - low or low)
    span = (times[-1] - times[0]) or 1.0

    def x(time: float) -> float:
        return round(left + (time - times[0]) / span * (_WIDTH - left - right), 1)

    def y(rate: float) -> float:
        return round(top + (high - rate) / (high - low) * (_HEIGHT - top - bottom), 1)

    gaps = [later - earlier for earlier, later in pairwise(times)]
    joined = [False, *(gap <= _GAP * median(gaps) for gap in gaps)]
    places = [f"{x(time)},{y(point.rate)}" for time, point in zip(times, points, strict=True)]
    starts = [0, *(change.at for change in series.changes), len(points)]
    of_unit = points[-1].rate / exp(points[-1].log_mean)
    means = []
    for start, stop in pairwise(starts):
        mean = exp(sum(point.log_mean for point in points[start:stop]) / (stop - start))
        means.append(f"M{x(times[start])},{y(of_unit * mean)}H{x(times[stop - 1])}")
    step = _round_up((high - low) / 4)
    rates = [step * place for place in range(int(low / step) + 1, int(high / step) + 1)]
    days = {
        f"{datetime.fromtimestamp(times[0] + span * part / 3, UTC):%Y-%m-%d}": part for part in (0, 1, 2, 3)
    }
    return {
        "size": (_WIDTH, _HEIGHT),
        "points": "".join(f"M{place}h0" for place in places),
        "intervals": "".join(f"M{x(t)},{y(a)}V{y(b)}" for t, (a, b) in zip(times, ends, strict=True)),
        "line": "".join(f"{'L' if to else 'M'}{place}" for to, place in zip(joined, places, strict=True)),
        "means": "".join(means),
        "rates": [(y(rate), f"{rate:,.{max(0, -floor(log10(step)))}f}") for rate in rates],
        "dates": [(x(times[0] + span * part / 3), day) for day, part in days.items()],
        "changes": [x((times[at - 1] + times[at]) / 2) for at in starts[1:-1]],
    }


def _round_up(value: float) -> float:
    power = 10.0 ** floor(log10(value))
    return next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= value)
