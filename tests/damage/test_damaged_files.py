"""Damaged and contradictory files of a study: every case is a fact or one clear error, and nothing hangs."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from analysis.data.load import load_study
from analysis.stats.measured import measure
from bench.facts import Fact
from bench.jobs.outcome import process_outcome
from bench.jobs.scheduler import settle
from bench.study.layout import StudyFolder
from bench.study.ledger import Ledger
from bench.study.plan_json import open_study
from tests.commands.command_line import bench, bench_process
from tests.common import change_json, edited_json
from tests.damage.fuzzer import COMMANDS, LIMIT_S, Fuzzer, time_limit
from tests.damage.whole_studies import ENDED_PROCESS, write_studies

#: A short-lived study has a run that completed with this name.
RUN = "n1x2-gloo-torchrun-b32-r1"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return three whole studies."""
    return write_studies(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def study(whole: list[Path], tmp_path: Path) -> Path:
    """Return a copy of the study in which all runs completed."""
    return Path(shutil.copytree(whole[0], tmp_path / "results" / "complete"))


def attempt(study: Path, run: str = RUN) -> Path:
    return study / "runs" / run / "attempt-1"


def shown(study: Path, run: str = RUN) -> Any:
    """Return a run's row in the frames, with its reason."""
    runs = measure(load_study(study)).runs
    return runs[runs["run_id"] == run].iloc[0]


def change_events(study: Path, **values: Any) -> None:
    """Change values of the events ``started`` of a run, and remove its end."""
    path = study / "ledger.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [one for one in events if not (one["run_id"] == RUN and one["event"] == "ended")]
    lines = [json.dumps({**one, **(values if one["run_id"] == RUN else {})}) for one in kept]
    path.write_text("".join(f"{line}\n" for line in lines))


# -- any file, at random --------------------------------------------------------------


def test_no_damage_of_one_file_changes_a_number_silently(whole, tmp_path):
    fuzzer = Fuzzer(tmp_path, whole)
    fuzzer.run(300, seed=30)
    assert fuzzer.bad == []
    assert fuzzer.counts["reported"] > 30
    assert fuzzer.counts["error"] > 10


@pytest.mark.usefixtures("nothing_drawn")
def test_no_damage_of_one_file_stops_a_command(whole, tmp_path):
    fuzzer, chance = Fuzzer(tmp_path, whole), random.Random(30)
    for trial in range(30):
        copy, target, what = fuzzer.damaged(chance)
        places = {"STUDY": str(copy), "OTHER": str(whole[0])}
        words = [places.get(word, word) for word in COMMANDS[trial % len(COMMANDS)]]
        with time_limit(LIMIT_S):
            done = bench(*words, cwd=tmp_path)
        assert done.returncode in (0, 1, 2, 3), what
        if done.returncode == 2:
            assert "error: " in done.stderr, what
            assert target.name in done.stderr or "no " in done.stderr, what


# -- times ----------------------------------------------------------------------------


def test_a_lost_end_keeps_the_time_of_run_json(study):
    before = shown(study)["wall_s"]
    path = study / "ledger.jsonl"
    lines = [line for line in path.read_text().splitlines() if not ('"ended"' in line and RUN in line)]
    path.write_text("\n".join(lines) + "\n")
    assert bench("status", str(study), cwd=study.parent).returncode == 0
    assert shown(study)["wall_s"] == before
    assert Ledger(path).records([RUN])[RUN].state == "completed"


def test_a_kill_between_the_end_of_a_run_and_its_record_keeps_the_time_of_end_json(study):
    run = attempt(study) / "run.json"
    content = json.loads(run.read_text())
    change_events(study)
    change_json(run, state="running", ended_at=None, exit_code=None)
    assert bench("status", str(study), cwd=study.parent).returncode == 0
    now = json.loads(run.read_text())
    assert (now["state"], now["ended_at"]) == ("completed", content["ended_at"])


def test_a_killed_run_without_an_end_has_no_end_time(whole, tmp_path):
    study = Path(shutil.copytree(whole[1], tmp_path / "failed"))
    assert bench("status", str(study), cwd=tmp_path).returncode == 1
    ended = {
        json.loads(p.read_text())["state"]: json.loads(p.read_text()) for p in study.glob("runs/*/*/run.json")
    }
    killed = [
        one
        for one in (json.loads(p.read_text()) for p in study.glob("runs/*/*/run.json"))
        if one["failure_class"] == "killed"
    ]
    assert ended.keys() == {"completed", "failed"}
    assert [one["ended_at"] for one in killed] == [None]
    assert killed[0]["reason"].endswith("was killed during this run, which left no exit code in end.json")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("started_at", "yesterday", "run.json: started_at yesterday contradicts the format of a time"),
        ("started_at", 7, "run.json: started_at 7 contradicts the format of a time"),
        ("ended_at", "2026-01-02T09:00:00.000Z", "contradicts end.json: time 2026-01-02T0"),
        ("ended_at", "2026-01-02T09:00:00.000Z", "contradicts ledger.jsonl: ended_at 2026-01-02T0"),
    ],
)
def test_a_time_that_contradicts_another_place_is_named_and_empty(study, name, value, text):
    change_json(attempt(study) / "run.json", **{name: value})
    found = shown(study)
    assert text in found["reason"]
    assert found["wall_s"] != found["wall_s"]
    assert f"{name}" in bench("verify", str(study), cwd=study.parent).stdout


