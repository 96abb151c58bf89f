"""The report's page in a real browser: offline, without errors, usable with mouse, keyboard and on a phone.

All tests share one page, which each of them loads anew: a new page or browser takes longer than most tests.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.report.write import write_report
from bench.study.ledger import Ledger, RunState
from bench.study.reasons import LogCause
from tests.analysis import studies
from tests.analysis.figures import no_figure, only_svg
from tests.analysis.report.test_report_page import hostile_study

HOSTILE = "<img src=x onerror=alert(1)>"
EVIDENCE = f"torch.OutOfMemoryError: {HOSTILE}"
#: axe-core 4.10.3 from the npm registry (MPL-2.0), unchanged.
AXE = Path(__file__).with_name("axe.min.js")
AXE_SHA256 = "880970c081707360e64f34cea25ff91892f5bc95675b0776925b9709dd8a68bb"
#: The looks that axe checks; it takes a second or more for each.
AUDITED = ((1280, "light"), (390, "dark"), (1280, "print"))

#: The texts of visible figures that leave their figure, or overlap another one.
TEXTS_OF_FIGURES = """() => [...document.querySelectorAll('.plot svg')].flatMap((svg) => {
    const around = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map((text) => [text.textContent, text.getBoundingClientRect()]);
    const outside = texts.filter(([, box]) => box.width && (box.left < around.left - 1 || box.right > around.right + 1
        || box.top < around.top - 1 || box.bottom > around.bottom + 1));
    const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
    const pairs = texts.filter(([, box], at) => texts.slice(at + 1).some(([, other]) => overlap(box, other)));
    return [...outside, ...pairs].map(([text]) => text);
})"""

pytestmark = pytest.mark.browser


def with_cause(path: Path) -> Path:
    """Add the cause that `bench doctor` finds to the end of each failed run."""
    said = {"evidence": EVIDENCE, "explanation": "too large", "remedy": "a smaller batch"}
    cause = LogCause(cause="out-of-memory", path="job.err", line=12, **said)
    for run_id, attempts in Ledger(path / "ledger.jsonl").attempts().items():
        if attempts[1].state is RunState.FAILED:
            studies.change_run(path, run_id, cause=cause)
    return path


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with two regimes, a failed size, a long cell name, and more rows than one page shows."""

    def state(cell: Any, repeat: int) -> studies.State | None:
        failed = cell.world_size == 16 and cell.backend == "gloo"
        return ("failed", f"ran out of memory {HOSTILE}", "out-of-memory") if failed else None

    sizes = (1, 2, 4, 8, 16)
    cells = studies.merged(
        cell
        for backend in ("gloo", "nccl")
        for cell in studies.strong(64, sizes, backend=backend) + studies.weak(16, sizes, backend=backend)
    )
    cells += [
        cell
        for n in range(7)
        for cell in studies.strong(128, (1, 2, 4), swept={"n": n, "a_rather_long_name_of_an_option": n})
    ]
    path = tmp_path_factory.mktemp("browser") / "a study; & <b>"
    studies.finished(path, cells, repeats=3, epochs=1, ranks_files=False, state=state)
    with only_svg(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.report.page.STATIC_ROWS", 40)  # of 41 rows, the script shows all
        return write_report(with_cause(path)).page


class Visit:
    """The page that all tests share, with its requests, console messages, errors and dialogs."""

    def __init__(self, browser: Any) -> None:
        self.context = browser.new_context()
        self.page = self.context.new_page()
        self.page.set_default_timeout(120_000)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._refuse)

    def _refuse(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, file: Path, *, width: int = 1400, scheme: str = "light") -> Any:
        """Load a page into a window of this width; ``scheme`` is light, dark or print."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.show(scheme)
        self.requests.clear()
        self.page.goto(file.as_uri())
        self.page.wait_for_function("!document.querySelector('#controls[hidden]')")  # the table is complete
        return self.page

    def show(self, scheme: str) -> None:
        """Show the page in another scheme, without loading it again."""
        medium, colours = ("print", "light") if scheme == "print" else ("screen", scheme)
        self.page.emulate_media(media=medium, color_scheme=colours)

    def wait_until(self, condition: Callable[[], bool], *, deadline_s: float = 60) -> None:
        """Handle the page's events until the condition holds."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, "the page did not do what was expected"
            self.page.wait_for_timeout(10)

    def cells(self, column: int) -> list[str]:
        """The first line of every shown cell of a column of the table."""
        found: list[str] = self.page.eval_on_selector_all(
            f"#table tbody td:nth-child({column + 1})",
            "cells => cells.map(c => (c.querySelector('.name') ?? c).firstChild?.data ?? '')",
        )
        return found

    def shown(self) -> str:
        return str(self.page.text_content("#shown"))


