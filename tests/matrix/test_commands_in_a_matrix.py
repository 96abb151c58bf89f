"""Parse, check and quote a command that replaces the built-in training."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.matrix.workload import shell_word, torchrun_words
from bench.plan import make_plan
from tests.common import run_program

HEAD = """\
cluster: {executor: %s}
axes: {tasks_per_node: [1, 2]}
scaling: [{mode: weak, per_gpu_batch: [16]}]
workload:
  device: cpu
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def plan(workload: str, executor: str = "local"):
        (tmp_path / "own.yaml").write_text(
            HEAD % executor + "".join(f"  {line}\n" for line in workload.splitlines())
        )
        return make_plan(Path("own.yaml"))

    return plan


def test_a_text_is_split_like_in_a_shell_and_a_list_is_kept(plan):
    text = plan("command: python train.py --name 'a b' {per_gpu_batch}")
    words = plan("command: [python, train.py, --name, a b, '{per_gpu_batch}']")
    assert text.cells[0].command == ["python", "train.py", "--name", "a b", "{per_gpu_batch}"]
    assert words.cells[0].command == text.cells[0].command


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (
            "torchrun --nproc_per_node 2 t.py --b {per_gpu_batch}",
            "`launcher: [torchrun]` and `command: python t.py --b {per_gpu_batch}`",
        ),
        (
            "env X=1 accelerate launch -m own.train 'a b'",
            "`launcher: [torchrun]` and `command: env X=1 python -m own.train 'a b'`",
        ),
        ("srun python t.py", "`launcher: [srun]` and `command: python t.py`"),
    ],
)
def test_a_launcher_in_the_command_is_a_warning_with_the_lines_to_write(plan, command, lines):
    name = next(name for name in ("torchrun", "accelerate launch", "srun") if name in command)
    warning = f"own.yaml:6: bench starts the command once per rank, and {name} in it starts ranks again; use {lines}"
    found = plan(f'command: "{command}"').warnings
    assert [one for one in found if "starts ranks again" in one] == [warning]


def test_unused_settings_of_a_command_give_warnings(plan):
    warnings = plan("command: python x.py\nprecision: bf16\nepochs: 2").warnings
    assert [words for words in warnings if words.startswith("own.yaml")] == [
        "own.yaml:6: the command contains neither {per_gpu_batch} nor {global_batch}: "
        "unless it reads $BENCH_PER_GPU_BATCH, its batch may differ from the cell's",
        "own.yaml:7: workload.precision is ignored: the command does not contain {precision}",
    ]
    assert (
        "own.yaml:6: workload.metrics is ignored: there is no workload.command"
        in plan("metrics: none").warnings
    )


def test_a_command_can_be_an_axis(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(
        "cluster: {executor: local}\n"
        "axes: {command: ['python a.py {global_batch}', [python, b.py, '{global_batch}']]}\n"
        "scaling: [{mode: weak, per_gpu_batch: [16]}]\n"
        "workload: {device: cpu, metrics: none}\n"
    )
    plan = make_plan(Path("own.yaml"))
    assert [cell.command for cell in plan.cells] == [
        ["python", "a.py", "{global_batch}"],
        ["python", "b.py", "{global_batch}"],
    ]
    assert [cell.metrics for cell in plan.cells] == [{"source": "none"}] * 2
    assert len({cell.cell_id for cell in plan.cells}) == 2


def test_the_names_of_commands_are_in_the_names_of_cells_and_series(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(
        "cluster: {executor: local}\naxes:\n  tasks_per_node: [1, 2]\n  command:\n"
        "    - {name: fsdp-2, run: python a.py --fsdp2}\n    - {name: ddp, run: [python, a.py]}\n"
        "    - python b.py\nscaling: [{mode: weak, per_gpu_batch: [16]}]\n"
        "workload: {device: cpu, metrics: none}\n"
        "exclude: [{command: ddp, tasks_per_node: 2}]\n"
        "include:\n  - {tasks_per_node: 4, command: fsdp-2}\n"
        "  - {tasks_per_node: 1, command: {name: new, run: ./new}}\n"
    )
    plan = make_plan(path)
    assert [(cell.cell_id, cell.command) for cell in plan.cells] == [
        ("n1x1-gloo-torchrun-b16-command.fsdp-2", ["python", "a.py", "--fsdp2"]),
        ("n1x1-gloo-torchrun-b16-command.ddp", ["python", "a.py"]),
        ("n1x1-gloo-torchrun-b16-command.python+b.py", ["python", "b.py"]),
        ("n1x2-gloo-torchrun-b16-command.fsdp-2", ["python", "a.py", "--fsdp2"]),
        ("n1x2-gloo-torchrun-b16-command.python+b.py", ["python", "b.py"]),
        ("n1x4-gloo-torchrun-b16-command.fsdp-2", ["python", "a.py", "--fsdp2"]),
        ("n1x1-gloo-torchrun-b16-command.new", ["./new"]),
    ]
    assert {cell.series[0].series for cell in plan.cells if cell.command_label == "fsdp-2"} == {
        "weak-16-gloo-torchrun-command.fsdp-2"
    }


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python train.py --a", "train.py --a"),
        ("python -m pkg.train --a", "-m pkg.train --a"),
        ("./train.sh --a", "--no-python ./train.sh --a"),
        ("/usr/bin/python3 train.py", "--no-python /usr/bin/python3 train.py"),
    ],
)
def test_torchrun_is_given_a_script_a_module_or_a_program(command, words):
    assert torchrun_words(shlex.split(command)) == shlex.split(words)


def test_pythons_own_options_are_kept_under_torchrun():
    assert shell_word(torchrun_words(["python", "-O", "x.py"])[1], {}) == '"$python"'
    assert torchrun_words(["python", "-c", "print()"])[2:] == ["-c", "print()"]


@given(st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"])), st.text("{}$`'\" ;a\\"))
def test_any_value_reaches_the_program_unchanged(value, around):
    template = around.replace("{", "{{").replace("}", "}}") + "={data}"
    word = shell_word(template, {"data": value})
    assert shlex.split(word) == [f"{around}={value}"]


@pytest.mark.parametrize("value", ["\r", "a\r\nb", "it's\r", "\\\r$(x)"])
def test_a_carriage_return_reaches_the_program_and_is_not_in_the_script(value):
    """bash is asked, because ``shlex.split`` does not know ``$'...'``."""
    word = shell_word("{data}", {"data": value})
    assert "\r" not in word
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert done.stdout.decode() == value


def test_a_value_of_run_time_is_expanded_and_not_split(tmp_path):
    word = shell_word("--out={run_dir}/a b;{{", {})
    done = run_program(["bash", "-c", f"run_dir='x  *\"$(y)'; printf '[%s]' {word}"], check=True)
    assert done.stdout == '[--out=x  *"$(y)/a b;{]'


def test_the_device_of_a_command_can_be_that_of_the_site_file(tmp_path):
    path, site = tmp_path / "own.yaml", tmp_path / "site.yaml"
    path.write_text("axes: {command: ['true', 'false']}\nscaling: [{mode: weak, per_gpu_batch: [4]}]\n")
    site.write_text("cluster: {executor: local}\nworkload: {device: cpu}\n")
    assert {cell.device for cell in make_plan(path, site=site).cells} == {"cpu"}
