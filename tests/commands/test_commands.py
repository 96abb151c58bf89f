"""The commands on the command line: exit codes, both streams, and the files that they write."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from bench.shipped import shipped
from bench.study.layout import StudyFolder
from bench.study.plan_json import open_study
from tests.analysis.figures import no_figure
from tests.commands.command_line import bench, bench_process
from tests.matrices import SHORT, matrix, training

TINY = matrix(
    axes={"tasks_per_node": [1, 2]},
    scaling=[{"mode": "strong", "global_batch": [8]}],
    workload=training(parameters="20k", **SHORT | {"steps_per_epoch": 4, "epochs": 2, "sweep_time": 0.5}),
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """Return a folder in which `bench run` has completed a study."""
    folder = tmp_path_factory.mktemp("a user's folder")
    (folder / "tiny.yaml").write_text(TINY)
    with no_figure():
        done = bench("run", "tiny.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "results/tiny/report/index.html\n"
    assert re.search(r"^\[2/2\] n1x\S+ completed in ", done.stderr, re.M)
    assert "study tiny: 2 completed\n" in done.stderr
    return folder


def test_max_queued_without_a_queue_is_reported(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    assert bench("plan", "tiny.yaml", cwd=tmp_path).returncode == 0
    done = bench("submit", "--max-queued", "2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    assert (
        done.stderr == "--max-queued is ignored: executor local has no queue and starts one run at a time\n"
    )


def test_each_listing_shows_which_command_a_name_means(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "cluster: {executor: local}\n"
        "axes: {command: [{name: fsdp2, run: 'python a.py --lr 1'}, python b.py]}\n"
        "scaling: [{mode: weak, per_gpu_batch: [16]}]\n"
        "workload: {device: cpu, metrics: none}\n"
    )
    lines = ["command fsdp2: python a.py --lr 1", "command python+b.py: python b.py"]
    labels = ["fsdp2", "python+b.py"]
    for words in (["plan", "own.yaml"], ["status"], ["submit", "--dry-run"]):
        done = bench(*words, cwd=tmp_path)
        assert [line for line in done.stdout.splitlines() if line.startswith("command ")] == lines
    for words in (["plan", "own.yaml"], ["status"]):
        commands = json.loads(bench(*words, "--json", cwd=tmp_path).stdout)["commands"]
        assert [command["name"] for command in commands] == labels
        assert [command["words"][-1] for command in commands] == ["1", "b.py"]
        for command in commands:
            assert [command["name"] in cell for cell in command["cells"]] == [True]
    done = bench("submit", "--dry-run", "--only", "command=fsdp2", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "3 of 6 runs would be started"


def test_plan_prints_the_cells_the_cost_and_the_folder(tmp_path):
    done = bench("plan", "l40s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].strip() == "Study l40s"
    assert lines[1].split() == "cell nodes GPUs/node ranks per-GPU batch global batch series".split()
    assert lines[-3].split() == "n4x4-nccl-srun-b22 4 4 16 22 352 strong 352, weak 22".split()
    assert lines[-2] == (
        "5 cells x 3 repeats = 15 runs; up to 4 nodes; up to 16 GPUs; "
        "wall limit 20 min per run, 5 h 00 min in total; at most 40 GPU-hours"
    )
    assert lines[-1] == "written: results/l40s (scripts/, plan.json)"
    assert done.stderr.splitlines() == [
        f"matrix: {shipped('matrices') / 'l40s.yaml'}",
        "warning: up to 9 runs on several nodes can execute side by side and share the network, which disturbs "
        "their communication times; `bench submit --pack` (one job, one run after another) avoids this, and so "
        "does max_running: 1",
        "next: bench submit l40s",
    ]


def test_a_bad_matrix_is_exit_code_2_one_message_and_no_study(tmp_path):
    (tmp_path / "bad.yaml").write_text(TINY.replace("[1, 2]", "[3]"))
    done = bench("plan", "bad.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: bad.yaml:7: global_batch 8 is not divisible by 3 ranks (nodes 1 x tasks_per_node 3); try 6 or 9\n"
    )
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("verb", ["submit", "status", "verify", "report"])
def test_without_a_study_every_verb_reports_it(tmp_path, verb):
    done = bench(verb, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no study is planned below results; plan one: bench plan MATRIX\n"


def test_an_unknown_study_and_a_matrix_give_different_errors(ran):
    done = bench("status", "tinny", cwd=ran)
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: no study 'tinny' is planned below results (planned: tiny); plan it: bench plan MATRIX\n"
    )
    done = bench("submit", "tiny.yaml", cwd=ran)
    assert done.stderr == "error: tiny.yaml is a matrix, not a study; its study is tiny\n"
    done = bench("submit", "new.yaml", cwd=ran)
    assert done.stderr == "error: new.yaml is a matrix, not a study; plan it first: bench plan new.yaml\n"


def test_status_lists_every_run(ran):
    done = bench("status", cwd=ran)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["run", "state", "attempt", "job", "reason"]
    # Further lines name runs that other processes of this machine disturbed.
    runs = [f"n1x{ranks}-gloo-torchrun-b{batch}-r1" for ranks, batch in ((1, 8), (2, 4))]
    assert sorted(line.split()[0] for line in lines[2:4]) == runs
    assert "2 completed" in lines[4:]
    content = json.loads(bench("status", "--json", cwd=ran).stdout)
    assert (content["study"], content["counts"]["completed"]) == ("tiny", 2)
    assert sorted(run["run_id"] for run in content["runs"]) == runs
    assert {run["state"] for run in content["runs"]} == {"completed"}


@pytest.fixture(scope="module")
def read_only(ran, tmp_path_factory) -> Path:
    """Return a copy of the study in which a run's end was not recorded, and which cannot be written."""
    study = tmp_path_factory.mktemp("of another user") / "tiny"
    shutil.copytree(ran / "results" / "tiny", study)
    shutil.rmtree(study / "report")
    *lines, _ = (study / "ledger.jsonl").read_text().splitlines(keepends=True)
    (study / "ledger.jsonl").write_text("".join(lines))
    open_study(StudyFolder(study)).adopt()
    for path in (*study.rglob("*"), study):
        path.chmod(path.stat().st_mode & ~0o222)
    return study


