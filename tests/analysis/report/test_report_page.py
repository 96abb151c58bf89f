"""`report/` of finished, unfinished, broken and hostile studies, and rates in tokens/s."""

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.report.figures.drawing import is_name
from analysis.report.tables import STATIC_ROWS
from analysis.report.write import write_report
from bench.matrix.warnings import LiteralDollar
from ddp_scaling_bench.units import number
from tests.analysis import studies
from tests.analysis.figures import no_figure, only_svg
from tests.analysis.studies import with_probes, write_ranks
from tests.commands import command_line
from tests.common import read_rows


class Page:
    """The HTML of a page, its words, and the data of its script."""

    def __init__(self, html: str) -> None:
        self.html = html
        shown = re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", " ", html, flags=re.DOTALL)
        self.text = " ".join(unescape(shown).split())
        (self.data,) = re.findall(r'id="data">(.*?)</script>', html, re.DOTALL)
        content = json.loads(self.data)
        self.rows, self.run_texts = content["rows"], content["texts"]


def report(path: Path, *, is_drawn: bool = False) -> Page:
    with only_svg() if is_drawn else no_figure():
        page = write_report(path).page
    assert page == path / "report" / "index.html"
    return Page(page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(demo_study: Path) -> Page:
    return Page((demo_study / "report" / "index.html").read_text(encoding="utf-8"))


def test_the_report_has_its_files(demo_study: Path) -> None:
    folder = demo_study / "report"
    names = {path.name for path in folder.iterdir()}
    files = "index.html scaling.csv what-differs.csv scaling.md scaling.tex runs.csv causes.csv figures"
    assert names == {*files.split()}
    figures = {path.name for path in (folder / "figures").iterdir() if path.stat().st_size}
    kinds = ("speedup", "efficiency", "throughput", "shares")
    expected = [f"{kind}-{mode}" for kind in kinds for mode in ("strong", "weak")]
    expected += ["scaling", "why-1", "why-2"]
    assert figures == {f"{name}.{form}" for name in expected for form in ("svg", "pdf")}
    assert len(pd.read_csv(folder / "scaling.csv")) == 8
    assert len(pd.read_csv(folder / "runs.csv")) == 28


def test_the_first_lines_explain_the_words_of_the_answer(whole: Page) -> None:
    answer, terms, table = map(whole.text.index, ("efficiency 0.", "P: the probability that", "Verdict"))
    assert answer < terms < table
    assert "28 of 28 runs are valid, " in whole.text[:terms]
    assert re.search(
        r"baseline 1\.00 [\d.]+ \d+ % [a-z ]+? of its own step, no loss of efficiency", whole.text
    )


def test_only_words_that_the_page_uses_are_explained(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "one", studies.strong(sizes=(2,)), repeats=3)
    with no_figure():
        page = Page(write_report(path).page.read_text())
    assert "no advice from a single size: measure another one" in page.text
    assert not any(word in page.text for word in ("P: the probability", "Lost: what part", "Cannot tell: P"))


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}$\\frac{1}{0}$\u202e\x1b[31m"


def hostile_study(path: Path) -> Path:
    def env(cell: Any) -> dict[str, Any]:
        found = studies.environment(cell)
        found["hosts"][0].update(host=HOSTILE, cpu_model=HOSTILE)
        return found | {
            "torch": HOSTILE,
            "device_name": HOSTILE,
            "env": {HOSTILE: HOSTILE},
            "facts": [
                {"kind": HOSTILE, "subject": [HOSTILE], "values": {HOSTILE: HOSTILE}, "severity": "warning"}
            ],
            "transport": {"interface": HOSTILE},
        }

    cells = studies.strong(backend=HOSTILE, swept={"env." + HOSTILE: HOSTILE})
    for place, cell in enumerate(cells):
        cell.cell_id = f"cell{place}" + HOSTILE.replace("/", "")
        cell.workload["model"] = HOSTILE
    failed = {2: ("failed", HOSTILE, None)}
    options = {
        "state": lambda cell, repeat: failed.get(repeat),
        "env": env,
        "warnings": [LiteralDollar(variable=HOSTILE)],
    }
    path = studies.finished(path / "hostile", cells, **options)
    with_probes(path, [cell for cell in cells if cell.world_size > 1])
    write_ranks(path, late=lambda run, rank: 0.004 * (rank == 1), host=lambda rank: f"n{rank}{HOSTILE}")
    plan = json.loads((path / "plan.json").read_text(encoding="utf-8"))
    plan["study"] = f"x'; echo {HOSTILE}"
    plan["matrix"] = f"study: x # {HOSTILE}</pre></script>\n"
    (path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    return path


def test_everything_from_results_is_shown_as_text(tmp_path: Path) -> None:
    """test_page_in_browser.py finds no element or script that came from the results."""
    path = hostile_study(tmp_path)
    page = report(path, is_drawn=True)
    assert page.text.count("<script>alert(1)</script>") > 20
    assert "n1<script>alert(1)" in page.text
    assert "{{7*7}}" in page.text
    assert "49" not in page.text.split("{{7*7}}")[0][-3:]
    assert "\x1b" not in page.html
    assert "\u202e" not in page.html
    assert "<" not in page.data
    assert page.rows[0][0][0].startswith("cell0<script>alert(1)")
    assert set(page.run_texts) >= {"completed", "failed"}
    assert any("<script>alert(1)</script>" in text for text in page.run_texts)
    figures = {figure.stem: figure for figure in (path / "report" / "figures").glob("*.svg")}
    assert {"shares-strong", "why-1", "ranks"} <= figures.keys()
    assert all(map(is_name, figures))
    for figure in figures.values():
        assert "<script" not in figure.read_text(encoding="utf-8")


def run_states(*names: str) -> Any:
    return lambda cell, repeat: (names[(repeat - 1) % len(names)], "it broke", "bad-exit")


@pytest.mark.parametrize(
    ("state", "alert"),
    [
        (run_states("running", "queued"), "None of the 12 planned runs has a throughput: 8 running"),
        (run_states("completed", "failed", "cancelled"), "Went wrong 8 of 12 runs exited with an error"),
    ],
)
def test_an_unfinished_study_has_a_page_that_says_so(tmp_path: Path, state: Any, alert: str) -> None:
    page = report(studies.finished(tmp_path / "s", state=state))
    assert alert in page.text
    assert len(page.rows) == 4


def test_a_large_study_has_a_page_that_says_what_it_leaves_out(tmp_path: Path, monkeypatch: Any) -> None:
    def state(cell: Any, repeat: int) -> studies.State | None:
        return ("failed", "x" * 2000, "bad-exit") if cell.swept["n"] % 2 else None

    monkeypatch.setattr("analysis.report.tables.MAX_RUNS_LISTED", 42)
    cells = [cell for n in range(26) for cell in studies.strong(64 * (1 + n), (1, 2, 4, 8), swept={"n": n})]
    path = studies.finished(tmp_path / "s", cells, repeats=1, epochs=1, ranks_files=False, state=state)
    page = report(path)
    assert len(page.rows) == 104 > STATIC_ROWS
    table = page.html.partition('<table id="table"')[2].partition("</table>")[0]
    assert table.count("<tr>") == STATIC_ROWS + 1
    assert len(page.html) < 600_000
    assert "10 more are in runs.csv" in page.text
    assert "6 of 13 series drawn, with the most sizes" in page.text


def test_figures_of_an_older_report_are_removed_and_other_files_stay(tmp_path, nothing_drawn):
    cells = studies.merged(studies.strong(sizes=(1, 2)) + studies.weak(sizes=(1, 2)))
    path = studies.finished(tmp_path / "s", cells, repeats=1)
    write_report(path)
    figures = path / "report" / "figures"
    for name in ("mine.svg", "ranks.txt", "speedup-mine.svg"):
        (figures / name).write_text("<svg/>")
    plan = json.loads((path / "plan.json").read_text())
    plan["cells"] = [{**c, "series": [m for m in c["series"] if m["mode"] == "weak"]} for c in plan["cells"]]
    (path / "plan.json").write_text(json.dumps(plan))
    write_report(path)
    own = {"mine.svg", "ranks.txt", "speedup-mine.svg", "speedup-weak.svg"}
    assert {p.name for p in figures.iterdir()} >= own
    assert not list(figures.glob("*-strong.*"))


TOKENS = {"units": {"throughput": "tokens/s"}, "tokens_per_sample": 128}


def in_tokens(path, *, tokens: bool):
    cells = studies.strong(64, (1, 2))
    if tokens:
        cells = [replace(cell, metrics={"source": "recorder", **TOKENS}) for cell in cells]
    return studies.finished(path, cells)


def test_people_read_tokens_and_programs_samples(tmp_path, svg_only):
    found = {}
    for tokens in (True, False):
        report = write_report(in_tokens(tmp_path / str(tokens) / "s", tokens=tokens)).page.parent
        found[tokens] = [row["throughput_samples_per_sec"] for row in read_rows(report / "scaling.csv")]
        unit, other = ("Tokens/s", "Samples/s") if tokens else ("Samples/s", "Tokens/s")
        for file in (report / "index.html", report / "scaling.md"):
            text = file.read_text()
            assert (unit in text, other in text) == (True, False), file
        rate = float(found[tokens][0]) * (128 if tokens else 1)
        assert f"| {number(rate)} |" in (report / "scaling.md").read_text()
        assert f"({unit.lower()})" in next(report.rglob("throughput-strong.svg")).read_text()
    assert found[True] == found[False]


def test_a_comparison_is_in_tokens_if_both_studies_are(tmp_path):
    for name in ("a", "b"):
        in_tokens(tmp_path / "results" / name, tokens=True)
    done = command_line.bench("compare", "a", "b", cwd=tmp_path)
    assert "A tokens/s" in done.stdout, done.stderr
    assert "samples/s" not in done.stdout


def test_logs_in_tokens_are_shown_in_tokens(tmp_path, nothing_drawn):
    for ranks in (1, 2):
        (tmp_path / f"{ranks}.log").write_text(f"tps {1000 * ranks} tok/s\ntps {1010 * ranks} tok/s\n")
    words = ["report", "1=1.log", "2=2.log", "--pattern", r"throughput=tps ([0-9]+)", "--mode", "strong"]
    for more, mean in (([], "1004.98 tokens/s"), (["--set", "tokens_per_sample=10"], "100.498 samples/s")):
        done = command_line.bench(*words, "--unit", "tokens/s", *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"mean {mean}" in done.stderr
        page = (tmp_path / done.stdout.splitlines()[0]).read_text()
        assert "Tokens/s" in page
        assert "Samples/s" not in page
