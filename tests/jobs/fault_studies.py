"""A study in which each run has one fault, with real scripts and ranks.

The scripts are those of `bench plan`. Their set-up line puts a ``python`` on PATH that is a short
bash script; the cell's variable ``FAULT`` selects the behaviour of its ranks.
"""

from __future__ import annotations

import html
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_scaling_bench.records import METRICS_COLUMNS
from ddp_scaling_bench.run_folder import RunFolder
from tests.analysis.figures import no_figure
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.commands.command_line import is_reported
from tests.common import read_rows, write_program
from tests.jobs.slurm_studies import Study, plan_study
from tests.matrices import matrix, slurm, training

_METRICS = {"epoch": 1, "steps": 5, "samples": 40, "train_loss": 0.5, "epoch_time_sec": 0.4}
_METRICS |= {"throughput_samples_per_sec": 100, "step_time_sec_median": 0.08}


@dataclass
class Scene:
    """One run of a fault study."""

    cluster: Cluster
    study: FaultStudy
    fault: str

    @property
    def job_id(self) -> str:
        found = self.study.study.planned.records()[self.study.run_id(self.fault)].job_id
        assert found is not None, f"{self.fault} was not submitted"
        return found

    def squeue(self, field: str) -> str:
        shown = self.cluster.run(["squeue", "-h", "-t", "all", "-j", self.job_id, "-o", field], check=False)
        return shown.stdout.strip()

    def await_state(self, state: str) -> None:
        what = f"job {self.job_id} ({self.fault}) to be {state}"
        wait_for(lambda: self.squeue("%T") == state, what=what)

    def await_ranks(self) -> None:
        """Wait until both ranks of a run that waits for `go` have begun; RUNNING is earlier."""
        files = [self.study.folder(self.fault).path / f"begun-{rank}" for rank in range(2)]
        wait_for(lambda: all(file.exists() for file in files), what=f"the ranks of {self.fault}")

    def let_end(self) -> None:
        """Let a run end that waits for this."""
        self.study.folder(self.fault).path.joinpath("go").touch()

    def update(self, *settings: str) -> None:
        self.cluster.run(["scontrol", "update", f"JobId={self.job_id}", *settings])


@dataclass
class FaultStudy:
    """A planned study with one run per fault."""

    study: Study

    def run_id(self, fault: str) -> str:
        planned = self.study.planned
        return next(r.run_id for r in planned.runs if planned.cells[r.cell_id].env["FAULT"] == fault)

    def folder(self, fault: str, attempt: int = 1) -> RunFolder:
        return self.study.planned.folder.attempt(self.run_id(fault), attempt)

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the rows of ``bench status`` by fault."""
        shown = json.loads(self.study.bench("status", "STUDY", "--json").stdout)
        faults = {self.run_id(fault): fault for fault in self.faults}
        return {faults[run["run_id"]]: run for run in shown["runs"]}

    def verified(self) -> dict[str, str]:
        """Return the state check of ``bench verify`` by fault."""
        shown = json.loads(self.study.bench("verify", "STUDY", "--json").stdout)
        said = {run["run_id"]: run["checks"][0] for run in shown["runs"]}
        return {fault: said[self.run_id(fault)]["found"] for fault in self.faults}

    def reported(self) -> tuple[dict[str, dict[str, str]], str]:
        """Return the rows of the report's scaling.csv by fault, and the text of its page."""
        with no_figure():
            done = self.study.bench("report", "STUDY")
        assert is_reported(done), done.stderr
        rows = {row["cell_id"]: row for row in read_rows(self.study.folder / "report/scaling.csv")}
        planned = self.study.planned
        page = html.unescape((self.study.folder / "report/index.html").read_text(encoding="utf-8"))
        return {cell.env["FAULT"]: rows[cell.cell_id] for cell in planned.cells.values()}, page

    @property
    def faults(self) -> list[str]:
        return [cell.env["FAULT"] for cell in self.study.planned.cells.values()]

    def submit(self, *faults: str) -> None:
        for fault in faults:
            done = self.study.bench("submit", "STUDY", "--only", f"env.FAULT={fault}")
            assert "submitted as job" in done.stderr, done.stderr

    def await_ends(self, *faults: str) -> dict[str, dict[str, Any]]:
        """Wait until none of these runs is queued or running, and return their status."""
        shown: dict[str, dict[str, Any]] = {}

        def ended() -> bool:
            shown.update(self.status())
            return all(shown[fault]["state"] not in ("queued", "running") for fault in faults)

        wait_for(ended, what=f"the ends of {', '.join(faults)}")
        return shown


