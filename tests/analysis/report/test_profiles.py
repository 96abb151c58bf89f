"""Profiles: what a centre asks for is in the proposal, or the terminal lists it as missing."""

import json
import math
import re
import shutil
import statistics
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from scipy import stats

from analysis.data.load import load_study
from analysis.report.profile import read_profile
from analysis.report.proposal import Proposal, Request
from analysis.report.requirements import check_profile
from analysis.report.results import Results
from analysis.report.write import write_report
from ddp_scaling_bench.errors import BenchError, InputError
from tests.analysis.figures import no_figure
from tests.analysis.report.test_proposal import LATEX, compiled
from tests.analysis.studies import Timing, change_run, environment, finished, merged, strong, weak
from tests.common import change_json, edited_csv, raised
from tests.freeze.compare import unpack

FAST = Timing(comm_s=1e-4, fixed_s=0.0)


def checked(path: Path, profile: str = "csc", **asked):
    """Return the parts by title, and what is missing."""
    rules = read_profile(profile)
    proposal = Proposal.of(Results.of(load_study(path)), Request(profile=rules, **asked))
    parts, missing = check_profile(proposal, rules)
    return {part.title.partition(" of ")[0]: part for part in parts}, list(map(str, missing))


def cells(modes=strong, **options):
    """Return cells of a study on GPUs with their own program."""
    found = modes(sizes=(1, 2, 4), **options)
    for cell in found:
        cell.argv, cell.planned_epochs = ["python", "train.py"], None
        cell.workload = {**cell.workload, "device": "cuda"}
    return found


def on_roihu(cell):
    return environment(cell) | {"slurm": {"SLURM_CLUSTER_NAME": "roihu"}}


def walls(ranks: int, repeat: int) -> float:
    """Return the seconds of a run: start-up of 40 s, and the timed steps."""
    return 40 + 840 / ranks + 7 * repeat


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    """Return a study with everything that CSC asks for, as far as a tool can know it."""
    path = tmp_path_factory.mktemp("csc") / "s"
    finished(path, cells(), timing=FAST, env=on_roihu, steps=4000)
    for run in json.loads((path / "plan.json").read_text())["runs"]:
        end = datetime(2026, 1, 2, 3) + timedelta(seconds=walls(int(run["cell_id"][1]), run["repeat"]))
        times = {"started_at": "2026-01-02T03:00:00.000Z", "ended_at": f"{end.isoformat()}.000Z"}
        change_run(path, run["run_id"], hosts="n1", **times)
        with edited_csv(path / "runs" / run["run_id"] / "attempt-1/metrics.csv") as frame:
            frame["gpu_util_avg"] = 91.0
    (path / "scripts").mkdir()
    for cell in cells():
        (path / "scripts" / f"{cell.cell_id}.sbatch").write_text(
            "#!/bin/bash\n\tsrun 50%_\\end{x} ~ é ≠ $x\n"
        )
    return path


BY_HAND = [
    "by hand: check that the size fits the partition (large has 6 to 60 nodes, gpularge 1 to 10); results are "
    "expected within 30 days of the trial access",
    "by hand: with MPI and OpenMP, attach stderr of a run with OMP_DISPLAY_AFFINITY=true and the format of the rules",
    "by hand: check that the runs have the parameters of production, and that the smallest size is the least that "
    "fits",
]
OWN_PROGRAM = [
    "missing: what the program, its test case and its parallelisation are; add it by hand",
    "missing: whether the program reads the same input at all sizes; add it by hand",
    "missing: how the program reads and writes, and how much; add it by hand",
]


def test_a_complete_study_lacks_only_what_no_tool_can_know(complete):
    parts, missing = checked(complete, target_size="4x1")
    assert missing == [*OWN_PROGRAM, *BY_HAND]
    assert parts["Runs"].text.startswith(
        "Means over the runs of a size that count. Wall times are those of whole jobs"
    )
    assert parts["Target"].text.startswith(
        "The largest job in production is 4 GPUs on 4 nodes, with an effic"
    )
    assert parts["Job script"].lines == [(0, "#!/bin/bash"), (8, "srun 50%_\\end{x} ~ é ≠ $x")]


def test_wall_times_and_their_efficiency_are_those_of_runs_csv(complete):
    parts, _ = checked(complete)
    table = parts["Runs"].table
    assert table.headings == ["Job", "Wall time (s)", "E (wall time)", "Outside steps", "GPU utilisation"]
    by_size = {n: [walls(n, repeat) for repeat in (1, 2, 3)] for n in (1, 2, 4)}
    for (ranks, own), row in zip(by_size.items(), table.series[0][1], strict=True):
        mean = statistics.fmean(own)
        wall, efficiency = row[1].split(" ", 1), row[2]
        assert float(wall[0]) == pytest.approx(mean, rel=0.005)
        logs = [math.log(one) for one in own]
        low, high = stats.t.interval(0.95, 2, statistics.fmean(logs), stats.sem(logs))
        assert json.loads(wall[1]) == pytest.approx([math.exp(low), math.exp(high)], rel=0.005)
        if ranks > 1:
            base = [math.log(one) for one in by_size[1]]
            ends = stats.ttest_ind(base, logs, equal_var=False).confidence_interval(0.95)
            value, interval = efficiency.split(" ", 1)
            assert float(value) == pytest.approx(statistics.fmean(by_size[1]) / mean / ranks, abs=5e-4)
            assert json.loads(interval) == pytest.approx([math.exp(end) / ranks for end in ends], abs=5e-4)
        assert row[4] == "91.0 %"
    assert table.series[0][1][0][2] == "1"


