"""Skip what takes most of the time of a report, for tests that do not examine figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def _blank(draft: Any, draw: Any) -> Any:
    from analysis.report.figures.drawing import Drawing

    return Drawing(**vars(draft), svg="", inline_svg="", png=b"", pdf=b"")


@contextmanager
def no_figure() -> Iterator[None]:
    """Write empty files instead of figures within a ``with`` block; titles and captions stay."""
    from analysis.report.figures import bars, curves, heatmaps, step_times

    with pytest.MonkeyPatch.context() as patch:
        for module in (bars, curves, heatmaps, step_times):
            patch.setattr(module, "finish", _blank)
        yield


@contextmanager
def only_svg() -> Iterator[None]:
    """Write empty files instead of PNG and PDF within a ``with`` block."""
    from analysis.report.figures import drawing

    saved: Callable[..., bytes] = drawing._saved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            drawing, "_saved", lambda figure, form, name: saved(figure, form, name) if form == "svg" else b""
        )
        yield


@pytest.fixture
def nothing_drawn() -> Iterator[None]:
    """Write empty files instead of figures."""
    with no_figure():
        yield


@pytest.fixture
def svg_only() -> Iterator[None]:
    """Write empty files instead of PNG and PDF."""
    with only_svg():
        yield
