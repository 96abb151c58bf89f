"""The scaling section of a proposal: what reviewers look for, in Markdown and in LaTeX that compiles."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.checks.assessment import Assessment
from analysis.checks.scaling_table import scaling_table
from analysis.data.load import load_study
from analysis.report.proposal import Work, proposal_context
from analysis.report.results import Results
from analysis.report.write import render_proposal, write_report, write_table_report
from analysis.stats.attempts import Success
from bench.facts import Fact
from bench.matrix.cell import Cell
from bench.units import human_duration
from tests.analysis.figures import no_figure
from tests.analysis.studies import StudyBuilder, Timing, environment, finished, merged, strong, weak

LATEX = shutil.which("pdflatex")
#: Columns of metrics.csv that are no part of a step.
TIMES = ("epoch_time_sec", "checkpoint_time_sec")
WRAPPER = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage{booktabs,graphicx,textcomp}
\begin{document}
\input{proposal}
\end{document}
"""


def section(path: Path) -> tuple[str, str]:
    """Return the section of a study as Markdown and as LaTeX; figures are drawn only for pdflatex."""
    with nullcontext() if LATEX else no_figure():
        report = write_report(path, proposal=True).page.parent
    return (report / "proposal.md").read_text(), (report / "proposal.tex").read_text()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    cells = merged([*strong(64, sizes=(1, 2, 4, 8)), *weak(32, sizes=(1, 2, 4))])
    for cell in cells:
        cell.workload = {
            **cell.workload,
            "steps_per_epoch": 50,
            "epochs": 3,
            "precision": "bf16",
            "data": "synthetic",
        }
    path = finished(tmp_path_factory.mktemp("p") / "s", cells, timing=Timing(comm_s=5e-3), repeats=4)
    return path, *section(path)


def tables(markdown: str) -> list[list[list[str]]]:
    """Return the tables of a Markdown text as lists of rows of cells."""
    found: list[list[list[str]]] = []
    inside = False
    for line in markdown.splitlines():
        if line.startswith("|"):
            if not inside:
                found.append([])
            cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
            found[-1].append([cell.strip().replace("\\", "") for cell in cells])
        inside = line.startswith("|")
    return found


def test_the_table_holds_what_reviewers_ask_for(written):
    path, markdown, _ = written
    head, _, *rows = tables(markdown)[2]
    assert head == [
        *("Nodes", "Ranks per node", "Ranks", "Batch", "n", "Samples/s", "Step (ms)", "Speedup", "Efficiency"),
        *("Node-h", "Timed windows (s)", "Whole job (s)", "Node-h per 1M samples"),
    ]  # fmt: skip
    assert [row[2] for row in rows] == ["1", "2", "4", "8"]
    (last,) = (row for row in scaling_table(load_study(path)) if row.mode == "strong" and row.gpus == 8)
    shown = dict(zip(head, rows[-1], strict=True))
    assert shown["Efficiency"] == (
        f"{last.efficiency:.3f} [{last.efficiency_low:.3f}, {last.efficiency_high:.3f}]"
    )
    assert float(shown["Speedup"]) == pytest.approx(last.speedup, rel=0.005)
    assert (shown["n"], shown["Whole job (s)"], shown["Node-h"]) == ("4", "120", "0.267")
    per_million = 8 * 1e6 / last.throughput_samples_per_sec / 3600
    assert float(shown["Node-h per 1M samples"]) == pytest.approx(per_million, rel=0.005)
    step = last.step_time_sec * 150
    assert float(shown["Timed windows (s)"]) == pytest.approx(step, rel=0.02)


