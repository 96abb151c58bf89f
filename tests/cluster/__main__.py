"""Start, inspect and stop a test cluster manually: ``python -m tests.cluster --help``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from tests.cluster import network as networks
from tests.cluster.bed import Cluster
from tests.cluster.configuration import Options
from tests.cluster.containers import ClusterError
from tests.cluster.releases import SUITES, find_release
from tests.cluster.roots import Root, cache_folder, suite_version


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
    parser.add_argument(
        "--slurm",
        default="",
        metavar="SUITE|RELEASE",
        help="use Slurm of a Debian suite (trixie) or of a release (24.11), downloaded into a cache (default: "
        "the installed Slurm)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster that stays until `down`")
    up.add_argument("--nodes", type=int, default=4)
    up.add_argument("--gpus", type=int, default=4, help="stand-in GPUs per node")
    up.add_argument("--no-accounting", action="store_true")
    up.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a line of slurm.conf")
    down = commands.add_parser("down", help="end the cluster and remove all its traces")
    down.add_argument("--all", action="store_true", help="every cluster on this machine")
    commands.add_parser("status", help="say what runs, and where")
    commands.add_parser("releases", help="list the suites with their Slurm releases, and the cached ones")
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
    release = find_release(options.slurm)
    cluster = Cluster.start(
        Options(
            nodes=options.nodes,
            gpus=options.gpus,
            accounting=not options.no_accounting,
            settings=settings,
            release=release,
        ),
        folder=options.folder,
        keep=True,
    )
    print(
        f"up after {time.monotonic() - began:.1f} s: {len(cluster.nodes)} nodes, Slurm {release.version}, "
        f"state in {cluster.folder}"
    )
    _print_exports(cluster)
    return 0


def _print_exports(cluster: Cluster) -> None:
    here = os.environ.get("PATH", "")
    for name, value in cluster.environment.items():
        added = value.removesuffix(here) if name == "PATH" else value
        print(f"export {name}={shlex.quote(added)}{'$PATH' if name == 'PATH' else ''}")


def _down(options: argparse.Namespace) -> int:
    folders = list(networks.claimed().values()) if options.all else [_attached(options).folder]
    for folder in folders:
        Cluster.attach(folder).stop()
        print(f"ended the cluster of {folder}")
    return 0


def _status(options: argparse.Namespace) -> int:
    cluster = _attached(options)
    print(f"state in {cluster.folder}; Slurm {cluster.options.release.version}")
    _print_exports(cluster)
    for node, state in cluster.node_states().items():
        print(f"{node} {cluster.address(node)} {state}")
    return 0


def _releases(options: argparse.Namespace) -> int:
    for suite in SUITES:
        root = Root(cache_folder() / suite)
        version = suite_version(suite) or "not on the mirror"
        print(f"{suite} {version} {root.path if root.complete else '(not downloaded)'}")
    return 0


def _link(options: argparse.Namespace) -> int:
    _attached(options).link(options.rate)
    return 0


def _shell(options: argparse.Namespace) -> int:
    cluster = _attached(options)
    words = options.words or [os.environ.get("SHELL", "/bin/bash")]
    if options.node:
        words = cluster.command_on_node(options.node, words, cwd=Path.cwd())
    os.execvpe(words[0], words, {**os.environ, **cluster.environment})


_COMMANDS = {
    "up": _up,
    "down": _down,
    "status": _status,
    "releases": _releases,
    "link": _link,
    "shell": _shell,
}

if __name__ == "__main__":
    sys.exit(main())
