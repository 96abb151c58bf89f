"""Small functions that tests of several folders share."""

import csv
import json
import os
import pickle
import subprocess
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddp_scaling_bench.checksums import write_sums
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.train.options import OPTIONS

#: The id of the user nobody.
NOBODY = 65534


def raised(kind: type[Exception], call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Return the text of the exception that a call raises."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    return str(caught.value)


def run_program(words: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its exit code and both streams."""
    usual = {"capture_output": True, "text": True, "timeout": 280}
    return subprocess.run(words, **usual | options)


def in_fork(call: Callable[[], Any], *, user: int | None = None) -> Any:
    """Return the result of ``call`` in a fork of this process, which is that of another user if this one is root."""
    reader, writer = os.pipe()
    with forks():
        child = os.fork()
    if not child:
        try:
            if user is not None and os.geteuid() == 0:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            os.write(writer, pickle.dumps(call()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        content = stream.read()
    os.waitpid(child, 0)
    return pickle.loads(content)


@contextmanager
def forks() -> Iterator[None]:
    """Allow forks, of which Python 3.12 and later warns: the other threads of this process do nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def write_program(path: Path, text: str) -> None:
    """Write an executable script."""
    path.write_text(text)
    path.chmod(0o755)


def write_cell(
    folder: Path,
    *,
    launcher: str = "single",
    backend: str = "gloo",
    ranks: int = 1,
    batch: int = 8,
    **options: Any,
) -> None:
    """Write the cell.json of a run on one node; ``options`` of the training differ from the defaults."""
    sizes = {"tasks_per_node": ranks, "world_size": ranks, "per_gpu_batch": batch}
    workload = {**{name: one.default for name, one in OPTIONS.items()}, **options}
    content = {"launcher": launcher, "backend": backend, **sizes, "workload": workload}
    folder.mkdir(parents=True, exist_ok=True)
    RunFolder(folder).cell.write_text(json.dumps(content))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by the names of its columns."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@contextmanager
def edited_json(path: Path) -> Iterator[Any]:
    """Yield the content of a JSON file, and write it back as the block leaves it."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    yield content
    path.write_text(json.dumps(content), encoding="utf-8")


def change_json(path: Path, **values: Any) -> None:
    """Change values of a JSON object in a file."""
    with edited_json(path) as content:
        content.update(values)


@contextmanager
def edited_csv(path: Path) -> Iterator[Any]:
    """Yield the frame of a CSV file, and write it back as the block leaves it, with the digests of its run."""
    import pandas as pd  # not all tests need it

    frame = pd.read_csv(path)
    yield frame
    frame.to_csv(path, index=False)
    if (folder := RunFolder(path.parent)).sums.exists():
        write_sums(folder)
