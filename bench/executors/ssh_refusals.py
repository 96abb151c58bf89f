"""Why a host cannot take part in a run, in words with a remedy."""

from __future__ import annotations

from pathlib import Path

from bench.executors.serial import NotNowError
from bench.executors.ssh_connection import Connection, HostError
from bench.executors.ssh_hosts import READY_S

_REMEDIES = {
    "tool": ("lacks the command {}", "install util-linux (flock, setsid) and tar there"),
    "lock": ("cannot open its lock {}", "is it another user's, or /tmp full?"),
    "folder": (
        "cannot enter the folder of submission {folder}: {}",
        "submit from a folder that every host has: on a shared file system, or a copy at the same path",
    ),
    "write": (
        "cannot make a folder for results in {folder}: {}",
        "submit from a folder that can be written on every host",
    ),
}


def raise_unless_ready(connection: Connection, *, job: str, folder: Path) -> None:
    """Raise what keeps a host from taking part in ``job``, which is submitted from ``folder``.

    Raises:
        NotNowError: it is at work on another run.
        HostError: anything else.
    """
    host = connection.host
    if connection.refusal is not None:
        why, words = connection.refusal
        if why == "busy" and words.startswith(f"{job} "):
            what = f"{host} is a machine that cluster.hosts names twice"
            raise HostError(host, what, remedy="one entry per machine, with `processes` for its ranks")
        if why == "busy":
            remedy = "wait for it or stop it, then type `bench submit` again"
            raise NotNowError(f"{host} is busy with {words}", remedy=remedy)
        what, remedy = _REMEDIES[why]
        raise HostError(host, f"{host} {what.format(words, folder=folder)}", remedy=remedy)
    if connection.lost:
        what = f"{host} cannot be reached: {connection.last_words}"
        raise HostError(host, what, remedy=f"does `ssh -o BatchMode=yes {host} true` work here?")
    if connection.ready is None:
        what = f"{host} was not ready within {READY_S:g} s: {connection.last_words}"
        raise HostError(host, what, remedy=f"does `ssh -o BatchMode=yes {host} true` work here?")
