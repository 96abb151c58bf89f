"""Names of all files and folders in a results folder.

::

    results/<study>/  matrix.yaml site.yaml plan.json ledger.jsonl submit.lock report/
      scripts/                 <cell>.sbatch (.sh without Slurm) pack.sbatch
      runs/<run>/attempt-<n>/  run.json cell.json metrics.csv ranks.csv steps.csv probes.json
                               SHA256SUMS trace-rank0.json.gz env.json conditions.json sampled_step.json
                               heartbeat.RANK.json failure.RANK.json
                               start end.json pack_end.json sacct_summary.txt
                               job.out job.err nccl.log
      package/                 ddp_scaling_bench-<digest>.zip
      packs/pack-<n>/  members <cell>.sbatch job.out job.err

A run is described by its ``run.json``; its properties are never parsed from folder names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_scaling_bench.run_folder import Child, JobFolder, RunFolder


@dataclass(frozen=True)
class PackFolder(JobFolder):
    """Folder of a pack (one Slurm job that executes many runs); each run also has its own folder."""

    members = Child("members")  # list of runs, which the job's script reads

    def script(self, cell_id: str) -> Path:
        """Return the path of a cell's script as it was when the pack was submitted."""
        return self.path / f"{cell_id}.sbatch"


@dataclass(frozen=True)
class StudyFolder:
    """Folder of a study: a planned matrix and the results of its runs.

    If it was unpacked from an ``archive``, ``path`` is a temporary folder, and the study is only read.
    """

    path: Path
    archive: Path | None = None

    matrix = Child("matrix.yaml")  # copy of the planned matrix, for people: plan.json contains it, too
    site = Child("site.yaml")  # copy of the site file, if the matrix inherits from one
    plan_json = Child("plan.json")  # cells, runs and their order: see bench.study.plan_json
    ledger = Child("ledger.jsonl")  # states of the runs: see bench.study.ledger
    lock = Child("submit.lock")  # held during a submission
    scripts = Child("scripts")  # one script per cell
    pack_script = Child("scripts/pack.sbatch")  # executes many runs in one allocation
    package = Child("package")  # what runs in a job, as one file: see bench.package
    packs = Child("packs")  # one folder per pack
    runs = Child("runs")  # one folder per run, with a subfolder per attempt
    report = Child("report")  # HTML page, tables and figures

    @property
    def name(self) -> str:
        """Name of the study, also if the path is ``.`` or ends in ``..``."""
        return Path(os.path.abspath(self.path)).name  # noqa: PTH100 (a link keeps its name)

    @property
    def source(self) -> Path:
        """The folder or archive that a user gives as the study."""
        return self.archive or self.path

    def shown(self, path: Path | str) -> str:
        """Return a path in this folder for people; in an archive, the temporary folder is not named."""
        text = str(path)
        return f"{self.archive}{text.removeprefix(str(self.path))}" if self.archive and text else text

    @property
    def is_planned(self) -> bool:
        """True if the folder contains a plan.json."""
        return self.plan_json.is_file()

    @property
    def has_runs(self) -> bool:
        """True if a run of the study has been submitted or started."""
        return self.runs.is_dir() and any(self.runs.iterdir())

    @property
    def planned_s(self) -> float:
        """Time of the plan, in seconds since 1970; raise OSError if there is none."""
        return self.plan_json.stat().st_mtime

    def pack(self, number: int) -> PackFolder:
        """Return the folder of pack ``number`` (from 1)."""
        return PackFolder(self.packs / f"pack-{number}")

    def attempt(self, run_id: str, attempt: int) -> RunFolder:
        """Return the folder of an attempt of a run; ``attempt`` counts from 1."""
        return RunFolder(Path(self.attempt_path(run_id, attempt)))

    def attempt_path(self, run_id: str, attempt: int) -> str:
        """Return the path of :meth:`attempt`; with thousands of runs, pathlib is slower than reading."""
        return f"{self.path}/runs/{run_id}/attempt-{attempt}"


def studies(root: Path) -> Iterator[StudyFolder]:
    """Yield every planned study in ``root``, sorted by name, except other users' private studies."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        with suppress(PermissionError):
            if StudyFolder(path).is_planned:
                yield StudyFolder(path)


def latest_first(root: Path) -> list[StudyFolder]:
    """Return the studies in ``root``, the most recently planned study first."""
    return sorted(studies(root), key=lambda study: study.plan_json.stat().st_mtime_ns, reverse=True)
