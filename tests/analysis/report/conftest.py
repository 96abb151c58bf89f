"""Reports and the browser that several test modules share."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.report.write import write_report
from bench.matrix.warnings import OneNodeCount
from tests.analysis import studies
from tests.analysis.figures import only_svg
from tests.analysis.studies import with_probes, write_ranks

CHROMIUM = Path(os.environ.get("BENCH_CHROMIUM", "/usr/bin/chromium"))
ARGUMENTS = (
    "--no-sandbox --disable-gpu --in-process-gpu --disable-background-networking --no-first-run".split()
)
HOSTILE_HOST = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="session")
def report_svg() -> Callable[[Path], Path]:
    """Write a report without PDF files; return its page."""

    def report(path: Path) -> Path:
        with only_svg():
            return write_report(path).page

    return report


@pytest.fixture(scope="session")
def demo_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of a strong and a weak series, with its report."""
    path = tmp_path_factory.mktemp("reports") / "demo"
    cells = studies.merged(studies.strong() + studies.weak())
    studies.finished(path, cells, repeats=4, warnings=[OneNodeCount(nodes=2)])
    write_report(path)
    return path


@pytest.fixture(scope="session")
def grid_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study over nodes and ranks per node whose largest size failed."""

    failed = {16: ("failed", "ran out of <b>memory</b>", "out-of-memory")}
    cells = [cell for launcher in ("srun", "torchrun") for cell in studies.over_two_axes(launcher=launcher)]
    path = tmp_path_factory.mktemp("reports") / "grid"
    state = {"state": lambda cell, repeat: failed.get(cell.world_size)}
    return studies.finished(path, cells, epochs=1, ranks_files=False, **state)


@pytest.fixture(scope="session")
def full_study(tmp_path_factory: pytest.TempPathFactory, report_svg: Callable[[Path], Path]) -> Path:
    """A study with all parts of a report: batches, a late rank, probes, step times; hostile host names."""
    cells = [cell for batch in (64, 128) for cell in studies.strong(batch, (1, 2, 4), per_node=2)]
    path = tmp_path_factory.mktemp("reports") / "every part"
    studies.finished(path, cells, epochs=1)
    with_probes(path, [cell for cell in cells if cell.world_size > 1])
    write_ranks(path, late=lambda run, rank: 0.004 * (rank == 1), host=lambda rank: f"n{rank}{HOSTILE_HOST}")
    report_svg(path)
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium; tests that need it have the mark ``browser``."""
    if not CHROMIUM.exists():
        absent = f"Chromium is absent ({CHROMIUM}): install Debian's package chromium, or set BENCH_CHROMIUM"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(absent)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield found
        found.close()
