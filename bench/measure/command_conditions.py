"""Sample the nodes before and after a command without the recorder, for its conditions.json and env.json.

::

    python -m bench.measure.command_conditions before RUN_FOLDER    # on each node
    python -m bench.measure.command_conditions after RUN_FOLDER     # on each node
    python -m bench.measure.command_conditions merge RUN_FOLDER     # once, after all nodes

Until the end, each node keeps its values in a file of its own in the run's folder. The window of
conditions.json is the whole command. Its epoch is null. It has no ranks, because bench does not know them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.errors import UnwritableError
from bench.measure.command_env import note_node, write_environment
from bench.measure.node import Node, NodeSample
from bench.study.files import read_json, write_json
from bench.study.layout import RunFolder

_BEFORE, _NODE = "conditions-before.{}.json", "conditions-node.{}.json"
_ERRORS = "conditions.err"


def sample_before(folder: RunFolder, env: Mapping[str, str] = os.environ) -> None:
    """Sample this node before the command, whose environment is ``env``.

    Raises:
        UnwritableError: the folder cannot be written.
    """
    note_node(folder, env)
    node = Node(env)
    write_json(folder.path / _BEFORE.format(node.name), node.sample().as_json())


def sample_after(folder: RunFolder) -> None:
    """Sample this node after the command; no effect without a sample before it.

    Raises:
        UnwritableError: the folder cannot be written.
    """
    node = Node(os.environ)
    earlier = folder.path / _BEFORE.format(node.name)
    content = read_json(earlier)
    if content is None:
        return
    before, after = NodeSample.from_json(content), node.sample()
    entry = {"start": before.time, "end": after.time, "node": node.conditions(before, after)}
    write_json(folder.path / _NODE.format(node.name), entry)
    earlier.unlink()


def merge_nodes(folder: RunFolder) -> None:
    """Write conditions.json and env.json from the files of the nodes, and remove these.

    If no node was sampled, ``not_sampled_because`` contains the reason.

    Raises:
        UnwritableError: the folder cannot be written.
    """
    paths = sorted(folder.path.glob(_NODE.format("*")))
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


@contextmanager
def sampled_node(folder: RunFolder, env: Mapping[str, str]) -> Iterator[None]:
    """Sample this node before and after a block that runs the command, whose environment is ``env``.

    If the folder cannot be written, do nothing.
    """
    with suppress(UnwritableError):
        sample_before(folder, env)
    try:
        yield
    finally:
        with suppress(UnwritableError):
            sample_after(folder)
            merge_nodes(folder)


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def main() -> int:
    """Run the function that the first argument names."""
    functions = {"before": sample_before, "after": sample_after, "merge": merge_nodes}
    moment, folder = sys.argv[1:]
    functions[moment](RunFolder(Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
