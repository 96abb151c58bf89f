"""The scaling section of a proposal: what reviewers look for, in Markdown and in LaTeX that compiles."""

import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from analysis.checks.assessment import Assessment
from analysis.checks.nodes import CrowdedCores
from analysis.checks.slow_ranks import UnevenSamples
from analysis.data.load import load_study
from analysis.decide import efficiency_text, probability_text
from analysis.report.decision import main_loss
from analysis.report.proposal import Proposal, Request
from analysis.report.results import Results
from analysis.report.write import write_report
from analysis.stats.attempts import Success
from bench.matrix.cell import Cell
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import human_duration, percent
from tests.analysis.figures import no_figure
from tests.analysis.studies import Timing, environment, finished, merged, print_rates, strong, weak
from tests.commands.command_line import bench, refusal
from tests.common import change_json
from tests.freeze.compare import unpack

LATEX = shutil.which("pdflatex")
WRAPPER = r"""
\usepackage[T1]{fontenc}
\usepackage[margin=2.5cm]{geometry}
\usepackage{array,booktabs,graphicx,longtable,textcomp}
\renewcommand{\includegraphics}[2][]{\rule{\linewidth}{5cm}}
\begin{document}
\input{FILE}
\end{document}
"""


def section(path: Path) -> tuple[str, str]:
    """Return the section of a study as Markdown and as LaTeX; no figure is drawn."""
    with no_figure():
        report = write_report(path, proposal=Request()).page.parent
    return (report / "proposal.md").read_text(), (report / "proposal.tex").read_text()


def results(path: Path, *findings: Finding) -> Results:
    """Return the results of a study, with other findings of validity if some are given."""
    found = Results.of(load_study(path))
    if findings:
        vars(found)["assessment"] = Assessment(list(findings), [])
    return found


def proposal(path: Path, *findings: Finding, **asked: Any) -> dict[str, Any]:
    """Return the values of the section, with ``request`` as values and formulas by quantity."""
    context = Proposal.of(results(path, *findings), Request(**asked)).context()
    rows = context["request"].series[0][1] if context["request"] else ()
    return context | {"request": {what: (value, formula) for what, value, formula in rows}}


def advice(path: Path, *findings: Finding) -> str:
    return str(proposal(path, *findings)["sections"][0]["text"])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    cells = merged([*strong(64, sizes=(1, 2, 4, 8)), *weak(8, sizes=(1, 2, 4))])
    for cell in cells:
        own = {"steps_per_epoch": 50, "epochs": 3, "precision": "bf16", "data": "synthetic"}
        cell.workload = {**cell.workload, **own}
    path = finished(tmp_path_factory.mktemp("p") / "s", cells, timing=Timing(comm_s=4e-3), repeats=4)
    return path, *section(path)


def tables(markdown: str) -> list[list[list[str]]]:
    """Return the tables of a Markdown text as lists of rows of cells."""
    blocks = re.findall(r"(?:^\|.*\n)+", markdown, re.M)
    rows = [[re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()] for block in blocks]
    return [[[cell.strip().replace("\\", "") for cell in row] for row in table] for table in rows]


def test_each_scaling_mode_has_a_narrow_table_and_the_requested_size_its_own_loss(written):
    path, markdown, _ = written
    first, second, _ = tables(markdown)
    assert first[0] == second[0] == ["Nodes", "Ranks", "Samples/s", "Speedup", "Efficiency", "Runs"]
    assert [[row[0] for row in table[2:]] for table in (first, second)] == [[*"1248"], [*"124"]]
    found = results(path)
    own = {row.gpus: row for row in found.rows if row.mode == "strong"}
    assert first[-1][-2:] == [efficiency_text(own[8]), "4"]
    assert float(first[-1][3]) == pytest.approx(own[8].speedup, rel=0.005)
    strong_text, weak_text = (one["text"] for one in proposal(path)["sections"])
    assert "No size beyond the baseline is shown to have an efficiency of at least 0.8." in weak_text
    assert own[2].efficiency >= 0.8 > own[4].efficiency, "the study is made so"
    best, next_one = (f"efficiency of {own[size].efficiency:.2f} [" for size in (2, 4))
    assert f"The requested job size is 2 ranks on 2 nodes, with an {best}" in strong_text
    assert next_one in strong_text
    cause, share = main_loss(found.divisions[own[2].place])
    assert f": {cause}, {percent(share)} of" in strong_text


