"""The lock with which ssh_host.sh allows one run per host: its place, and what other users can prepare there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.shipped import shipped
from tests.common import run_program

#: Open the lock and print its path, or what open_lock printed and its exit code.
PROGRAM = '. "$0"; umask 000; open_lock && flock -n 9 && echo "$lock" || echo "no lock: $lock"'
NAME = f"ddp-scaling-bench-locks/ssh-{os.uname().nodename}.lock"
OTHER_USER = 54321


class Host:
    """A host with a runtime folder and a home."""

    def __init__(self, folder: Path) -> None:
        self.home, self.runtime = folder / "home", folder / "runtime"
        for path in (self.home, self.runtime):
            path.mkdir(mode=0o700)
        self.variables = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.runtime)}

    def open_lock(self, **variables: str) -> str:
        script = shipped("slurm_templates") / "ssh_host.sh"
        done = run_program(
            ["bash", "-c", PROGRAM, script],
            env={"PATH": os.environ["PATH"], **self.variables, **variables},
            check=True,
        )
        assert not done.stderr
        return done.stdout.strip()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def give_away(path: Path) -> None:
    """Make ``path`` look like a folder of another user."""
    if os.geteuid():
        pytest.skip("only root can create files of another user")
    os.chown(path, OTHER_USER, OTHER_USER)


def test_the_lock_is_in_the_runtime_folder_and_only_its_owner_can_write_there(host):
    lock = host.runtime / NAME
    for _ in range(2):
        assert host.open_lock() == str(lock)
    assert (mode(lock.parent), mode(lock)) == (0o700, 0o600)
    assert not list(host.home.iterdir())


@pytest.mark.parametrize("variable", ["", "XDG_CACHE_HOME"])
def test_without_a_runtime_folder_the_lock_is_in_the_cache(host, variable):
    cache = host.home / ("own cache" if variable else ".cache")
    variables = {variable: str(cache)} if variable else {}
    assert host.open_lock(XDG_RUNTIME_DIR=str(host.home / "absent"), **variables) == str(cache / NAME)
    assert [mode(path) for path in (cache, cache / "ddp-scaling-bench-locks", cache / NAME)] == [
        0o700,
        0o700,
        0o600,
    ]


def test_a_runtime_folder_of_another_user_is_not_used(host):
    give_away(host.runtime)
    host.runtime.chmod(0o777)
    assert host.open_lock() == str(host.home / ".cache" / NAME)
    assert not list(host.runtime.iterdir())


def test_a_lock_folder_that_others_can_write_to_is_not_used(host):
    (host.runtime / NAME).parent.mkdir()
    (host.runtime / NAME).parent.chmod(0o777)
    assert host.open_lock() == str(host.home / ".cache" / NAME)
    assert not (host.runtime / NAME).exists()


def test_a_link_in_place_of_the_lock_is_not_followed(host):
    target = host.home / "precious"
    target.write_text("kept")
    (host.runtime / NAME).parent.mkdir(mode=0o700)
    (host.runtime / NAME).symlink_to(target)
    assert host.open_lock() == str(host.home / ".cache" / NAME)
    assert target.read_text() == "kept"


def test_without_a_safe_folder_there_is_no_lock(host):
    for parent in (host.runtime, host.home / ".cache"):
        parent.mkdir(exist_ok=True)
        (parent / NAME).parent.symlink_to(host.home)
    assert host.open_lock() == f"no lock: {host.home}/.cache/{NAME}"


@pytest.mark.parametrize(
    ("flock", "answer"),
    [
        ("exit 1", "busy is busy with ; wait"),
        (
            "echo 'flock: 9: No locks available' >&2; exit 71",
            "refused cannot lock {} (No locks available); check",
        ),
    ],
)
def test_a_lock_that_is_held_differs_from_a_file_system_without_locks(host, tmp_path, flock, answer):
    (tmp_path / "flock").touch(mode=0o755)
    (tmp_path / "flock").write_text(f"#!/bin/bash\n{flock}\n")
    done = run_program(
        ["bash", "-c", '. "$0"; mark=M job=x holder=y; prepare', shipped("slurm_templates") / "ssh_host.sh"],
        env={**host.variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"M {answer.format(host.runtime / NAME)}")
