"""`bench init`: a commented starter matrix for the cluster or the machine at hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.commands.common import say
from bench.errors import BenchError
from bench.starter import Partition, cluster_matrix, local_matrix, partitions


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("init")(init_command)


def init_command(
    path: Annotated[
        Path | None, typer.Argument(help="The file to write; default: the partition's name.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", help="The partition to write it for.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take the first partition listed.")] = False,
) -> int:
    """Look at the cluster (sinfo) or at this machine, and write a matrix that plans as it is.

    With several partitions it asks which one, unless --partition or --yes says so. An
    existing file is never overwritten.
    """
    found = _ask_slurm()
    if not found:
        if partition is not None:
            raise BenchError(
                f"no partition {partition!r}: Slurm is not here",
                remedy="leave --partition out, or run this on a login node",
            )
        return _write(path or Path("local.yaml"), local_matrix(os.cpu_count() or 1))
    defaults = _site_defaults()
    usual = defaults.get("partition")
    found.sort(key=lambda one: one.name != usual)  # stable: what the site names comes first
    chosen = _choose(found, partition, ask=not yes and sys.stdin.isatty())
    return _write(path or Path(f"{chosen.name}.yaml"), cluster_matrix(chosen, inherited=defaults))


def _site_defaults() -> dict[str, Any]:
    """Return what a site file says of the cluster's jobs; nothing where there is none."""
    from bench.matrix.load import find_site, read_site

    path = find_site()
    cluster = read_site(path).content.get("cluster") if path else None
    return cluster or {}


def _ask_slurm() -> list[Partition]:
    """Return the cluster's partitions; none where there is no Slurm."""
    from bench.slurm.client import Slurm, SlurmUnavailableError

    try:
        return partitions(Slurm().nodes())
    except SlurmUnavailableError as absent:
        if "command not found" not in absent.output:
            raise
        return []


def _choose(found: list[Partition], name: str | None, *, ask: bool) -> Partition:
    names = [partition.name for partition in found]
    if name is not None:
        if name not in names:
            raise BenchError(f"no partition {name!r} is in service", remedy=f"there are: {', '.join(names)}")
        return found[names.index(name)]
    for partition in found:
        say(str(partition))
    if len(found) == 1 or not ask:
        return found[0]
    answer = typer.prompt("partition", default=names[0])
    return _choose(found, answer, ask=False)


def _write(path: Path, text: str) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise BenchError(
            f"{path} exists and is left as it is", remedy="name another file: bench init PATH"
        ) from None
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from None
    print(path)
    say(f"next: bench plan {path}")
    return 0