def test_each_lack_is_listed_with_its_reason(complete, tmp_path):
    """A requirement that a change of the study breaks is the only further line."""

    def lacks(**asked) -> list[str]:
        return [one for one in checked(copy, **asked)[1] if one not in OWN_PROGRAM + BY_HAND]

    copy = Path(shutil.copytree(complete, tmp_path / "s"))
    assert lacks() == ["missing: the size of your largest job in production; add --target-size SIZE"]
    assert "missing: a valid result of the target size 8x1; add it to the axes, and submit it" in lacks(
        target_size="8x1"
    )
    few = "missing: 1 more node count: 2 of 3 are valid; add sizes up to the target to the axes"
    assert few in lacks(target_size="2x1")
    change_json(copy / "plan.json", executor="local")
    assert lacks(target_size="4x1") == [
        "missing: runs with executor slurm: it is local; run it on roihu",
        "missing: the job script: scripts/n4x1-gloo-srun-b16.sh is not there; attach the one that ran",
    ]
    for script in (copy / "scripts").iterdir():
        script.rename(script.with_suffix(".sh"))
    assert "missing: a batch script: this one is for executor local; add it by hand" in lacks()


def test_short_weak_runs_on_cpus_of_another_cluster_lack_most(tmp_path):
    path = finished(tmp_path / "s", weak(sizes=(1, 2)), timing=Timing(comm_s=20e-3))
    with_secret = json.loads((path / "plan.json").read_text())["cells"]
    change_json(path / "plan.json", cells=[cell | {"env": {"API_TOKEN": "x"}} for cell in with_secret])
    _, missing = checked(path)
    assert [one.removeprefix("missing: ").partition(":")[0] for one in missing[: -len(BY_HAND)]] == [
        "1 more node count",
        "a size above the baseline with an efficiency of at least 0.75; submit more runs, or other sizes",
        "runs of your program",
        "the same input at all sizes",
        "the size of your largest job in production; add --target-size SIZE",
        "runs on roihu",
        "runs of 3 min",
        "an efficiency of the wall time",
        "a start-up that does not dominate",
        "GPU utilisation",
        "the load on the file system",
        "the job script",
    ]
    assert "missing: runs on roihu: the cluster is not recorded; run it on roihu" in missing
    assert any("it sets API_TOKEN, whose values are not shown" in one for one in missing)


def test_the_guide_of_a_profile_is_that_of_the_proposal_only(tmp_path):
    path = finished(tmp_path / "s", strong(sizes=(1, 2, 4)), timing=Timing(comm_s=7e-3), noise=0.001)
    said: list[str] = []
    with no_figure():
        write_report(path, proposal=Request())
        report = path / "report"
        before = (report / "scaling.csv").read_bytes()
        page = (report / "index.html").read_text()
        request = Request(profile=read_profile("csc"))
        write_report(path, proposal=request, progress=said.append)
    assert (report / "scaling.csv").read_bytes() == before
    assert (report / "index.html").read_text() == page
    text = (report / "proposal.md").read_text()
    assert "The guide for the efficiency is 0.75, the least that CSC Roihu" in text
    assert "0.8" not in text
    assert (
        "requested by 0.75: 2 ranks on 2 nodes; the page recommends by 0.8: no size beyond the baseline"
        in said
    )


def test_the_hours_are_those_of_the_request_in_the_words_of_the_centre(tmp_path, complete):
    rules = tmp_path / "mine.yaml"
    text = "title: A\nsource: B\ndate: C\nthreshold: 0.8\ncontents: [hours]\n"
    rules.write_text(text + "hours: {name: core-hours, unit: gpu, factor: 24, periods: 2}\n")
    _, missing = checked(complete, str(rules))
    wanted = "missing: the core-hours: the training is an example; add --samples N --epochs N --trainings N"
    assert missing == [wanted]
    parts, missing = checked(complete, str(rules), samples=10**9, epochs=9, trainings=3)
    proposal = Proposal.of(Results.of(load_study(complete)), Request(samples=10**9, epochs=9, trainings=3))
    hours = 24 * 27e9 / proposal.row.throughput_samples_per_sec / 3600 * proposal.row.gpus
    assert missing == []
    found = re.fullmatch(
        r"The request with its reserve is for (\S+) core-hours \(24 per gpu-hour\), (\S+) in each of 2 equal periods.",
        parts["Hours"].text,
    )
    assert [float(one.replace(",", "")) for one in found.groups()] == pytest.approx(
        [hours, hours / 2], rel=0.005
    )


