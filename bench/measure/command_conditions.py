"""Sample the nodes of a run whose ranks measure nothing, and write its conditions.json and env.json.

::

    python -m bench.measure.command_conditions before RUN_FOLDER    # on each node
    python -m bench.measure.command_conditions after RUN_FOLDER     # on each node
    python -m bench.measure.command_conditions merge RUN_FOLDER     # once, after all nodes
    python -m bench.measure.command_conditions finish RUN_FOLDER    # after and merge, for a single node

Until the end, each node keeps its values in its own file in the run's folder. conditions.json has one window,
the whole command. The window's epoch is null, and it has no ranks, because bench does not know the ranks.

The ranks write no env.json if the command does not use the recorder, or if the run failed. Then this module
writes an env.json with what is known without the ranks: the run's hosts, their cores, the requested threads,
and the versions of the python that the command begins with. Values that only the ranks know, such as their
backend, are null.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import __version__
from ..cores import cpu_groups, cpu_quota
from ..errors import BenchError
from ..study.cell_json import CellFile, read_cell
from ..study.files import read_json, write_json
from ..study.layout import RunFolder
from ..study.run_json import changed_script, read_run, script_sha256
from .node import Node, NodeSample, host_name
from .ranks import cpu_model, kept_variables, requested_threads

_BEFORE, _AFTER = "conditions-before.{}.json", "conditions-node.{}.json"
_ERRORS = "conditions.err"
_ENV_NODE = "env-node.{}.json"
#: Time limit for a Python interpreter to report its versions.
PYTHON_S = 20.0
# torch/version.py is read without importing torch, which would take seconds.
_VERSIONS = """
import importlib.util, json, os, platform, runpy
spec = importlib.util.find_spec("torch")
path = spec and spec.origin and os.path.join(os.path.dirname(spec.origin), "version.py")
torch = runpy.run_path(path) if path else {}
found = {"torch": torch.get("__version__"), "python": platform.python_version(), "cuda": torch.get("cuda")}
print(json.dumps(found, default=str))
"""


def sample_before(folder: RunFolder, env: Mapping[str, str] = os.environ) -> None:
    """Sample this node before the command, whose environment is ``env``."""
    note_node(folder, env)
    node = Node(env)
    write_json(folder.path / _BEFORE.format(node.name), node.sample().as_json())


def sample_after(folder: RunFolder) -> None:
    """Sample this node after the command, if this node was also sampled before the command."""
    node = Node(os.environ)
    earlier = folder.path / _BEFORE.format(node.name)
    content = read_json(earlier)
    if content is None:
        return
    before, after = NodeSample.from_json(content), node.sample()
    entry = {"start": before.time, "end": after.time, "node": node.conditions(before, after)}
    write_json(folder.path / _AFTER.format(node.name), entry)
    earlier.unlink()


def merge_nodes(folder: RunFolder) -> None:
    """Write conditions.json and env.json from the nodes' files, and remove the nodes' files.

    If no node was sampled, ``not_sampled_because`` contains the reason.
    """
    paths = sorted(folder.path.glob(_AFTER.format("*")))
    entries = [entry for path in paths if (entry := read_json(path)) is not None]
    errors = folder.path / _ERRORS
    if entries:
        window = {
            "epoch": None,
            "start": min(entry["start"] for entry in entries),
            "end": max(entry["end"] for entry in entries),
            "nodes": [entry["node"] for entry in entries],
            "ranks": [],
        }
        write_json(folder.conditions, {"schema": 1, "windows": [window]})
    else:
        reason = _last_line(errors) or "no node was sampled after the command"
        write_json(folder.conditions, {"schema": 1, "windows": [], "not_sampled_because": reason})
    for path in [*paths, *folder.path.glob(_BEFORE.format("*"))]:
        path.unlink(missing_ok=True)
    write_environment(folder)
    with suppress(OSError):
        if errors.stat().st_size == 0:
            errors.unlink()


def finish(folder: RunFolder) -> None:
    """Sample the only node of a run after the command, and write conditions.json and env.json."""
    sample_after(folder)
    merge_nodes(folder)


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def note_node(folder: RunFolder, env: Mapping[str, str]) -> None:
    """Write this node's facts to a file, before the command; ``env`` is the command's environment."""
    run, cell = read_run(folder.path)[0] or {}, None
    with suppress(BenchError):
        cell = read_cell(folder.path)
    name, is_first = host_name(env), env.get("SLURM_NODEID", "0") == "0"
    facts: dict[str, Any] = {"host": _host(name, env, cell), "cores": _cores(name, env, cell)}
    if is_first:
        facts |= {"gpus": _gpu_models(), "variables": kept_variables(env)}
        facts |= {"versions": _versions(run), "threads_per_rank": requested_threads(env)}
        facts["script_sha256"] = script_sha256(run, Path.cwd())
    write_json(folder.path / _ENV_NODE.format(name), facts)


def write_environment(folder: RunFolder) -> None:
    """Write env.json from the nodes' files, unless it already exists, and remove these files."""
    paths = sorted(folder.path.glob(_ENV_NODE.format("*")))
    nodes = [node for path in paths if (node := read_json(path)) is not None]
    run = read_run(folder.path)[0]
    if run is not None and not folder.env.is_file():
        write_json(folder.env, _environment(run, read_json(folder.cell) or {}, nodes))
    for path in paths:
        path.unlink(missing_ok=True)


