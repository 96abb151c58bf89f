"""Studies for tests on the cluster, with real training or with short scripts."""

import itertools
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.jobs.engine import Engine
from bench.jobs.slurm.client import Slurm
from bench.jobs.slurm.scheduler import SlurmScheduler
from bench.study.layout import StudyFolder
from bench.study.ledger import Record
from bench.study.plan_json import PlannedStudy, open_study
from ddp_scaling_bench.records import METRICS_COLUMNS
from ddp_scaling_bench.run_folder import RunFolder
from tests.cluster.containers import wait_for
from tests.commands import command_line
from tests.commands.command_line import Command
from tests.common import run_program, write_program
from tests.matrices import matrix, planned_study, slurm

#: The first act of each script.
GATE = Path(__file__).parents[2].joinpath("slurm_templates/gate.j2").read_text(encoding="utf-8")
GATE += 'claim_folder "$1" "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}"'
#: Commands that write the results that the executor expects of a successful run.
MEASURE = f"printf '%s\\n' {','.join(METRICS_COLUMNS)} {',' * (len(METRICS_COLUMNS) - 1)} >\"$1/metrics.csv\""


#: Modules of a user with the names of bench's own, and of packages that it uses.
NAMES = ("bench.py", "analysis/__init__.py", "torch_helpers.py", "psutil.py", "yaml.py", "rich/__init__.py")


def add_modules(folder: Path, names: Iterable[str] = NAMES) -> None:
    """Write modules that end the process that imports them."""
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise SystemExit('the module {name} of the user was imported')\n")


@dataclass
class Study:
    """A planned study, and calls of `bench` for it."""

    folder: Path
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def planned(self) -> PlannedStudy:
        return open_study(StudyFolder(self.folder))

    @property
    def engine(self) -> Engine:
        planned, environment = self.planned, {**os.environ, **self.environment}
        return Engine(planned, SlurmScheduler(planned, slurm=Slurm(environment=environment)))

    def _given(self, words: Sequence[str]) -> list[str]:
        """Return the words; the word STUDY is replaced by the folder."""
        return [str(self.folder) if word == "STUDY" else word for word in words]

    def bench(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call ``bench WORDS`` in this process."""
        return command_line.bench(*self._given(words), cwd=Path.cwd(), **self.environment)

    def bench_process(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call ``bench WORDS`` in a new process, as users do; benchmarks measure this."""
        return command_line.bench_process(*self._given(words), cwd=Path.cwd(), **self.environment)

    def start(self, *words: str) -> Command:
        """Start ``bench WORDS`` without waiting for it."""
        return Command(*self._given(words), env=self.environment)

    def status(self) -> dict[str, Record]:
        """Return the present record of each run."""
        return self.engine.poll()

    def states(self) -> dict[str, str]:
        """Return the present state of each run."""
        return {run_id: str(record.state) for run_id, record in self.status().items()}

    def record(self, run_id: str) -> Record:
        """Return the record of a run in the ledger; Slurm is not asked."""
        return self.planned.records()[run_id]

    def attempt(self, run_id: str, attempt: int = 1) -> RunFolder:
        return self.planned.folder.attempt(run_id, attempt)

    def run_json(self, run_id: str, attempt: int = 1) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.attempt(run_id, attempt).run_json.read_text())
        return content

    def jobs_per_run(self) -> Counter[str]:
        """Return the number of Slurm jobs per run, of all attempts and ended jobs too."""
        return Counter(name.split(".")[1] for name in self._queue("--states=all").values())

    def job_ids(self) -> list[str]:
        """Return the ids of all jobs of this study, ended ones too."""
        return sorted(self._queue("--states=all"), key=int)

    def cancel_all(self) -> None:
        """Cancel every job of this study, even if its ledger lacks it."""
        if ids := list(self._queue()):
            subprocess.run(["scancel", *ids], env={**os.environ, **self.environment}, check=False)

    def _queue(self, *options: str) -> dict[str, str]:
        """Return the names of this study's jobs in squeue by job id."""
        shown = run_program(
            ["squeue", "--noheader", "--format=%A %j", *options],
            env={**os.environ, **self.environment},
            check=True,
        )
        jobs = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
        key = self.planned.plan["key"]
        return {job_id: name for job_id, name in jobs.items() if name.endswith(f".{key}")}


def with_sbatch(study: Study, folder: Path, text: str) -> Study:
    """Return a study whose sbatch is a bash script with this text; {sbatch} is the real one."""
    folder.joinpath("bin").mkdir()
    write_program(folder / "bin/sbatch", "#!/bin/bash\n" + text.replace("{sbatch}", shutil.which("sbatch")))
    return Study(study.folder, {**study.environment, "PATH": f"{folder}/bin:{os.environ['PATH']}"})


@contextmanager
def submitted(study: Study, *options: str) -> Iterator[Study]:
    """Submit a study; cancel its jobs at the end of the block."""
    try:
        done = study.bench("submit", "STUDY", *options)
        assert done.returncode == 0, done.stderr
        yield study
    finally:
        study.cancel_all()


def plan_study(folder: Path, matrix: str, environment: Mapping[str, str]) -> Study:
    """Plan a matrix in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    return Study(planned_study(folder, matrix).folder.path, environment)


def scripted_study(
    folder: Path,
    bodies: Sequence[str],
    environment: Mapping[str, str],
    *,
    name: str = "scripted",
    nodes: Sequence[int] = (1,),
    repeats: int = 1,
    max_running: int | None = None,
    **cluster: Any,
) -> Study:
    """Plan a study whose cells are short scripts; the run's folder is ``$1``.

    Its runs are called ``n1x1-gloo-srun-b1-r1``, ``...-b2-r1``: the N-th batch runs body N, on each
    number of nodes. ``cluster`` are options of the matrix's section of this name.
    """
    text = matrix(
        name,
        cluster=slurm(exclusive=False, **cluster),  # many small jobs share four nodes
        axes={"nodes": list(nodes), "tasks_per_node": [1], "backend": ["gloo"]},
        scaling=[{"mode": "weak", "per_gpu_batch": list(range(1, len(bodies) + 1))}],
        repeats=repeats,
        max_running=max_running,
    )
    study = plan_study(folder, text, environment)
    for size, (batch, body) in itertools.product(nodes, enumerate(bodies, 1)):
        script = study.folder / f"scripts/n{size}x1-gloo-srun-b{batch}.sbatch"
        assert script.exists()
        head, directives, body = _parted(body)
        script.write_text(f"{head}{directives}\n{GATE}\n{body}\n")
    return study


def _parted(body: str) -> tuple[str, str, str]:
    """Return the first line, the directives, and the rest."""
    lines = body.splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    if not any("--mem" in line for line in directives):
        directives.append("#SBATCH --mem=100M")
    rest = [line for line in lines if not line.startswith("#SBATCH")]
    return "#!/bin/bash\n", "\n".join(directives), "\n".join(rest)


def await_child(process: subprocess.Popen[str]) -> None:
    """Wait until a process has started another one."""
    wait_for(lambda: bool(psutil.Process(process.pid).children()), what=f"a child of {process.args}")


def run_id(number: int, repeat: int = 1) -> str:
    """Return the name of a run of cell ``number`` of a scripted study."""
    return f"n1x1-gloo-srun-b{number}-r{repeat}"


def lines(stream: Any) -> Iterator[str]:
    """Yield the lines of a process's standard error."""
    for line in stream:
        yield line.rstrip("\n")