#: Without this capability, root obeys the modes of files.
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()


def test_a_study_that_cannot_be_written_is_reported_in_another_folder(read_only, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in read_only.rglob("*")}
    done = bench_process("report", str(read_only), cwd=tmp_path, prefix=UNPRIVILEGED)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {read_only}: cannot be written: Permission denied; make it writable and repeat the command, "
        f"or write the report elsewhere: bench report '{read_only}' --output DIR\n"
    )
    done = bench_process("report", str(read_only), "--output", "mine", cwd=tmp_path, prefix=UNPRIVILEGED)
    assert (done.returncode, done.stdout) == (0, "mine/tiny-report/index.html\n"), done.stderr
    report = tmp_path / "mine" / "tiny-report"
    links = set(re.findall(r'href="([^"#:]+)"', (report / "index.html").read_text()))
    assert {"scaling.csv", "runs.csv", "figures/"} <= links
    assert [link for link in links if not (report / link).exists()] == []
    runs = list(csv.DictReader((report / "runs.csv").read_text().splitlines()))
    assert [run["state"] for run in runs] == ["completed"] * 2
    assert {path: path.stat().st_mtime_ns for path in read_only.rglob("*")} == before


def test_the_report_of_another_study_is_not_replaced(ran, tmp_path):
    shutil.copytree(ran / "results" / "tiny", tmp_path / "results" / "tiny")
    (tmp_path / "tiny-report").mkdir()
    (tmp_path / "tiny-report" / "study.json").write_text('{"study": "../elsewhere/tiny"}')
    done = bench("report", "--output", ".", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: tiny-report is the report of elsewhere/tiny; results/tiny would replace it; "
        "give another folder with --output DIR, or rename this folder"
    )


