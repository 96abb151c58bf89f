"""`bench compare` and `bench advise` on the command line, and Slurm's estimates of queue waits."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.commands.advise import waits_for
from bench.jobs.slurm.client import Slurm
from bench.plan import make_plan, write_plan
from bench.study.layout import StudyFolder
from bench.study.ledger import Record, RunState
from bench.study.plan_json import PlannedStudy, open_study
from tests.analysis.studies import StudyBuilder, Timing, finished, strong
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.commands.command_line import bench, refusal
from tests.common import run_program, write_program
from tests.matrices import matrix, slurm, training

SLOW = Timing(sample_s=1.2e-3, comm_s=4.8e-3, fixed_s=1.2e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with three studies: one before a change, one after it, and one with two backends."""
    root = tmp_path_factory.mktemp("it's a folder")
    cells = strong(64, sizes=(1, 2))
    options = {"repeats": 4, "epochs": 1, "ranks_files": False}
    finished(root / "before/s", cells, **options)
    finished(root / "after/s", strong(64, sizes=(1, 2)), timing=SLOW, seed=2, **options)
    both = [*strong(64, sizes=(1, 2)), *strong(64, sizes=(1, 2), backend="nccl")]
    finished(root / "results/backends", both, **options)
    return root


def test_compare_prints_the_verdicts_and_a_regression_is_exit_code_1(folder):
    done = bench("compare", "before/s", "after/s", cwd=folder)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].strip() == "B: after/s against A: before/s"
    names = "cell ranks batch A samples/s B samples/s B/A 95 % interval n verdict remark"
    assert lines[1].split() == names.split()
    assert all(" slower " in line for line in lines[2:4])
    assert lines[-1] == "2 cells compared: 2 slower"
    assert bench("compare", "after/s", "before/s", cwd=folder).returncode == 0


def test_strict_exits_with_3_if_the_data_cannot_tell(folder):
    for name in ("first", "second"):
        finished(folder / name / "s", strong(64, sizes=(1,)), repeats=2)
    arguments = ["compare", "first/s", "second/s"]
    assert bench(*arguments, cwd=folder).returncode == 0
    assert bench(*arguments, "--strict", cwd=folder).returncode == 3
    assert bench("compare", "before/s", "after/s", "--strict", cwd=folder).returncode == 1


def test_compare_as_json_and_as_markdown(folder, tmp_path):
    report = tmp_path / "a report.md"
    done = bench("compare", "before/s", "after/s", "--json", "--output", str(report), cwd=folder)
    content = json.loads(done.stdout)
    assert content["regression"] is True
    assert content["counts"] == {"faster": 0, "slower": 2, "same": 0, "cannot tell": 0}
    assert set(content) == {
        *"a b minimum_effect regression counts cells only_a only_b differences notes validity".split()
    }
    cell = content["cells"][0]
    assert cell["ratio"] == pytest.approx(1 / 1.2, rel=0.02)
    assert cell["low"] < cell["ratio"] < cell["high"] < 1
    assert report.read_text().startswith(
        "**B: after/s against A: before/s.** 2 cells compared: 2 slower.\n\n| cell |"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["before/s"], "a second study is missing; use bench compare A B for two studies, bench compare A --by KEY for one"),
        (["before/s", "after/s", "--by", "backend"], "--by backend compares cells of one study, but two studies are given; use bench compare A B for two studies, bench compare A --by KEY for one"),
        (["before/s", "before/../before/s"], "before/s and before/../before/s are the same study; give two different studies, or compare cells of one study with --by KEY"),
        (["backends", "--by", "backend", "--ignore", "x"], "--ignore cannot be used with --by; omit it: --by compares cells that differ only in KEY"),
        (["before/s", "after/s", "--minimum-effect", "2"], "--minimum-effect 2 is not between 0 and 1; write a fraction, such as 0.02 for 2 %"),
        (["before/s", "after/s", "--output", "no/such/folder.md"], "no/such/folder.md: cannot be written: No such file or directory; check the folders of this path"),
        (["before/s", "nope"], "no study 'nope' is planned below results (planned: backends); give the name or folder of one of these"),
    ],
)  # fmt: skip
def test_compare_rejects_contradicting_options(folder, words, said):
    assert refusal("compare", *words, cwd=folder) == f"{said}"


def test_advise_prints_options_and_a_recommendation(folder):
    done = bench("advise", "before/s", "--samples", "1.3M", "--epochs", "3", "--wait", "1h", cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].strip() == "Options, shortest total time first"
    names = "study nodes ranks batch setting epoch wait training total hours succeeded choice remark"
    assert (lines[1].split(), "first" in lines[2]) == (names.split(), True)
    assert lines[5].startswith("Ends first: 2 nodes x 1 rank (s): about ")
    assert "after a wait of 1 h: " in lines[5]
    assert "Queue wait of s: as given (--wait).\n" in done.stderr