def test_a_profile_with_mistakes_is_refused_with_its_lines(tmp_path):
    path = tmp_path / "mine.yaml"
    text = "title: A\nsource: B\ndate: C\nthreshold: 1.5\nleast_size: 3\ncontents: [wall_tim]\n"
    path.write_text(f"{text}hours: {{periods: many}}\n")
    with pytest.raises(InputError) as error:
        read_profile(str(path))
    assert [problem.line for problem in error.value.problems] == [4, 5, 6, 7]
    assert "did you mean 'wall_time'?" in str(error.value)
    assert "hours.periods must be a whole number, not 'many'; write a number" in str(error.value)
    assert "give csc, generic, or a FILE.yaml" in raised(BenchError, read_profile, "cse")


def test_a_proposal_by_a_profile_compiles(complete, tmp_path):
    copy = Path(shutil.copytree(complete, tmp_path / "s"))
    with no_figure():
        write_report(copy, proposal=Request(profile=read_profile("csc"), target_size="4x1"))
    text = (copy / "report/proposal.tex").read_text()
    for wanted in (r"\paragraph{Target.}", "E (wall time)", r"\paragraph{Job script of 4 GPUs on 4 nodes.}"):
        assert wanted in text
    assert r"srun 50\%\_\textbackslash{}end\{x\}" in text
    assert "\n    " + " " * 8 + "srun 50%_\\end{x}" in (copy / "report/proposal.md").read_text()
    if LATEX:
        text = re.sub(r"\\begin\{figure\}.*?\\end\{figure\}", "", text, flags=re.DOTALL)
        (copy / "report/proposal.tex").write_text(text)
        assert "Output written" in compiled(copy / "report", "proposal")


def test_strong_scaling_comes_first_with_the_reason_where_the_rules_ask_for_the_same_input(tmp_path):
    both = merged([*weak(64, (1, 2, 4)), *strong(64, (1, 2, 4))])
    found = Results.of(load_study(finished(tmp_path / "both", both, timing=Timing(comm_s=1e-3))))
    profiles = (None, read_profile("csc"))
    chosen = [Proposal.of(found, Request(profile=profile)) for profile in profiles]
    assert [one.series[0][0].mode for one in chosen] == ["weak", "strong"]
    said = ["of strong scaling, which has the same input" in one.reason for one in chosen]
    assert said == [False, True]


@pytest.mark.parametrize(
    ("study", "asked", "lacks"),
    [
        (
            "disturbed",
            {"target_size": "2x1"},
            [
                "an efficiency of at least 0.75 at 2 ranks on 2 nodes: 0.99 is not certain with fewer than three runs; "
                "submit more runs"
            ],
        ),
        (
            "pack",
            {"target_size": "2x1"},
            [
                "a valid result at 2 ranks on 2 nodes: Ranks share cores; remove the error, and measure again",
                "runs of 3 min: 14 s at 1 rank on 1 node; raise workload.steps_per_epoch, or the work of the command",
                "the wall time of each size: the runs shared a job (--pack); submit each run as a job of its own",
                "the script of a job of this size: the runs shared jobs of scripts/pack.sbatch; submit each run as a job of "
                "its own",
            ],
        ),
        (
            "preempted",
            {},
            [
                "an efficiency of at least 0.75: no two sizes can be compared; measure several sizes, see bench plan",
                "the same input at all sizes: this series is not strong scaling; measure scaling: {mode: strong}",
                "runs of 3 min: no size has a valid result; bench status says what is wrong with its runs",
                "the wall time of each size: no size has a valid result; bench status says what is wrong with its runs",
                "the job script: no size is requested; attach one of scripts/",
            ],
        ),
    ],
)
def test_what_real_studies_lack_is_listed_with_its_true_reason(study, asked, lacks, tmp_path):
    unpack(study, tmp_path)
    _, missing = checked(tmp_path / study, **asked)
    assert [one for one in lacks if f"missing: {one}" not in missing] == []
    proposal = Proposal.of(Results.of(load_study(tmp_path / study)), Request(profile=read_profile("csc")))
    method = proposal.context()["method"]
    assert ("; the runs shared jobs, one after another." in method) is (study == "pack")
    unrecorded = "No run recorded its software, so the training is described as planned."
    assert (unrecorded in method) is ("and no time is requested." in method) is (study == "preempted")


@pytest.mark.parametrize(
    ("ended", "is_too_short", "is_noted"),
    [("05:00:00.000", False, True), ("05:00:00.250", False, False), ("03:00:01.000", True, True)],
)
def test_times_in_whole_seconds_are_noted_and_impossible_ones_missing(
    complete, ended, is_too_short, is_noted, tmp_path
):
    path = Path(shutil.copytree(complete, tmp_path / "s"))
    for run in json.loads((path / "plan.json").read_text())["runs"]:
        change_run(path, run["run_id"], ended_at=f"2026-01-02T{ended}Z")
    parts, missing = checked(path)
    assert ("in whole seconds, so that intervals may be too narrow" in parts["Runs"].text) is is_noted
    assert ("Outside steps" not in parts["Runs"].table.headings) is is_too_short
    assert any("the timed steps are longer than the wall time" in one for one in missing) is is_too_short
