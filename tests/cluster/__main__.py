"""Start, inspect and stop a test cluster manually: ``python -m tests.cluster --help``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from tests.cluster import network as networks
from tests.cluster.bed import Cluster, missing
from tests.cluster.configuration import Options
from tests.cluster.containers import ClusterError


def main(words: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    options = _parser().parse_args(words)
    try:
        return _COMMANDS[options.command](options)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--folder", type=Path, help="the cluster's state (default /tmp/bench-cluster-<slot>)")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster that stays until `down`")
    up.add_argument("--nodes", type=int, default=4)
    up.add_argument("--gpus", type=int, default=4, help="stand-in GPUs per node")
    up.add_argument("--no-accounting", action="store_true")
    up.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a line of slurm.conf")
    down = commands.add_parser("down", help="end the cluster and remove all its traces")
    down.add_argument("--all", action="store_true", help="every cluster on this machine")
    commands.add_parser("status", help="say what runs, and where")
    commands.add_parser("missing", help="say what keeps a cluster from being started here")
    link = commands.add_parser("link", help="give the nodes' links a known speed")
    link.add_argument("--rate", help="as tc writes it, such as 400mbit; left out: full speed")
    shell = commands.add_parser("shell", help="a shell, or a command, on the login node or on a node")
    shell.add_argument("--node", help="ctl, n1, n2, ...; left out: the login node (this machine)")
    shell.add_argument("words", nargs=argparse.REMAINDER)
    return parser


def _attached(options: argparse.Namespace) -> Cluster:
    folders = [options.folder] if options.folder else list(networks.claimed().values())
    if not folders:
        raise ClusterError("no cluster runs here; start one with: python -m tests.cluster up")
    if len(folders) > 1:
        raise ClusterError(f"several clusters run: name one with --folder {' | '.join(map(str, folders))}")
    return Cluster.attach(folders[0])


def _up(options: argparse.Namespace) -> int:
    began = time.monotonic()
    settings = dict(line.split("=", 1) for line in options.set)
    cluster = Cluster.start(
        Options(
            nodes=options.nodes,
            gpus=options.gpus,
            accounting=not options.no_accounting,
            settings=settings,
        ),
        folder=options.folder,
        keep=True,
    )
    print(f"up after {time.monotonic() - began:.1f} s: {len(cluster.nodes)} nodes, state in {cluster.folder}")
    for name, value in cluster.environment.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _down(options: argparse.Namespace) -> int:
    folders = list(networks.claimed().values()) if options.all else [_attached(options).folder]
    for folder in folders:
        Cluster.attach(folder).stop()
        print(f"ended the cluster of {folder}")
    return 0


def _status(options: argparse.Namespace) -> int:
    cluster = _attached(options)
    print(f"state in {cluster.folder}; export SLURM_CONF={cluster.environment['SLURM_CONF']}")
    for node, state in cluster.node_states().items():
        print(f"{node} {cluster.address(node)} {state}")
    return 0


def _missing(options: argparse.Namespace) -> int:
    print(missing() or "nothing is missing")
    return 1 if missing() else 0


def _link(options: argparse.Namespace) -> int:
    _attached(options).link(options.rate)
    return 0


def _shell(options: argparse.Namespace) -> int:
    cluster = _attached(options)
    words = options.words or [os.environ.get("SHELL", "/bin/bash")]
    if options.node:
        words = cluster.command_on_node(options.node, words, cwd=Path.cwd())
    os.execvpe(words[0], words, {**os.environ, **cluster.environment})


_COMMANDS = {"up": _up, "down": _down, "status": _status, "missing": _missing, "link": _link, "shell": _shell}

if __name__ == "__main__":
    sys.exit(main())