def test_the_recommended_size_is_the_largest_at_or_above_the_guide_and_why(written):
    path, markdown, _ = written
    own = {row.gpus: row.efficiency for row in scaling_table(load_study(path)) if row.mode == "strong"}
    assert own[2] >= 0.8 > own[4], "the study is made so"
    text = markdown.partition("## Resources asked for\n\n")[2].partition("\n\n|")[0].replace("\\", "")
    assert text.startswith(
        "2 nodes x 1 (2 ranks): the largest size with valid values whose efficiency (strong scaling) is at least 0.8 in its "
        "whole 95 % interval, with at least 3 runs of it and of the baseline without a recorded disturbance: "
        f"{own[2]:.3f} ["
    )
    assert "The next larger size, 4 nodes x 1 (4 ranks), has an efficiency of 0." in text
    assert re.search(
        r"One million samples cost 0\.\d+ \[0\.\d+, 0\.\d+\] node-hours, and 0\.\d+ \[[^]]+\] at the baseline\.",
        text,
    )
    assert "…" not in text, "no paragraph is cut"


def test_formula_and_baseline_are_named_and_both_figures_are_there(written):
    path, markdown, latex = written
    assert "Speedup S(N) = T(N0)/T(N), efficiency E(N) = S(N) N0/N" in markdown
    assert "Baseline N0: 1x1 (1 rank), T(N0) = " in markdown
    for name in ("speedup-strong", "efficiency-strong"):
        assert (path / "report/figures" / f"{name}.png").is_file()
        assert (path / "report/figures" / f"{name}.pdf").is_file()
        assert f"](figures/{name}.png)" in markdown
        assert f"{{figures/{name}.pdf}}" in latex


def lines(markdown: str, place: int) -> dict[str, tuple[str, str]]:
    """Return value and source of each line of a table with these columns."""
    return {row[0]: (row[1], row[2]) for row in tables(markdown)[place][2:]}


def test_what_was_run_is_stated_with_the_source_of_each_value(written):
    _, markdown, _ = written
    assert "exposed communication" in markdown.partition("## Causes of the loss")[2]
    run = lines(markdown, 0)
    assert all(source for _, source in run.values())
    assert run["Training"] == (
        "the built-in training of ddp-scaling-bench: model mlp, precision bf16, grad_accum 1, backend gloo",
        "the plan (plan.json)",
    )
    assert run["Input"][0].startswith(
        "synthetic batches, drawn anew for each step; reading from storage is not"
    )
    assert run["Measured"][0].startswith(
        "3 windows with 150 steps in total per run, after a warm-up, without"
    )
    assert run["Software"] == ("Python 3.11.2, PyTorch 2.13.0+cpu", "env.json of 24 runs")
    assert run["Machine"][0].startswith("Test CPU @ 2.0 GHz; 8 hosts: n1, n2, ")


def test_the_training_has_only_options_that_its_model_uses_and_each_host_is_counted_once(tmp_path):
    """The cores of n1 and n2 differ between the cells; no rank has a GPU."""
    cells = strong(64, sizes=(1, 2))
    options = {"model": "mlp", "parameters": 1000, "seq_len": 128, "image_size": 224, "optimizer": "sgd"}
    for cell in cells:
        cell.workload = {**cell.workload, **options, "device": "cpu"}
    path = finished(tmp_path / "s", cells, repeats=1, epochs=1)
    for file in path.glob("runs/n1x*/*/env.json"):
        text = file.read_text()
        assert text.count('"cores": 8') == 1
        file.write_text(text.replace('"cores": 8', '"cores": 1'))
    context = proposal_context(Results.of(load_study(path)), [])
    run = {line.what: line.value for line in context["run"]}
    assert run["Training"].endswith(": model mlp, parameters 1000, optimizer sgd, grad_accum 1, backend gloo")
    assert run["Machine"] == "Test CPU @ 2.0 GHz; 2 hosts: n1 and n2; cores for the ranks of a host: 1 and 8"
    assert run["Measured"].startswith("1 window with ")
    assert run["Launcher"] == "srun; a rank is one process"