@pytest.fixture(scope="module")
def shared(browser: Any) -> Iterator[Visit]:
    visit = Visit(browser)
    yield visit
    visit.context.close()


@pytest.fixture
def visit(shared: Visit) -> Iterator[Visit]:
    yield shared
    complaints, shared.complaints[:] = list(shared.complaints), []
    assert complaints == []


def test_no_request_leaves_the_page_and_the_policy_refuses_injected_scripts_and_images(visit, page_file):
    visit.open(page_file).wait_for_load_state("networkidle")
    assert [url for url in visit.requests if not url.startswith("data:")] == [page_file.as_uri()]
    visit.page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = 'window.smuggled = 1';
            document.body.append(script);
            const image = document.createElement('img');
            image.src = 'https://example.invalid/pixel';
            document.body.append(image);
        }"""
    )
    visit.wait_until(lambda: len(visit.complaints) >= 2)
    assert visit.page.evaluate("window.smuggled") is None
    assert len(visit.complaints) == 2
    assert all("Content Security Policy" in complaint for complaint in visit.complaints)
    visit.complaints.clear()


def test_nothing_planted_in_the_results_runs_or_becomes_an_element(visit, tmp_path):
    with no_figure():  # test_report_page.py checks the texts of figures
        page = visit.open(write_report(with_cause(hostile_study(tmp_path))).page)
    page.fill("#filter", "<img")
    assert visit.shown().endswith("rows")
    for kind in (".runs .name", "#table .name"):
        page.locator(kind).first.click()
        assert page.is_visible("#run")
        assert "<script>alert(1)</script>" in page.inner_text("#run")
        page.keyboard.press("Escape")
    own = "script:not(:last-of-type):not([type='application/json']), img, iframe, object, embed"
    assert page.locator(own).count() == 0
    assert page.locator("script").count() == 2
    assert page.evaluate(
        "[...document.querySelectorAll('*')].every(e => ![...e.attributes].some(a => a.name.startsWith('on')))"
    )


@pytest.fixture(scope="module")
def grid_page(grid_study: Path, report_svg: Callable[[Path], Path]) -> Path:
    return report_svg(grid_study)


@pytest.mark.parametrize("width", [1280, 1200, 390])
def test_every_look_fits_and_can_be_read(visit, full_study, page_file, grid_page, width):
    most = full_study / "report/index.html"
    for file in (grid_page, page_file, most):
        page = visit.open(file, width=width)
        page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        for scheme in ("light", "dark", "print"):
            visit.show(scheme)
            if scheme != "dark":  # which has other colours only
                check_that_everything_is_inside(page, width)
            if file == most and (width, scheme) in AUDITED:
                check_with_axe(page)


def check_that_everything_is_inside(page: Any, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        """() => [...document.querySelectorAll('body *')].filter((element) => {
            if (element.closest('svg, [hidden], script, style, dialog, thead')) return false;
            const box = element.getBoundingClientRect();
            return box.width && (box.right > innerWidth + 1 || box.left < -1);
        }).map((element) => element.outerHTML.slice(0, 80))"""
    )
    assert outside == []
    cut = page.evaluate(
        """() => [...document.querySelectorAll('body *')].filter((element) => {
            if (element.closest('svg, [hidden], script, style, dialog, thead')) return false;
            const look = getComputedStyle(element);
            const scrolls = ['auto', 'scroll', 'hidden', 'clip'];
            if (!scrolls.includes(look.overflowX) && !scrolls.includes(look.overflowY)) return false;
            return element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 1;
        }).map((element) => element.outerHTML.slice(0, 80))"""
    )
    assert cut == [], "no element scrolls inside, and nothing is cut"
    wide = "[...document.querySelectorAll('.framed')].filter((box) => box.scrollWidth > box.clientWidth + 1).length"
    assert page.evaluate(wide) == 0, "no table is wider than its box"
    assert page.evaluate(TEXTS_OF_FIGURES) == [], "texts of figures are inside and do not overlap"
    headings = page.locator("#table thead th")
    assert headings.all_inner_texts()[:4] == ["Cell", "Efficiency", "State", "Remark"]


def check_with_axe(page: Any) -> None:
    assert hashlib.sha256(AXE.read_bytes()).hexdigest() == AXE_SHA256
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa']})")
    assert [(v["id"], v["nodes"][0]["html"][:120]) for v in found["violations"]] == []


def test_a_phones_first_screen_shows_each_size_with_efficiency_and_verdict(visit, full_study):
    page = visit.open(full_study / "report/index.html", width=390)
    rows = page.locator(".sizes").first.locator("tr[class]:not(.series)")
    assert rows.count() == 6
    for place in (0, 2):
        for cell in ("th", "td:nth-child(2)", ".verdict"):
            box = rows.nth(place).locator(cell).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390
            assert box["y"] + box["height"] <= 844


def test_errors_are_folded_on_a_phone_and_counted(visit, tmp_path):
    cells = studies.strong(sizes=(1, 2, 4), per_node=4)
    path = studies.finished(tmp_path / "s", cells, env=lambda cell: studies.environment(cell, cores=2))
    with no_figure():
        file = write_report(path).page
    row = visit.open(file).locator(".alert tbody tr")
    assert row.is_visible()
    assert row.locator("td").all_inner_texts()[:2] == ["error", "Ranks share cores"]
    page = visit.open(file, width=390)
    assert not row.is_visible()
    assert page.inner_text(".alert summary") == "1 error: Ranks share cores"
    page.locator(".alert summary").focus()
    page.keyboard.press("Enter")
    assert row.is_visible()


def test_the_theme_is_that_of_the_system_and_prints_are_light_with_all_figures(visit, page_file):
    ground = "getComputedStyle(document.body).backgroundColor"
    label = "getComputedStyle(document.querySelector('.plot svg text')).fill"
    mark = "getComputedStyle(document.querySelector('.plot path[style*=\"stroke: var(--blue)\"]')).stroke"
    page = visit.open(page_file, scheme="dark")
    dark, ink, blue = page.evaluate(ground), page.evaluate(label), page.evaluate(mark)
    visit.show("light")
    assert page.evaluate(ground) == "rgb(255, 255, 255)" != dark
    assert page.evaluate(label) == "rgb(31, 35, 40)" != ink
    assert page.evaluate(mark) == "rgb(0, 114, 178)" != blue
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    assert not page.is_visible("#filter")
    assert not page.locator(".tabs").first.is_visible()
    figures = page.locator("main > section figure:not(details *)")
    assert all(figures.nth(place).is_visible() for place in range(figures.count()))
    assert page.pdf().startswith(b"%PDF-")


def test_headings_sort_by_number_with_missing_values_last_and_by_text_and_the_keyboard(visit, page_file):
    page, column = visit.open(page_file), 7
    page.fill("#filter", "gloo")
    button = page.locator("#table thead th button").nth(column)
    for order in ("ascending", "descending"):
        button.click()
        texts = visit.cells(column)
        values = [float(text.replace(",", "")) for text in texts if text != "–"]
        assert values == sorted(values, reverse=order == "descending")
        assert "–" not in texts[: len(values)]
        assert page.locator("#table thead th").nth(column).get_attribute("aria-sort") == order
    page.fill("#filter", "")
    page.locator("#table thead th button").first.focus()
    page.keyboard.press("Enter")
    names = visit.cells(0)
    page.keyboard.press("Enter")
    assert names[0].startswith("n1x1-gloo")
    assert visit.cells(0)[0].startswith("n16x1-nccl")


def test_one_filter_serves_table_and_runs(visit: Visit, page_file: Path) -> None:
    page = visit.open(page_file)
    assert visit.shown() == "rows 1–20 of 41 rows"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # on paper, all are shown
    assert (visit.shown(), page.locator("#table tbody tr").count()) == ("41 rows", 41)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert visit.shown() == "rows 1–20 of 41 rows"
    page.click("#next")
    assert visit.shown() == "rows 21–40 of 41 rows"
    for words, rows in (("16 ranks", 4), ("nodes=16", 4), ("strong 16 nodes nccl", 1), ("gpus=3", 0)):
        page.fill("#filter", words)
        assert visit.shown() == f"{rows} of 41 rows"
    page.fill("#filter", "Weak NCCL")
    assert visit.shown() == "5 of 41 rows"
    assert all(name.split("-")[1] == "nccl" for name in visit.cells(0))
    assert page.locator(".runs tbody tr:not([hidden])").count() == 0
    page.fill("#filter", "failed")
    assert visit.shown() == "2 of 41 rows"
    assert set(visit.cells(2)) == {"failed"}
    assert page.locator(".runs tbody tr:not([hidden])").count() == 6
    assert HOSTILE in str(page.text_content("#table tbody"))
    page.fill("#filter", "n1x1-gloo-srun-b16")
    assert set(visit.cells(0)) == {"n1x1-gloo-srun-b16"}, "names that begin with this one are left out"
    page.fill("#filter", "")
    assert visit.shown() == "rows 1–20 of 41 rows"


def test_without_a_script_the_page_has_the_same_rows_and_all_figures(browser, visit, page_file):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    static = page.locator("#table tbody tr").all_text_contents()
    assert page.locator("noscript").first.is_visible()
    assert not page.locator("#controls").is_visible()
    figures = page.locator("figure:not(details figure)")
    assert all(figures.nth(place).is_visible() for place in range(figures.count()))
    context.close()
    drawn = visit.open(page_file).locator("#table tbody tr").all_text_contents()
    assert len(drawn) == 20, "the script shows a part of the rows"
    assert drawn == ["".join(text.split("\n")) for text in static[:20]]


def test_figures_switch_between_values_and_a_name_shows_state_reason_evidence_and_folder(visit, page_file):
    page = visit.open(page_file)
    names = ["Efficiency", "Speedup", "Throughput"]
    views = page.locator(".views").first
    buttons, figures = views.locator(".tabs button"), views.locator("figure")
    assert buttons.all_inner_texts() == names
    for place in range(len(names)):
        buttons.nth(place).click()
        visible = [figures.nth(other).is_visible() for other in range(len(names))]
        assert visible == [other == place for other in range(len(names))]
        assert buttons.nth(place).get_attribute("aria-pressed") == "true"
    page.fill("#filter", "failed weak")
    page.locator("#table .name").first.click()
    assert page.locator("#run-list dl").count() == 4, "the cell's values, and its runs"
    text = page.inner_text("#run-list dl >> nth=1")
    assert "failed (out-of-memory)" in text
    assert f"ran out of memory {HOSTILE}" in text
    assert f"out-of-memory (job.err:12): {EVIDENCE}" in text
    folder = page.evaluate("document.querySelector('#run-list a').pathname")
    assert Path(page.evaluate("decodeURIComponent", folder)).is_dir()
    page.locator("#run button").click()
    assert not page.is_visible("#run")
