"""Fixtures of the Slurm executor's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.jobs import submission
from bench.jobs.contract import Scheduler
from tests.cluster.bed import Cluster
from tests.jobs.slurm_studies import Study, scripted_study


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `bench submit --wait` in this process ask every second."""
    monkeypatch.setattr(Scheduler, "poll_s", 1.0)
    monkeypatch.setattr(submission, "LONGEST_PAUSE_S", 1.0)


@pytest.fixture
def scripted(running_cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Study]]:
    """Create studies of short scripts; cancel their jobs at the end of the test."""
    made: list[Study] = []

    def make(*bodies: str, name: str = "scripted", folder: Path = tmp_path, **more: Any) -> Study:
        study = scripted_study(folder / name, bodies, running_cluster.environment, name=name, **more)
        made.append(study)
        return study

    yield make
    for study in made:
        study.cancel_all()
