"""What CONTRIBUTING.md says about new parts: a new part is one file, and the rest of the program finds it."""

import filecmp
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.commands.command_line import is_reported
from tests.common import read_rows, run_program, write_cell
from tests.matrices import BARE, matrix

ROOT = Path(__file__).resolve().parents[2]
MODEL = '''
"""One layer of weights."""

from torch import nn

from .spec import DataShape, ModelSpec


def build(options, shape):
    return nn.Linear(shape.inputs[0], shape.classes)


def sample(options):
    return DataShape((options.seq_len,), (), 3)


SPEC = ModelSpec("one-layer", "classes", build, sample, options=("seq_len",))
'''
STRATEGY = """
from torch import nn

from .spec import Parts, Strategy


class Counted(nn.Module):
    calls = 0

    def __init__(self, model, options):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        self.calls += 1
        return self.model(*inputs)


class CountedParts(Parts):
    module = property(lambda parts: parts.model.model)

    def facts(self):
        return {"calls": self.model.calls}


SPEC = Strategy("counted", wrap=Counted, parts=CountedParts)
"""

#: Runs the training on two ranks, which share the import of torch.
TWO_RANKS = """
import os, socket
from ddp_scaling_bench.train.__main__ import main
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
child = os.fork()
os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0" if child else "1")
code = main()
other = os.waitpid(child, 0)[1] if child else 0
os._exit(code or other)
"""


def copy_program(folder: Path) -> Path:
    """Copy the program into a folder."""
    for name in ("bench", "analysis", "ddp_scaling_bench", "matrices", "slurm_templates"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the program."""
    return copy_program(tmp_path)


def run(folder: Path, *words: str, **env: str) -> str:
    """Run `bench`, or another program, of a copy of the program."""
    module = () if words[0] == "-c" else ("-m", "bench")
    env = {**os.environ, "PYTHONPATH": str(folder), **env}
    done = run_program([sys.executable, *module, *words], cwd=folder, env=env)
    assert done.returncode == 0 or is_reported(done), done.stdout + done.stderr
    return done.stdout


def changed_files(copy: Path) -> list[str]:
    """Return the files of the program that a copy of it adds or changes."""
    found = [path.relative_to(copy) for path in copy.rglob("*.[pjt]*") if "__pycache__" not in path.parts]
    names = [
        path
        for path in found
        if path.parts[0] in ("bench", "analysis", "ddp_scaling_bench", "slurm_templates")
    ]
    same = [name for name in names if (ROOT / name).is_file() and filecmp.cmp(ROOT / name, copy / name)]
    return sorted(map(str, {*names} - {*same}))


def test_a_model_is_one_file_and_a_strategy_is_another(copy):
    (copy / "ddp_scaling_bench/train/models/one_layer.py").write_text(MODEL)
    (copy / "ddp_scaling_bench/train/strategies/counted.py").write_text(STRATEGY)
    assert changed_files(copy) == [
        "ddp_scaling_bench/train/models/one_layer.py",
        "ddp_scaling_bench/train/strategies/counted.py",
    ]
    options = {"seq_len": 5, **BARE, "steps_per_epoch": 2, "attribution_steps": 1}
    workload = {"device": "cpu", "model": "one-layer", "strategy": "counted", **options}
    (copy / "own.yaml").write_text(matrix("own", axes={"tasks_per_node": [2]}, batch=2, workload=workload))
    run(copy, "plan", "own")
    (cell,) = json.loads((copy / "results/own/plan.json").read_text())["cells"]
    write_cell(copy / "run", launcher="torchrun", ranks=2, batch=2, **cell["workload"])
    run(copy, "-c", TWO_RANKS, BENCH_RUN_DIR=str(copy / "run"))
    env_json = copy / "run/env.json"
    env = json.loads(env_json.read_text())
    assert (env["parameters"], env["strategy"]) == (5 * 3 + 3, "counted")
    (row,) = read_rows(env_json.with_name("metrics.csv"))
    assert env["calls"] - (2 + 2) in (3, 6, 9)  # both windows, after one to three rounds of warm-up
    assert float(row["forward_time_sec"]) > 0
    assert row["comm_exposed_time_sec"] == "", "what is not measured is empty"
    (window,) = json.loads(env_json.with_name("conditions.json").read_text())["windows"]
    assert [rank["sync_passes"] for rank in window["ranks"]] == [None] * 2


COLUMN = """
    rate_per_rank: Annotated[
        float, Column("throughput per rank", "samples/s", _ALL, "Rank-rate", number)
    ] = math.nan
"""


FINDING = """
from analysis.checks.assessment import check
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import count


class OddSize(Finding, kind="odd-size"):
    heading = "Odd size"
    ranks: int

    def _message(self) -> str:
        return f"{count(self.ranks, 'rank')} cannot be halved."


@check()
def odd_sizes(about):
    yield from (OddSize(subject=(row.cell_id,), ranks=row.gpus) for row in about.rows if row.gpus == 3)
"""


FIGURE = """
from analysis.report.figures.drawing import Drawing, figure


@figure("memory")
def memory_figure(results):
    points = [(row.gpus, row.throughput_samples_per_sec) for row in results.rows]
    drawing = Drawing(name="memory", subject="A new figure", topic="memory", description="Two points.")
    yield drawing.draw(lambda axes: axes.plot(*zip(*points, strict=True), label="a new line"))
"""


def test_a_column_is_an_entry_and_the_line_that_computes_it_and_findings_and_figures_are_one_file(copy):
    """The column is then in the CSV file, on the page, in Markdown, LaTeX and the proposal."""
    add(copy / "analysis/data/columns.py", COLUMN, before="    series_place: Annotated")
    computed = "            row.rate_per_rank = row.rate / row.gpus\n"
    add(copy / "analysis/stats/scaling.py", computed, before="            row.mode = _regime(")
    (copy / "analysis/checks/odd_sizes.py").write_text(FINDING)
    (copy / "analysis/report/figures/memory.py").write_text(FIGURE)
    assert changed_files(copy) == [
        "analysis/checks/odd_sizes.py",
        "analysis/data/columns.py",
        "analysis/report/figures/memory.py",
        "analysis/stats/scaling.py",
    ]
    table = copy / "t.csv"
    table.write_text("gpus,global_batch,throughput\n1,66,100\n3,66,264\n")
    shown = json.loads(run(copy, "report", str(table), "--output", str(copy), "--proposal", "--json"))
    (warning,) = [one for one in shown["validity"] if one["code"] == "odd-size"]
    assert (warning["severity"], warning["values"]) == ("warning", {"ranks": 3})
    assert [float(row["rate_per_rank"]) for row in read_rows(copy / "t-report/scaling.csv")] == [100, 88]
    for name in ("index.html", "scaling.md", "scaling.tex", "proposal.md", "proposal.tex"):
        text = (copy / "t-report" / name).read_text()
        assert "88.00" in text, name
        assert "Rank-rate" in text, name
        assert ("3 ranks cannot be halved." in text) == ("scaling" not in name), name
    page = (copy / "t-report/index.html").read_text()
    assert "<b>A new figure.</b>" in page
    assert "a new line" in page
    assert (copy / "t-report/figures/memory.pdf").read_bytes().startswith(b"%PDF-")


def add(file: Path, text: str, *, before: str) -> None:
    """Insert a text before the only place of another one."""
    start, end = file.read_text().split(before)
    file.write_text(f"{start.rstrip(' ')}{text}{before}{end}")
