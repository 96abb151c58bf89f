"""Values that the shell completes: studies, matrices, runs, and the keys, values and sizes of a study."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from ddp_scaling_bench.errors import BenchError

from ..archive import SUFFIX
from ..matrix.cell import value_text
from ..shipped import shipped
from ..study.layout import StudyFolder, latest_first
from ..study.plan_json import read_plan
from .next_step import matrices


def complete_matrix(incomplete: str) -> list[str]:
    """Return the matrices of a folder, the folders in it, and the shipped examples."""
    folder = Path(f"{incomplete}x").parent
    paths = [*matrices(folder), *(path for path in folder.glob("[!.]*") if path.is_dir())]
    names = [f"{path}{'/' * path.is_dir()}" for path in paths]
    return _beginning(incomplete, [*names, *(path.stem for path in shipped("matrices").glob("*.yaml"))])


def complete_study(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the studies, the newest first, and the archives beside them and in a folder."""
    named = [path.name for path in sorted(_root(ctx).glob(f"*{SUFFIX}"))]
    paths = [str(path) for path in sorted(Path(f"{incomplete}x").parent.glob(f"*{SUFFIX}"))]
    return _beginning(incomplete, [*(folder.name for folder in _studies(ctx)), *named, *paths])


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the studies, and the runs of the newest one, or those of the study that is typed: STUDY/RUN."""
    name, slash, _ = incomplete.rpartition("/")
    listed = _studies(ctx)
    chosen = [one for one in listed if one.name == name] if slash else listed[:1]
    entries = [entry for one in chosen for entry in _plan(one).get("runs", ())]
    runs = [f"{name}{slash}{entry['run_id']}" for entry in entries]
    return _beginning(incomplete, runs if slash else [*(one.name for one in listed), *runs])


def complete_key(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the settings that vary in the study, for --by."""
    cells = _cells(ctx)
    varying = [key for key in ("backend", "launcher") if len({cell.get(key) for cell in cells}) > 1]
    return _beginning(incomplete, [*varying, *(key for cell in cells for key in cell.get("swept", {}))])


def complete_filter(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the sizes, and the values of settings that vary in the study, for --only."""
    cells = _cells(ctx)
    names = ("nodes", "tasks_per_node", "backend", "launcher")
    settings = [{name: cell.get(name) for name in names} | cell.get("swept", {}) for cell in cells]
    pairs = [f"{key}={value_text(value)}" for own in settings for key, value in own.items()]
    return _beginning(incomplete, pairs)


def complete_baseline(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the sizes and cells of the study, for --baseline."""
    cells = _cells(ctx)
    sizes = [f"{cell['nodes']}x{cell['tasks_per_node']}" for cell in cells]
    return _beginning(incomplete, ["common", "no-ddp", *sizes, *(cell["cell_id"] for cell in cells)])


def _studies(ctx: typer.Context) -> list[StudyFolder]:
    return latest_first(_root(ctx))


def _root(ctx: typer.Context) -> Path:
    return Path(ctx.params.get("results") or "results")


def _cells(ctx: typer.Context) -> list[dict[str, Any]]:
    """Return the cells of the study that was typed before, or else of the newest one."""
    given = next(filter(None, map(ctx.params.get, ("study", "a", "target", "sources"))), ())
    # While a value of an option is completed, the arguments before it are not assigned yet.
    named = [*([given] if isinstance(given, str) else given), *ctx.args]
    listed = _studies(ctx)
    chosen = [one for one in listed if one.name in named or str(one.path) in named] or listed
    return _plan(chosen[0]).get("cells", []) if chosen else []


def _plan(folder: StudyFolder) -> dict[str, Any]:
    """Return the plan of a study; empty if it is damaged: a shell shows no errors while somebody types."""
    with suppress(BenchError):
        return read_plan(folder)
    return {}


def _beginning(incomplete: str, values: Iterable[str]) -> list[str]:
    return [value for value in dict.fromkeys(values) if value.startswith(incomplete)]
