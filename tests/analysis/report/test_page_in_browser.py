"""The report's page in a real browser: offline, without errors, usable with mouse, keyboard and on a phone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.report.write import write_report
from tests.analysis import studies

HOSTILE = "<img src=x onerror=alert(1)>"

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with two regimes, a failed size, a long cell name, and more rows than one page shows."""

    def state(cell: Any, repeat: int) -> tuple[str, str, str | None]:
        failed = cell.world_size == 16 and cell.backend == "gloo"
        return ("failed", f"ran out of memory {HOSTILE}", "oom") if failed else ("completed", "", None)

    sizes = (1, 2, 4, 8, 16)
    cells = studies.merged(
        cell
        for backend in ("gloo", "nccl")
        for cell in studies.strong(64, sizes, backend=backend) + studies.weak(16, sizes, backend=backend)
    )
    cells += [
        cell
        for n in range(30)
        for cell in studies.strong(128, (1, 2, 4), swept={"n": n, "a_rather_long_name_of_an_option": n})
    ]
    path = tmp_path_factory.mktemp("browser") / "a study; & <b>"
    studies.finished(path, cells, repeats=3, epochs=1, ranks_files=False, state=state)
    return write_report(path).page


class Visit:
    """An open page, with its requests, console messages, errors and dialogs."""

    def __init__(self, browser: Any, file: Path, *, width: int = 1400, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.goto(file.as_uri())

    def wait_until(self, condition: Callable[[], bool], *, deadline_s: float = 30) -> None:
        """Handle the page's events until the condition holds."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, "the page did not do what was expected"
            self.page.wait_for_timeout(10)

    def cells(self, column: int) -> list[str]:
        """The first line of every shown cell of a column of the table."""
        found: list[str] = self.page.eval_on_selector_all(
            f"#table tbody td:nth-child({column + 1})", "cells => cells.map(c => c.firstChild?.data ?? '')"
        )
        return found

    def shown(self) -> str:
        return str(self.page.text_content("#shown"))


@pytest.fixture
def visit(browser: Any, page_file: Path) -> Iterator[Visit]:
    visited = Visit(browser, page_file)
    yield visited
    visited.context.close()
    assert visited.complaints == []


def test_no_request_leaves_the_page_and_the_console_is_silent(visit: Visit, page_file: Path) -> None:
    visit.page.wait_for_load_state("networkidle")
    assert [url for url in visit.requests if not url.startswith("data:")] == [page_file.as_uri()]
    assert visit.complaints == []


def test_the_policy_refuses_injected_scripts_and_images(visit: Visit) -> None:
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(browser: Any, page_file: Path, scheme: str) -> None:
    visited = Visit(browser, page_file, scheme=scheme)
    for width in (360, 768, 1400):
        visited.page.set_viewport_size({"width": width, "height": 900})
        sizes = visited.page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]")
        assert max(sizes) <= width
        outside = visited.page.evaluate(
            """() => [...document.querySelectorAll('body *')].filter((element) => {
                if (element.closest('.scroll, pre, svg, #tip, [hidden], script, style')) return false;
                const box = element.getBoundingClientRect();
                return box.width && (box.right > innerWidth + 1 || box.left < -1);
            }).map((element) => element.outerHTML.slice(0, 80))"""
        )
        assert outside == []
        scrolls = visited.page.evaluate(
            "(() => { const b = document.getElementById('table').parentElement; return b.scrollWidth > b.clientWidth; })()"
        )
        assert scrolls
    assert visited.complaints == []
    visited.context.close()


def contrast(page: Any, selector: str) -> float:
    """The contrast of an element's text against the page's ground, by WCAG's formula."""
    ratio: float = page.evaluate(
        """(selector) => {
            const linear = (v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
            const light = (text) => {
                const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(linear);
                return .2126 * r + .7152 * g + .0722 * b;
            };
            const element = document.querySelector(selector);
            const style = getComputedStyle(element);
            const ink = element.closest('svg') ? style.fill : style.color;
            const [a, b] = [light(ink), light(getComputedStyle(document.body).backgroundColor)].sort();
            return (b + .05) / (a + .05);
        }""",
        selector,
    )
    return ratio


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_themes(browser: Any, page_file: Path, scheme: str) -> None:
    visited = Visit(browser, page_file, scheme=scheme)
    for selector in ("h1", ".lead", ".formula", "figcaption", ".plot svg text", "td small", "a"):
        assert contrast(visited.page, selector) >= 4.5, selector
    for colour in ("--blue", "--vermillion", "--green"):
        visited.page.evaluate(f"document.querySelector('h2').style.color = 'var({colour})'")
        assert contrast(visited.page, "h2") >= 3.0, colour
    visited.context.close()


def test_the_theme_follows_the_system_until_the_reader_chooses(browser: Any, page_file: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    visited = Visit(browser, page_file, scheme="dark")
    dark = visited.page.evaluate(ground)
    ink = visited.page.evaluate("getComputedStyle(document.querySelector('.plot svg text')).fill")
    visited.page.click("#theme")
    assert visited.page.evaluate(ground) == "rgb(255, 255, 255)" != dark
    assert visited.page.evaluate("getComputedStyle(document.querySelector('.plot svg text')).fill") != ink
    visited.page.click("#theme")
    assert visited.page.evaluate(ground) == dark
    visited.context.close()


def test_headings_sort_by_number_with_missing_values_last(visit: Visit) -> None:
    visit.page.fill("#filter", "gloo")
    column = 9
    button = visit.page.locator("#table thead th button").nth(column)
    for order in ("ascending", "descending"):
        button.click()
        texts = visit.cells(column)
        values = [float(text.replace(",", "")) for text in texts if text != "–"]
        assert values == sorted(values, reverse=order == "descending")
        assert "–" not in texts[: len(values)]
        heading = visit.page.locator("#table thead th").nth(column)
        assert heading.get_attribute("aria-sort") == order


def test_headings_sort_by_text_and_by_the_keyboard(visit: Visit) -> None:
    visit.page.locator("#table thead th button").first.focus()
    visit.page.keyboard.press("Enter")
    names = visit.cells(0)
    visit.page.keyboard.press("Enter")
    assert names[0].startswith("n1x1-gloo")
    assert visit.cells(0)[0].startswith("n16x1-nccl")


def test_filtering_keeps_rows_that_hold_every_word(visit: Visit) -> None:
    assert visit.shown() == "rows 1–100 of 110 rows"
    visit.page.fill("#filter", "Weak NCCL")
    assert visit.shown() == "5 of 110 rows"
    assert all(name.split("-")[1] == "nccl" for name in visit.cells(0))
    visit.page.fill("#filter", "failed")
    assert visit.shown() == "2 of 110 rows"
    assert set(visit.cells(5)) == {"failed"}
    assert HOSTILE in str(visit.page.text_content("#table tbody"))
    visit.page.fill("#filter", "no such cell")
    assert visit.shown() == "0 of 110 rows"
    visit.page.fill("#filter", "")
    assert visit.shown() == "rows 1–100 of 110 rows"


def test_the_rest_of_the_rows_is_on_the_next_page(visit: Visit) -> None:
    first = visit.cells(0)
    visit.page.click("#next")
    assert visit.shown() == "rows 101–110 of 110 rows"
    assert len(visit.cells(0)) == 10
    assert visit.page.is_disabled("#next")
    visit.page.click("#previous")
    assert visit.cells(0) == first


def test_the_rows_a_script_draws_are_those_of_the_page_itself(browser: Any, page_file: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    static = page.locator("#table tbody").inner_html()
    assert page.locator("noscript").first.is_visible()
    assert not page.locator("#controls").is_visible()
    context.close()
    visited = Visit(browser, page_file)
    drawn = visited.page.locator("#table tbody").inner_html()
    visited.context.close()
    assert drawn == "".join(line.strip() for line in static.splitlines())


def test_a_pointer_over_a_mark_shows_its_values(visit: Visit) -> None:
    assert not visit.page.is_visible("#tip")
    mark = visit.page.locator(".plot").first.locator(".mark").last
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    text = str(visit.page.text_content("#tip"))
    assert visit.page.is_visible("#tip")
    assert "ranks" in text
    assert "×" in text
    visit.page.mouse.move(1, 1)
    assert not visit.page.is_visible("#tip")


def test_the_keyboard_steps_through_the_marks(visit: Visit) -> None:
    plot = visit.page.locator(".plot").nth(1)
    plot.focus()
    visit.page.keyboard.press("Tab")
    visit.page.keyboard.press("Shift+Tab")
    first = str(visit.page.text_content("#tip"))
    assert visit.page.is_visible("#tip")
    visit.page.keyboard.press("ArrowRight")
    second = str(visit.page.text_content("#tip"))
    assert first != second
    assert "efficiency" in second
    visit.page.keyboard.press("ArrowLeft")
    assert visit.page.text_content("#tip") == first
    visit.page.keyboard.press("Escape")
    assert not visit.page.is_visible("#tip")


def test_the_tip_stays_inside_a_phones_window(browser: Any, page_file: Path) -> None:
    visited = Visit(browser, page_file, width=360)
    plot = visited.page.locator(".plot").first
    plot.focus()
    marks = plot.locator(".mark").count()
    for _ in range(min(marks, 30)):
        visited.page.keyboard.press("ArrowRight")
        box = visited.page.locator("#tip").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    visited.context.close()


def test_the_page_prints_in_light_colours_without_controls(browser: Any, page_file: Path) -> None:
    visited = Visit(browser, page_file, scheme="dark")
    visited.page.emulate_media(media="print")
    assert not visited.page.is_visible("#theme")
    assert not visited.page.is_visible("#controls")
    assert visited.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert visited.page.pdf().startswith(b"%PDF-")
    visited.context.close()


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1400, "light")])
def test_the_grid_of_two_axes_and_its_table_fit_the_window(
    browser: Any, grid_study: Path, width: int, scheme: str
) -> None:
    visited = Visit(browser, grid_study / "report" / "index.html", width=width, scheme=scheme)
    visited.page.locator("details.axes summary").first.click()
    table = visited.page.locator("details.axes table").first
    assert table.is_visible()
    assert table.locator("tbody tr").count() == 9
    assert visited.page.evaluate("document.documentElement.scrollWidth") <= width
    plot = visited.page.locator(".plot").filter(has=visited.page.locator("text=Ranks per node")).first
    box = plot.locator("svg").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert plot.locator(".mark").count() == 18
    field = plot.locator(".mark").nth(7)
    field.scroll_into_view_if_needed()
    box = field.bounding_box()
    assert box is not None
    visited.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "2 nodes × 4 ranks = 8 ranks" in str(visited.page.text_content("#tip"))
    assert "over nodes" in str(visited.page.text_content("#tip"))
    visited.context.close()
    assert visited.complaints == []


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1400, "light")])
def test_every_figure_has_a_caption_and_values_and_fits_the_window(
    browser: Any, full_study: Path, width: int, scheme: str
) -> None:
    visited = Visit(browser, full_study / "report" / "index.html", width=width, scheme=scheme)
    visited.page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    figures = visited.page.evaluate(
        """() => [...document.querySelectorAll('figure')].map((figure) => {
            const svg = figure.querySelector('svg');
            const box = svg.getBoundingClientRect();
            return [svg.getAttribute('role'), svg.getAttribute('aria-label').length > 40, box.left >= 0,
                    box.right <= innerWidth, figure.querySelectorAll('.mark').length > 0,
                    figure.querySelector('.plot').tabIndex, figure.querySelector('figcaption').innerText.length > 30];
        })"""
    )
    assert figures == [["img", True, True, True, True, 0, True]] * 10
    assert visited.page.evaluate("document.documentElement.scrollWidth") <= width
    headings = visited.page.locator("h2").all_text_contents()
    order = [
        "Summary",
        "Strong scaling",
        "Losses and step time",
        "Ranks and nodes",
        "Bandwidth and step times",
        "All cells",
    ]
    assert [heading for heading in headings if heading in order] == order
    node = visited.page.locator("details.nodes tbody tr").first
    assert str(node.text_content()).startswith(f"n1{HOSTILE}")
    visited.context.close()
    assert visited.complaints == []


def test_the_values_of_the_folded_figures_are_under_the_pointer_and_the_keys(
    browser: Any, full_study: Path
) -> None:
    visited = Visit(browser, full_study / "report" / "index.html")
    assert not visited.page.locator("svg[aria-label^='All-reduce bandwidth']").is_visible()
    for summary in ("All-reduce bandwidth", "Step times"):
        fold = visited.page.locator("summary", has_text=summary)
        fold.focus()
        visited.page.keyboard.press("Enter")
        visited.page.keyboard.press("Tab")  # to a link of the fold, or to its figure
        plot = fold.locator("xpath=..").locator(".plot").first
        while not plot.evaluate("(plot) => plot === document.activeElement"):
            visited.page.keyboard.press("Tab")
        visited.page.keyboard.press("ArrowRight")
        tip = str(visited.page.text_content("#tip"))
        assert ("bandwidth" in summary and "/s" in tip) or "median" in tip or "slowest" in tip
    late = visited.page.locator("svg[aria-label^='Work and waiting'] .mark").first
    late.scroll_into_view_if_needed()
    box = late.bounding_box()
    assert box is not None
    visited.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert HOSTILE in str(visited.page.text_content("#tip"))
    visited.context.close()
    assert visited.complaints == []
