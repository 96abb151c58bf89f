"""What tests of the Slurm executor share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.bed import Cluster
from tests.executors.slurm_studies import Study, scripted_study


@pytest.fixture
def scripted(running_cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Study]]:
    """Make studies of scripts of a few lines; their jobs end with the test, those of other tests go on."""
    made: list[Study] = []

    def make(*bodies: str, name: str = "scripted", folder: Path = tmp_path, **more: Any) -> Study:
        study = scripted_study(folder / name, bodies, running_cluster.environment, name=name, **more)
        made.append(study)
        return study

    yield make
    for study in made:
        study.cancel_all()
