"""The commands on the command line: exit codes, both streams, and the files that they write."""

import csv
import ctypes
import json
import os
import pty
import re
import shutil
import struct
import sys
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import pytest

from bench.matrix.document import shown_text
from bench.shipped import shipped
from bench.study.layout import StudyFolder
from bench.study.plan_json import open_study
from ddp_scaling_bench.variables import without_users
from tests.analysis.figures import no_figure
from tests.analysis.studies import finished, leave_run, strong
from tests.commands.command_line import be_bench, bench, is_reported, refusal
from tests.common import NOBODY, change_json, forks, in_fork
from tests.matrices import SHORT, matrix, training

TINY = matrix(
    axes={"tasks_per_node": [1, 2]},
    scaling=[{"mode": "strong", "global_batch": [8]}],
    workload=training(parameters="20k", **SHORT | {"steps_per_epoch": 4, "epochs": 2, "sweep_time": 0.5}),
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """Return a folder with a study whose runs have completed, and its report."""
    folder = tmp_path_factory.mktemp("a user's folder")
    (folder / "tiny.yaml").write_text(TINY)
    assert bench("plan", "tiny.yaml", cwd=folder).returncode == 0
    study = open_study(StudyFolder(folder / "results/tiny"))
    for run in study.runs:
        left = leave_run(study, run)
        change_json(left.env, exchange={"together": True, "by": "parameters"})
    with no_figure():
        done = bench("run", "tiny.yaml", cwd=folder)
    assert is_reported(done), done.stderr
    assert done.stdout.startswith(
        "results/tiny/report/index.html\nStrong scaling: the best size is not known yet\nhow sure: "
    )
    return folder


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
    assert lines[0].strip() == "Study l40s (nccl, srun)"
    assert lines[1].split() == "cell nodes GPUs/node ranks per-GPU batch global batch series".split()
    assert "n2x4-b44 2 4 8 44 352 strong 352, weak 44".split() in [line.split() for line in lines]
    assert lines[-2] == (
        "5 cells x 3 repeats = 15 runs; up to 4 nodes; up to 16 GPUs; "
        "wall limit 20 min per run, 5 h 00 min in total; at most 48 GPU-hours"
    )
    assert lines[-1] == "written: results/l40s (scripts/, plan.json)"
    assert done.stderr.splitlines() == [
        f"matrix: {shipped('matrices') / 'l40s.yaml'}",
        "expected cost: give the step time of the smallest size with --step-time, or as expected.step_time",
        "warning: runs can execute side by side and disturb each other (up to 9 runs on several nodes share the "
        "network); set max_running: 1, or use `bench submit --pack`",
        "next: bench submit l40s",
    ]


def test_a_bad_matrix_is_exit_code_2_one_message_and_no_study_which_every_verb_reports(tmp_path):
    (tmp_path / "bad.yaml").write_text(TINY.replace("[1, 2]", "[3]"))
    assert refusal("plan", "bad.yaml", cwd=tmp_path) == (
        "bad.yaml:7: global_batch 8 is not divisible by 3 ranks (nodes 1 x tasks_per_node 3); try 6 or 9"
    )
    assert not (tmp_path / "results").exists()
    for verb in ("submit", "status", "verify", "report"):
        assert (
            refusal(verb, cwd=tmp_path)
            == "no study is planned below results; the next step: bench plan bad.yaml"
        )


def test_an_unknown_study_and_a_matrix_give_different_errors(ran):
    unknown = "no study 'tinny' is planned below results (planned: tiny); did you mean tiny?"
    assert refusal("status", "tinny", cwd=ran) == unknown
    matrix_given = "is a matrix, not a study;"
    assert refusal("submit", "tiny.yaml", cwd=ran) == f"tiny.yaml {matrix_given} give its study: tiny"
    planning = "plan it first: bench plan new.yaml"
    missing = "new.yaml: the matrix does not exist; give the name of a study (see bench list)"
    assert refusal("submit", "new.yaml", cwd=ran) == missing
    (ran / "new.yaml").touch()
    assert refusal("submit", "new.yaml", cwd=ran) == f"new.yaml {matrix_given} {planning}"
    assert refusal("verify", "results", cwd=ran) == (
        "results is the folder of all studies; give one of the studies (planned: tiny)"
    )
    plan = "results/tiny/plan.json"
    assert refusal("status", plan, cwd=ran) == f"{plan} is not a study; its study is results/tiny"
    assert refusal("report", "1=a.log", cwd=ran).endswith(
        "need --pattern; type, for example: bench report 4=a.log 8=b.log --pattern throughput='REGEX with one group ( )'"
    )


def test_status_lists_every_run(ran):
    done = bench("status", cwd=ran)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["run", "state", "attempt", "job", "reason"]
    # Further lines say what was found about a run, such as the disturbance by other processes.
    assert sorted(line.split()[0] for line in lines if line.startswith("n1x")) == ["n1x1-b8", "n1x2-b4"]
    assert "2 completed" in lines[4:]
    content = json.loads(bench("status", "--json", cwd=ran).stdout)
    assert (content["study"], content["counts"]["completed"]) == ("tiny", 2)
    runs = [f"n1x{ranks}-gloo-torchrun-b{batch}-r1" for ranks, batch in ((1, 8), (2, 4))]
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


def as_user(*calls: list[str], cwd: Path) -> list[list[Any]]:
    """Call `bench` several times in a process to which the modes of files apply; return codes and streams."""

    def call() -> list[list[Any]]:
        if os.geteuid() == 0:  # without capabilities, root obeys them
            no_capabilities = struct.pack("Ii", 0x20080522, 0), bytes(24)
            assert ctypes.CDLL(None).capset(*no_capabilities) == 0
        with no_figure():
            done = [bench(*words, cwd=cwd) for words in calls]
        return [[one.returncode, one.stdout, one.stderr] for one in done]

    return in_fork(call)


def test_a_study_that_cannot_be_written_is_reported_in_another_folder(read_only, tmp_path):
    """In the same folder, a path without permission is one error, and a private study is left out."""
    before = {path: path.stat().st_mtime_ns for path in read_only.rglob("*")}
    private = tmp_path / "results/private"
    private.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(private, NOBODY, NOBODY)
    private.chmod(0)
    (tmp_path / "tiny.yaml").write_text(TINY)
    assert bench("plan", "tiny.yaml", cwd=tmp_path).returncode == 0
    report = ["report", str(read_only)]
    refused, written, unreadable, status = as_user(
        report, [*report, "--output", "mine"], ["submit", "--dry-run", str(private)], ["status"], cwd=tmp_path
    )
    assert refused[:2] == [2, ""]
    assert refused[2] == (
        f"error: {read_only}: cannot be written: Permission denied; make it writable and repeat the command, "
        f"or write the report elsewhere: bench report '{read_only}' --output DIR\n"
    )
    assert written[1].splitlines()[0] == "mine/tiny-report/index.html", written
    report = tmp_path / "mine" / "tiny-report"
    links = set(re.findall(r'href="([^"#:]+)"', (report / "index.html").read_text()))
    assert {"scaling.csv", "runs.csv", "figures/"} <= links
    assert [link for link in links if not (report / link).exists()] == []
    runs = list(csv.DictReader((report / "runs.csv").read_text().splitlines()))
    assert [run["state"] for run in runs] == ["completed"] * 2
    assert {path: path.stat().st_mtime_ns for path in read_only.rglob("*")} == before
    assert unreadable == [
        2,
        "",
        f"error: {private}/plan.json: Permission denied; "
        "check the permissions of this path and of the folders above it\n",
    ]
    assert (status[0], status[2]) == (0, "")


def test_verify_passes_for_study_run_and_folder(ran):
    done = bench("verify", cwd=ran)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2 of 2 runs pass")
    done = bench("verify", "n1x2-gloo-torchrun-b4-r1", cwd=ran)
    assert done.returncode == 0
    assert "  ok    joined: 2 of 2 on " in done.stdout
    assert "  ok    backend: gloo\n" in done.stdout
    done = bench("verify", "results/tiny/runs/n1x2-gloo-torchrun-b4-r1/attempt-1", "--json", cwd=ran)
    content = json.loads(done.stdout)
    assert content["passed"] is True
    assert {check["check"] for check in content["runs"][0]["checks"]} == {
        *("state", "files", "joined", "world size", "backend", "transport", "nodes"),
        *("global batch", "options", "epochs", "throughput", "loss", "samples", "trains together"),
    }


def test_only_chooses_by_name_and_by_property(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    bench("plan", "tiny.yaml", cwd=tmp_path)
    by_name = bench("submit", "--dry-run", "--only", "n1x2-*", cwd=tmp_path).stdout
    by_value = bench("submit", "--dry-run", "--only", "world_size=2", cwd=tmp_path).stdout
    by_short_name = bench("submit", "--dry-run", "--only", "n1x2-b4", cwd=tmp_path).stdout
    assert by_name == by_value == by_short_name
    assert by_name.splitlines()[-1] == "1 of 2 runs would be started"
    whole = bench("submit", "--dry-run", "--only", "sweep_time=0.50", cwd=tmp_path).stdout
    assert whole.splitlines()[-1] == "2 of 2 runs would be started", "0.50 is 0.5"
    said = refusal("submit", "--dry-run", "--only", "wrold_size=2", cwd=tmp_path)
    assert said.startswith("--only: unknown key 'wrold_size'; did you mean 'world_size'? ")
    assert not (tmp_path / "results/tiny/runs").exists(), "a dry run leaves nothing"


@pytest.mark.parametrize("words", [["--help"], ["submit", "-h"], ["--version"]])
def test_help_and_version_work(tmp_path, words):
    done = bench(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_name_that_is_too_long_is_one_error(tmp_path):
    for command in ("plan", "status", "lint", "doctor", "report", "preflight"):
        said = refusal(command, "a" * 300, cwd=tmp_path)
        assert re.fullmatch(r"a{300}\S*: File name too long; give a shorter name", said)


def test_studies_are_listed_with_their_states_the_newest_first(tmp_path: Path) -> None:
    failed, planned = ("failed", "", "out-of-memory"), ("planned", "", None)
    root = tmp_path / "results"
    whole = finished(root / "a study", strong(sizes=(1, 2)))
    (whole / "report").mkdir()
    (whole / "report/index.html").touch()
    ends = {"state": lambda cell, repeat: failed if repeat == 1 else planned}
    finished(root / "fails", strong(sizes=(1,)), **ends)
    finished(root / "damaged", strong(sizes=(1,)))
    StudyFolder(root / "damaged").plan_json.write_text("{")
    for age_s, name in enumerate(("fails", "a study", "damaged")):
        plan = StudyFolder(root / name).plan_json
        os.utime(plan, (1e9 - age_s, 1e9 - age_s))
    done = bench("list", cwd=tmp_path)
    first, second, third = done.stdout.splitlines()[-3:]
    assert (done.returncode, done.stderr) == (0, "")
    runs = "0 of 3 runs completed; 1 failed; 2 not started"
    assert first.split() == f"fails 2001-09-09 {runs} bench doctor fails".split()
    assert second.split() == "a study 2001-09-09 6 of 6 runs completed bench report 'a study'".split()
    assert third.startswith("damaged")
    listed = json.loads(bench("list", "--json", cwd=tmp_path).stdout)["studies"]
    assert [one["study"] for one in listed] == ["fails", "a study", "damaged"]
    assert listed[0]["states"] == {"failed": 1, "planned": 2}
    assert listed[1] == {
        "study": "a study",
        "planned": "2001-09-09",
        "matrix": None,
        "states": {"completed": 6},
        "problem": None,
        "report": "results/a study/report/index.html",
        "next": "bench report 'a study'",
    }
    assert listed[2]["problem"]


@pytest.fixture
def folder(tmp_path):
    def write(**cluster):
        axes = {"nodes": [1, 2], "gpus_per_node": [1, 4]}
        cluster["time_limit"] = "30m"
        text = matrix("s", cluster=cluster, axes=axes, batch=8, workload=None, repeats=2)
        (tmp_path / "m.yaml").write_text(text)
        return tmp_path

    return write


WHOLE = "; at most 24 GPU-hours with exclusive nodes, 15 without"
UNKNOWN = "; at least 15 GPU-hours (set cluster.node_gpus for the number with exclusive nodes)"


@pytest.mark.parametrize(
    ("cluster", "expected", "cost"),
    [
        # 2 repeats of half an hour: the nodes of the four cells x 4 GPUs, or the GPUs in use.
        ({"node_gpus": 4}, (24, True, 15, {"n1x1-nccl-srun-b8": 3, "n2x1-nccl-srun-b8": 6}), WHOLE),
        ({"exclusive": True}, (15, False, 15, {}), UNKNOWN),
        ({"exclusive": False}, (15, True, 15, {}), "; at most 15 GPU-hours"),
        ({"exclusive": False, "node_gpus": 4}, (15, True, 15, {}), "; at most 15 GPU-hours"),
    ],
)
def test_the_plan_says_what_nodes_cost_and_whether_this_is_exact(folder, cluster, expected, cost):
    path = folder(**cluster)
    content = json.loads(bench("plan", "m.yaml", "--json", cwd=path).stdout)
    names = ("gpu_hours", "gpu_hours_exact", "gpu_hours_without_exclusive", "idle_gpus")
    assert tuple(content[name] for name in names) == expected
    lines = bench("plan", "m.yaml", cwd=path).stdout.splitlines()
    assert any(line.endswith(cost) for line in lines[-3:])
    idle = "idle GPUs that each run of a cell reserves: n1x1 (3), n2x1 (6)"
    assert (idle in lines) == bool(expected[3])


def test_the_budget_counts_all_gpus_of_whole_nodes_in_runs_and_packs(folder):
    path = folder(node_gpus=4)
    bench("plan", "m.yaml", cwd=path)
    assert refusal("submit", "--budget", "23", "--dry-run", cwd=path) == (
        "8 runs could use 24 GPU-hours, more than the budget of 23; raise --budget, lower "
        "cluster.time_limit, or choose runs with --only"
    )
    assert bench("submit", "--budget", "24", "--dry-run", cwd=path).returncode == 0
    assert refusal("submit", "--pack", "--dry-run", "--budget", "31", cwd=path) == (
        "8 runs in 1 pack (up to 2 nodes for 4 h 00 min) could use 32 GPU-hours, more than the budget of 31; "
        "raise --budget, lower cluster.time_limit, choose runs with --only, or omit --pack"
    )
    only = ("--only", "nodes=1", "--only", "gpus_per_node=1")
    done = bench("submit", "--pack", "--dry-run", "--budget", "4", *only, cwd=path)
    cost = "at most 4 GPU-hours with exclusive nodes, 1 without"
    assert done.stderr == f"1 job: 2 runs in 1 pack (up to 1 node for 1 h 00 min), {cost}\n"
    assert " --nodes=1 --ntasks-per-node=1 --gres=gpu:1 --time=01:00:00 " in done.stdout
    # GPUs that runs on CPUs reserve are counted, too.
    own = {"cluster": {"partition": "p", "node_gpus": 4}, "workload": {"device": "cpu"}}
    (path / "cpu.yaml").write_text(matrix("cpu", axes={"tasks_per_node": [1]}, batch=8, **own))
    bench("plan", "cpu.yaml", cwd=path)
    found = refusal("submit", "cpu", "--budget", "0.1", "--dry-run", cwd=path)
    assert "GPU-hours, more than the budget of 0.1" in found


MATRIX = """\
cluster:
  executor: local
  env: {OWN: qzv-1, NCCL_DEBUG: INFO}
axes: {nodes: [1], tasks_per_node: [1], launcher: [own], env.WAY: [w1]}
scaling: [{mode: weak, per_gpu_batch: [2]}]
repeats: 1
workload: {device: cpu, command: 'python -c pass {env.OWN}', metrics: none}
"""
PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.usefixtures("nothing_drawn")
def test_a_value_without_a_prefix_is_in_no_report_and_no_json(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(MATRIX)
    done = bench("run", "m.yaml", cwd=tmp_path, **PATH)
    assert (done.returncode, done.stderr.count("\nerror: Nothing to compare. ")) == (1, 1), done.stderr
    assert re.search(r"^\[1/1\] n1x\S+ completed in ", done.stderr, re.M)
    assert "study m: 1 completed\n" in done.stderr
    study = tmp_path / "results/m"
    holders = {path for path in study.rglob("*") if path.is_file() and b"qzv" in path.read_bytes()}
    (script,) = study.glob("scripts/*")
    assert holders == {script, study / "plan.json", study / "matrix.yaml"}
    assert {path.stat().st_mode & 0o777 for path in holders} == {0o600}
    assert "w1" in (study / "report/index.html").read_text()
    for words in ("plan m.yaml --json", "status m --json", "verify m --json", "compare m m --json"):
        assert "qzv" not in bench(*words.split(), cwd=tmp_path).stdout


def test_a_shown_matrix_lacks_only_values_that_are_not_shown_and_urls_their_users() -> None:
    text = "x: &x {A: 1}\ncluster:\n  env:\n    <<: *x\n    B: |\n      2\n    NCCL_C: 3\n"
    assert shown_text(text) == text.replace("A: 1", "A: ...").replace("|\n      2\n", "...\n")
    assert without_users("a https://u:p/w@h:1/x http://h:1/a@b") == "a https://h:1/x http://h:1/a@b"


def answered(folder: Path, text: bytes | None) -> tuple[int, str]:
    """Submit study m on a terminal, type ``text`` (None: Ctrl-C) at the question; return exit code and output."""
    with forks():
        process, terminal = pty.fork()
    if not process:
        with chdir(folder):
            be_bench("submit", "m", **PATH, COLUMNS="200")
    shown = b""
    while b"[y/N] " not in shown:
        shown += os.read(terminal, 1000)
    os.write(terminal, b"\x03" if text is None else text)
    with suppress(OSError):  # the terminal is closed
        while more := os.read(terminal, 1000):
            shown += more
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.close(terminal)
    return code, shown.decode()


def test_on_a_terminal_a_cost_above_the_limit_is_a_question_and_only_yes_starts_runs(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(MATRIX)
    (tmp_path / "site.yaml").write_text("ask_above: {jobs: 0}")
    bench("plan", "m.yaml", "--site", "site.yaml", cwd=tmp_path)
    for text in (b"\n", None):
        code, shown = answered(tmp_path, text)
        assert (code, "nothing was started" in shown) == (1, True)
        assert not (tmp_path / "results/m/ledger.jsonl").exists()
    assert refusal("submit", "m", cwd=tmp_path, **PATH) == (
        "this is above ask_above (jobs: 0; a site file can change it): 1 run, at most 0.5 node-hours, no GPU; "
        "give --yes if this is intended"
    )
    assert bench("submit", "m", "--dry-run", cwd=tmp_path, **PATH).returncode == 0
    assert answered(tmp_path, b"y\n")[0] == 0
    done = bench("run", "m.yaml", "--site", "site.yaml", "--retry-failed", cwd=tmp_path, **PATH)
    assert "\nnothing to start\n" in done.stderr
    assert len((tmp_path / "results/m/ledger.jsonl").read_text().splitlines()) >= 2
    done = bench("run", "m.yaml", "--site", "site.yaml", "--results", "other", cwd=tmp_path, **PATH)
    assert (done.returncode, "give --yes" in done.stderr) == (2, True)
