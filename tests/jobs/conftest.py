"""Fixtures of the tests of jobs."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
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


#: What torch needs.
OF_TORCH = (
    "torchgen functorch numpy numpy.libs sympy mpmath networkx jinja2 markupsafe filelock fsspec setuptools"
)


@pytest.fixture(scope="session")
def plain_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The line that activates an environment with torch, but neither bench nor its dependencies."""
    environment, links = (tmp_path_factory.mktemp(name) for name in ("environment", "links"))
    words = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
    subprocess.run(words, check=True, timeout=120)
    site = Path(find_spec("torch").origin).parents[1]
    for name in ("torch", *OF_TORCH.split(), "typing_extensions.py"):
        if (site / name).exists():
            (links / name).symlink_to(site / name)
    next(environment.glob("lib/python*/site-packages")).joinpath("torch.pth").write_text(f"{links}\n")
    return f"source '{environment}/bin/activate'"