# -- metrics.csv ----------------------------------------------------------------------


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda lines: lines[:-1], "metrics.csv: rows 2 contradicts plan.json: epochs 3"),
        (lambda lines: [*lines, lines[-1]], "metrics.csv: epoch 1, 2, 3, 3 contradicts"),
        (lambda lines: [lines[0], *lines[:0:-1]], "metrics.csv: epoch 3, 2, 1 contradicts"),
    ],
)
def test_a_deleted_doubled_or_moved_row_empties_the_throughput(study, change, text):
    path = attempt(study) / "metrics.csv"
    path.write_text("".join(change(lines_of(path))))
    found = shown(study)
    assert text in found["reason"]
    assert not found["measured"]
    assert found["rate"] != found["rate"]


def test_values_of_a_command_that_were_changed_after_the_run_are_empty(whole, tmp_path):
    study = Path(shutil.copytree(whole[2], tmp_path / "command"))
    path, other = (attempt(study, f"n1x1-gloo-torchrun-b8-r{repeat}") / "metrics.csv" for repeat in (1, 2))
    header, first, *rest = lines_of(path)
    for text in ("".join([header, first, *rest, f"4{first[1:]}"]), other.read_text()):
        path.write_text(text)
        found = shown(study, "n1x1-gloo-torchrun-b8-r1")
        assert "run.json: metrics_sha256" in found["reason"]
        assert not found["measured"]


@pytest.mark.parametrize("name", ["throughput_samples_per_sec", "samples", "epoch_time_sec", "steps"])
@pytest.mark.parametrize("value", ["123", "1e-320", "1e400"])
def test_a_throughput_that_contradicts_its_row_or_the_ranks_is_empty(study, name, value):
    path = attempt(study) / "metrics.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    rows[1][name] = value
    write_rows(path, rows)
    found = shown(study)
    assert "metrics.csv: " in found["reason"]
    assert not found["measured"]
    done = bench("verify", str(study), cwd=study.parent)
    assert done.returncode == 1
    assert "contradicts" in done.stdout


@pytest.mark.parametrize("name", ["throughput_samples_per_sec", "samples", "steps"])
def test_an_empty_cell_that_another_one_is_computed_from_is_a_contradiction(study, name):
    path = attempt(study) / "metrics.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    rows[1][name] = ""
    write_rows(path, rows)
    assert f"metrics.csv: {name} in epoch 2 nothing contradicts " in shown(study)["reason"]


def test_the_parts_of_a_step_contradict_the_ranks(study):
    path = attempt(study) / "ranks.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    rows[0]["forward_time_sec"] = "1"
    write_rows(path, rows)
    found = shown(study)
    assert "metrics.csv: forward_time_sec in epoch 1 " in found["reason"]
    assert " contradicts ranks.csv: their mean " in found["reason"]
    assert found["measured"]
    balance = load_study(study).epochs.set_index("run_id")["load_balance"]
    assert balance[RUN].isna().all()
    assert balance.notna().sum() == 24


