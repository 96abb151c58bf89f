"""Names of all files and folders in a results folder.

::

    results/<study>/  matrix.yaml site.yaml plan.json ledger.jsonl submit.lock report/
      scripts/                 <cell>.sbatch (.sh without Slurm) pack.sbatch
      runs/<run>/attempt-<n>/  run.json cell.json metrics.csv ranks.csv steps.csv probes.json
                               SHA256SUMS trace-rank0.json.gz env.json conditions.json sampled_step.json
                               start end.json pack_end.json sacct_summary.txt
                               job.out job.err nccl.log
      packs/pack-<n>/  members <cell>.sbatch job.out job.err

A run is described by its ``run.json``; its properties are never parsed from folder names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class _Child:
    """Descriptor that returns the path of a named file or subfolder in a folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, owner: type) -> Path:
        return Path(folder.path, self._name)


@dataclass(frozen=True)
class JobFolder:
    """Folder that contains the output files of a job."""

    path: Path

    out = _Child("job.out")
    err = _Child("job.err")


@dataclass(frozen=True)
class RunFolder(JobFolder):
    """Folder of one attempt of a run."""

    run_json = _Child("run.json")  # description, written at the submission: see bench.study.run_json
    cell = _Child("cell.json")  # sizes and options for the ranks, written by the script: see cell_json.py
    metrics_csv = _Child("metrics.csv")  # see bench.study.records.EpochRow
    ranks_csv = _Child("ranks.csv")  # see bench.study.records.RankRow
    steps_csv = _Child("steps.csv")  # see bench.study.records.StepRow
    probes = _Child("probes.json")
    sums = _Child("SHA256SUMS")  # of these four files: see bench.study.checksums
    trace = _Child("trace-rank0.json.gz")  # profiler trace of some steps, if the matrix sets trace_steps
    env = _Child("env.json")  # software, hardware, hosts that took part, and network that was used
    recorder = _Child("recorder.json")  # host and process of the training that records here
    conditions = _Child("conditions.json")  # state of nodes and ranks in each measured window
    sampled_step = _Child("sampled_step.json")  # slowest calls of one step, see bench.study.run_json
    start = _Child("start")  # a line per start of the script: job id, time, host, number of restarts
    end = _Child("end.json")  # exit code and end time, written by the job itself
    pack_end = _Child("pack_end.json")  # the same, written by the script of the run's pack
    sacct_summary = _Child("sacct_summary.txt")  # rows of the job in sacct, written by bench

    @property
    def logs(self) -> tuple[Path, ...]:
        """The existing logs: of the job, then those that NCCL wrote here (NCCL_DEBUG_FILE), by name."""
        of_job = [log for log in (self.err, self.out) if log.is_file()]
        return (*of_job, *sorted(log for log in self.path.glob("nccl*.log") if log.is_file()))

    @property
    def is_described(self) -> bool:
        """True if the folder contains a run.json."""
        return self.run_json.is_file()


@dataclass(frozen=True)
class PackFolder(JobFolder):
    """Folder of a pack (one Slurm job that executes many runs); each run also has its own folder."""

    members = _Child("members")  # list of runs, which the job's script reads

    def script(self, cell_id: str) -> Path:
        """Return the path of a cell's script as it was when the pack was submitted."""
        return self.path / f"{cell_id}.sbatch"


@dataclass(frozen=True)
class StudyFolder:
    """Folder of a study: a planned matrix and the results of its runs."""

    path: Path

    matrix = _Child("matrix.yaml")  # copy of the planned matrix, for people: plan.json contains it, too
    site = _Child("site.yaml")  # copy of the site file, if the matrix inherits from one
    plan_json = _Child("plan.json")  # cells, runs and their order: see bench.study.plan_json
    ledger = _Child("ledger.jsonl")  # states of the runs: see bench.study.ledger
    lock = _Child("submit.lock")  # held during a submission
    scripts = _Child("scripts")  # one script per cell
    pack_script = _Child("scripts/pack.sbatch")  # executes many runs in one allocation
    packs = _Child("packs")  # one folder per pack
    runs = _Child("runs")  # one folder per run, with a subfolder per attempt
    report = _Child("report")  # HTML page, tables and figures

    @property
    def name(self) -> str:
        """Name of the study."""
        return self.path.name

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
        return RunFolder(Path(f"{self.path}/runs/{run_id}/attempt-{attempt}"))


def studies(root: Path) -> Iterator[StudyFolder]:
    """Yield every planned study in ``root``, sorted by name, except other users' private studies."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        with suppress(PermissionError):
            if StudyFolder(path).is_planned:
                yield StudyFolder(path)


def latest_first(root: Path) -> list[StudyFolder]:
    """Return the studies in ``root``, the most recently planned study first."""
    return sorted(studies(root), key=lambda study: study.plan_json.stat().st_mtime_ns, reverse=True)
