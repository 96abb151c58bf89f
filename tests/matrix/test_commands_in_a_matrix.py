"""Parse, check and quote a command that replaces the built-in training."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bench.matrix.launchers import LAUNCHERS, read_launch
from bench.matrix.workload import command_values, filled_words, shell_word
from bench.plan import make_plan, scripts, write_plan
from bench.study.plan_json import open_study
from ddp_scaling_bench.errors import InputError
from ddp_scaling_bench.train.options import OPTIONS
from tests.common import run_program
from tests.matrices import plan_of

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
    assert text.cells[0].argv == ["python", "train.py", "--name", "a b", "{per_gpu_batch}"]
    assert words.cells[0].argv == text.cells[0].argv


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "|\n  python t.py\n  trainer.batch={per_gpu_batch}\n  data=x",
            "t.py trainer.batch={per_gpu_batch} data=x",
        ),
        ("|\n  python t.py\n  --data\n  /scratch/x", "t.py --data /scratch/x"),
        ("|\n  python t.py --name\n  a:\u00a0b", "t.py --name a:\u00a0b"),
        (">\n  python t.py --config\n    data/x.yaml", "t.py --config data/x.yaml"),
        ("|\n  python t.py \\\n    --bs 4 \\\n  --lr 1\\\\", "t.py --bs 4 --lr '1\\'"),
        (">\n  python t.py \\\n  --bs 4 \\\n  --lr 1", "t.py --bs 4 --lr 1"),
        ("python t.py --pattern ' \\ x'", "t.py --pattern ' \\ x'"),
        ('python t.py --sep " \\ "', "t.py --sep ' \\ '"),
        ("python t.py --sep \\  --bs 4", "t.py --sep ' ' --bs 4"),
    ],
)
def test_the_words_of_a_command_can_be_in_several_lines_and_quotes_keep_theirs(plan, command, words):
    assert plan(f"command: {command}").cells[0].argv == ["python", *shlex.split(words)]


def test_a_placeholder_has_the_text_of_the_matrix(plan):
    made = plan(
        "command: python t.py {parameters} {join_timeout} {grad_accum}\nparameters: 25M\njoin_timeout: 5m"
    )
    scripts_now = [text for _, text in scripts(made)]
    assert all("t.py 25M 5m 1\n" in text for text in scripts_now)
    assert {cell.workload["parameters"] for cell in made.cells} == {25_000_000}
    study = open_study(write_plan(made, Path("results")))
    for cell in study.cells.values():
        values = command_values(cell, "own")
        assert filled_words(cell.argv, values)[-3:] == ["25M", "5m", "1"]


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
    assert [(cell.cell_id, cell.argv) for cell in plan.cells] == [
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


def test_a_cell_has_the_options_that_its_command_uses(plan):
    common = ["device", "steps_per_epoch", "epochs", "warmup_steps", "attribution_steps", "grad_accum"]
    common.append("join_timeout")
    assert list(plan("command: python x.py").cells[0].workload) == common
    named = plan("command: python x.py {precision} {data}\nprecision: bf16").cells[0].workload
    assert named.keys() - set(common) == {"precision", "data"}
    assert (named["precision"], named["data"]) == ("bf16", "synthetic")


def test_the_built_in_training_is_the_default_command(plan):
    cell = plan("epochs: 2").cells[0]
    assert cell.argv == ["python", "-m", "ddp_scaling_bench.train"]
    assert (cell.program, cell.metrics) == ("the built-in training", {"source": "recorder"})
    assert (cell.planned_epochs, cell.planned_samples, "torch" in cell.packages) == (2, 16 * 50, True)
    assert list(cell.workload) == list(OPTIONS)
    own = plan("command: python 'a b.py' {per_gpu_batch}").cells[0]
    assert own.program == "python 'a b.py' {per_gpu_batch}"
    assert (own.planned_epochs, own.planned_samples, own.packages) == (None, None, [])


@given(st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"])), st.text("{}$`'\" ;a\\"))
def test_any_value_reaches_the_program_unchanged(value, around):
    template = around.replace("{", "{{").replace("}", "}}") + "={data}"
    word = shell_word(template, {"data": value})
    assert shlex.split(word) == [f"{around}={value}"]


def test_values_reach_the_program_in_bash_and_a_carriage_return_is_not_in_the_script():
    """bash is asked, because ``shlex.split`` does not know ``$'...'``."""
    value = "it's a\r\n\\\r$(x)"
    word = shell_word("{data}", {"data": value})
    assert "\r" not in word
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert done.stdout.decode() == value
    # A value of run time is expanded and not split.
    word = shell_word("--out={run_dir}/a b;{{", {})
    done = run_program(["bash", "-c", f"run_dir='x  *\"$(y)'; printf '[%s]' {word}"], check=True)
    assert done.stdout == '[--out=x  *"$(y)/a b;{]'


def test_the_device_of_a_command_can_be_that_of_the_site_file(tmp_path):
    path, site = tmp_path / "own.yaml", tmp_path / "site.yaml"
    path.write_text("axes: {command: ['true', 'false']}\nscaling: [{mode: weak, per_gpu_batch: [4]}]\n")
    site.write_text("cluster: {executor: local}\nworkload: {device: cpu}\n")
    assert {cell.device for cell in make_plan(path, site=site).cells} == {"cpu"}


#: Commands with their launcher and the program that one process executes, if it is certain; commands whose launcher
#: stays, with their words for all sizes; and commands without a launcher.
FOUND, KEPT, NONE = (
    [part.splitlines() for part in path.read_text().split("\n\n")]
    for path in (
        Path(__file__).with_name("launches") / f"{name}.txt" for name in ("one_process", "kept", "none")
    )
)


def test_a_launcher_and_its_program_are_found():
    for command, launcher, *program in FOUND:
        found = read_launch(shlex.split(command))
        words = [*found.wrapper, *found.program] if found.program else []
        assert (found.launcher.name, words) == (launcher, shlex.split("".join(program))), command
    assert [command for command in NONE[0] if read_launch(shlex.split(command))] == []


@pytest.mark.parametrize(("command", "words"), KEPT)
@pytest.mark.parametrize("launcher", ["torchrun", "own"])
def test_a_launcher_of_the_command_keeps_its_words(command, words, launcher, tmp_path):
    """The lines of the error, pasted into the matrix, are a matrix without warnings about its launch."""
    launch = read_launch(shlex.split(command))
    assert launch.for_sizes() == words.split()
    per = launch.launcher.starts[0]
    lines = {"launcher": [launcher], "command": command}
    if launcher == "own":
        if launch.launcher.starts == ("node", "job"):
            return
        lines["command_per"] = "node" if per == "job" else "job"
    with pytest.raises(InputError) as raised:
        plan_with(tmp_path, lines)
    (problem,) = raised.value.problems
    assert "starts ranks again" in problem.message
    for line in re.findall(r"`(.*?)`", problem.remedy):
        lines |= yaml.safe_load(line)
    if per == "node":
        lines.pop("command_per", None)
    plan = plan_with(tmp_path, lines)
    assert {(cell.launcher, cell.command_per) for cell in plan.cells} == {("own", per)}
    assert not {"nodes-not-named", "ranks-go-on"} & {one.kind for one in plan.warnings}


def plan_with(folder, lines):
    launcher = {"launcher": lines["launcher"]}
    workload = {key: value for key, value in lines.items() if key != "launcher"} | {"device": "cuda"}
    matrix = {
        "axes": {"nodes": [1, 2], "gpus_per_node": [4], **launcher},
        "scaling": [{"mode": "weak", "per_gpu_batch": [4]}],
        "workload": workload,
    }
    return plan_of(folder, matrix)


def test_the_options_of_torchrun_are_those_of_the_installed_torch():
    from torch.distributed.run import get_args_parser

    found: dict[bool, set[str]] = {True: set(), False: set()}
    for action in get_args_parser()._actions:
        found[action.nargs == 0] |= {text.lstrip("-").replace("-", "_") for text in action.option_strings}
    torchrun = LAUNCHERS[0]
    assert found == {True: {*torchrun.flags.split()}, False: {*torchrun.values.split()}}