@pytest.mark.parametrize("name", ["metrics.csv", "run.json"])
def test_advise_and_compare_name_a_file_that_they_cannot_read(study, whole, name):
    (attempt(study) / name).write_text("[\n")
    for words in (("compare", str(whole[0]), str(study)), ("advise", str(study), "--samples", "1M")):
        assert f"{RUN}: {name}" in bench(*words, cwd=study.parent).stderr


# -- files that are no files ----------------------------------------------------------


def replaced(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_text("[" * 100_000)


@pytest.mark.parametrize("kind", ["folder", "loop", "fifo"])
def test_a_ledger_that_is_no_file_is_one_clear_error(study, kind):
    replaced(study / "ledger.jsonl", kind)
    for command in ("status", "verify", "cancel", "submit"):
        done = bench(command, str(study), cwd=study.parent)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"error: {study}/ledger.jsonl: ")
        assert done.stderr.endswith("; replace it by the original file\n")


def test_a_line_of_100_000_brackets_is_ignored_with_a_message(study):
    with (study / "ledger.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    done = bench("status", str(study), cwd=study.parent)
    assert (done.returncode, done.stderr) == (0, "ledger.jsonl: line 19 cannot be read and is ignored\n")


@pytest.mark.parametrize("kind", ["folder", "loop", "fifo", "brackets"])
@pytest.mark.parametrize("name", ["run.json", "metrics.csv", "ranks.csv", "env.json", "end.json", "job.err"])
def test_files_of_a_run_that_are_no_files_do_not_hang(study, name, kind):
    replaced(attempt(study) / name, kind)
    with time_limit(LIMIT_S):
        bench("status", str(study), cwd=study.parent)
        bench("verify", str(study), cwd=study.parent)
        load_study(study)


# -- processes ------------------------------------------------------------------------


@pytest.mark.parametrize("pid", [0, -1, "abc", 1, True, None, 2.5, 10**20])
def test_an_impossible_process_is_never_signalled(study, pid, monkeypatch):
    signalled: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *words: signalled.append(words))
    change_json(attempt(study) / "run.json", state="running")
    (attempt(study) / "end.json").unlink()
    change_events(study, pid=pid, pid_started=None)
    done = bench("cancel", str(study), cwd=study.parent)
    assert signalled == []
    assert done.returncode in (0, 2)
    done = bench("status", str(study), cwd=study.parent)
    assert "ledger.jsonl" in done.stdout + done.stderr


def test_a_number_that_is_not_finite_makes_its_line_unusable(study):
    path = study / "ledger.jsonl"
    path.write_text(path.read_text().replace(f'"pid": {ENDED_PROCESS["pid"]}', '"pid": 1e400', 1))
    done = bench("status", str(study), cwd=study.parent)
    assert (done.returncode, done.stderr) == (0, "ledger.jsonl: line 1 cannot be read and is ignored\n")


def test_cancel_does_not_end_the_callers_process_group(study):
    change_json(attempt(study) / "run.json", state="running")
    (attempt(study) / "end.json").unlink()
    change_events(study, pid=0, pid_started=None)
    done = bench_process("cancel", str(study), cwd=study.parent, prefix=("setsid", "-w"))
    assert done.returncode not in (-signal.SIGTERM, 128 + signal.SIGTERM)


# -- values of other types ------------------------------------------------------------


def test_a_run_json_without_a_workload_fails_its_verification(study):
    path = attempt(study) / "run.json"
    cell = json.loads(path.read_text())["cell"]
    del cell["workload"]
    change_json(path, cell=cell)
    done = bench("verify", str(study), cwd=study.parent)
    assert done.returncode == 1
    assert "  FAIL  run.json: does not describe a cell: workload is missing, expected" in done.stdout


@pytest.mark.parametrize("joined", [5, "x", [1], None])
def test_an_env_json_with_another_type_fails_its_verification(study, joined):
    change_json(attempt(study) / "env.json", joined=joined, hosts=joined, warnings=joined, transport=joined)
    done = bench("verify", str(study), cwd=study.parent)
    assert done.returncode == 1
    assert "  FAIL  ranks joined: unknown of 2, expected 2 of 2" in done.stdout