def test_the_resources_asked_for_follow_from_the_stated_work(written):
    path, *_ = written
    results = with_findings(path)
    context = proposal_context(results, [], work=Work(100_000_000, 2))
    request = {line.what: line for line in context["request"]}
    (best,) = (row for row in results.rows if row.mode == "strong" and row.gpus == 2)
    hours = 2e8 / best.throughput_samples_per_sec / 3600
    assert request["Job size"].value == "2 nodes x 1 (2 ranks), strong scaling (recommended)"
    assert request["Work"].value == "100,000,000 samples x 2 epochs = 200,000,000 samples"
    assert request["Time to solution"].source.startswith("work / throughput = 200,000,000 / ")
    shortest, longest = (2e8 / rate / 3600 for rate in (best.throughput_high, best.throughput_low))
    value, *ends = request["Node-hours"].value.replace("[", "").replace("]", "").replace(",", "").split()
    assert float(value) == pytest.approx(2 * hours, rel=0.005)
    assert [float(end) for end in ends] == pytest.approx([2 * shortest, 2 * longest], rel=0.005)
    times = [human_duration(3600 * time) for time in (hours, shortest, longest)]
    assert request["Time to solution"].value == f"{times[0]} [{times[1]}, {times[2]}]"
    assert request["Node-hours"].source.startswith("nodes x time to solution = 2 x ")
    assert request["Memory per rank"].value == "512.0 MiB"
    assert request["Headroom"].value == "97 % of 16.0 GiB, its share of the host's memory"
    assert request["Validity"].value == "no error and no warning"


def test_a_proposal_on_gpus_has_gpu_hours_and_a_bound_without_a_failure(tmp_path):
    cells = strong(64, sizes=(2, 4), per_node=2, backend="nccl")
    for cell in cells:
        cell.workload = {**cell.workload, "device": "cuda"}
    path = finished(
        tmp_path / "s", cells, env=lambda cell: {**environment(cell), "device": "cuda"}, repeats=3
    )
    context = proposal_context(Results.of(load_study(path)), [])
    request = {line.what: line for line in context["request"]}
    node_hours, gpu_hours = (request[what].value.split()[0] for what in ("Node-hours", "GPU-hours"))
    assert float(gpu_hours) == pytest.approx(2 * float(node_hours), rel=0.005)
    assert request["GPU-hours"].source.endswith("; one GPU per rank")
    low = Success(3, 3).low
    assert request["Success rate"].value == (
        "3 of 3 attempts of this size completed: 100 %, at least 44 %; 6 of 6 of all sizes"
    )
    most = float(node_hours) * (1 / low - 1)
    shown = request["Reserve for failures"].value
    assert shown.startswith("0 node-hours (0 %), at most ")
    assert shown.endswith(" (128 %)")
    assert float(shown.split()[-3]) == pytest.approx(most, rel=0.01)


def test_warnings_stand_beside_the_numbers_that_they_affect(written):
    path, *_ = written
    finding = Fact("straggler", ("n2x1-gloo-srun-b32",))
    context = proposal_context(with_findings(path, finding), [])
    assert {line.what: line.value for line in context["request"]}["Validity"] == "Warning: Late ranks"
    (section, _) = context["sections"]
    place = section["headings"].index("Validity")
    assert [row[place] for row in section["rows"]].count("1") == 1
    of_all_cells = Fact("runs-differ")
    context = proposal_context(with_findings(path, of_all_cells), [])
    assert {row[place] for row in context["sections"][0]["rows"]} == {"1"}


def with_findings(path: Path, *findings: Fact) -> Results:
    """Return the results of a study with other findings of validity."""
    results = Results.of(load_study(path))
    vars(results)["assessment"] = Assessment(findings, [])
    return results


def values_of(path: Path, validity: list[Fact]) -> dict[str, Any]:
    """Return the values of a study's proposal, with its causes."""
    return proposal_context(with_findings(path, *validity), [])


def test_the_causes_are_those_of_the_largest_valid_size_too(tmp_path):
    path = finished(tmp_path / "s", strong(64, sizes=(1, 2, 4)), timing=Timing(comm_s=0.1))
    error = Fact("shared-cores", ("n4x1-gloo-srun-b16",), severity="error")
    context = values_of(path, [error])
    largest, valid = context["losses"]
    assert [row[0] for row in largest["rows"]] == ["not valid"]
    assert valid["size"].startswith("Strong scaling, 2 nodes x 1 (2 ranks), efficiency 0.")
    assert [row[0] for row in valid["rows"]][:2] == ["whole loss", "not explained"]
    assert {line.what: line.value for line in context["request"]}[
        "Validity"
    ] == "no error and no warning for this size"
    assert len(values_of(path, [])["losses"]) == 1


