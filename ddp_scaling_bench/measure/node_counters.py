"""Sample the nodes of a run whose ranks measure nothing, and write its conditions.json and env.json.

The script of a run starts this module ``before`` and ``after`` the command on each node, then to ``merge``.
Until then, each node has a file of its own. The only window of conditions.json is the whole command. Values
of env.json that only ranks know, such as how many joined, are null. If the ranks wrote env.json, it is kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..cores import read_text
from ..files import read_json, write_json
from ..run_folder import RunFolder, read_run
from .env_file import changed_script, script_sha256, write_conditions, write_environment
from .node import Node, NodeSample
from .ranks import RankFacts, cores_of_nodes, hosts_of, kept_variables, own_facts

_NODE = "conditions-node.{}.json"
# torch/version.py is read without importing torch, which would take seconds.
_VERSIONS = """
import importlib.util, json, platform, runpy
spec = importlib.util.find_spec("torch")
torch = runpy.run_path(spec.origin.replace("__init__", "version")) if spec else {}
found = {"python": platform.python_version(), "torch": torch.get("__version__"), "cuda": torch.get("cuda")}
print(json.dumps(found))
"""


def sample_before(folder: RunFolder, env: Mapping[str, str] = os.environ) -> None:
    """Describe and sample this node before the command, whose environment is ``env``."""
    node, run = Node(env), read_run(folder.path)[0] or {}
    place = int(env.get("SLURM_NODEID") or env.get("BENCH_NODE") or 0)
    gpus = map(read_text, Path("/proc/driver/nvidia/gpus").glob("*/information"))
    known = {**kept_variables(env), "script_sha256": script_sha256(run, Path.cwd())}
    content = {
        "facts": asdict(own_facts(place, 0, env)),
        "gpu_models": [text.partition("Model:")[2].partition("\n")[0].strip() for text in gpus],
        "known": known | (_versions(run.get("interpreter")) if place == 0 else {}),
        "before": asdict(node.sample()),
    }
    write_json(folder.path / _NODE.format(node.name), content)


def _versions(python: str | None) -> dict[str, Any]:
    """Return the versions of the python with which the command begins, or ``{}`` if unknown."""
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        done = subprocess.run([python or "", "-c", _VERSIONS], input=b"", capture_output=True, timeout=20)
        return dict(json.loads(done.stdout))
    return {}


def sample_after(folder: RunFolder) -> None:
    """Sample this node after the command, if it was also sampled before the command."""
    node = Node(os.environ)
    path = folder.path / _NODE.format(node.name)
    if (content := read_json(path)) is not None:
        before, after = NodeSample.from_json(content.pop("before")), node.sample()
        window = {"start": before.time, "end": after.time, "node": node.conditions(before, after)}
        write_json(path, content | {"window": window})


def merge_nodes(folder: RunFolder) -> None:
    """Write conditions.json, with a reason if no node was sampled, and env.json; remove the nodes' files."""
    paths, errors = list(folder.path.glob(_NODE.format("*"))), folder.path / "conditions.err"
    nodes = sorted(filter(None, map(read_json, paths)), key=lambda node: node["facts"]["rank"])
    windows: list[dict[str, Any]] = []
    more: dict[str, str] = {}
    if sampled := [node["window"] for node in nodes if "window" in node]:
        times = {"start": min(one["start"] for one in sampled), "end": max(one["end"] for one in sampled)}
        conditions = [one["node"] for one in sampled]
        windows = [{"epoch": None, **times, "nodes": conditions, "ranks": []}]
    else:
        said = read_text(errors).rpartition("\n")[2]
        more["not_sampled_because"] = said or "no node was sampled after the command"
    write_conditions(folder, windows, **more)
    if not folder.env.is_file() and (run := read_run(folder.path)[0]) is not None:
        write_environment(folder, **_environment(run, read_json(folder.cell) or {}, nodes))
    for path in [*paths, *([] if read_text(errors) else [errors])]:
        path.unlink(missing_ok=True)


def _environment(run: Mapping[str, Any], cell: Mapping[str, Any], nodes: Sequence[Any]) -> dict[str, Any]:
    """Return what is known without the ranks; ``ranks_here`` is what the plan starts on a host."""
    facts = [RankFacts(**node["facts"]) for node in nodes]
    hosts, cores = [host.as_json() for host in hosts_of(facts)], cores_of_nodes(facts)
    planned, device = cell.get("tasks_per_node"), (cell.get("workload") or {}).get("device")
    for host, node in zip(hosts, cores, strict=True):
        ranks = planned[host["ranks"][0]] if isinstance(planned, list) else planned or 0
        tasks = ranks if cell.get("launcher") == "srun" else 1  # a task of srun has only its own cores
        host["cores"] = min(host["cores"] * tasks, node["cores"])
        host.update(ranks=None, affinity=None, ranks_here=ranks)
        node["threads_per_rank"] *= ranks
    gpus = [model for node in nodes for model in node["gpu_models"]]
    models = set(gpus if device == "cuda" else [one.cpu_model for one in facts])
    known: dict[str, Any] = nodes[0]["known"] if nodes else {"env": {}, "slurm": {}}
    changed = changed_script(run, known.get("script_sha256"))
    return known | {
        "device_name": models.pop() if len(models) == 1 else None,
        "device": device,
        "launcher": cell.get("launcher"),
        "hosts": hosts,
        "cores": cores,
        "threads_per_rank": facts[0].threads if facts else None,
        "facts": [changed.as_json()] if changed else [],
    }


if __name__ == "__main__":
    moments = {"before": sample_before, "after": sample_after, "merge": merge_nodes}
    moments[sys.argv[1]](RunFolder(Path(sys.argv[2])))
