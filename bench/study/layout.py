"""Names of all files and folders of the results.

::

    results/<study>/  matrix.yaml site.yaml plan.json ledger.jsonl submit.lock report/
      scripts/                 <cell>.sbatch (.sh without Slurm) pack.sbatch
      runs/<run>/attempt-<n>/  run.json metrics.csv ranks.csv steps.csv probes.json
                               trace-rank0.json.gz env.json end.json sacct_summary.txt
                               job.out job.err
      packs/pack-<n>/  pack.json members marks.jsonl <cell>.sbatch job.out job.err

A run is described by its ``run.json``; folder names are never parsed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: One row per epoch. Values are over all ranks. Times of the parts of a step are seconds per step,
#: means over the ranks and steps of the attribution window. An empty cell was not measured.
METRICS_COLUMNS = (
    "epoch",
    "steps",
    "samples",
    "train_loss",
    "val_loss",
    "val_accuracy",
    "val_mae",
    "val_rmse",
    "epoch_time_sec",
    "throughput_samples_per_sec",
    "step_time_sec_median",
    "step_time_sec_p95",
    "data_load_time_sec",
    "compute_time_sec",
    "forward_time_sec",
    "backward_time_sec",
    "comm_time_sec",
    "comm_exposed_time_sec",
    "comm_wait_time_sec",
    "optimizer_time_sec",
    "other_time_sec",
    "checkpoint_time_sec",
    "load_balance",
    "comm_efficiency",
    "pop_parallel_efficiency",
    "gpu_util_avg",
    "cpu_util_avg",
    "peak_mem_bytes",
    "energy_joules",
    "mfu",
)

#: One row per epoch and rank; the parts are seconds per step of the rank's attribution window.
RANKS_COLUMNS = (
    "epoch",
    "rank",
    "local_rank",
    "host",
    "device",
    "steps",
    "samples",
    "window_time_sec",
    "step_time_sec",
    "data_load_time_sec",
    "forward_time_sec",
    "backward_time_sec",
    "comm_exposed_time_sec",
    "comm_wait_time_sec",
    "optimizer_time_sec",
    "other_time_sec",
    "peak_mem_bytes",
)

#: One row per epoch and step of the throughput window; the time is the maximum over ranks.
STEPS_COLUMNS = ("epoch", "step", "step_time_sec", "slowest_rank")


@dataclass(frozen=True)
class JobFolder:
    """Folder of a job's output."""

    path: Path

    @property
    def out(self) -> Path:
        """Standard output of the job."""
        return self.path / "job.out"

    @property
    def err(self) -> Path:
        """Standard error of the job."""
        return self.path / "job.err"


@dataclass(frozen=True)
class RunFolder(JobFolder):
    """Folder of one attempt of a run."""

    @property
    def run_json(self) -> Path:
        """Description and state of the attempt: :mod:`bench.study.run_json`."""
        return self.path / "run.json"

    @property
    def metrics_csv(self) -> Path:
        """One row per epoch: :data:`METRICS_COLUMNS`."""
        return self.path / "metrics.csv"

    @property
    def ranks_csv(self) -> Path:
        """One row per epoch and rank: :data:`RANKS_COLUMNS`."""
        return self.path / "ranks.csv"

    @property
    def steps_csv(self) -> Path:
        """One row per epoch and step: :data:`STEPS_COLUMNS`."""
        return self.path / "steps.csv"

    @property
    def probes(self) -> Path:
        """Results of the probes."""
        return self.path / "probes.json"

    @property
    def trace(self) -> Path:
        """Profiler trace of some steps of rank 0, if the matrix asks for one."""
        return self.path / "trace-rank0.json.gz"

    @property
    def env(self) -> Path:
        """Software, hardware, the hosts that joined and the transport in use."""
        return self.path / "env.json"

    @property
    def end(self) -> Path:
        """Exit code and time, written by the job itself."""
        return self.path / "end.json"

    @property
    def sacct_summary(self) -> Path:
        """Slurm's accounting of the job and its steps, written by the harness."""
        return self.path / "sacct_summary.txt"

    @property
    def is_described(self) -> bool:
        """Whether the folder contains a run.json."""
        return self.run_json.is_file()


@dataclass(frozen=True)
class PackFolder(JobFolder):
    """Folder of a pack: many runs in one allocation, each with its own run folder."""

    @property
    def pack_json(self) -> Path:
        """Job name, allocation and the runs in their order."""
        return self.path / "pack.json"

    @property
    def members(self) -> Path:
        """List of runs, read by the job's script."""
        return self.path / "members"

    @property
    def marks(self) -> Path:
        """Start and end of each run, one JSON object per line, written by the job's script."""
        return self.path / "marks.jsonl"

    def script(self, cell_id: str) -> Path:
        """Return the path of a cell's script as it was when the pack was submitted."""
        return self.path / f"{cell_id}.sbatch"


@dataclass(frozen=True)
class StudyFolder:
    """Folder of a study: one planned matrix and its results."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the study."""
        return self.path.name

    @property
    def matrix(self) -> Path:
        """Copy of the planned matrix."""
        return self.path / "matrix.yaml"

    @property
    def site(self) -> Path:
        """Copy of the site file, if the matrix inherits values from one."""
        return self.path / "site.yaml"

    @property
    def plan_json(self) -> Path:
        """Cells, runs and their order: :mod:`bench.study.plan_json`."""
        return self.path / "plan.json"

    @property
    def is_planned(self) -> bool:
        """Whether the folder contains a plan.json."""
        return self.plan_json.is_file()

    @property
    def ledger(self) -> Path:
        """Events of the study: :mod:`bench.study.ledger`."""
        return self.path / "ledger.jsonl"

    @property
    def lock(self) -> Path:
        """Lock file, held during a submission."""
        return self.path / "submit.lock"

    @property
    def scripts(self) -> Path:
        """Folder with one script per cell."""
        return self.path / "scripts"

    @property
    def pack_script(self) -> Path:
        """Script that runs many runs in one allocation."""
        return self.scripts / "pack.sbatch"

    @property
    def packs(self) -> Path:
        """Folder with one subfolder per pack."""
        return self.path / "packs"

    def pack(self, number: int) -> PackFolder:
        """Return the folder of pack ``number`` (from 1)."""
        return PackFolder(self.packs / f"pack-{number}")

    @property
    def runs(self) -> Path:
        """Folder with one subfolder per run, which contains one per attempt."""
        return self.path / "runs"

    @property
    def report(self) -> Path:
        """Folder of the page, its tables and figures."""
        return self.path / "report"

    def attempt(self, run_id: str, attempt: int) -> RunFolder:
        """Return the folder of attempt ``attempt`` (from 1) of a run."""
        return RunFolder(self.runs.joinpath(run_id, f"attempt-{attempt}"))


def results_root() -> Path:
    """Return the folder of all studies: ``$BENCH_RESULTS``, or ``results`` in the current folder."""
    return Path(os.environ.get("BENCH_RESULTS") or "results")


def studies(root: Path) -> Iterator[StudyFolder]:
    """Yield every planned study in ``root``, sorted by name."""
    if root.is_dir():
        for path in sorted(root.iterdir()):
            if StudyFolder(path).is_planned:
                yield StudyFolder(path)


def latest_first(root: Path) -> list[StudyFolder]:
    """Return the studies in ``root``, the most recently planned first."""
    return sorted(studies(root), key=lambda study: study.plan_json.stat().st_mtime_ns, reverse=True)
