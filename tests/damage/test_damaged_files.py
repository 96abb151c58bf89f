"""A truncated, missing, unreadable or foreign file never gives a traceback, a hang or a run started twice."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.data.load import load_study
from analysis.stats.measured import measure
from bench.study.layout import StudyFolder
from bench.study.ledger import Ledger, Record
from bench.study.plan_json import PlannedStudy, open_study
from ddp_scaling_bench.errors import unwritable
from tests.analysis.studies import leave_run
from tests.commands.command_line import bench, bench_process, refusal
from tests.common import change_json
from tests.matrices import matrix, planned_study, training

#: The study ``complete`` has a run that completed with this name.
RUN = "n1x2-gloo-torchrun-b32-r1"
FOLDER = f"runs/{RUN}/attempt-1"


#: What became of some runs of the study ``failed``, by their order: failed, ended but not recorded, killed.
ENDS: dict[int, dict[str, Any]] = {
    1: {"exit_code": 1, "err": "RuntimeError: it broke\n"},
    2: {"is_recorded": False},
    4: {"exit_code": None, "is_recorded": False},
}


def plan(root: Path, name: str) -> PlannedStudy:
    axes, scaling = {"tasks_per_node": [1, 2, 4]}, [{"mode": "strong", "global_batch": [64]}]
    workload = training(steps_per_epoch=20, epochs=3)
    text = matrix(name, axes=axes, scaling=scaling, workload=workload, repeats=3)
    return planned_study(root, text, results=root)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two whole studies; in the second, some runs failed, and one has not started."""
    root = tmp_path_factory.mktemp("whole")
    complete, failed = plan(root, "complete"), plan(root, "failed")
    for place, run in enumerate(complete.runs):
        leave_run(complete, run)
        if place != 6:
            leave_run(failed, run, **ENDS.get(place, {}))
    return [complete.folder.path, failed.folder.path]


@pytest.fixture
def study(whole: list[Path], tmp_path: Path) -> Path:
    """Return a copy of the study in which all runs completed."""
    return copied(whole[0], tmp_path / "results" / "complete")


def copied(whole: Path, path: Path) -> Path:
    """Copy a study, and let the copy be the study."""
    shutil.copytree(whole, path)
    open_study(StudyFolder(path)).adopt()
    return path


def shown(study: Path) -> Any:
    """Return the values of a run, with its reason."""
    return next(vars(run) for run in measure(load_study(study)).runs if run.run_id == RUN)


def forget_end(study: Path, run: str = RUN, **changes: Any) -> None:
    """Remove the end of a run from the ledger; ``changes`` are values of the line before."""
    path = study / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [one for one in lines if not (one.get("run_id") == run and one["state"] == "completed")]
    changed = [{**one, **(changes if one.get("run_id") == run else {})} for one in kept]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in changed))


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(2**30 + 1)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "foreign":
        path.write_text("[" * 100_000)


CHANGED = "is not as the run wrote it: its SHA-256 is not that in SHA256SUMS"


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        ("metrics.csv", "changed", CHANGED),
        ("probes.json", "changed", CHANGED),
        ("ranks.csv", "missing", "cannot be read: No such file or directory"),
        ("ranks.csv", "fifo", "cannot be read: It is not a regular file"),
        ("ranks.csv", "sparse", "cannot be read: it is larger than 1 GiB"),
        ("SHA256SUMS", "missing", "cannot be read: No such file or directory"),
        ("SHA256SUMS", "foreign", "is larger than 4096 bytes"),
    ],
)
def test_a_changed_or_unreadable_file_leaves_the_run_without_values(study, name, kind, problem):
    path = study / FOLDER / name
    if kind == "changed":
        path.write_text(path.read_text().replace("3", "4", 1) if name != "probes.json" else "{}")
    else:
        replace(path, kind)
    problem, found, loaded = f"{FOLDER}/{name} {problem}", shown(study), load_study(study)
    assert (found["reason"], bool(found["measured"])) == (problem, False)
    assert RUN not in set(loaded.epochs["run_id"])
    assert not loaded.ranks_of([RUN])
    done = bench("verify", str(study), cwd=study.parent)
    assert (done.returncode, " of 9 runs pass; 1 fail" in done.stdout) == (1, True)
    assert problem in done.stdout or f"FAIL  files: missing {name}" in done.stdout


def test_sha256sum_checks_the_files(study):
    done = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=study / FOLDER, capture_output=True, text=True
    )
    names = ("metrics.csv", "ranks.csv", "steps.csv", "probes.json")
    assert done.stdout.splitlines() == [f"{name}: OK" for name in names]


def test_a_run_that_was_killed_before_its_last_window_has_no_values(study):
    (study / FOLDER / "SHA256SUMS").unlink()
    (study / FOLDER / "end.json").unlink()
    forget_end(study)
    assert bench("status", str(study), cwd=study.parent).returncode == 1
    assert shown(study)["state"] == "failed"
    assert not shown(study)["measured"]


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.usefixtures("nothing_drawn")
def test_files_of_a_run_that_are_no_files_stop_no_command(study, kind):
    for name in ("run.json", "env.json", "end.json", "job.err", "conditions.json", "metrics.csv"):
        replace(study / FOLDER / name, kind)
    for words in (["status"], ["verify"], ["report"], ["doctor"], ["advise", "--samples", "1M"]):
        done = bench(words[0], str(study), *words[1:], cwd=study.parent)
        assert done.returncode in (0, 1), done.stderr
        if words[0] == "verify":
            assert f"FAIL  files: {FOLDER}/metrics.csv " in done.stdout
    found = shown(study)
    assert found["state"] == "completed"  # as in the ledger
    assert found["reason"].startswith(f"{FOLDER}/metrics.csv ")