def test_measured_cells_without_an_efficiency_are_listed_with_the_reason(tmp_path):
    """The script always processes 32 samples per rank, so that the strong series has another batch."""
    path = finished(tmp_path / "s", merged([*strong(32, sizes=(1, 2)), *weak(32, sizes=(1, 2))]))
    for file in path.glob("runs/n2x1-gloo-srun-b16-r*/*/metrics.csv"):
        frame = pd.read_csv(file)
        frame[["samples", "throughput_samples_per_sec"]] *= 2
        frame.to_csv(file, index=False)
        file.with_name("ranks.csv").unlink()
    context = values_of(path, [])
    assert [one["title"] for one in context["sections"]] == ["Weak scaling"]
    assert context["missing"] == [
        "n2x1-gloo-srun-b16 (2 nodes x 1 (2 ranks)): measured in 3 runs; no efficiency: the runs of this cell or "
        "of its baseline process another batch than planned."
    ]


def test_runs_that_differ_stand_beside_the_numbers_of_the_baseline_and_of_the_size(tmp_path):
    path = finished(tmp_path / "s", strong(64, sizes=(1, 2)), noise=0.2, repeats=6)
    value = {line.what: line.value for line in values_of(path, [])["request"]}["Validity"]
    assert re.fullmatch(
        r"no error and no warning; runs of this size differ by \d+ % \(standard deviation\); "
        r"runs of the baseline differ by \d+ % \(standard deviation\)",
        value,
    )


def test_every_table_of_the_markdown_has_rows_of_one_width(written):
    _, markdown, _ = written
    assert len(tables(markdown)) == 6
    for table in tables(markdown):
        assert len({len(row) for row in table}) == 1


def test_if_no_size_reaches_the_guide_none_is_recommended(tmp_path):
    markdown, _ = section(finished(tmp_path / "s", strong(sizes=(1, 4)), timing=Timing(comm_s=0.1)))
    assert (
        "No measured size beyond the baseline, 1x1 (1 rank), reaches an efficiency of 0.8 in strong scaling: no larger size can be recommended. 4 nodes x 1 (4 ranks) comes closest, with 0."
    ) in markdown


@pytest.mark.parametrize("state", ["planned", "failed"])
def test_a_study_without_numbers_gives_a_section_that_says_so(tmp_path, state):
    path = finished(tmp_path / "s", strong(sizes=(1, 2)), state=lambda cell, repeat: (state, "why", None))
    markdown, latex = section(path)
    assert "No series has two measured sizes, so there is no speedup and no efficiency." in markdown
    assert "## Measurements" not in markdown
    assert "Planned sizes without a result" in latex


def test_a_single_size_is_shown_without_speedup_but_with_its_losses(tmp_path):
    markdown, latex = section(finished(tmp_path / "s", strong(sizes=(2,))))
    table = markdown.partition("## Measurements\n")[2]
    assert table.splitlines()[1].startswith(
        "| Nodes | Ranks per node | Ranks | Batch | n | Samples/s | Step (ms) |"
    )
    assert "2 nodes x 1 (2 ranks):" in table.partition("## Causes of the loss")[2]
    assert "Measurements" in latex


def test_a_planned_size_without_a_run_is_listed_with_its_reason(tmp_path):
    path = finished(
        tmp_path / "s",
        strong(sizes=(1, 2, 4)),
        state=lambda cell, repeat: (
            ("failed", "killed", "oom") if cell.world_size == 4 else ("completed", "", None)
        ),
    )
    markdown, _ = section(path)
    assert (
        "n4x1-gloo-srun-b16 (4 nodes x 1 (4 ranks)): no run completed: 3 failed by oom (killed)." in markdown
    )


