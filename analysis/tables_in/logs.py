"""Read the logs of finished runs with the patterns of a matrix, and make a table of them."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import pandas as pd
from pydantic import ValidationError

from analysis.stats.estimate import run_rates
from bench.matrix.cell import Cell
from bench.matrix.mistakes import finding_in_words
from bench.matrix.workload import UNITS, Metrics, Quantity
from bench.study.readings import Readings, readings_in
from ddp_scaling_bench.errors import BenchError, missing_file
from ddp_scaling_bench.units import listed

#: A log with its size: ``4=a.log``, ``'4 GPUs=a.log'``, or nodes x ranks per node (``1x4=a.log``).
SIZE_AND_LOG = re.compile(r"(?:(?P<nodes>[1-9]\d*)[x×])?(?P<ranks>[1-9]\d*)(?: ?GPUs?)?=(?P<path>.+)", re.I)


@dataclass(frozen=True)
class Log:
    """A log of a finished run, and what the patterns match in it.

    ``nodes`` is 0 if it is not known. ``rate`` is the mean over all values, in ``unit``: samples/s of all
    ranks, tokens/s if the throughput is one of tokens and ``tokens_per_sample`` is not given, or steps/s if
    neither a batch nor a throughput is given.
    """

    path: Path
    nodes: int
    gpus: int
    readings: Readings
    rate: float | None
    unit: str
    tokens_per_sample: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the log as `bench report --json` prints it."""
        own = {
            "path": str(self.path),
            "nodes": self.nodes or None,
            "gpus": self.gpus,
            "rate": self.rate,
            "unit": self.unit,
        }
        found = self.readings
        told = [one.told() for one in found.findings]
        return {**own, "values": len(found.rows), "problem": found.problem or None, "findings": told}


def metrics_of(patterns: Sequence[str], units: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """Return `workload.metrics` of a matrix from NAME=PATTERN, units, and KEY=VALUE.

    Raises:
        BenchError: a matrix would refuse them.
    """
    content: dict[str, Any] = {}
    for text in settings:
        key, _, value = text.partition("=")
        content[key] = int(value) if value.isdigit() else value
    names = [text.partition("=")[0] for text in patterns]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise BenchError(f"--pattern {twice}= is given twice", remedy="keep one of them")
    content["output"] = dict(text.partition("=")[::2] for text in patterns)
    if unknown := [name for name in content["output"] if name not in get_args(Quantity)]:
        what = f"--pattern {unknown[0]!r} does not begin with throughput=, step_time= or loss="
        own = shlex.quote(f"throughput={patterns[0]}")
        raise BenchError(what, remedy=f"write for example: --pattern {own}")
    content["units"] = {name: unit for unit in units for name, known in UNITS.items() if unit in known}
    if wrong := [unit for unit in units if not any(unit in known for known in UNITS.values())]:
        allowed = ", ".join(unit for known in UNITS.values() for unit in known)
        raise BenchError(f"--unit {wrong[0]!r} is not known", remedy=f"allowed: {allowed}")
    try:
        return Metrics.model_validate(content).as_json()
    except ValidationError as error:
        options = {"output": "--pattern", "units": "--unit"}
        given = {"--pattern": patterns, "--unit": units, "--set": settings}
        texts = []
        for one in error.errors():
            place = [*map(str, one["loc"])]
            option = options[place.pop(0)] if place and place[0] in options else "--set"
            option = option if one["loc"] else listed([name for name, own in given.items() if own])
            what = one.get("ctx", {}).get("error") or finding_in_words(one, Metrics)
            if one["type"] == "extra_forbidden":
                what = "this key is not known; give kind, scope, skip, ranks or tokens_per_sample"
            texts.append(f"{' '.join([option, *place])}: {what}")
        raise BenchError("\n".join(texts)) from None


def read_log(source: str, metrics: Mapping[str, Any], *, batch: int | None, mode: str | None) -> Log:
    """Read a log, given as SIZE=LOG. ``batch`` is that of a rank in mode weak, else the global batch.

    Raises:
        BenchError: the source is not SIZE=LOG, or the log does not exist.
    """
    if (given := SIZE_AND_LOG.fullmatch(source)) is None:
        own = "a.log" if "=" in source else source
        if own.endswith((".csv", ".tsv")):
            what = f"--pattern is for logs, not for a table such as {own}"
            raise BenchError(what, remedy="omit it; --map NAME=COLUMN says what a column means")
        remedy = f"write 4={own} for 4 GPUs, or 1x4={own} for 1 node with 4"
        raise BenchError(f"{source!r} has no number of GPUs", remedy=remedy)
    if not (path := Path(given["path"])).is_file():
        raise missing_file(path, what="the log", remedy="give the output of a finished run")
    nodes, per_node = int(given["nodes"] or 0), int(given["ranks"])
    gpus = per_node * (nodes or 1)
    cell = Cell(
        cell_id=source,
        launcher="",
        backend="",
        nodes=nodes or 1,
        tasks_per_node=per_node,
        world_size=gpus,
        per_gpu_batch=1,
        global_batch=(batch or 1) * (gpus if batch and mode == "weak" else 1),
        argv=[],
        metrics=dict(metrics),
        workload={},
        env={},
    )
    readings = readings_in({str(path): path}, cell)
    rates = run_rates(pd.DataFrame(map(asdict, readings.rows)).assign(run_id="")) if readings.rows else None
    rate = None if rates is None else float(rates["throughput_samples_per_sec"].iloc[0])
    given_unit = (metrics.get("units") or {}).get("throughput")
    in_samples = batch or ("throughput" in metrics["output"] and given_unit != "it/s")
    unit = "samples/s" if in_samples else "steps/s"
    tokens = int(metrics.get("tokens_per_sample", 1)) if given_unit == "tokens/s" else None
    if tokens == 1:
        unit = "tokens/s"
    return Log(path, nodes, gpus, readings, rate, unit, tokens)


def table_text(logs: Sequence[Log], *, batch: int | None, mode: str | None) -> str:
    """Return a table of the logs for :func:`analysis.tables_in.read.read_table`."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    batches = ["per_gpu_batch" if mode == "weak" else "global_batch"] if batch else []
    # A throughput in samples/s that people read in tokens/s.
    tokens = [logs[0].tokens_per_sample] if (logs[0].tokens_per_sample or 1) > 1 else []
    table.writerow(["nodes", "gpus", *batches, logs[0].unit, *["tokens_per_sample"] * len(tokens), "repeat"])
    for place, log in enumerate(logs):
        repeat = 1 + sum((one.nodes, one.gpus) == (log.nodes, log.gpus) for one in logs[:place])
        rate = f"{log.rate:.9g}" if log.rate else ""
        table.writerow([log.nodes or "", log.gpus, *([batch] * len(batches)), rate, *tokens, repeat])
    return text.getvalue()
