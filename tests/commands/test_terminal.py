"""What a user sees on a terminal: widths, names, colours, the first screen, and completed values."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.analysis.studies import change_run, finished, strong
from tests.commands.command_line import bench, on_terminal, refusal
from tests.common import run_program
from tests.matrices import command, matrix

ROOT = Path(__file__).resolve().parents[2]
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a study with a failed run, a planned run, and a long reason."""
    states = {2: ("failed", "exit code 2; torch said that it found 6/4 of nothing " * 4, "bad-exit")}
    ends = {"state": lambda cell, repeat: states.get(repeat, ("planned", "", None))}
    monkeypatch.chdir(tmp_path)
    return finished(tmp_path / "results" / "s", strong(sizes=(1, 2)), **ends)


@pytest.mark.parametrize(
    "words", ["", "plan mixed_nodes", "status s", "verify s", "list", "status nothing", "--help"]
)
def test_no_line_is_too_wide_and_no_word_is_broken(study, words, monkeypatch):
    whole = on_terminal(*words.split(), columns=2000, monkeypatch=monkeypatch)
    for columns in (60, 100):
        shown = on_terminal(*words.split(), columns=columns, monkeypatch=monkeypatch)
        lines = ESCAPES.sub("", shown).splitlines()
        assert lines
        assert [line for line in lines if len(line) > columns and " " in line.strip()] == []
        assert words_of(shown) <= words_of(whole), "a word is broken"


def words_of(text: str) -> set[str]:
    """Return the words and names in a text, except those that typer cuts in its list of options."""
    return {word.strip(".:") for word in re.findall(r"[\w/.:%+-]++(?!…)", ESCAPES.sub("", text))}


def test_states_have_colours_unless_the_user_wants_none(study, monkeypatch):
    assert "\x1b[31mfailed" in on_terminal("status", "s", columns=120, monkeypatch=monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in on_terminal("status", "s", columns=120, monkeypatch=monkeypatch)
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b" not in bench("status", "s", cwd=study.parents[1]).stdout


def test_the_first_screen_and_the_list_end_with_the_next_command(tmp_path):
    def next_step() -> str:
        done = bench(cwd=tmp_path)
        assert (done.returncode, len(done.stdout.splitlines())) == (0, 8)
        return done.stdout.splitlines()[-1]

    assert next_step() == "next: bench init"
    (tmp_path / "other.yaml").write_text("a: 1\n")
    (tmp_path / "my study.yaml").write_text(matrix("s"))
    assert next_step() == "next: bench plan 'my study.yaml'"
    bench("plan", "my study.yaml", cwd=tmp_path)
    assert next_step() == "next: bench submit s"
    study = finished(tmp_path / "results" / "t", strong(sizes=(1, 2)))
    assert next_step() == "next: bench report t"
    assert [line.split()[-1] for line in bench("list", cwd=tmp_path).stdout.splitlines()[-2:]] == ["t", "s"]
    for cell in strong(sizes=(1, 2)):
        for repeat in (1, 2, 3):
            change_run(study, f"{cell.cell_id}-r{repeat}", state="failed", reason="exit code 1")
    assert next_step() == "next: bench doctor t"


#: Words that a user begins to type, and values that the shell offers.
COMPLETED = {
    "verify s/n1x1": {"s/n1x1-gloo-torchrun-b8-precision.fp32-r1"},
    "plan m": {"m.yaml", "mixed_nodes"},
    "report s --baseline 1": {"1x1"},
    "submit s --only pre": {"precision=fp32", "precision=bf16"},
    "verify broken/n": set(),
    "report broken --baseline 1": set(),
}
#: Prints the values that the shell offers for each of the arguments, and the heavy packages that were imported.
COMPLETE = """\
import os, sys
from ddp_scaling_bench.__main__ import main
typed, sys.argv = sys.argv[1:], ["bench"]
for words in typed:
    os.environ |= {"COMP_WORDS": f"bench {words}", "COMP_CWORD": str(words.count(" ") + 1)}
    try:
        main()
    except SystemExit:
        print("--")
print({"torch", "numpy", "pandas", "scipy"} & {*sys.modules})
"""


def test_the_shell_completes_values_without_heavy_packages(tmp_path):
    axes = {"tasks_per_node": [1], "precision": ["fp32", "bf16"]}
    own = command("python t.py {precision} {per_gpu_batch}")
    for name in ("s", "other"):
        (tmp_path / "m.yaml").write_text(matrix(name, axes=axes, batch=8, workload=own))
        assert bench("plan", "m.yaml", cwd=tmp_path).returncode == 0
    (tmp_path / "results/broken").mkdir()
    (tmp_path / "results/broken/plan.json").write_text('{"runs": [{}], "cells": [1]}')
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, "_BENCH_COMPLETE": "complete_bash"}
    done = run_program([sys.executable, "-c", COMPLETE, *COMPLETED], cwd=tmp_path, env=env)
    *offered, heavy = done.stdout.split("--\n")
    assert (heavy, done.stderr) == ("set()\n", "")
    for values, text in zip(COMPLETED.values(), offered, strict=True):
        assert values <= {*text.splitlines()}


