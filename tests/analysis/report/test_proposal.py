"""The scaling section of a proposal: what reviewers look for, in Markdown and in LaTeX that compiles."""

import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from analysis.checks.assessment import Assessment
from analysis.checks.nodes import CrowdedCores
from analysis.checks.scaling_table import scaling_table
from analysis.data.load import load_study
from analysis.report.proposal import Work, proposal_context
from analysis.report.results import Results
from analysis.report.write import write_report, write_table_report
from analysis.stats.attempts import Success
from bench.matrix.cell import Cell
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import human_duration, percent
from tests.analysis.figures import no_figure
from tests.analysis.studies import Timing, environment, finished, merged, print_rates, strong, weak
from tests.common import change_json

LATEX = shutil.which("pdflatex")
WRAPPER = r"""\documentclass[a4paper,11pt]{article}
\usepackage[T1]{fontenc}
\usepackage[margin=2.5cm]{geometry}
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
    head, _, *rows = tables(markdown)[0]
    assert head == [
        *("Scaling", "Nodes", "Ranks per node", "Ranks", "Batch", "n", "Samples/s", "Step (ms)", "Speedup"),
        *("Efficiency", "Node-h per million"),
    ]  # fmt: skip
    assert [row[:2] for row in rows] == [["strong", n] for n in "1248"] + [["weak", n] for n in "124"]
    (last,) = (row for row in scaling_table(load_study(path)) if row.mode == "strong" and row.gpus == 8)
    shown = dict(zip(head, rows[3], strict=True))
    assert shown["Efficiency"] == (
        f"{last.efficiency:.3f} [{last.efficiency_low:.3f}, {last.efficiency_high:.3f}]"
    )
    assert float(shown["Speedup"]) == pytest.approx(last.speedup, rel=0.005)
    assert shown["n"] == "4"
    per_million = 8 * 1e6 / last.throughput_samples_per_sec / 3600
    assert float(shown["Node-h per million"]) == pytest.approx(per_million, rel=0.005)


def test_the_requested_size_is_the_recommended_one_and_why(written):
    path, markdown, _ = written
    own = {row.gpus: row.efficiency for row in scaling_table(load_study(path)) if row.mode == "strong"}
    assert own[2] >= 0.8 > own[4], "the study is made so"
    text = markdown.partition("## Request\n\n")[2].partition("\n\n|")[0].replace("\\", "")
    assert text.startswith(
        f"The requested job size is 2 ranks on 2 nodes, with an efficiency of {own[2]:.3f} ("
    )
    assert (
        "In strong scaling, it is the largest measured size whose whole interval is at least 0.8 and that is faster than each smaller size, with"
        in text
    )
    assert "The next larger size, 4 ranks on 4 nodes, has an efficiency of 0." in text
    assert re.search(
        r"Of a step of 8 ranks on 8 nodes, \d+ % is lost compared with the rate of the baseline\. The largest",
        text,
    )
    assert ", as shares of the step: exposed commun" in text
    assert "…" not in text, "no paragraph is cut"


def test_every_number_of_a_source_is_in_the_list(written):
    _, markdown, _ = written
    text, _, listed = markdown.replace("\\", "").partition("## Sources\n\n")
    numbers = [line.partition(". ")[0] for line in listed.splitlines() if line]
    cited = {one for group in re.findall(r"\[([0-9, ]+)\]", text) for one in group.split(", ")}
    assert numbers == [str(n) for n in range(1, len(numbers) + 1)]
    assert cited == set(numbers)
    assert listed.startswith("1. plan.json: the plan\n2. report/runs.csv: ")


def method(path: Path, **options: Any) -> str:
    return str(proposal_context(Results.of(load_study(path)), **options)["method"])


def requested(path: Path, work: Work | None = None, *findings: Finding) -> dict[str, tuple[str, str]]:
    context = proposal_context(with_findings(path, *findings), work=work)
    return {what: (value, source) for what, value, source in context["request"]}


def test_the_request_follows_from_the_stated_work(written):
    path, *_ = written
    request = requested(path, Work(100_000_000, 2, 3))
    rows = Results.of(load_study(path)).rows
    (best,) = (row for row in rows if row.mode == "strong" and row.gpus == 2)
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
    assert float(request["Total"][0].split()[0]) == pytest.approx(6 * hours, rel=0.005)
    assert requested(path)["Samples"] == ("1,000,000", "an example")


def limits(path: Path, *findings: Finding) -> dict[str, str]:
    return dict(proposal_context(with_findings(path, *findings))["limits"])


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
    request = requested(path)
    node_hours, gpu_hours = (request[what][0].split()[0] for what in ("Node-hours", "GPU-hours"))
    assert float(gpu_hours) == pytest.approx(2 * float(node_hours), rel=0.005)
    assert request["GPU-hours"][1] == "2 GPUs x time"
    assert request["Reserve"] == ("33 %: 3 of 4 attempts completed", "1/(3/4) - 1 [2]")
    totals = [float(text.split()[0]) for text in request["Total"][0].split(", ")]
    assert totals == pytest.approx([float(node_hours) * 4 / 3, float(gpu_hours) * 4 / 3], rel=0.01)
    texts = " ".join(limits(path).values())
    low = Success(3, 4).low
    assert f"success rate may be as low as {percent(low)} " in texts
    assert f"the reserve would then be {percent(1 / low - 1)}." in texts
    of = ", of the 80.0 GiB of its GPU" if memory else ""
    assert f"A rank of the requested size used up to 512.0 MiB of memory{of} [" in texts


def with_findings(path: Path, *findings: Finding) -> Results:
    """Return the results of a study with other findings of validity."""
    results = Results.of(load_study(path))
    vars(results)["assessment"] = Assessment(list(findings), [])
    return results


def crowded(cell):
    return CrowdedCores(subject=(cell,), ranks=4, threads=4, cores=2, crowds={})


def test_a_size_that_is_not_valid_is_not_requested_and_has_no_losses(tmp_path):
    path = finished(tmp_path / "s", strong(64, sizes=(1, 2, 4)), timing=Timing(comm_s=0.1))
    error = crowded("n4x1-gloo-srun-b16")
    advice = proposal_context(with_findings(path, error))["advice"]
    assert (
        "Nothing is concluded about 4 ranks on 4 nodes: its values are not valid (Ranks share cores)."
        in advice
    )
    assert (
        "Of a step of 2 ranks on 2 nodes, 79 % is lost compared with the rate of the baseline. The largest losses"
        in advice
    )
    base = crowded("n1x1-gloo-srun-b64")
    advice = proposal_context(with_findings(path, base))["advice"]
    assert (
        "No size is requested: the values of the baseline, 1 rank on 1 node, are not valid (Ranks share"
        in advice
    )


def test_a_command_is_stated_with_the_values_of_its_variables(tmp_path):
    cells = strong(64, sizes=(1, 2))
    for cell in cells:
        words = ["train", "{env.NCCL_ALGO}", "{env.WAYS}", "{env.TOKEN}", "{run_dir}/x", "{strategy}"]
        cell.argv, cell.planned_epochs = words, None
        cell.env = {"NCCL_ALGO": "Ring", "WAYS": str(cell.nodes), "TOKEN": "hunter2"}
        cell.swept = {"env.WAYS": str(cell.nodes)}
    text = method(finished(tmp_path / "s", cells))
    assert (
        "command of these runs is train Ring ENV.WAYS ENV.TOKEN RUN_DIR/x ddp, where ENV.WAYS is 1 or 2"
        in text
    )
    assert " and RUN_DIR is the folder of the run [1]." in text
    assert "hunter2" not in text


def test_if_no_size_reaches_the_guide_none_is_recommended(tmp_path):
    path = finished(tmp_path / "s", strong(sizes=(1, 4)), timing=Timing(comm_s=0.1))
    advice = proposal_context(Results.of(load_study(path)))["advice"]
    assert advice.startswith(
        "No measured size beyond the baseline reaches an efficiency of 0.8 (strong scaling); "
        "4 ranks on 4 nodes is closest, with 0."
    )
    assert "The request is therefore for the baseline, 1 rank on 1 node." in advice


@pytest.mark.parametrize("state", ["planned", "failed"])
def test_a_study_without_numbers_gives_a_section_that_says_so(tmp_path, state):
    path = finished(tmp_path / "s", strong(sizes=(1, 2)), state=lambda cell, repeat: (state, "why", None))
    markdown, latex = section(path)
    assert "No two sizes can be compared with each other, so there is no speedup" in markdown
    assert "None of them has a throughput" in markdown
    assert "The training is that of the tool itself" in markdown
    assert "They executed" not in markdown
    assert not tables(markdown)
    assert "## Request" not in markdown
    assert "1 rank on 1 node has no result: " in latex


def test_a_table_measured_elsewhere_gives_a_section_of_its_columns(tmp_path, nothing_drawn):
    (tmp_path / "bert.csv").write_text("gpus,throughput\n8,4553\n16,9191\n32,18119\n64,35774\n")
    page = write_table_report(tmp_path / "bert.csv", output=tmp_path, mode="strong", proposal=True).page
    markdown = (page.parent / "proposal.md").read_text().replace("\\", "")
    head, _, *rows = tables(markdown)[0]
    assert head == ["Ranks", "n", "Samples/s", "Speedup", "Efficiency", "Limits"]
    assert rows[-1] == ["64", "1", "35,770", "7.86", "0.982", "a"]
    assert "ode-hours" not in markdown
    assert "The values were measured elsewhere and are taken from a table [1]." in markdown
    assert markdown.endswith(
        "1. bert.csv\n2. POP (Performance Optimisation and Productivity), co-design.pop-coe.eu/metrics\n"
    )


HOSTILE = "<script>alert(1)</script> \\input{/etc/passwd} $x$ 50% a_b #1 & | `c` [d] ^~ {e} \" ' ± µ “q” 語"


def hostile_study(path: Path) -> Path:
    cells = [*strong(sizes=(1, 2, 4))]
    for cell in cells:
        cell.env = {"NOTE": HOSTILE}
        cell.workload = {**cell.workload, "data": HOSTILE, "model": HOSTILE}

    def env(cell: Cell) -> dict[str, Any]:
        return {**environment(cell), "device_name": HOSTILE}

    failed = {4: ("failed", HOSTILE, None)}
    return finished(path, cells, env=env, state=lambda cell, _: failed.get(cell.world_size))


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
def test_the_latex_compiles_with_hostile_texts_and_without_on_one_page(written, hostile, tmp_path):
    sizes = [2**doubling for doubling in range(10)]
    cells = merged([*strong(4096, sizes=sizes), *weak(16, sizes=sizes)])
    ten = finished(tmp_path / "s", cells, repeats=1, epochs=1, ranks_files=False)
    section(ten)
    for path in (written[0], hostile[0], ten):
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
        assert path == hostile[0] or "(1 page," in done.stdout


def test_of_a_command_only_what_is_known_is_said(tmp_path):
    cells = strong(64, sizes=(1, 2))
    words = ["python", "train.py", "--batch", "{per_gpu_batch}", "--seq", "{seq_len}"]
    for cell in cells:
        cell.workload = {**cell.workload, "seq_len": 64}
        cell.planned_epochs = None
        cell.argv, cell.metrics = words, {"output": {"throughput": "rate (.*)"}}
    path = print_rates(finished(tmp_path / "s", cells))
    assert "The code of this command was not recorded." in method(path)
    git = {"script_sha256": "0123456789abcdef", "git_commit": "fedcba9876543210", "git_dirty": True}
    for file in path.glob("runs/*/*/run.json"):
        change_json(file, command={"script": "train.py", **git})
    context = proposal_context(with_findings(path))
    text = context["method"]
    command = "python train.py --batch BATCH_PER_RANK --seq 64"
    assert f"The command of these runs is {command}, where BATCH_PER_RANK is 64 or 32 [1]." in text
    assert (
        "train.py (SHA-256 begins with 0123456789ab, git commit fedcba987654 with uncommitted changes)"
        in text
    )
    assert "The command itself reported its throughput, 3 values per run, in its standard output" in text
    for word in ("built-in", "synthetic", "sgd", "mlp", "heckpoint"):
        assert word not in text
    assert "Batch (planned)" in context["measured"]["headings"]
