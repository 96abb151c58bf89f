"""Start, inspect and stop a test cluster manually: ``python -m tests.cluster --help``."""

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tests.cluster import network as networks
from tests.cluster.bed import Cluster
from tests.cluster.configuration import Options
from tests.cluster.containers import ClusterError
from tests.cluster.releases import SUITES, find_release
from tests.cluster.roots import Root, cache_folder, suite_version

Folder = Annotated[Path | None, typer.Option(help="the cluster's state (default /tmp/bench-cluster-<slot>)")]
Slurm = Annotated[
    str,
    typer.Option(
        metavar="SUITE|RELEASE", help="a Debian suite (trixie) or release (24.11), not the installed Slurm"
    ),
]
Gpus = Annotated[int, typer.Option(help="stand-in GPUs per node")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="a line of slurm.conf")]
All = Annotated[bool, typer.Option("--all", help="every cluster on this machine")]
Rate = Annotated[str | None, typer.Option(help="as tc writes it, such as 400mbit; left out: full speed")]
Node = Annotated[str, typer.Option(help="ctl, n1, n2, ...; left out: the login node (this machine)")]

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


@app.callback()
def common(context: typer.Context, folder: Folder = None, slurm: Slurm = "") -> None:
    context.obj = folder, slurm


def attached(context: typer.Context) -> Cluster:
    folders = [context.obj[0]] if context.obj[0] else list(networks.claimed().values())
    if not folders:
        raise ClusterError("no cluster runs here; start one with: python -m tests.cluster up")
    if len(folders) > 1:
        raise ClusterError(f"several clusters run: name one with --folder {' | '.join(map(str, folders))}")
    return Cluster.attach(folders[0])


@app.command()
def up(
    context: typer.Context,
    nodes: int = 4,
    gpus: Gpus = 4,
    accounting: bool = True,
    lines: Set = [],  # noqa: B006
) -> None:
    """Start a cluster that stays until `down`."""
    began, (folder, slurm) = time.monotonic(), context.obj
    settings = dict(line.split("=", 1) for line in lines)
    options = Options(nodes, gpus, accounting=accounting, settings=settings, release=find_release(slurm))
    cluster = Cluster.start(options, folder=folder, keep=True)
    print(f"up after {time.monotonic() - began:.1f} s: {nodes} nodes, Slurm {options.release.version}")
    print_state(cluster)


def print_state(cluster: Cluster) -> None:
    print(f"state in {cluster.folder}; Slurm {cluster.options.release.version}")
    here = os.environ.get("PATH", "")
    for name, value in cluster.environment.items():
        added = value.removesuffix(here) if name == "PATH" else value
        print(f"export {name}={shlex.quote(added)}{'$PATH' if name == 'PATH' else ''}")


@app.command()
def down(context: typer.Context, every: All = False) -> None:
    """End the cluster and remove all its traces."""
    for folder in list(networks.claimed().values()) if every else [attached(context).folder]:
        Cluster.attach(folder).stop()
        print(f"ended the cluster of {folder}")


@app.command()
def status(context: typer.Context) -> None:
    """Say what runs, and where."""
    cluster = attached(context)
    print_state(cluster)
    for node, state in cluster.node_states().items():
        print(f"{node} {cluster.address(node)} {state}")


@app.command()
def releases() -> None:
    """List the suites with their Slurm releases, and the cached ones."""
    for suite in SUITES:
        root = Root(cache_folder() / suite)
        version = suite_version(suite) or "not on the mirror"
        print(f"{suite} {version} {root.path if root.complete else '(not downloaded)'}")


@app.command()
def link(context: typer.Context, rate: Rate = None) -> None:
    """Give the nodes' links a known speed."""
    attached(context).link(rate)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def shell(context: typer.Context, words: list[str] = typer.Argument(None), node: Node = "") -> None:  # noqa: B008
    """Open a shell, or run a command, on the login node or on a node."""
    cluster = attached(context)
    words = words or [os.environ.get("SHELL", "/bin/bash")]
    if node:
        words = cluster.command_on_node(node, words, cwd=Path.cwd())
    os.execvpe(words[0], words, {**os.environ, **cluster.environment})


if __name__ == "__main__":
    try:
        app(prog_name="python -m tests.cluster")
    except ClusterError as error:
        sys.exit(str(error))
