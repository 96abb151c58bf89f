"""Where everything lies: the one module that knows the names of files and folders.

::

    results/<study>/  matrix.yaml site.yaml plan.json ledger.jsonl submit.lock report/
      scripts/                 <cell>.sbatch (.sh without Slurm) pack.sbatch
      runs/<run>/attempt-<n>/  run.json metrics.csv ranks.csv steps.csv probes.json
                               trace-rank0.json.gz env.json end.json sacct_summary.txt
                               job.out job.err
      packs/pack-<n>/  pack.json members marks.jsonl <cell>.sbatch job.out job.err

What a run *is* stands in its ``run.json``; nothing is parsed out of a folder's name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: One row per epoch. Values are over all ranks; times of the parts are seconds per step
#: (mean over ranks and steps) of the attribution window. Empty means not measured.
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

#: One row per epoch and rank; the parts are seconds per step of that rank's attribution window.
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
    """A folder that a job writes its output to."""

    path: Path

    @property
    def out(self) -> Path:
        """The job's standard output."""
        return self.path / "job.out"

    @property
    def err(self) -> Path:
        """The job's standard error."""
        return self.path / "job.err"


@dataclass(frozen=True)
class RunFolder(JobFolder):
    """The folder of one attempt of one run."""

    @property
    def run_json(self) -> Path:
        """What this run is, and how it ended; written by the harness only."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """One row per epoch: :data:`METRICS_COLUMNS`."""
        return self.path / "metrics.csv"

    @property
    def ranks(self) -> Path:
        """One row per epoch and rank: :data:`RANKS_COLUMNS`."""
        return self.path / "ranks.csv"

    @property
    def steps(self) -> Path:
        """One row per epoch and step: :data:`STEPS_COLUMNS`."""
        return self.path / "steps.csv"

    @property
    def probes(self) -> Path:
        """What the probes read."""
        return self.path / "probes.json"

    @property
    def trace(self) -> Path:
        """The profiler's trace of some steps of rank 0, where one was asked for."""
        return self.path / "trace-rank0.json.gz"

    @property
    def env(self) -> Path:
        """Software, hardware, hosts that joined, and the transport in use."""
        return self.path / "env.json"

    @property
    def end(self) -> Path:
        """The provisional end that the job itself could still write."""
        return self.path / "end.json"

    @property
    def sacct_summary(self) -> Path:
        """Slurm's accounting of the job, step rows included; written from outside."""
        return self.path / "sacct_summary.txt"


@dataclass(frozen=True)
class PackFolder(JobFolder):
    """The folder of one pack: many runs of a study in one allocation; each leaves its output in its own."""

    @property
    def pack_json(self) -> Path:
        """What was asked for: the job's name, the allocation, and its runs in their order."""
        return self.path / "pack.json"

    @property
    def members(self) -> Path:
        """The list that the job's script reads."""
        return self.path / "members"

    @property
    def marks(self) -> Path:
        """When each run began and ended, by the job's script: one JSON object a line."""
        return self.path / "marks.jsonl"

    def script(self, cell_id: str) -> Path:
        """Return a cell's script as it was when the pack was submitted."""
        return self.path / f"{cell_id}.sbatch"


@dataclass(frozen=True)
class StudyFolder:
    """The folder of one study: one planned matrix and its results."""

    path: Path

    @property
    def name(self) -> str:
        """The study's name."""
        return self.path.name

    @property
    def matrix(self) -> Path:
        """The matrix as it was planned, byte for byte."""
        return self.path / "matrix.yaml"

    @property
    def site(self) -> Path:
        """The site file that the matrix inherited from, byte for byte; absent where it took nothing."""
        return self.path / "site.yaml"

    @property
    def plan(self) -> Path:
        """Cells, runs and their order."""
        return self.path / "plan.json"

    @property
    def ledger(self) -> Path:
        """What happened, one JSON object a line, only ever appended to."""
        return self.path / "ledger.jsonl"

    @property
    def lock(self) -> Path:
        """Held by whoever submits."""
        return self.path / "submit.lock"

    @property
    def scripts(self) -> Path:
        """One script per cell."""
        return self.path / "scripts"

    @property
    def pack_script(self) -> Path:
        """The script that runs many runs in one allocation."""
        return self.scripts / "pack.sbatch"

    @property
    def packs(self) -> Path:
        """One folder per pack."""
        return self.path / "packs"

    def pack(self, number: int) -> PackFolder:
        """Return the folder of pack ``number`` (from 1)."""
        return PackFolder(self.packs / f"pack-{number}")

    @property
    def runs(self) -> Path:
        """One folder per run, one below it per attempt."""
        return self.path / "runs"

    @property
    def report(self) -> Path:
        """The page, the tables and the figures."""
        return self.path / "report"

    def attempt(self, run_id: str, attempt: int) -> RunFolder:
        """Return the folder of attempt ``attempt`` (from 1) of a run."""
        return RunFolder(self.runs.joinpath(run_id, f"attempt-{attempt}"))


def results_root() -> Path:
    """Return the folder that studies land in: ``$BENCH_RESULTS``, else ``results`` here."""
    return Path(os.environ.get("BENCH_RESULTS") or "results")


def studies(root: Path) -> Iterator[StudyFolder]:
    """Yield every planned study below ``root``, by name."""
    if root.is_dir():
        for path in sorted(root.iterdir()):
            if (path / "plan.json").is_file():
                yield StudyFolder(path)


def latest_first(root: Path) -> list[StudyFolder]:
    """Return the studies below ``root``, the one planned last first."""
    return sorted(studies(root), key=lambda study: study.plan.stat().st_mtime_ns, reverse=True)
