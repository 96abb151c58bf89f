"""A short study on each other Slurm release that the Debian mirror has; `make releases` runs all cluster tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from bench.jobs.outcome import JobStatus
from bench.jobs.slurm.client import BatchJob, Slurm, SlurmRefusedError
from bench.jobs.slurm.job_states import state_from_notices
from bench.study.ledger import FailureClass, RunState
from tests.cluster.bed import Cluster
from tests.cluster.configuration import Options
from tests.cluster.containers import ClusterError, run, wait_for
from tests.cluster.plugin import release_or_skip, started
from tests.cluster.releases import find_release, other_suites
from tests.cluster.roots import Apt, SuiteMissingError
from tests.common import raised
from tests.jobs.slurm.statuses import job_statuses

#: Rank 1 fails while rank 0 waits for it.
BAD_RANK = "srun --kill-on-bad-exit=1 bash -c '[ $SLURM_PROCID = 0 ] && sleep 60; sleep 0.5; exit 7'"


@pytest.fixture(params=other_suites())
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield a cluster of two nodes for each other release."""
    if request.config.getoption("--slurm"):
        pytest.skip("--slurm selects one release")
    release = release_or_skip(request.param)
    with started(Options(nodes=2, gpus=1, release=release)) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        yield cluster


@pytest.mark.cluster
def test_jobs_end_on_another_release_as_they_do_on_the_installed_one(other, tmp_path):
    slurm, ids = Slurm(), {}
    assert run(["sbatch", "--version"]).stdout.split()[-1] == other.options.release.version
    for name, body, options in (
        ("complete", "srun true", ["-N2", "--time=1"]),
        ("rank", BAD_RANK, ["-N2", "--time=1"]),
        ("cancel", "srun bash -c 'echo runs; exec sleep 60'", ["-N1", "--time=1"]),
    ):
        script = tmp_path / f"{name}.sbatch"
        script.write_text(f"#!/bin/bash\n{body}\n")
        start = slurm.test_only(script, options=options)
        assert start is not None
        assert abs(start - datetime.now(UTC)) < timedelta(minutes=5)
        files = {"output": tmp_path / f"{name}.out", "error": tmp_path / f"{name}.err"}
        ids[name] = slurm.submit(BatchJob(script=script, job_name=name, options=options, **files))
    with pytest.raises(SlurmRefusedError) as refused:
        slurm.test_only(script, options=["--partition=nope"])
    assert refused.value.output.endswith("Invalid partition name specified")

    said = tmp_path / "cancel.err"
    # A step is listed before it is launched; one that is cancelled in between is not launched and says so.
    printed = tmp_path / "cancel.out"
    wait_for(lambda: printed.exists() and printed.read_text(), what="the step that is to be cancelled")
    slurm.cancel([ids["cancel"]])
    found: dict[str, JobStatus] = {}

    def settled() -> bool:
        found.update(job_statuses(slurm.accounting(list(ids.values()))))
        return len(found) == len(ids) and all(status.settled for status in found.values())

    wait_for(settled, what="the accounting")
    ends = {
        name: (found[job].state, found[job].failure_class, found[job].exit_code) for name, job in ids.items()
    }
    assert ends == {
        "complete": (RunState.COMPLETED, None, 0),
        "rank": (RunState.FAILED, FailureClass.BAD_EXIT, 7),
        "cancel": (RunState.CANCELLED, FailureClass.CANCELLED, None),
    }
    notice = state_from_notices(said.read_text(), job_id=ids["cancel"])
    assert notice is not None, said.read_text()
    assert notice.word == "CANCELLED"


def test_a_suite_that_the_mirror_does_not_have_is_named(tmp_path):
    with pytest.raises(SuiteMissingError) as caught:
        Apt(tmp_path / "apt", "trixie", mirror=f"file:{tmp_path}/mirror").version()
    assert str(caught.value) == "the Debian mirror does not have the suite trixie"


def test_a_suite_without_a_valid_signature_is_not_used(tmp_path):
    suite = tmp_path / "mirror/dists/trixie"
    suite.mkdir(parents=True)
    (suite / "Release").write_text(
        f"Suite: trixie\nDate: {time.strftime('%a, %d %b %Y %H:%M:%S UTC', time.gmtime())}\n"
    )
    with pytest.raises(ClusterError) as caught:
        Apt(tmp_path / "apt", "trixie", mirror=f"file:{tmp_path}/mirror").version()
    assert not isinstance(caught.value, SuiteMissingError)
    assert "is not signed" in str(caught.value)


def test_only_a_suite_that_the_mirror_does_not_have_is_skipped_in_ci(monkeypatch):
    def fail(error: ClusterError) -> None:
        def find(name: str) -> None:
            raise error

        monkeypatch.setattr("tests.cluster.plugin.find_release", find)

    monkeypatch.setenv("CI", "true")
    fail(SuiteMissingError("the Debian mirror does not have the suite trixie"))
    with pytest.raises(pytest.skip.Exception, match=r"^the Debian mirror does not have the suite trixie$"):
        release_or_skip("trixie")
    fail(ClusterError("another Slurm release needs patchelf"))
    with pytest.raises(pytest.fail.Exception, match=r"^another Slurm release needs patchelf$"):
        release_or_skip("trixie")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=r"^another Slurm release needs patchelf$"):
        release_or_skip("trixie")


def test_a_release_that_no_suite_has_is_an_error_that_lists_those_of_the_mirror(monkeypatch):
    monkeypatch.setattr("tests.cluster.releases.SUITES", ("old", "new", "gone"))
    versions = {"old": "20.11.4", "new": "24.11.5", "gone": ""}
    monkeypatch.setattr("tests.cluster.releases.suite_version", versions.__getitem__)
    assert raised(ClusterError, find_release, "24.1") == (
        "no Debian suite has Slurm 24.1; the mirror has: old 20.11.4, new 24.11.5, gone is missing"
    )