def test_verify_passes_for_study_run_and_folder(ran):
    done = bench("verify", cwd=ran)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2 of 2 runs pass")
    done = bench("verify", "n1x2-gloo-torchrun-b4-r1", cwd=ran)
    assert done.returncode == 0
    assert "  ok    ranks joined: 2 of 2 on " in done.stdout
    assert "  ok    backend: gloo\n" in done.stdout
    done = bench("verify", "results/tiny/runs/n1x2-gloo-torchrun-b4-r1/attempt-1", "--json", cwd=ran)
    content = json.loads(done.stdout)
    assert content["passed"] is True
    assert {check["check"] for check in content["runs"][0]["checks"]} == {
        *("state", "files", "ranks joined", "world size", "backend", "transport", "nodes", "hosts"),
        *("global batch", "epochs", "throughput", "loss", "samples"),
    }


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "env.json").unlink(), "FAIL  files: missing env.json, expected"),
        (
            lambda f: (f / "env.json").write_text(
                (f / "env.json").read_text().replace('"world_size": 2', '"world_size": 1')
            ),
            "FAIL  world size: 1, expected 2",
        ),
    ],
)
def test_verify_prints_the_failed_check(ran, tmp_path, damage, said):
    shutil.copytree(ran / "results/tiny", tmp_path / "tiny")
    folder = tmp_path / "tiny/runs/n1x2-gloo-torchrun-b4-r1/attempt-1"
    damage(folder)
    done = bench("verify", str(folder), cwd=tmp_path)
    assert done.returncode == 1
    assert said in done.stdout


def test_run_again_starts_nothing(ran, nothing_drawn):
    done = bench("run", "tiny.yaml", cwd=ran)
    assert done.returncode == 0
    assert "nothing to start" in done.stderr


def test_only_chooses_by_name_and_by_property(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    bench("plan", "tiny.yaml", cwd=tmp_path)
    by_name = bench("submit", "--dry-run", "--only", "n1x2-*", cwd=tmp_path).stdout
    by_value = bench("submit", "--dry-run", "--only", "world_size=2", cwd=tmp_path).stdout
    assert by_name == by_value
    assert by_name.splitlines()[-1] == "1 of 2 runs would be started"
    whole = bench("submit", "--dry-run", "--only", "sweep_time=0.50", cwd=tmp_path).stdout
    assert whole.splitlines()[-1] == "2 of 2 runs would be started", "0.50 is 0.5"
    done = bench("submit", "--dry-run", "--only", "wrold_size=2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: --only: unknown key 'wrold_size'; allowed: nodes, tasks_per_node, gpus_per_node, "
    )
    assert not (tmp_path / "results/tiny/runs").exists(), "a dry run leaves nothing"


def test_schema_is_json_schema(tmp_path):
    schema = json.loads(bench("schema", cwd=tmp_path).stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    "words", [["--help"], ["plan", "--help"], ["submit", "-h"], ["--version"], ["--show-completion", "bash"]]
)
def test_help_version_and_completion_work(tmp_path, words):
    shell = {"SHELL": "/bin/bash", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    call = bench_process if "--show-completion" in words else bench
    done = call(*words, cwd=tmp_path, **shell)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_path_without_permission_is_one_error_and_private_studies_are_left_out(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    assert bench("plan", "tiny.yaml", cwd=tmp_path).returncode == 0
    private = tmp_path / "results/private"
    private.mkdir()
    as_user: list[str] = []
    if os.geteuid() == 0:  # without these capabilities, permissions apply to root
        os.chown(private, 65534, 65534)
        capabilities = "-dac_override,-dac_read_search"
        as_user = ["setpriv", "--bounding-set", capabilities, "--inh-caps", capabilities, "--"]
    private.chmod(0)
    done = bench_process("submit", "--dry-run", "results/private", cwd=tmp_path, prefix=as_user)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: results/private/plan.json: Permission denied; "
        "check the permissions of this path and of the folders above it\n"
    )
    done = bench_process("status", cwd=tmp_path, prefix=as_user)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["plan", "status", "lint", "doctor", "report", "preflight"])
def test_a_name_that_is_too_long_is_one_error(tmp_path, command):
    done = bench(command, "a" * 300, cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"error: a{300}\S*: File name too long; give a shorter name\n", done.stderr)
