"""Faults on the real cluster, and their presentation by status, verify and the report."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.common import run_program
from tests.jobs.fault_studies import FAULTS, Scene, differences, fault_study
from tests.jobs.slurm_studies import MEASURE, await_child, run_id, with_waiting_sbatch

SIZE = 4 << 20


@dataclass(frozen=True)
class SmallDisk:
    """A mounted file system of a few megabytes."""

    path: Path

    def fill(self) -> None:
        """Fill the disk."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 1024)
            except OSError:
                return

    def free(self) -> None:
        """Free the space."""
        (self.path / "filler").unlink()


@contextmanager
def small_disk(cluster: Cluster, folder: Path) -> Iterator[SmallDisk]:
    """Create a disk in a file, and mount it here and on every node.

    Raises:
        CalledProcessError: there is no loop device here.
    """
    image, mounted = folder / "disk.img", folder / "disk"
    with image.open("wb") as file:
        file.truncate(SIZE)
    mounted.mkdir()
    _run("mke2fs", "-q", "-F", "-t", "ext2", "-m", "0", str(image))
    loop = _run("losetup", "--find", "--show", str(image)).strip()
    try:
        _run("mount", loop, str(mounted))
        for node in cluster.nodes:
            cluster.run_on_node(node, ["mount", loop, mounted])
        yield SmallDisk(mounted)
    finally:
        for node in cluster.nodes:
            cluster.run_on_node(node, ["umount", "--lazy", mounted], check=False)
        subprocess.run(["umount", "--lazy", mounted], check=False)
        _run("losetup", "--detach", loop)


def _run(*words: str) -> str:
    return run_program(words, check=True).stdout


#: Faults that take a few seconds; `make campaign` tests all.
QUICK = ("fine", "out-of-memory", "killed", "requeued")


@pytest.fixture
def disk(cluster: Cluster, tmp_path: Path) -> Iterator[SmallDisk]:
    """Mount a small disk."""
    with small_disk(cluster, tmp_path) as mounted:
        yield mounted


def test_status_verify_and_report_agree_on_every_fault(cluster, tmp_path):
    study = fault_study(tmp_path, QUICK, cluster.environment)
    study.submit(*QUICK)
    for fault in QUICK:
        FAULTS[fault].strike(Scene(cluster, study, fault))
    study.await_ends(*QUICK)
    assert differences(study, QUICK) == []
    # Discard what earlier tests left.
    again = study.folder("requeued").path
    assert (again / "before-restart-1/metrics.csv").exists()
    assert not (again / "probes.json").exists()
    job_id = study.status()["requeued"]["job_id"]
    ends = [line.split() for line in (again / "sacct_summary.txt").read_text().splitlines()]
    assert [words[1] for words in ends if words[0] == job_id] == ["REQUEUED", "COMPLETED"]
    lines = map(json.loads, (study.study.folder / "ledger.jsonl").read_text().splitlines())
    states = [line["state"] for line in lines if line["run_id"] == study.run_id("requeued")]
    assert states == ["queued", "queued", "completed"]


def test_a_run_waits_for_a_drained_node_and_says_so(cluster, scripted):
    study = scripted(f"#SBATCH -w n3\n{MEASURE}")
    cluster.drain("n3")
    try:
        done = study.bench("submit", "STUDY")
        assert done.returncode == 0
        assert done.stderr.startswith(
            f"{run_id(1)} is submitted first, because sbatch --test-only says: "
            "allocation failure: Requested node configuration is not available\n"
        )
        # The second reason is that of 24.11 and later.
        reasons = ("UnavailableNodes:n3", "May be reserved for other job")
        expected = {f"waits to start (ReqNodeNotAvail, {reason})" for reason in reasons}
        wait_for(lambda: study.status()[run_id(1)].reason in expected, what="the reason")
        why = study.status()[run_id(1)].reason
        verified = json.loads(study.bench("verify", "STUDY", "--json").stdout)
        assert verified["runs"][0]["checks"][0]["found"] == f"queued ({why})"
        assert study.bench("report", "STUDY").returncode == 0
        assert why in (study.folder / "report/scaling.csv").read_text()
    finally:
        cluster.resume("n3")
    assert study.bench("submit", "STUDY", "--wait").stderr.splitlines()[-1] == "study scripted: 1 completed"


def test_a_job_whose_id_could_not_be_saved_is_not_lost(cluster, disk, scripted, tmp_path):
    study = scripted(MEASURE, f"#SBATCH --hold\n{MEASURE}", folder=disk.path)
    assert study.bench("submit", "STUDY", "--wait", "--only", run_id(1)).returncode == 0
    ledger = study.folder / "ledger.jsonl"
    size = ledger.stat().st_size
    process = with_waiting_sbatch(study, tmp_path).start("submit", "STUDY")
    wait_for(lambda: ledger.stat().st_size > size, what="the intent")
    await_child(process)
    _fill_up(ledger)
    disk.fill()
    (tmp_path / "go").touch()
    said = process.communicate(timeout=280)[1]
    assert process.returncode == 2, said
    assert said.startswith(f"error: {ledger}: cannot be written: No space left on device; ")
    assert all(json.loads(line) for line in ledger.read_text().splitlines() if line.strip())
    disk.free()
    cluster.run(["scontrol", "release", study.job_ids()[-1]])
    done = study.bench("submit", "STUDY", "--wait")
    assert done.stderr.splitlines()[-1] == "study scripted: 2 completed", done.stderr
    assert study.jobs_per_run() == {run_id(1): 1, run_id(2): 1}


def _fill_up(ledger: Path) -> None:
    """Pad a file with empty lines to a full block, so that its next line needs a new block."""
    with ledger.open("a") as file:
        file.write("\n" * (-ledger.stat().st_size % 4096))
