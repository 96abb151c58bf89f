"""The files of a run's folder: names that jobs and `bench` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import read_object


class Child:
    """Descriptor that returns the path of a named file or subfolder in a folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, owner: type) -> Path:
        return Path(folder.path, self._name)


@dataclass(frozen=True)
class JobFolder:
    """Folder that contains the output files of a job."""

    path: Path

    out = Child("job.out")
    err = Child("job.err")


@dataclass(frozen=True)
class RunFolder(JobFolder):
    """Folder of one attempt of a run."""

    run_json = Child("run.json")  # description, written at the submission: see bench.study.run_json
    cell = Child("cell.json")  # sizes and options for the ranks, written by the script: see cell_json.py
    metrics_csv = Child("metrics.csv")  # see ddp_scaling_bench.records.EpochRow
    ranks_csv = Child("ranks.csv")  # see ddp_scaling_bench.records.RankRow
    steps_csv = Child("steps.csv")  # see ddp_scaling_bench.records.StepRow
    probes = Child("probes.json")
    sums = Child("SHA256SUMS")  # of these four files: see ddp_scaling_bench.checksums
    trace = Child("trace-rank0.json.gz")  # profiler trace of some steps, if the matrix sets trace_steps
    env = Child("env.json")  # software, hardware, hosts that took part, and network that was used
    recorder = Child("recorder.json")  # host and process of the training that records here
    conditions = Child("conditions.json")  # state of nodes and ranks in each measured window
    sampled_step = Child("sampled_step.json")  # slowest calls of one step, see bench.study.run_json
    start = Child("start")  # a line per start of the script: job id, time, host, number of restarts
    end = Child("end.json")  # exit code and end time, written by the job itself
    pack_end = Child("pack_end.json")  # the same, written by the script of the run's pack
    sacct_summary = Child("sacct_summary.txt")  # rows of the job in sacct, written by bench

    @property
    def logs(self) -> tuple[Path, ...]:
        """The existing logs: of the job, then those that NCCL wrote here (NCCL_DEBUG_FILE), by name."""
        of_job = [log for log in (self.err, self.out) if log.is_file()]
        return (*of_job, *sorted(log for log in self.path.glob("nccl*.log") if log.is_file()))

    @property
    def is_described(self) -> bool:
        """True if the folder contains a run.json."""
        return self.run_json.is_file()


# Paths are concatenated as text: with pathlib, reading thousands of files would take much longer.
_NAME = RunFolder(Path()).run_json.name


def read_run(attempt: str | Path) -> tuple[dict[str, Any] | None, str]:
    """Return (content of run.json in folder ``attempt``, ``""``), or (None, why it cannot be read)."""
    return read_object(f"{attempt}/{_NAME}")