def test_runs_that_failed_have_no_part_in_the_facts_and_no_traceback_is_referred_to(tmp_path, nothing_drawn):
    def state(cell: Cell, repeat: int) -> tuple[str, str, str | None]:
        reason = "rank 1 on n2: ValueError: truncated; see the traceback above"
        return ("failed", reason, "error") if cell.nodes == 4 else ("completed", "", None)

    path = finished(tmp_path / "s", strong(sizes=(1, 2, 4)), state=state)
    for folder in path.glob("runs/n4x1*/attempt-1"):
        (folder / "env.json").write_text(json.dumps({"schema": 1, "transport": {"network": "RoCE"}}))
    markdown, _ = section(path)
    assert "RoCE" not in markdown
    assert lines(markdown, 0)["Network"] == ("Backend gloo, Interface eth0", "env.json of 6 runs")
    assert "3 failed by error (rank 1 on n2: ValueError: truncated)." in markdown
    page = (path / "report" / "index.html").read_text()
    assert "RoCE" in page
    assert "traceback above" not in page


def test_the_backend_of_a_command_is_called_that_of_the_plan_and_missing_code_not_recorded(tmp_path):
    cells = strong(64, sizes=(1, 2))
    for cell in cells:
        cell.workload = {
            **cell.workload,
            "command": ["python", "-m", "train"],
            "metrics": {"source": "recorder"},
        }
    path = finished(tmp_path / "s", cells)
    markdown, _ = section(path)
    assert "*Efficiency, strong scaling (batch 64, gloo in the plan, srun)" in markdown
    assert "Whole job and node-hours cover the whole command, with the number of steps that" in markdown
    assert lines(markdown, 0)["Code of the command"] == ("not recorded", "none")


def test_without_parts_of_the_step_none_is_said_to_be_measured(tmp_path, nothing_drawn):
    path = finished(tmp_path / "s", strong(sizes=(1, 2)), timing=Timing(comm_s=0.02))
    assert "windows; their shares are means over the ranks." in section(path)[0]
    for file in path.glob("runs/*/*/metrics.csv"):
        frame = pd.read_csv(file)
        parts = [name for name in frame if name.endswith("_time_sec") and name not in TIMES]
        frame.assign(**dict.fromkeys(parts)).to_csv(file, index=False)
    markdown, _ = section(path)
    assert "instrumented" not in markdown.partition("## Causes of the loss")[2]
    assert "the parts of the step were not measured" in markdown


def test_a_table_measured_elsewhere_gives_a_section_of_its_columns(tmp_path, nothing_drawn):
    (tmp_path / "bert.csv").write_text("gpus,throughput\n8,4553\n16,9191\n32,18119\n64,35774\n")
    page = write_table_report(tmp_path / "bert.csv", output=tmp_path, mode="strong", proposal=True).page
    markdown = (page.parent / "proposal.md").read_text()
    head, _, *rows = tables(markdown)[2]
    assert head == ["Ranks", "n", "Samples/s", "Speedup", "Efficiency"]
    assert rows[-1] == ["64", "1", "35,770", "7.86", "0.982"]
    assert "ode-hours" not in markdown
    assert lines(markdown, 0)["Values"] == ("measured elsewhere and taken from a table", "bert.csv")


def test_without_batches_in_a_table_the_section_has_no_time_to_solution(tmp_path, nothing_drawn):
    table = tmp_path / "t.csv"
    table.write_text(
        "nodes,gpus_per_node,time,mode\n" + "".join(f"{n},4,{1 + n / 9},weak\n" for n in (1, 2, 4))
    )
    write_table_report(table, output=tmp_path, proposal=True)
    requested = lines((tmp_path / "t-report" / "proposal.md").read_text(), 1)
    assert requested["Throughput, time to solution, node-hours"][0].startswith(
        "not known: the table does not"
    )
    assert requested["Validity"][0] == "no error and no warning"


def test_the_section_is_optional(tmp_path, nothing_drawn):
    page = write_report(finished(tmp_path / "s", strong(sizes=(1,)), repeats=1)).page
    assert page.exists()
    assert not list(page.parent.glob("proposal*"))


