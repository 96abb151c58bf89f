"""Rates in tokens/s: everywhere that people read them, and nowhere that programs do."""

import csv
from dataclasses import replace

from analysis.report.write import write_report
from ddp_scaling_bench.units import number
from tests.analysis import studies
from tests.commands import command_line

TOKENS = {"units": {"throughput": "tokens/s"}, "tokens_per_sample": 128}


def in_tokens(path, *, tokens: bool):
    cells = studies.strong(64, (1, 2))
    if tokens:
        cells = [replace(cell, metrics={"source": "recorder", **TOKENS}) for cell in cells]
    return studies.finished(path, cells)


def test_people_read_tokens_and_programs_samples(tmp_path, svg_only):
    found = {}
    for tokens in (True, False):
        study = in_tokens(tmp_path / str(tokens) / "s", tokens=tokens)
        report = write_report(study).page.parent
        rows = csv.DictReader((report / "scaling.csv").read_text().splitlines())
        texts = {path.name: path.read_text() for path in (*report.glob("*.html"), report / "scaling.md")}
        assert len(texts) == 2
        figure = next(report.rglob("throughput-strong.svg")).read_text()
        found[tokens] = [row["throughput_samples_per_sec"] for row in rows]
        unit, other = ("Tokens/s", "Samples/s") if tokens else ("Samples/s", "Tokens/s")
        for name, text in texts.items():
            assert unit in text, name
            assert other not in text, name
        rate = float(found[tokens][0]) * (128 if tokens else 1)
        assert f"| {number(rate)} |" in texts["scaling.md"]
        assert f"({unit.lower()})" in figure
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