STRING = ('"nodes": 1, "tasks', '"nodes": "1", "tasks')
OUTSIDE = ('{"source": "recorder"}', '{"csv": "../x"}')
#: Changes of plan.json, and the beginning of the reason why it cannot be read.
CANNOT_READ = "is not a plan that this version can read"
DAMAGES = [
    (lambda text: text[:-40], "is damaged, or was cut short; restore it; without a copy, move "),
    (
        lambda text: text.replace(*STRING, 1),
        f"{CANNOT_READ} (cells.0.nodes: Input should be a valid integer)",
    ),
    (lambda text: text.replace(*OUTSIDE), f"{CANNOT_READ} (cells.0.metrics.csv: "),
    (
        lambda text: text.replace('"warnings": [', '"warnings": [{"kind": 5}, '),
        f"{CANNOT_READ} (warnings.0.",
    ),
]


def test_a_damaged_plan_is_one_clear_error_of_every_command(study):
    path = study / "plan.json"
    whole = path.read_text()
    commands = ["status", "verify", "report", "compare", "advise", "submit", "cancel"]
    # All commands read the plan by one function: each damage is shown to one command, and one to all.
    for (change, problem), names in zip(DAMAGES, (commands, *(["status"],) * 3), strict=True):
        path.write_text(change(whole))
        for command in names:
            words = [command, str(study), *([str(study)] if command == "compare" else [])]
            words += ["--samples", "1M"] if command == "advise" else []
            said = refusal(*words, cwd=study.parent)
            assert said.startswith(f"{path} {problem}")
            assert "\n" not in said


@pytest.mark.usefixtures("nothing_drawn")
def test_impossible_values_in_env_json_stop_no_command(study):
    host = {"host": "n1", "ranks": True, "memory_bytes": 10**400}
    huge = {"global_batch": 10**400, "parameters": 10**400, "gradient_bytes": 10**400, "hosts": [host]}
    change_json(study / FOLDER / "env.json", world_size=float("nan"), backend=[], **huge)
    for command in ("verify", "report", "doctor", "status"):
        assert bench(command, str(study), cwd=study.parent).returncode in (0, 1)


@pytest.mark.parametrize("kind", ["fifo", "sparse"])
def test_a_ledger_that_is_no_file_is_one_clear_error(study, kind):
    replace(study / "ledger.jsonl", kind)
    for command in ("status", "verify", "cancel", "submit"):
        done = bench(command, str(study), cwd=study.parent)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"error: {study}/ledger.jsonl: ")


def test_a_run_whose_events_were_lost_is_not_started_again(study):
    path = study / "ledger.jsonl"
    path.write_text(
        "".join(line for line in path.read_text().splitlines(True) if RUN not in line) + "[" * 100_000
    )
    done = bench("status", str(study), cwd=study.parent)
    assert done.stderr == ""
    assert bench("submit", str(study), cwd=study.parent).returncode == 0
    assert not (study / FOLDER).with_name("attempt-2").exists()
    assert shown(study)["measured"]


def test_an_impossible_process_is_never_signalled(study):
    host = os.uname().nodename
    runs = sorted(path.name for path in (study / "runs").iterdir())
    for run, job_id in zip(runs, ("0", f"{host}:abc:5", f"{host}:0:"), strict=False):
        (study / f"runs/{run}/attempt-1/end.json").unlink()
        forget_end(study, run, job_id=job_id)
    done = bench_process("cancel", str(study), cwd=study.parent, prefix=("setsid", "-w"))
    assert done.returncode in (0, 2)


def test_status_shows_states_that_it_cannot_save(whole, tmp_path, monkeypatch):
    study = copied(whole[1], tmp_path / "failed")
    before = StudyFolder(study).ledger.read_text()

    def full(ledger: Ledger, records: Sequence[Record]) -> None:
        raise unwritable(ledger.path, OSError(28, "No space left on device"))

    monkeypatch.setattr(Ledger, "append", full)
    done = bench("status", str(study), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("not saved: ") == 2
    assert "No space left on device" in done.stdout
    assert StudyFolder(study).ledger.read_text() == before


@pytest.mark.usefixtures("nothing_drawn")
def test_a_disk_that_is_full_during_training_is_the_cause_in_all_views(study, monkeypatch):
    monkeypatch.setattr("bench.jobs.end._LEAST_FREE_BYTES", 2**70)
    (study / FOLDER / "job.out").write_text("")
    change_json(study / FOLDER / "end.json", exit_code=1)
    forget_end(study)
    status = json.loads(bench("status", str(study), "--json", cwd=study.parent).stdout)
    (run,) = [one for one in status["runs"] if one["run_id"] == RUN]
    assert run["reason"].endswith("is full (No space left on device); exit code 1")
    diagnosis = json.loads(bench("doctor", str(study), "--json", cwd=study.parent).stdout)
    assert run["cause"] == diagnosis["causes"][0]["cause"] == diagnosis["runs"][0]["cause"] == "disk-quota"
