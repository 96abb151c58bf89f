"""Identify equal cells of different studies, and label them.

Cells are equal if everything that affects their runs is equal, with executor, partition and device. Versions,
hosts, dates, names, repeats and time limits are not part of it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import asdict
from typing import Any

from analysis.text import one_line
from bench.matrix.cell import BUILT_IN, canonical, value_text
from bench.study.plan_json import physical_values
from ddp_scaling_bench.train.options import TrainOptions
from ddp_scaling_bench.variables import shown_variables

#: Settings of a cell by name, without those that have their default values.
Settings = dict[str, Any]

_DEFAULTS = {**asdict(TrainOptions()), "metrics": {"source": "recorder"}, "model_parallel": 1}
#: The settings of a label: those by which people know cells come first. The size is always part of it.
_FIRST = ("model", "strategy", "backend", "launcher", "per_gpu_batch", "command")
_SIZE = ("nodes", "tasks_per_node", "world_size", "global_batch")


def cell_settings(cell: Mapping[str, Any], *, executor: str, device_name: str) -> Settings:
    """Return everything that distinguishes a cell of plan.json from cells that are not equal.

    ``device_name`` is the product name of the devices that measured it.
    """
    values = physical_values(dict(cell)) | {"executor": executor, "device_name": device_name}
    values["partition"] = cell["resources"].get("partition")
    if cell["argv"][-1:] == [*BUILT_IN[-1:]]:  # its other words depend on the version of this project
        del values["command"]
    per_node = values["tasks_per_node"]
    if isinstance(per_node, list) and len(set(per_node)) == 1:
        values["tasks_per_node"] = per_node[0]
    empty = (None, "", False)
    names = [name for name in sorted(values) if name not in ("cell_id", "name") and values[name] not in empty]
    return {name: values[name] for name in names if values[name] != _DEFAULTS.get(name)}


def key_of(settings: Settings) -> str:
    """Return a short text that is equal for equal settings."""
    return hashlib.sha256(canonical(settings).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def shown_settings(settings: Settings, swept: Container[str]) -> dict[str, str]:
    """Return settings as texts, with the values of those environment variables only that may be shown."""
    env = {name.removeprefix("env."): value for name, value in settings.items() if name.startswith("env.")}
    shown = {f"env.{name}": value or "set" for name, value in shown_variables(env, swept).items()}
    return {name: one_line(value_text(shown.get(name, value)), limit=120) for name, value in settings.items()}


def labels_of(series: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return a label for each series: its size, and as few settings as distinguish it from the others."""
    labels = {key: f"n{own['nodes']}x{own['tasks_per_node']}" for key, own in series.items()}
    for name in dict.fromkeys(
        [*_FIRST, *(name for own in series.values() for name in own if name not in _SIZE)]
    ):
        texts: dict[str, set[str]] = {}
        for key, own in series.items():
            texts.setdefault(labels[key], set()).add(_text(name, own))
        for key, own in series.items():
            if len(texts[labels[key]]) > 1 and (text := _text(name, own)):
                labels[key] += f", {text}"
    counts = Counter(labels.values())
    return {key: label if counts[label] == 1 else f"{label}, {key[:6]}" for key, label in labels.items()}


def _text(name: str, settings: Mapping[str, str]) -> str:
    """Return a setting with its name, if its value alone is not clear; empty if it is not set."""
    default = _DEFAULTS.get(name)
    text = one_line(settings.get(name) or ("" if default is None else value_text(default)), limit=40)
    prefix = (
        ""
        if name in _FIRST and name != "per_gpu_batch"
        else f"{'batch' if name == 'per_gpu_batch' else name.removeprefix('env.')} "
    )
    return text and prefix + text