def test_a_run_where_a_study_is_wanted_and_a_typing_error_get_their_remedies(study):
    run = next(path.name for path in sorted((study / "runs").iterdir()))
    where = study.parents[1]
    assert refusal("status", run, cwd=where) == f"{run} is a run, not a study; its study is s"
    finished(study.parent / "training", strong(sizes=(1,)))
    wrong = "no study 'trainin' is planned below results (planned: s, training); did you mean training?"
    assert refusal("status", "trainin", cwd=where) == wrong
    part = f"{run[:4]} is not the whole name of a run; give a run, such as training/{run[:4]}"
    assert refusal("verify", run[:4], cwd=where).startswith(part)
    assert refusal("doctor", "s/other", cwd=where).startswith(
        "s has no run other; give a run, such as s/n1x1"
    )
    assert refusal("run", "results/s", cwd=where).startswith("results/s is a study, not a matrix")
    (where / "results/broken").mkdir()
    (where / "results/broken/plan.json").write_text('{"runs": [{}]}')
    assert refusal("doctor", "nosuch", cwd=where).startswith(
        "nosuch: there is no such file, study, run or job"
    )
    assert refusal("run", "s", cwd=where).startswith("s is a study, not a matrix; give its matrix")
    assert refusal("list", "--results", "x", cwd=where).startswith(
        "no study is planned below x; studies are below results: give --results results"
    )
    assert refusal("submit", "--budget", "1", "s", cwd=where).startswith(
        "--budget is a number of GPU-hours, but"
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["list", "demo"],
            "bench list: it does not take demo; to list the runs of a study: bench status STUDY;",
        ),
        (
            ["plan", "m.yaml", "--repeats", "3"],
            "bench plan: no such option: --repeats; in the matrix, write `repeats` at the top level;",
        ),
        (
            ["submit", "s", "-p", "gpu"],
            "bench submit: no such option: -p; in the matrix, write `partition` below `cluster:`;",
        ),
        (
            ["--results", "r", "status"],
            "bench: no such option: --results; write it after a command, as in `bench status --results`;",
        ),
        (
            ["report", "--epochs", "x"],
            "bench report: --epochs x: give a valid integer (with --samples:",
        ),
        (["preflight", "m.yaml", "--nodes", "0"], "bench preflight: --nodes 0: give a value greater than"),
        (["frobnicate"], "bench: no such command 'frobnicate'; see bench --help"),
        (["status", "--json=3\x1b[31m"], "bench status: --json does not take a value; write only --json;"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistyped_command_gives_one_line_with_place_reason_and_remedy(words, error, tmp_path):
    done = bench(*words, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {error}")
    assert line.endswith("--help")
    assert (done.returncode, "\x1b" in line) == (2, False)


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        ("submit s t", "it does not take t: it takes one study; repeat the command for others;"),
        ("submit s --wait 5m", "it does not take 5m: --wait has no value;"),
        ("submit s --only nodes 1", "it does not take 1: --only has one value (select runs by a name pattern"),
        ("run s epochs=3", "it does not take epochs=3: it takes one matrix; settings belong into the matrix;"),
        ("submit --only", "--only needs a value (select runs by a name pattern ('n4x4-*')"),
        ("submit --dryrun", "no such option: --dryrun; did you mean --dry-run? see"),
        ("submit --retry", "no such option: --retry; did you mean --retry-disturbed or --retry-failed? see"),
        ("submit -W", "no such option: -W; did you mean --wait? see"),
        ("submit --resume", "no such option: --resume; see bench submit --help"),
        ("submit --begin=now", "no such option: --begin; in the matrix, write `directives: [--begin=VALUE]` below"),
        ("submit --export ALL", "no such option: --export; in the matrix, use cluster.env; see"),
        ("submit --array 1-4", "no such option: --array; every run is one job that starts once; see"),
        ("status -w", "no such option: -w; did you mean --watch? see"),
        ("status --follow", "no such option: --follow; see bench status --help"),
        ("advise -s", "no such option: -s; did you mean --samples? see"),
    ],
)  # fmt: skip
def test_the_remedy_of_a_mistyped_option_is_about_its_command(typed, error, tmp_path):
    words = typed.split()
    assert refusal(*words, cwd=tmp_path).startswith(f"bench {words[0]}: {error}")


def test_a_word_that_is_no_command_is_compared_with_commands_and_options(tmp_path):
    for typed, error in {
        "--json status": "no such option: --json; write it after a command, as in `bench status --json`;",
        "version": "no such command 'version'; did you mean --version? see",
        "statsu": "no such command 'statsu'; did you mean status? see",
        "start s": "no such command 'start'; see bench --help",
        "m.yaml": "no such command 'm.yaml'; plan a matrix with `bench plan m.yaml`; see",
    }.items():
        assert refusal(*typed.split(), cwd=tmp_path).startswith(f"bench: {error}")


