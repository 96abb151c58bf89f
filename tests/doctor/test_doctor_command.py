"""`bench doctor` of logs, runs and studies: text, JSON, exit codes and error messages."""

import gzip
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.commands.doctor import run_doctor
from bench.study.reasons import LogCause
from ddp_scaling_bench.errors import BenchError
from tests.analysis.causes.planted import attempts, plant
from tests.analysis.studies import change_run
from tests.common import raised

FAILED = """\
rank 0 starts
torch.distributed.DistStoreError: Timed out after 3601 seconds waiting for clients. 1/16 clients joined.
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_text_names_cause_line_reason_and_remedy(folder, capsys):
    Path("job.err").write_text(FAILED)
    assert run_doctor([Path("job.err")], json=False) == 1
    said = capsys.readouterr().out
    assert said.startswith(
        "missing-srun  job.err:2\n    torch.distributed.DistStoreError: Timed out after 3601"
    )
    assert "\n  Why: Only 1 of 16 processes joined." in said
    assert "\n  Do:  Put srun before the command" in said


def test_a_log_without_a_known_cause_exits_with_three(folder, capsys):
    Path("job.out").write_text("step 1 loss 2.0\nTraining finished\n")
    assert run_doctor([Path("job.out")], json=False) == 3
    assert capsys.readouterr().out == (
        "No known cause. This does not show that the job succeeded. The last lines, errors if there are any:\n\n"
        "  job.out:1\n    step 1 loss 2.0\n\n  job.out:2\n    Training finished\n\n"
        "Give the job's other logs, too, such as the file of --error and those of all nodes.\n"
    )


def test_standard_input_and_files_are_read_together_and_other_targets_are_errors(folder, capsys, monkeypatch):
    awkward = Path("a'; echo foo ä.log")
    awkward.write_text("RuntimeError: Tensors must be CUDA and dense\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FAILED.encode())))
    assert run_doctor([awkward, "-"], json=True) == 1
    found = [(cause["cause"], cause["path"]) for cause in json.loads(capsys.readouterr().out)["causes"]]
    assert found[:2] == [("backend-device-mismatch", str(awkward)), ("missing-srun", "-")]
    remedy = "give a log file, such as slurm-<job>.out"
    missing = raised(BenchError, run_doctor, [Path("gone\nfor ever")], json=False)
    assert missing == f"gone for ever: log does not exist; {remedy}"
    assert raised(BenchError, run_doctor, [Path()], json=False) == f".: log is a directory; {remedy}"


RUN = "n4x1-gloo-srun-b16-r2"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    plant(tmp_path / "results" / "slow", {"data": 0.025}, noise=0.0)
    return tmp_path / "results"


def doctor(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


def content(*arguments: str) -> dict[str, Any]:
    result = doctor(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_slow_run_is_named_by_its_folder_and_exits_with_zero(results: Path) -> None:
    found = content(f"slow/{RUN}")
    assert found == content(f"results/slow/runs/{RUN}/attempt-1")
    assert (found["study"], found["run_id"], found["attempt"]) == ("results/slow", RUN, 1)
    assert found["state"] == "completed"
    (cause,) = found["causes"]
    assert (cause["cause"], cause["severity"], cause["line"]) == ("data-loading", "slow", None)
    assert cause["share"] == pytest.approx(0.2, abs=1e-3)
    assert cause["path"] == f"results/slow/runs/{RUN}/attempt-1"
    (fact,) = cause["facts"]
    assert (fact["kind"], [part["part"] for part in fact["values"]["parts"]]) == ("longer", ["data"])
    assert cause["evidence"] == "data loading takes 25.0 ms per step (0 µs at the baseline's rate)"


def test_the_causes_of_a_study_are_those_of_all_its_cells_after_its_failures(results: Path) -> None:
    found = content("slow")
    assert (found["study"], found["run_id"], found["state"]) == ("results/slow", None, "completed")
    assert [cause["cause"] for cause in found["causes"]] == ["data-loading"]
    text = doctor("results/slow").stdout
    assert text.startswith("Study results/slow: completed\n\n")
    assert "data-loading  20 % of the step  results/slow/runs/n4x1-gloo-srun-b16-r1/attempt-1\n" in text
    folder = attempts(results / "slow", RUN)[0]
    change_run(results / "slow", RUN, state="failed")
    folder.err.write_text("RuntimeError: Tensors must be CUDA and dense\n")
    result = doctor("slow", "--json")
    causes = json.loads(result.stdout)["causes"]
    assert result.exit_code == 1
    assert [cause["cause"] for cause in causes] == ["backend-device-mismatch", "data-loading"]


@pytest.mark.parametrize(
    ("target", "log"),
    [("slow", None), (RUN, ""), (f"results/slow/runs/{RUN}", "Training finished in 10 s\n")],
)
def test_a_failure_that_no_log_shows_has_the_reason_of_the_ledger(results, target, log):
    folder = attempts(results / "slow", RUN)[0]
    change_run(results / "slow", RUN, state="failed", reason="NODE_FAIL: a node of the job failed")
    if log is not None:
        folder.err.write_text(log)
    result = doctor(target, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["state"], found["causes"][1:]) == (1, "failed", [])
    line = found["last_lines"][0]
    assert line["text"] == "NODE_FAIL: a node of the job failed"
    assert line["path"] == "results/slow/ledger.jsonl"
    assert line["line"] == len((results / "slow/ledger.jsonl").read_text().splitlines())
    assert "NODE_FAIL: a node of the job failed" in doctor(target).stdout


def test_a_running_run_with_empty_logs_is_neither_ok_nor_a_statement_about_its_study(results: Path) -> None:
    folder = attempts(results / "slow", RUN)[0]
    change_run(results / "slow", RUN, state="running")
    folder.err.write_text("")
    result = doctor(str(folder.path))
    assert result.exit_code == 3
    assert result.stdout == (
        f"Study {results}/slow, run {RUN}, attempt 1: running\n\n"
        "No known cause. This does not show that the job succeeded. The logs are empty.\n"
    )


def test_a_run_that_waits_or_was_not_started_has_no_logs(results: Path) -> None:
    folder = attempts(results / "slow", RUN)[0]
    change_run(results / "slow", RUN, state="queued")
    for log in (folder.err, folder.out):
        log.unlink(missing_ok=True)
    result = doctor(RUN)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        f"error: results/slow/runs/{RUN}/attempt-1: the run is queued and has no job.out or job.err; "
        "`bench status slow` shows its state"
    )
    (results / "slow" / "ledger.jsonl").unlink()
    shutil.rmtree(folder.path.parent)
    assert doctor(RUN).stderr == f"error: {RUN} has not been started; start it: bench submit slow\n"


def test_a_study_of_which_some_runs_are_missing_is_not_completed(results: Path) -> None:
    ledger, runs = results / "slow" / "ledger.jsonl", len(attempts(results / "slow", "*"))
    ledger.write_text(
        "".join(line for line in ledger.read_text().splitlines(keepends=True) if RUN not in line)
    )
    shutil.rmtree(results / "slow/runs" / RUN)
    result = doctor("slow")
    assert result.exit_code == 3
    heading = f"Study results/slow: {runs - 1} of {runs} runs completed, 1 not run\n\n"
    assert result.stdout.startswith(f"{heading}Makes the job slow, but does not end it:\n\ndata-loading  ")
    found = json.loads(doctor("slow", "--json").stdout)
    assert (found["state"], found["counts"]) == ("incomplete", {"planned": 1, "completed": runs - 1})


def test_the_logs_of_a_deleted_folder_are_not_recommended(results: Path) -> None:
    shutil.rmtree(results / "slow/runs" / RUN)
    for target in ("slow", RUN):
        result = doctor(target)
        assert result.exit_code == 1
        assert (
            "the run's folder is missing: `bench submit --retry-failed` starts the run again" in result.stdout
        )
        assert "job.err" not in result.stdout


def test_a_warning_in_the_log_is_reported_once(results: Path) -> None:
    folder = attempts(results / "slow", RUN)[0]
    folder.err.write_text("Warning: Grad strides do not match bucket view strides. This may indicate\n")
    line = LogCause(cause="slow-gradient-strides", path="job.err", line=1, evidence="Warning")
    change_run(results / "slow", RUN, warnings=(line,))
    assert [one["cause"] for one in content(str(folder.path))["causes"]] == ["data-loading", "computation"]


def test_a_compressed_log_gets_the_command_that_reads_it(tmp_path: Path) -> None:
    log = tmp_path / "slurm 1.out.gz"
    log.write_bytes(gzip.compress(b"RuntimeError: CUDA out of memory\n"))
    result = doctor(str(log))
    assert result.exit_code == 2
    assert result.stderr == f"error: {log} is compressed; gunzip -c '{log}' | bench doctor -\n"


def test_of_several_files_those_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    (model := tmp_path / "model.pt").write_bytes(bytes(range(256)))
    alone = f"error: {model} is a binary file, not a log; give a text, such as slurm-<job>.out\n"
    assert (
        doctor(str(model)).stderr
        == doctor(str(model), str(model)).stderr.splitlines(keepends=True)[-1]
        == alone
    )
    (log := tmp_path / "job.slurm").write_text(FAILED)
    for names in ([model, log], [log, model]):
        result = doctor(*map(str, names))
        assert result.exit_code == 1
        assert result.stderr == f"warning: {model} is a binary file, not a log; it is left out\n"


def test_a_matrix_is_no_log(tmp_path: Path) -> None:
    (matrix := tmp_path / "m.yaml").write_text("scaling: []\n")
    hint = f"to check a matrix: bench plan {matrix}"
    assert doctor(str(matrix)).stderr == f"error: {matrix} is a YAML file, not a log; {hint}\n"


def test_a_log_is_told_from_a_script_by_its_content(tmp_path: Path) -> None:
    hint = f"If this is a script, not a log, check it: bench lint {(file := tmp_path / 'job.sbatch')}\n"
    for content, is_script in (("#!/bin/bash\n", True), ("#\n#SBATCH -N 2\n", True), ("epoch 1\n", False)):
        file.write_text(content)
        assert (hint in doctor(str(file)).stdout) is is_script
    file.write_text(f"#!/bin/bash\n{FAILED}")  # a job that printed its script
    assert doctor(str(file)).exit_code == 1


def test_the_sequences_of_a_terminal_are_text(tmp_path: Path) -> None:
    (log := tmp_path / "job.out").write_text("\x1b(B\x0f epoch 1 é\n" * 1000 + FAILED, encoding="utf-8")
    assert doctor(str(log)).exit_code == 1


def test_a_log_with_zeros_or_in_utf_16_is_read(tmp_path: Path) -> None:
    line = "RuntimeError: CUDA out of memory\n"
    for content in (b"\0" * 4096 + line.encode(), line.encode("utf-16")):
        (tmp_path / "job.out").write_bytes(content)
        assert doctor(str(tmp_path / "job.out")).exit_code == 1


def test_a_run_of_several_studies_lists_the_candidates(results: Path) -> None:
    plant(results / "later", {"data": 0.025}, noise=0.0)
    result = doctor(RUN)
    assert result.exit_code == 2
    assert f"{RUN} is in 2 studies: " in result.stderr
    for name in ("slow", "later"):
        assert f"results/{name}/runs/{RUN}/attempt-1" in result.stderr
    unknown = doctor("no-such-run")
    assert unknown.exit_code == 2
    assert unknown.stderr.startswith(
        "error: no-such-run: there is no such file, study, run or job; give a log file"
    )