def test_a_reviewer_needs_no_file(written):
    _, markdown, latex = written
    for text in (markdown, latex):
        text = re.sub(r"<!--.*?-->|^%.*|!\[.*|.*includegraphics.*", "", text.replace("\\", ""), flags=re.M)
        assert not re.findall(r"\S+\.(?:csv|json|html|md)\b|\[\d+\]", text)
        for fact in ("ddp-scaling-bench 0.1.0", "PyTorch 2.13.0+cpu", "Python 3.11.2", "28 runs", "bf16"):
            assert fact in text


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Return a study of strong and weak scaling with a fast and a slow setting, and one that never scales."""
    folder = tmp_path_factory.mktemp("swept") / "results"

    def cells(precision: str) -> list[Cell]:
        options = {"swept": {"precision": precision}, "sizes": (1, 2, 4)}
        return merged([*strong(512, **options), *weak(256, **options)])

    class Builder(Timing):
        def parts(self, cell: Cell) -> dict[str, float]:
            precision = cell.swept["precision"]
            comm_s = 1.0 if precision == "fp16" else self.comm_s
            speed = 2 if precision == "bf16" else 1
            return Timing(sample_s=1e-3 / speed, comm_s=comm_s / speed).parts(cell)

    every = [cell for precision in ("fp32", "bf16", "fp16") for cell in cells(precision)]
    return finished(folder / "s", every, timing=Builder())


def test_without_a_choice_the_series_has_a_reason_in_the_text_and_on_the_terminal(swept, nothing_drawn):
    done = bench("report", "s", "--proposal", cwd=swept.parents[1])
    reason = "it has the highest throughput of those with a recommended size"
    assert f"series weak-256-gloo-srun-precision.bf16: {reason}; another with --series\n" in done.stderr
    text = (swept / "report/proposal.md").read_text().replace("\\", "")
    title = "Weak scaling, 256 per rank, precision bf16"
    assert (
        f"The request is based on this series ({title}): {reason}. The requested job size is 4 ranks" in text
    )
    assert text.index("## Weak scaling") < text.index("## Strong scaling")
    assert "The recommended job size is 4 ranks" in text.partition("## Strong scaling")[2]
    assert "Not described: 4 other series, with other settings" in text


def test_the_applicant_chooses_the_series(swept, nothing_drawn):
    done = bench("report", "s", "--proposal", "--series", "strong, precision fp32", cwd=swept.parents[1])
    assert "series strong-512-gloo-srun-precision.fp32: it was chosen by the applicant\n" in done.stderr
    text = (swept / "report/proposal.md").read_text().replace("\\", "")
    assert text.index("## Strong scaling") < text.index("## Weak scaling")
    assert "precision fp32): it was chosen by the applicant." in text


def test_an_unknown_series_is_an_error_with_the_known_ones(swept):
    for name, what in (("bf61", "is no series with several sizes"), ("strong", "is not unique")):
        said = refusal("report", "s", "--proposal", "--series", name, cwd=swept.parents[1]).splitlines()[-1]
        assert said.startswith(
            f"error: --series '{name}' {what}; give one of strong-512-gloo-srun-precision.fp32"
        )
    assert refusal("report", "s", "--series", name, cwd=swept.parents[1]).startswith(
        "--series requires --prop"
    )


def test_the_request_follows_from_the_stated_work(written):
    path, *_ = written
    request = proposal(path, samples=100_000_000, epochs=2, trainings=3)["request"]
    (best,) = (row for row in results(path).rows if row.mode == "strong" and row.gpus == 2)
    hours = 2e8 / best.throughput_samples_per_sec / 3600
    assert request["Job size"][0] == "2 ranks on 2 nodes"
    assert request["Samples"] == ("100,000,000 x 2 epochs = 200,000,000", "applicant")
    shortest, longest = (2e8 / rate / 3600 for rate in (best.throughput_high, best.throughput_low))
    numbers = re.findall(r"[0-9.]+", request["Node-hours"][0])
    assert [float(one) for one in numbers] == pytest.approx([2 * hours, 2 * shortest, 2 * longest], rel=0.005)
    assert request["Node-hours"][1] == "2 nodes x time"
    times = [human_duration(3600 * time) for time in (hours, shortest, longest)]
    assert request["Time"] == (f"{times[0]} ({times[1]} to {times[2]})", "samples / throughput")
    assert request["Trainings"] == ("3", "applicant")
    assert float(request["Total node-hours"][0].split()[0]) == pytest.approx(6 * hours, rel=0.005)
    assert proposal(path)["request"]["Samples"] == ("1,000,000", "an example")


@pytest.mark.parametrize("memory", [None, 80 * 2**30])
def test_failures_are_a_reserve_of_gpu_hours_and_memory_is_that_of_the_gpu(tmp_path, memory):
    cells = strong(64, sizes=(2, 4), per_node=2, backend="nccl")
    for cell in cells:
        cell.workload = {**cell.workload, "device": "cuda"}

    def env(cell: Cell) -> dict[str, Any]:
        return {**environment(cell), "device": "cuda", "device_memory_bytes": memory}

    failed = {(1, 4): ("failed", "", "out-of-memory")}
    options = {"env": env, "repeats": 4, "timing": Timing(comm_s=0.2)}
    path = finished(
        tmp_path / "s", cells, state=lambda cell, repeat: failed.get((cell.nodes, repeat)), **options
    )
    found = proposal(path)
    request, texts = found["request"], " ".join(text for _, text in found["limits"])
    assert found["sections"][0]["table"].headings[:2] == ["Nodes", "GPUs"]
    assert request["Job size"][0] == "2 GPUs on 1 node"
    node_hours, gpu_hours = (float(request[what][0].split()[0]) for what in ("Node-hours", "GPU-hours"))
    assert gpu_hours == pytest.approx(2 * node_hours, rel=0.005)
    assert request["GPU-hours"][1] == "2 GPUs x time"
    assert request["Reserve"] == ("33 %: 3 of 4 attempts completed", "1/(3/4) - 1")
    totals = [float(request[f"Total {what}-hours"][0].split()[0]) for what in ("node", "GPU")]
    assert totals == pytest.approx([node_hours * 4 / 3, gpu_hours * 4 / 3], rel=0.01)
    low = Success(3, 4).low
    assert f"success rate may be as low as {percent(low)} " in texts
    assert f"the reserve would then be {percent(1 / low - 1)}." in texts
    of = ", of the 80.0 GiB of its GPU" if memory else ""
    assert f"A rank of the requested size used up to 512.0 MiB of memory{of}." in texts


def test_a_size_that_is_not_valid_is_not_requested(tmp_path):
    path = finished(tmp_path / "s", strong(64, sizes=(1, 2, 4)), timing=Timing(comm_s=2e-3))
    crowded = {"ranks": 4, "threads": 4, "cores": 2, "crowds": {}}
    text = advice(path, CrowdedCores(subject=("n4x1-gloo-srun-b16",), **crowded))
    assert "The requested job size is 2 ranks on 2 nodes" in text
    assert (
        "Nothing is concluded about 4 ranks on 4 nodes: its values are not valid (Ranks share cores)." in text
    )
    found = proposal(path, CrowdedCores(subject=("n1x1-gloo-srun-b64",), **crowded))
    text, table = found["sections"][0]["text"], found["sections"][0]["table"]
    assert "No size is requested: the values of the baseline are not valid (Ranks share cores)." in text
    assert [row[-1] for row in table.series[0][1]] == ["3 (a)"] * 3, (
        "an efficiency is as valid as its baseline"
    )
    assert found["request"] == {}


def test_configurations_of_equal_size_and_batch_are_named_by_what_differs(tmp_path):
    unpack("failed", tmp_path)
    limits = [text for _, text in proposal(tmp_path / "failed")["limits"]]
    lacking = [text.split(" has no result")[0] for text in limits if " has no result" in text]
    assert lacking[:2] == [
        f"2 ranks on 1 node with batch 8 (FAULT {fault})" for fault in ("out-of-memory", "killed")
    ]
    assert len({*lacking}) == len(lacking) == 6


def test_each_cell_that_is_not_in_the_table_counts(tmp_path):
    path = finished(tmp_path / "s", strong(64, sizes=(1, 2, 4, 8)))
    measured = [cell.cell_id for cell in load_study(path).planned]
    split = {"rank": 1, "other_rank": 0, "ratio": 2.0}
    for own, cells in (
        (measured[:2], "2 ranks on 2 nodes and others not in the table)"),
        (measured, "and 4 more)"),
    ):
        uneven = UnevenSamples(subject=(*own, "elsewhere-a", "elsewhere-b", "elsewhere-c"), **split)
        assert cells in proposal(path, uneven)["limits"][0][1]


def test_a_command_is_stated_with_the_values_of_its_variables(tmp_path):
    cells = strong(64, sizes=(1, 2))
    for cell in cells:
        words = ["train", "{env.NCCL_ALGO}", "{env.WAYS}", "{env.TOKEN}", "{run_dir}/x", "{strategy}"]
        cell.argv, cell.planned_epochs = words, None
        cell.env = {"NCCL_ALGO": "Ring", "WAYS": str(cell.nodes), "TOKEN": "hunter2"}
        cell.swept = {"env.WAYS": str(cell.nodes)}
    text = proposal(finished(tmp_path / "s", cells))["method"]
    command = "train Ring ENV.WAYS ENV.TOKEN RUN_DIR/x ddp"
    assert f"command of these runs is {command}, where ENV.WAYS is 1 or 2" in text
    assert " and RUN_DIR is the folder of the run." in text
    assert "hunter2" not in text


def test_a_study_without_numbers_gives_a_section_that_says_so(tmp_path):
    path = finished(tmp_path / "s", strong(sizes=(1, 2)), state=lambda cell, repeat: ("failed", "why", None))
    markdown, latex = section(path)
    assert "No two sizes can be compared with each other, so there is no speedup" in markdown
    assert "None of them has a throughput" in markdown
    assert "The training is that of the tool itself" in markdown
    assert not tables(markdown)
    assert "## Request" not in markdown
    assert "1 rank on 1 node has no result: " in latex


HOSTILE = "<script>alert(1)</script> \\input{/etc/passwd} $x$ 50% a_b #1 & | `c` [d] ^~ {e} \" ' ± µ “q” 語"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    cells = strong(sizes=(1, 2, 4))
    for cell in cells:
        cell.env = {"NOTE": HOSTILE}
        cell.workload = {**cell.workload, "data": HOSTILE, "model": HOSTILE}

    def env(cell: Cell) -> dict[str, Any]:
        return {**environment(cell), "device_name": HOSTILE}

    failed = {4: ("failed", HOSTILE, None)}
    path = tmp_path_factory.mktemp("p") / "hostile"
    finished(path, cells, env=env, state=lambda cell, _: failed.get(cell.world_size))
    return path, *section(path)


def test_texts_from_results_stay_texts(hostile):
    _, markdown, latex = hostile
    assert "<script>" not in markdown
    assert "\\input{" not in latex.replace("\\textbackslash{}input", "")
    assert not re.search(r"(?<!\\)\$x", latex)


@pytest.mark.skipif(LATEX is None, reason="no pdflatex here")
def test_the_latex_compiles_with_hostile_texts_and_without_on_few_pages(written, hostile, tmp_path):
    sizes = [2**doubling for doubling in range(10)]
    cells = merged([*strong(4096, sizes=sizes), *weak(16, sizes=sizes)])
    ten = finished(tmp_path / "s", cells, repeats=1, epochs=1, ranks_files=False)
    section(ten)
    for path in (written[0], hostile[0], ten):
        folder = path / "report"
        text = compiled(folder, "proposal")
        assert path == hostile[0] or re.search(r"\([12] pages?,", text)
    for name in ("proposal", "scaling"):
        two_columns = compiled(ten / "report", name, r"\documentclass[10pt,twocolumn]{article}")
        assert "Overfull" not in two_columns, two_columns


def compiled(folder: Path, name: str, document_class: str = r"\documentclass[a4paper,11pt]{article}") -> str:
    """Compile a file of a report within a document, and return the output of pdflatex."""
    document = "\n".join([document_class, *WRAPPER.splitlines()[1:]]).replace("FILE", name)
    (folder / "wrapper.tex").write_text(document)
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "wrapper.tex"],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def test_of_a_command_only_what_is_known_is_said(tmp_path):
    cells = strong(64, sizes=(1, 2))
    words = ["python", "train.py", "--batch", "{per_gpu_batch}", "--seq", "{seq_len}"]
    for cell in cells:
        cell.workload = {**cell.workload, "seq_len": 64}
        cell.planned_epochs = None
        cell.argv, cell.metrics = words, {"output": {"throughput": "rate (.*)"}}
    path = print_rates(finished(tmp_path / "s", cells))
    assert "The code of this command was not recorded." in proposal(path)["method"]
    git = {"script_sha256": "0123456789abcdef", "git_commit": "fedcba9876543210", "git_dirty": True}
    for file in path.glob("runs/*/*/run.json"):
        change_json(file, command={"script": "train.py", **git})
    text = proposal(path)["method"]
    command = "python train.py --batch BATCH_PER_RANK --seq 64"
    assert f"The command of these runs is {command}, where BATCH_PER_RANK is 64 or 32." in text
    script = "SHA-256 begins with 0123456789ab, git commit fedcba987654 with uncommitted changes"
    assert f"train.py ({script})" in text
    assert "The command itself reported its throughput, 3 values per run, in its standard output" in text
    for word in ("built-in", "synthetic", "sgd", "mlp", "heckpoint"):
        assert word not in text


def test_a_stated_spread_is_said_beside_the_size_that_comes_closest(tmp_path):
    path = finished(tmp_path / "few", strong(64, (1, 2)), repeats=1)
    found = Results.of(load_study(path), spread=math.log1p(0.02))
    text = Proposal.of(found, Request()).context()["sections"][0]["text"]
    judged = next(one.judged for one in found.verdicts.values() if one.judged)
    assert f"with a stated spread of 2 % between runs, it is with {probability_text(judged.p)}." in text