HOSTILE = "<script>alert(1)</script> \\input{/etc/passwd} $x$ 50% a_b #1 & | `c` [d] ^~ {e} \" ' ± µ “q” 語"


def hostile_study(path: Path) -> Path:
    cells = [*strong(sizes=(1, 2, 4))]
    for cell in cells:
        cell.env = {"NOTE": HOSTILE}
        cell.workload = {**cell.workload, "data": HOSTILE, "model": HOSTILE}

    def env(cell: Cell) -> dict[str, Any]:
        return {**environment(cell), "device_name": HOSTILE}

    def state(cell: Cell, repeat: int) -> tuple[str, str, str | None]:
        return ("failed", HOSTILE, HOSTILE) if cell.world_size == 4 else ("completed", "", None)

    return StudyBuilder(path, cells, env=env, state=state).write()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    path = hostile_study(tmp_path_factory.mktemp("p") / "hostile")
    return path, *section(path)


def test_texts_from_results_stay_texts(hostile):
    _, markdown, latex = hostile
    assert "<script>" not in markdown
    assert "\\input{" not in latex.replace("\\textbackslash{}input", "")
    assert not re.search(r"(?<!\\)\$x", latex)


@pytest.mark.skipif(LATEX is None, reason="no pdflatex here")
def test_the_latex_compiles_with_hostile_texts_and_without(written, hostile):
    for path, *_ in (written, hostile):
        folder = path / "report"
        (folder / "wrapper.tex").write_text(WRAPPER)
        done = subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "wrapper.tex"],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
        )
        assert done.returncode == 0, done.stdout[-2000:]
        assert (folder / "wrapper.pdf").is_file()


def test_the_section_has_the_same_content_in_both_forms():
    context = {
        "title": "A & B",
        "introduction": "one_two",
        "run": [("Command", "a|b", "matrix.yaml")],
        "request": [],
        "validity": [("Shared cores", "2_cores")],
        "recommendation": "",
        "sections": [
            {
                "title": "S",
                "text": "t",
                "caption": "T",
                "headings": ["a", "b"],
                "rows": [["x|y", "1"]],
                "figures": [{"name": "f", "description": "what it shows", "caption": "C"}],
            }
        ],
        "losses": [{"size": "two_2", "rows": [("c", "e", "1 %")]}],
        "losses_note": "",
        "missing": [],
    }
    files = render_proposal(context)
    assert files["proposal.md"] == (
        "# A \\& B\n\none\\_two\n\n"
        "## What was run\n\n|  | Value | Source |\n|---|---|---|\n| Command | a\\|b | matrix.yaml |\n\n"
        "## Validity\n\n1. **Shared cores.** 2\\_cores\n\n## S\n\nt\n\n| a | b |\n|---:|---:|\n| x\\|y | 1 |\n\n*T*\n\n"
        "![what it shows](figures/f.png)\n\n*C*\n\n## Causes of the loss\n\ntwo\\_2:\n\n"
        "| Cause | Evidence | Share of the step |\n|---|---|---|\n| c | e | 1 % |\n"
    )
    assert files["proposal.tex"].partition("\n\n")[2] == (
        "\\section{A \\& B}\n\none\\_two\n\n"
        "\\subsection{What was run}\n\n{\\footnotesize\\noindent\n"
        "\\begin{tabular}{@{}p{0.15\\linewidth}p{0.47\\linewidth}p{0.28\\linewidth}@{}}\n\\toprule\n"
        "\\raggedright  & \\raggedright Value & \\raggedright Source \\tabularnewline\n\\midrule\n"
        "\\raggedright Command & \\raggedright a\\textbar{}b & \\raggedright matrix.yaml \\tabularnewline\n"
        "\\bottomrule\n\\end{tabular}\\par}\n\n"
        "\\subsection{Validity}\n\n\\begin{enumerate}\\raggedright\n"
        "\\item \\textbf{Shared cores.} 2\\_cores\n\\end{enumerate}\n\n"
        "\\subsection{S}\n\nt\n\n"
        "\\begin{table}[htbp]\n\\centering\\footnotesize\n\\caption{T}\n"
        "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%\n"
        "\\begin{tabular}{rr}\n\\toprule\n"
        "\\shortstack[r]{a} & \\shortstack[r]{b} \\\\\n\\midrule\nx\\textbar{}y & 1 \\\\\n"
        "\\bottomrule\n\\end{tabular}\n}\n\\end{table}\n\n"
        "\\begin{figure}[htbp]\n\\centering\n\\begin{minipage}[t]{0.48\\linewidth}\n"
        "\\includegraphics[width=\\linewidth]{figures/f.pdf}\n\\caption{C}\n\\end{minipage}\n\\end{figure}\n\n"
        "\\subsection{Causes of the loss}\n\ntwo\\_2:\n\n{\\footnotesize\\noindent\n"
        "\\begin{tabular}{@{}p{0.15\\linewidth}p{0.47\\linewidth}p{0.28\\linewidth}@{}}\n\\toprule\n"
        "\\raggedright Cause & \\raggedright Evidence & \\raggedright Share of the step \\tabularnewline\n\\midrule\n"
        "\\raggedright c & \\raggedright e & \\raggedright 1 \\% \\tabularnewline\n"
        "\\bottomrule\n\\end{tabular}\\par}\n"
    )