def test_advise_as_json_has_the_promised_keys(folder):
    words = "--samples 1000000 --epochs 2 --wait before/s=0 --wait after/s=30m --json".split()
    done = bench("advise", "before/s", "after/s", *words, cwd=folder)
    content = json.loads(done.stdout)
    assert (content["samples"], content["epochs"]) == (1_000_000, 2)
    assert set(content) == {"samples", "epochs", "summary", "options", "notes", "validity"}
    waits = {option["study"]: option["wait_s"] for option in content["options"]}
    assert waits == {"before/s": 0.0, "after/s": 1800.0}
    first = content["options"][0]
    assert first["first"] is True
    assert first["kind"] == "measured"
    assert first["gpu_hours"] is None
    assert first["total_s"] == pytest.approx(first["training_s"] + first["wait_s"])
    again = bench("advise", "before/s", "after/s", *words, cwd=folder)
    assert again.stdout == done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--samples is missing; give the samples per epoch: --samples 1.3M"),
        (["--samples", "lots"], "--samples: 'lots' is not a count; write a number such as 500000, 10M or 1.5B"),
        (["--samples", "1M", "--wait", "6"], "--wait 6: '6' is not a duration; write one such as 20m, 1h30m, 45s, or Slurm's [days-]hours:minutes:seconds; for no wait, 0; for one study, STUDY=TIME"),
        (["--samples", "1M", "--wait", "x=6h"], "--wait x=6h: no study 'x' is given; the studies are: s"),
    ],
)  # fmt: skip
def test_advise_rejects_bad_options(folder, words, said):
    assert refusal("advise", "before/s", *words, cwd=folder) == f"{said}"


def measured_study(path: Path, *, partition: str) -> PlannedStudy:
    """Return a planned study of the test cluster whose runs were made up."""
    path.mkdir()
    text = matrix(
        "queue",
        cluster=slurm(partition=partition),
        axes={"nodes": [1, 2], "tasks_per_node": [1], "backend": ["gloo"]},
        scaling=[{"mode": "strong", "global_batch": [8]}],
        workload=training(epochs=1, steps_per_epoch=4),
    )
    (path / "queue.yaml").write_text(text)
    plan = make_plan(path / "queue.yaml")
    folder = write_plan(plan, path)
    builder = StudyBuilder(folder.path, plan.cells, repeats=1)
    cells = {cell.cell_id: cell for cell in plan.cells}
    for run in plan.runs:
        builder._write_run(folder, cells[run.cell_id], run, random.Random(1))
    return open_study(StudyFolder(folder.path))


def asked(study: PlannedStudy, *, samples: int) -> dict[tuple[int, str], Any]:
    from analysis.advise.options import fastest_training_s, options_of
    from analysis.data.load import load_study

    options = options_of({"queue": load_study(study.folder.path)}, samples=samples, epochs=1).options
    waits = waits_for(fastest_training_s(options), {"queue": study}, given={}, ask=True)
    return {layout[1:]: wait for layout, wait in waits.items()}


def test_a_busy_cluster_has_a_wait_by_slurms_own_estimate(cluster: Cluster, tmp_path):
    study = measured_study(tmp_path / "l40s", partition="l40s")
    words = (
        "sbatch --parsable --partition=l40s --account=users --nodes=4 --exclusive --time=5 --output=/dev/null "
        "--job-name=busy"
    )
    run_program([*words.split(), "--wrap=sleep 200"], check=True)
    wait_for(lambda: [row.state for row in Slurm().queue(["busy"])] == ["RUNNING"], what="the job's start")
    waits = asked(study, samples=1000)
    assert all(0 < wait.seconds <= 300 for wait in waits.values())


SBATCH = """\
#!/bin/sh
echo "sbatch: Job 7 to start at $(date -d '+2 hours' +%Y-%m-%dT%H:%M:%S) using 1 processors on nodes n1 in \
partition l40s" >&2
"""


def test_jobs_of_the_study_itself_are_not_counted_as_waiting_time(tmp_path, monkeypatch):
    study = measured_study(tmp_path / "l40s", partition="l40s")
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin/sbatch", SBATCH)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    waits = asked(study, samples=1000)
    assert all(7000 < wait.seconds < 9000 for wait in waits.values()), "Slurm's estimate without own jobs"
    job = {"state": RunState.QUEUED, "job_name": "queue.a2", "job_id": "7"}
    study.ledger.append([Record(run_id=study.runs[0].run_id, attempt=2, **job)])
    for wait in asked(study, samples=1000).values():
        assert wait.seconds is None
        assert wait.remark.startswith("Slurm's estimate of ")
        assert wait.remark.endswith(
            "may include 1 queued or running job of this study, so the wait is not known"
        )
