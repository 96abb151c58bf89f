"""Small matrices for tests whose subject is not the text of a matrix."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.plan import Plan, make_plan, write_plan
from bench.study.plan_json import PlannedStudy, open_study

#: The steps of a training that takes no longer than it must.
SHORT = {"steps_per_epoch": 3, "epochs": 1, "warmup_steps": 3, "attribution_steps": 2}
#: A training without validation and measurements of the network.
BARE = {**SHORT, "val_steps": 0, "probe_steps": 0, "sweep_time": 0}


def slurm(**options: Any) -> dict[str, Any]:
    """Return the cluster section for the test cluster."""
    usual = {"executor": "slurm", "partition": "l40s", "account": "users", "cpus_per_task": 1}
    return usual | {"time_limit": "2m"} | options


def training(**options: Any) -> dict[str, Any]:
    """Return the workload section of a training on CPUs."""
    return {"device": "cpu", "model": "mlp", **options}


def command(words: str | list[str], **options: Any) -> dict[str, Any]:
    """Return the workload section of a command, by default without metrics."""
    return {"device": "cpu", "command": words, "metrics": "none", **options}


def torchrun_cell(**options: Any) -> dict[str, Any]:
    """Return an entry of ``include``."""
    return {"launcher": "torchrun", "backend": "gloo", "mode": "weak", "per_gpu_batch": 4, **options}


def matrix(study: str = "tiny", *, batch: int = 4, **sections: Any) -> str:
    """Return the YAML text of a matrix of a training with one and with two ranks on this machine.

    Args:
        study: the study's name.
        batch: samples per rank of the only series.
        sections: replace the sections of these names, or omit them if None.
    """
    usual = {
        "study": study,
        "cluster": {"executor": "local", "time_limit": "2m"},
        "axes": {"tasks_per_node": [1, 2]},
        "scaling": [{"mode": "weak", "per_gpu_batch": [batch]}],
        "workload": training(parameters="20k", **SHORT),
        "repeats": 1,
    }
    content = {name: section for name, section in (usual | sections).items() if section is not None}
    return yaml.safe_dump(
        content, default_flow_style=None, sort_keys=False, allow_unicode=True, width=math.inf
    )


def plan_of(folder: Path, content: str | Mapping[str, Any], **options: Any) -> Plan:
    """Plan a matrix, given as its text or its content, from the file m.yaml of a folder."""
    path = folder / "m.yaml"
    text = (
        content if isinstance(content, str) else yaml.safe_dump(dict(content), allow_unicode=True, width=1000)
    )
    path.write_text(text, encoding="utf-8")
    return make_plan(path, **options)


def planned_study(
    folder: Path, content: str | Mapping[str, Any], *, results: Path | None = None, **options: Any
) -> PlannedStudy:
    """Plan a matrix as :func:`plan_of` does; return its study, which is below ``folder/results`` or ``results``."""
    return open_study(write_plan(plan_of(folder, content, **options), results or folder / "results"))