def test_what_is_near_a_mistyped_study_or_run_is_named(study):
    where, run = study.parents[1], next(path.name for path in sorted((study / "runs").iterdir()))
    (where / "m.yaml").write_text("scaling: []\n")
    (where / "packed.tgz").write_bytes(b"\x1f\x8b\0")
    (where / "results/other.tar.gz").touch()
    listed = "is planned below results (planned: s)"
    path = f"results/s/runs/{run}"
    for words, error in {
        ("status", "m"): "no study 'm' is planned below results; plan it: bench plan m.yaml",
        ("status", "m.yml"): "m.yml: the matrix does not exist; plan the one that exists: bench plan m.yaml",
        ("status", ""): "the name of the study is empty; give a name (see bench list)",
        ("status", "other"): f"no study 'other' {listed}; did you mean results/other.tar.gz?",
        ("status", "/reslts/s"): f"no study '/reslts/s' {listed}; did you mean s?",
        (
            "status",
            "packed.tgz",
        ): "packed.tgz is not a study; give one of the studies (planned: s); an archive has",
        ("status", "results/s/nope"): "results/s/nope does not exist; its study is results/s",
        ("verify", f"{path}/metrics.csv"): f"{path}/metrics.csv does not exist; give the run: {path}",
        (
            "verify",
            f"{path}/attempt-1/run.json",
        ): f"{path}/attempt-1/run.json is a file of a run; give the run: {path}",
        ("verify", f"s/runs/{run}"): f"s/runs/{run} does not exist; give the run: {path}",
        ("verify", "results/s/runs/nope"): "s has no run nope; give a run, such as s/",
        (
            "status",
            "--results",
            "results/s",
        ): "results/s is a study, not a folder of studies; give --results results",
        (
            "submit",
            "s",
            "--only",
            "nodes=9",
        ): "--only nodes=9 matches no run; write nodes=VALUE with one of its values: 1",
        (
            "submit",
            "s",
            "--only",
            "nodes>1",
        ): "--only nodes>1 matches no run; write nodes=VALUE with one of its values: 1",
        (
            "submit",
            "s",
            "--only",
            "n1",
        ): "--only n1 matches no run; a pattern matches whole names: --only 'n1*'",
        (
            "submit",
            "s",
            "--only",
            "",
        ): "--only is empty; give KEY=VALUE or a pattern of run names, or omit it",
        ("submit", "s", "--only", "state=failed"): "--only: unknown key 'state'; allowed are",
        ("preflight", "s"): "s is a study, not a matrix; give its matrix",
    }.items():
        assert refusal(*words, cwd=where).startswith(error)
    assert refusal("status", cwd=study).endswith("studies are below ..: give --results ..")
    assert "BENCH_RESULTS=m.yaml is not a folder" in refusal("status", cwd=where, BENCH_RESULTS="m.yaml")
    (study / "plan.json").rename(study / "plan")
    away = "restore it, or move results/s away and plan the matrix again"
    assert refusal("status", "s", cwd=where) == f"results/s contains runs, but no plan.json; {away}"


def test_an_error_breaks_at_the_width_of_the_terminal(tmp_path):
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "bench", "status", "nosuch"]
    subprocess.run(words, cwd=tmp_path, env=env, stdout=follower, stderr=follower, check=False)
    os.close(follower)
    lines = os.read(leader, 10_000).decode().splitlines()
    os.close(leader)
    assert len(lines) > 1
    assert max(map(len, lines)) <= 50
    assert " ".join(lines).split() == ["error:", *refusal("status", "nosuch", cwd=tmp_path).split()]


def test_words_that_look_like_others_get_the_right_remedy(tmp_path):
    done = bench("init", "--command", "python", "train.py", cwd=tmp_path)
    assert "train.py is no name of a matrix" in done.stderr
    assert not [*tmp_path.iterdir()]
    done = bench("init", "--command", "python", "m.yaml", "--lr", "1", cwd=tmp_path)
    assert "no such option: --lr; put a --command into quotes; see bench init --help" in done.stderr
    assert refusal("doctor", "a", "b", cwd=tmp_path).startswith(
        "a is not a log; give several logs, or one run"
    )
    (tmp_path / "t.csv").write_text("gpus,tok\n1,10\n2,19\n")
    (tmp_path / "bare.csv").write_text("1,1200\n2,2300\n")
    bare = refusal("report", "bare.csv", cwd=tmp_path)
    assert "error: bare.csv:1: the first line has numbers, not names of columns; put a line of names" in bare
    swapped = bench("report", "t.csv", "--mode", "strong", "--map", "tok=throughput", cwd=tmp_path).stderr
    assert swapped.endswith("--map tok=throughput: the column comes second; write --map throughput=tok\n")