@pytest.mark.parametrize(
    ("metrics", "said", "main_loop"),
    [
        (
            {"source": "recorder"},
            "3 windows with 150 steps in total per run, by the recorder in the command",
            True,
        ),
        (
            {"output": {"throughput": "rate (.*)"}},
            "throughput, as the command reported it in its standard output: 3 per run",
            False,
        ),
        (
            {"csv": "log.csv", "columns": {"step_time": "dt"}, "skip": 2},
            "step time, as the command reported it in its file log.csv: 3 per run, after 2 values that were skipped",
            False,
        ),
    ],
)
def test_of_a_command_only_what_is_known_is_said(tmp_path, metrics, said, main_loop):
    cells = strong(64, sizes=(1, 2))
    options = {"seq_len": 64, "image_size": 224, "optimizer": "sgd", "data": "synthetic", "checkpoint": False}
    words = ["python", "train.py", "--batch", "{per_gpu_batch}", "--seq", "{seq_len}", "--api-key", "abc"]
    for cell in cells:
        own = {"steps_per_epoch": 50, "epochs": 3, "command": words, "metrics": metrics}
        cell.workload = {**cell.workload, **options, **own}
    path = finished(tmp_path / "s", cells)
    git = {"script_sha256": "0123456789abcdef", "git_commit": "fedcba9876543210", "git_dirty": True}
    for file in path.glob("runs/*/*/run.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"command": {"script": "train.py", **git}}))
    context = values_of(path, [])
    run = {line.what: line.value for line in context["run"]}
    assert run["Command"] == "python train.py --batch {per_gpu_batch} --seq {seq_len} --api-key ***"
    assert run["First file of the command, when submitted"] == (
        "train.py, SHA-256 0123456789ab, git commit fedcba987654 with uncommitted changes"
    )
    assert run["Values of the matrix in it"] == "per_gpu_batch 64 or 32, seq_len 64"
    assert ("Conditions" in run) is not main_loop
    assert "input, output" in run["Not examined"]
    assert run["Measured"] == said
    assert run.get("Samples/s") == ("computed with the batch of the matrix" if "csv" in metrics else None)
    assert ("Time per step" in run) is ("output" in metrics)
    assert not run.keys() & {"Training", "Input", "Output"}
    assert ("Batch in the matrix" in context["sections"][0]["headings"]) is not main_loop
    left_out = {line.what: line.value for line in context["request"]}["Not included"]
    assert "start-up" in left_out
    assert "validation" not in left_out
    for word in ("synthetic", "sgd", "224", "mlp", "no checkpoints"):
        assert word not in str(context["run"])
    assert ("Timed windows (s)" in context["sections"][0]["headings"]) is main_loop
