"""Hostile text in every field arrives literally or is refused, and is never executed."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.plan import make_plan, scripts
from ddp_scaling_bench.cell_json import read_cell
from ddp_scaling_bench.errors import BenchError
from tests.common import write_program
from tests.jobs.slurm_studies import plan_study
from tests.matrices import matrix, slurm
from tests.planning.test_scripts import run_script

VALUES = (
    "$(touch planted)",
    "x; touch planted",
    "x\ntouch planted",
    "x\r\n",
    "x' ; `touch planted` ; '\"",
    "é ü 漢",
    "-x",
    "\\",
)
PLAIN = {
    "study": "hostile",
    "cluster": {"executor": "slurm"},
    "axes": {"nodes": [2], "gpus_per_node": [2]},
    "workload": {},
    "scaling": [{"mode": "weak", "per_gpu_batch": [2]}],
}
#: Paths of the fields; a number is an index of a list.
FIELDS = (
    "study",
    *(
        f"cluster.{name}"
        for name in (
            *("executor", "partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude"),
            *("mem", "gpu_type", "gpu_request", "time_limit", "exclusive", "cpus_per_task"),
        )
    ),
    "cluster.directives.0",
    "cluster.hosts.0",
    "cluster.env.VALUE",
    "axes.backend.0",
    "axes.launcher.0",
    "axes.precision.0",
    "axes.nodes.0",
    "axes.env/AXIS.0",
    "workload.data",
    "workload.model",
    "workload.precision",
    "scaling.0.mode",
    "exclude.0.backend",
    "include.0.launcher",
)
#: Fields in which the text is only part of the value.
WRAPPED: dict[str, Any] = {
    "a directive's value": lambda value: {"cluster": {"directives": [f"--comment={value}"]}},
    "a variable's name": lambda value: {"cluster": {"env": {value: "x"}}},
    "a variable's name on an axis": lambda value: {"axes": {**PLAIN["axes"], f"env.{value}": ["x"]}},
    "a section's name": lambda value: {value: 1},
    "an option's name": lambda value: {"workload": {value: 1}},
    "an image": lambda value: {"cluster": {"container": {"runtime": "apptainer", "image": value}}},
    "a pyxis image": lambda value: {"cluster": {"container": {"runtime": "pyxis", "image": value}}},
    **{
        f"a container's {name}": lambda value, name=name: {
            "cluster": {"container": {"runtime": "apptainer", "image": "x.sif", name: [value]}}
        }
        for name in ("mounts", "options")
    },
}


def _planted(field: str, value: str) -> dict[str, Any]:
    matrix: dict[str, Any] = json.loads(json.dumps(PLAIN))
    if field in WRAPPED:
        return {**matrix, **WRAPPED[field](value)}
    *way, last = (key.replace("/", ".") for key in field.split("."))
    place: Any = matrix
    for key, after in zip(way, [*way, last][1:], strict=True):
        beyond: Any = [{}] if after == "0" else {}
        place = place[0] if key == "0" else place.setdefault(key, beyond)
    place[0 if last == "0" else last] = value
    return matrix


@pytest.mark.parametrize("field", [*FIELDS, *WRAPPED])
def test_hostile_text_in_a_field_is_refused_or_arrives_and_is_never_executed(tmp_path, field):
    for number, value in enumerate(VALUES):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "matrix.yaml"
        path.write_text(yaml.safe_dump(_planted(field, value), allow_unicode=True), encoding="utf-8")
        texts, said = [], str(path)
        try:
            texts = [text for _, text in scripts(make_plan(path))]
        except BenchError as refusal:
            said = str(refusal)
        assert str(path) in said, said
        for text in texts:
            done = run_script(text, folder)
            assert not list(folder.rglob("planted")), f"{field}: {value!r} ran"
            assert value in text or value in _arrived(done, folder), f"{field}: {value!r} got lost"


def _arrived(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    """Return all arguments and variables of srun, and the options for ranks, as one text."""
    arrived = json.loads(done.stdout)
    options = map(str, read_cell(folder / "run dir").workload.values())
    return "\0".join([*arrived["words"], *arrived["env"].values(), *options])


HOSTILE_FOLDER = "a'; touch planted; é $(touch planted)"
#: A python that records its arguments and environment.
WRITE_DOWN = """\
#!{python}
import json, os, sys
words = sys.argv[1:]
folder = os.environ["BENCH_RUN_DIR"]
if os.environ["SLURM_PROCID"] == "0":
    with open(os.path.join(folder, "arrived.json"), "w") as file:
        json.dump({{"words": words, "env": dict(os.environ)}}, file)
"""


def test_hostile_folders_and_values_arrive_in_real_jobs(cluster, tmp_path):
    folder = tmp_path / HOSTILE_FOLDER
    (folder / "bin").mkdir(parents=True)
    write_program(folder / "bin/python", WRITE_DOWN.format(python=sys.executable))
    values = {f"VALUE_{number}": value for number, value in enumerate(VALUES)}
    setup = ['PATH="$PWD/bin:$PATH"', """export SPOKEN='it is "$(echo said)"; `x` é'"""]
    axes = {"nodes": [2], "tasks_per_node": [1], "backend": ["gloo"], "launcher": ["srun", "torchrun"]}
    text = matrix("hostile", cluster=slurm(mem="100M", setup=setup, env=values), axes=axes)
    study = plan_study(folder, text, cluster.environment)
    with contextlib.chdir(folder):
        done = study.bench("submit", "STUDY", "--wait")
    assert done.stderr.splitlines()[-3] == "study hostile: 2 failed", done.stderr
    runs = study.planned.runs
    assert len(runs) == 2
    for run in runs:
        attempt = study.planned.folder.attempt(run.run_id, 1)
        assert attempt.path.is_relative_to(folder)
        arrived = json.loads((attempt.path / "arrived.json").read_text())
        assert {name: arrived["env"][name] for name in values} == values
        assert arrived["env"]["SPOKEN"] == 'it is "$(echo said)"; `x` é'
        assert arrived["env"]["BENCH_RUN_DIR"] == str(attempt.path)
        assert study.planned.records()[run.run_id].reason.startswith(
            "ended without metrics.csv; the job says COMPLETED"
        )
    for command in ("status", "verify", "report"):
        shown = study.bench(command, "STUDY")
        assert "Traceback" not in shown.stderr
    assert (Path(study.folder) / "report/index.html").exists()
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("planted")]
    assert not Path("planted").exists()
