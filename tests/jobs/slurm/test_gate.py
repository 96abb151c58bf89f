"""The gate of each script: which start of a job owns the folder of an attempt."""

import subprocess
from pathlib import Path

from bench.shipped import shipped

GATE = shipped("slurm_templates").joinpath("gate.j2").read_text()


def start(folder: Path, job: str = "7", restarts: int = 0) -> tuple[int, str]:
    """Begin a script in a folder; return its exit code and its errors."""
    script = f'{GATE}\nclaim_folder "$1" {job} {restarts}\necho started\n'
    done = subprocess.run(["bash", "-c", script, "bash", str(folder)], capture_output=True, text=True)
    assert done.stdout == ("" if done.returncode else "started\n")
    return done.returncode, done.stderr


def lines(folder: Path) -> list[tuple[str, str]]:
    """Return the job and the restarts of each recorded start."""
    words = [line.split() for line in (folder / "start").read_text().splitlines()]
    return [(job, restarts) for job, _, _, restarts in words]


def test_the_first_job_owns_the_folder_and_a_requeued_one_adds_a_line(tmp_path):
    folder = tmp_path / "100% a'; echo foo"
    folder.mkdir()
    assert start(folder) == (0, "")
    assert start(folder, restarts=1) == (0, "")
    before = (folder / "start").read_text()
    code, errors = start(folder, job="70")
    assert (code, errors) == (1, f"bench: error: another start owns this folder: {before.splitlines()[0]}\n")
    assert (folder / "start").read_text() == before
    assert lines(folder) == [("7", "0"), ("7", "1")]


def test_a_folder_that_cannot_be_written_has_its_own_exit_code(tmp_path):
    missing = tmp_path / "missing"
    assert start(missing) == (74, f"bench: error: {missing}/start: cannot be written\n")
    (tmp_path / "start").touch()  # the disk was full
    assert start(tmp_path)[0] == 74