@pytest.mark.parametrize("value", ["x", None, [1], {}])
def test_values_of_another_type_do_not_stop_the_report(study, value):
    fact = Fact("foreign-cpu", ("n1",), {"share": value})
    for folder in study.glob("runs/*/attempt-1"):
        change_json(folder / "env.json", strategy=value)
        change_json(folder / "run.json", disturbed=[fact.as_json()])
    plan = json.loads((study / "plan.json").read_text())
    for cell in plan["cells"]:
        cell["workload"]["strategy"] = value
    change_json(study / "plan.json", cells=plan["cells"])
    for command in ("report", "doctor"):
        done = bench(command, str(study), cwd=study.parent)
        assert done.returncode in (0, 1), done.stderr


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plan: plan.pop("executor"), "KeyError: 'executor'"),
        (
            lambda plan: plan["cells"][0].update(series=[1]),
            "TypeError: cell 1, series is int instead of an object",
        ),
        (lambda plan: plan["cells"][0].update(nodes=float("inf")), "TypeError: cell 1: nodes 'inf' is not"),
        (lambda plan: plan["runs"].pop(), "ValueError: 8 runs, but cost.runs is 9"),
    ],
)
def test_a_damaged_plan_is_one_clear_error_of_every_command(study, change, text):
    with edited_json(study / "plan.json") as plan:
        change(plan)
    for command in ("status", "verify", "report", "compare", "advise", "submit", "cancel"):
        words = [command, str(study), *([str(study)] if command == "compare" else [])]
        words += ["--samples", "1M"] if command == "advise" else []
        done = bench(*words, cwd=study.parent)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(
            f"error: {study}/plan.json: is not a plan that this version can read ({text}"
        )
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("executor", ["pbs", "../x", ""])
def test_an_unknown_executor_is_one_clear_error_of_every_command(study, executor):
    change_json(study / "plan.json", executor=executor)
    for command in ("status", "verify", "report", "submit", "cancel"):
        done = bench(command, str(study), cwd=study.parent)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: executor {executor!r} is unknown"), done.stderr


def test_many_unknown_keys_give_a_short_message(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("".join(f"unknown_{number}: 1\n" for number in range(20_000)))
    done = bench("plan", str(path), cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr) < 20_000
    assert "more problems" in done.stderr


# -- a disk that is full or read-only -------------------------------------------------


def test_status_shows_states_that_it_cannot_save(whole, tmp_path, monkeypatch):
    study = Path(shutil.copytree(whole[1], tmp_path / "failed"))
    from bench.errors import unwritable
    from bench.study import files

    def full(path: Path, text: str) -> None:
        raise unwritable(path, OSError(28, "No space left on device"))

    monkeypatch.setattr("bench.study.run_json.rewrite_object", full)
    monkeypatch.setattr(files, "write_atomically", full)
    done = bench("status", str(study), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("not saved: ") == 2
    assert "No space left on device" in done.stdout
    assert StudyFolder(study).ledger.read_text() == StudyFolder(whole[1]).ledger.read_text()
    done = bench("doctor", str(study), cwd=tmp_path)
    assert done.stdout.splitlines()[0].endswith(": 6 of 9 runs completed, 1 not run, 2 failed")


@pytest.mark.usefixtures("nothing_drawn")
def test_a_disk_that_is_full_during_training_is_the_cause_in_all_views(study, monkeypatch):
    monkeypatch.setattr("bench.jobs.outcome._LEAST_FREE_BYTES", 2**70)
    change_events(study)
    (attempt(study) / "job.out").write_text("")
    planned = open_study(StudyFolder(study))
    record = planned.records()[RUN]
    outcome = process_outcome(planned.run_folder(record), planned.cell_of(RUN), 1)
    ended_at = json.loads((attempt(study) / "end.json").read_text())["time"]
    settle(planned, record, outcome, ended_at=ended_at)
    status = json.loads(bench("status", str(study), "--json", cwd=study.parent).stdout)
    (run,) = [one for one in status["runs"] if one["run_id"] == RUN]
    assert run["reason"].endswith("is full (No space left on device); exit code 1")
    diagnosis = json.loads(bench("doctor", str(study), "--json", cwd=study.parent).stdout)
    cause = diagnosis["causes"][0]
    assert run["cause"] == cause["cause"] == diagnosis["runs"][0]["cause"] == "disk-quota"
    assert cause["evidence"] == "job.err: No space left on device"
    assert run["failure_class"] == diagnosis["runs"][0]["failure_class"] == "bad-exit"