def fault_study(folder: Path, faults: Sequence[str], environment: Mapping[str, str]) -> FaultStudy:
    """Plan a study with one run per fault."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    rank = Path(__file__).with_name("fault_rank.sh").read_text(encoding="utf-8")
    values = ",".join(str(_METRICS.get(name, "")) for name in METRICS_COLUMNS)
    names = {"COLUMNS": ",".join(METRICS_COLUMNS), "VALUES": values, "PYTHON": sys.executable}
    for name, value in names.items():
        rank = rank.replace(name, value)
    write_program(programs / "python", rank)
    text = matrix(
        "faults",  # the runs are side by side
        cluster=slurm(exclusive=False, mem="300M", time_limit="2m", setup=[f"PATH={programs}:$PATH"]),
        axes={"nodes": [1], "tasks_per_node": [2], "backend": ["gloo"], "env.FAULT": [*faults]},
        workload=training(steps_per_epoch=5, epochs=1),
    )
    return FaultStudy(plan_study(folder, text, environment))


def requeue(scene: Scene) -> None:
    """Requeue a running job, as an administrator can despite --no-requeue."""
    scene.await_state("RUNNING")
    wait_for(scene.study.folder(scene.fault).path.joinpath("probes.json").exists, what="its first part")
    scene.update("Requeue=1")
    scene.cluster.run(["scontrol", "requeue", scene.job_id])
    scene.await_state("PENDING")
    # Its part before has ended now, and slurmd refuses credentials of that second (cred_revoked in slurm_cred.c).
    time.sleep(2)
    scene.update("StartTime=now")  # Slurm would wait for two minutes


def cancel(scene: Scene) -> None:
    """Cancel a running job from outside."""
    scene.await_state("RUNNING")
    scene.cluster.run(["scancel", scene.job_id])


def crash(scene: Scene) -> None:
    """Cut the power of the job's node; Slurm notices after SlurmdTimeout."""
    scene.await_state("RUNNING")
    node = scene.squeue("%N")
    scene.cluster.crash_node(node)
    scene.await_state("NODE_FAIL")
    scene.cluster.boot_node(node)


def stop_slurmd(scene: Scene) -> None:
    """Kill the slurmd of the job's node and restart it before Slurm notices; the ranks continue."""
    scene.await_ranks()
    node = scene.squeue("%N")
    scene.cluster.stop_slurmd(node)
    time.sleep(3)
    scene.cluster.start_slurmd(node)
    scene.let_end()


def drain(scene: Scene) -> None:
    """Drain the job's node while it runs there."""
    scene.await_ranks()
    node = scene.squeue("%N")
    scene.cluster.drain(node)
    scene.let_end()
    scene.await_state("COMPLETED")
    scene.cluster.resume(node)


def leave_alone(scene: Scene) -> None:
    """Wait for the end of the run without interfering."""


@dataclass(frozen=True)
class Fault:
    """Fault of a run, and its expected end in status, verify and report.

    ``reason`` is a regular expression of the whole reason.
    """

    state: str
    failure_class: str | None
    reason: str
    strike: Callable[[Scene], None] = leave_alone


FAULTS = {
    "fine": Fault("completed", None, ""),
    # The second reason is that of 20.11.
    "out-of-memory": Fault(
        "failed",
        "out-of-memory",
        r"OUT_OF_MEMORY(?: in step 0 \(bash\); the job says FAILED|: ran out of memory)",
    ),
    "killed": Fault(
        "failed",
        "killed",
        r"rank 1 on n\d was killed by SIGKILL; FAILED: step 0 \(bash\) was ended by SIG\w+",
    ),
    "cancelled": Fault("cancelled", "cancelled", "cancelled by user id 0", cancel),
    "requeued": Fault("completed", None, "requeued by Slurm 1 time", requeue),
    "slurmd-killed": Fault("completed", None, "", stop_slurmd),
    "drained": Fault("completed", None, "", drain),
    "time-limit": Fault("failed", "time-limit", "TIMEOUT: reached its time limit"),
    "crashed": Fault("failed", "node-failure", "NODE_FAIL: lost a node", crash),
}


def differences(study: FaultStudy, faults: Sequence[str]) -> list[str]:
    """Return differences of status, verify and report from the expected ends of ``faults``."""
    found = []
    status, verified = study.status(), study.verified()
    rows, page = study.reported()
    attempts = {row["run_id"]: row for row in read_rows(study.study.folder / "report/runs.csv")}
    for name in faults:
        fault, run = FAULTS[name], status[name]
        told = (run["state"], run["failure_class"])
        if told != (fault.state, fault.failure_class) or not re.fullmatch(fault.reason, run["reason"]):
            found.append(f"{name}: status says {told}, {run['reason']!r}")
        of_class = f" ({fault.failure_class})" if fault.failure_class else ""
        expected = [f"{fault.state}{of_class}", run["reason"]]
        if not all(part in verified[name] for part in expected):
            found.append(f"{name}: verify says {verified[name]!r}")
        attempt = attempts[study.run_id(name)]
        if (attempt["state"], attempt["failure_class"] or None) != told:
            found.append(f"{name}: runs.csv says {attempt}")
        row = rows[name]
        why = (run["cause"] or run["reason"]) if fault.state != "completed" else ""
        if row["state"] != fault.state or why not in row["reason"]:
            found.append(f"{name}: scaling.csv says {row['state']}, {row['reason']!r}")
        if run["reason"] not in page:
            found.append(f"{name}: the page does not say {run['reason']!r}")
    return found