def _environment(
    run: Mapping[str, Any], cell: Mapping[str, Any], nodes: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    first = next((node for node in nodes if "versions" in node), {})
    versions, sha256 = first.get("versions") or {}, first.get("script_sha256")
    device = (cell.get("workload") or {}).get("device")
    named = [node["host"] for node in nodes]
    models = first.get("gpus") if device == "cuda" else [host.get("cpu_model") for host in named]
    changed = changed_script(run, sha256)
    return {
        "schema": 1,
        "bench_version": __version__,
        "torch": versions.get("torch"),
        "python": versions.get("python"),
        "cuda": versions.get("cuda"),
        "nccl": None,
        "device_name": models[0] if models and len(set(models)) == 1 else None,
        "device": device,
        "backend": None,
        "world_size": None,
        "launcher": cell.get("launcher"),
        "joined": None,
        "hosts": named,
        "cores": [node["cores"] for node in nodes],
        "transport": None,
        "threads_per_rank": first.get("threads_per_rank"),
        "script_sha256": sha256,
        "facts": [changed.as_json()] if changed else [],
        **(first.get("variables") or {"env": {}, "slurm": {}}),
    }


def _ranks_here(env: Mapping[str, str], cell: CellFile | None) -> int | None:
    """Return the number of ranks that the launcher starts on this node, or None if it is unknown."""
    per_node = cell.tasks_per_node if cell else None
    if isinstance(per_node, list):
        place = env.get("SLURM_NODEID", "")
        return int(per_node[int(place)]) if place.isdigit() and int(place) < len(per_node) else None
    return per_node


def _host(name: str, env: Mapping[str, str], cell: CellFile | None) -> dict[str, Any]:
    ranks, cores = _ranks_here(env, cell), len(os.sched_getaffinity(0))
    if ranks and cell and cell.launcher == "srun":
        cores *= ranks  # this process has the cores of one task
    return {
        "host": name,
        "cores": min(cores, os.cpu_count() or cores),
        "cpu_model": cpu_model(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "ranks_here": ranks,
    }


def _cores(name: str, env: Mapping[str, str], cell: CellFile | None) -> dict[str, Any]:
    threads, ranks = requested_threads(env), _ranks_here(env, cell)
    return {
        "node": name,
        "cores": os.cpu_count(),
        "quota": cpu_quota(cpu_groups()),
        "threads_per_rank": [threads] * (ranks or 0),
    }


def _gpu_models() -> list[str]:
    """Return the model of each GPU of this node, from the driver's files, or ``[]`` if there are none."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def _versions(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions of the python with which the command begins, or ``{}`` if unknown."""
    python = run.get("interpreter")
    if python is None or shutil.which(python) is None:
        return {}
    try:
        done = subprocess.run(
            [python, "-c", _VERSIONS], stdin=subprocess.DEVNULL, capture_output=True, timeout=PYTHON_S
        )
        versions = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return versions if isinstance(versions, dict) else {}


def main() -> int:
    """Run the function that the first argument names."""
    functions = {"before": sample_before, "after": sample_after, "merge": merge_nodes, "finish": finish}
    moment, folder = sys.argv[1:]
    functions[moment](RunFolder(Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
