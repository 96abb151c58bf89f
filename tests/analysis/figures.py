"""Read the texts of figures; skip what takes most of the time of a report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:  # the plugin is loaded with every test, and matplotlib takes seconds
    from analysis.report.figures.drawing import Drawing
    from analysis.report.results import Results

SVG = "{http://www.w3.org/2000/svg}"


def texts(drawing: "Drawing") -> list[str]:
    """Return the texts in a figure."""
    return [element.text or "" for element in ElementTree.fromstring(drawing.svg.encode()).iter(f"{SVG}text")]


def styled(element: ElementTree.Element, name: str) -> str:
    """Return a property of an element's style, or an empty text."""
    declarations = dict(one.split(": ", 1) for one in element.get("style", "").split("; ") if one)
    return declarations.get(name, "")


@contextmanager
def drawn_here() -> Iterator[pytest.MonkeyPatch]:
    """Start no second process for the figures of a report within a ``with`` block."""
    from analysis.report import write
    from analysis.report.figures import drawing

    def draw_here(results: "Results") -> "list[Drawing]":
        return [one for _, draw in drawing._kinds() for one in draw(results)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "draw_figures", draw_here)
        yield patch


@contextmanager
def no_figure() -> Iterator[None]:
    """Write empty files instead of figures within a ``with`` block; titles and captions stay."""
    from analysis.report.figures.drawing import Drawing

    with drawn_here() as patch:
        patch.setattr(Drawing, "draw", lambda drawing, *_, **__: replace(drawing, svg="<svg></svg>"))
        yield


@contextmanager
def only_svg() -> Iterator[None]:
    """Write empty files instead of PDFs within a ``with`` block."""
    from analysis.report.figures import drawing

    saved: Callable[..., bytes] = drawing._saved

    def save(sheet: Any, form: str, *args: Any, **options: Any) -> bytes:
        return saved(sheet, form, *args, **options) if form == "svg" else b""

    with drawn_here() as patch:
        patch.setattr(drawing, "_saved", save)
        yield


@pytest.fixture
def nothing_drawn() -> Iterator[None]:
    """Write empty files instead of figures."""
    with no_figure():
        yield


@pytest.fixture
def svg_only() -> Iterator[None]:
    """Write empty files instead of PDFs."""
    with only_svg():
        yield
