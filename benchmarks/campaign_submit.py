"""Kill `bench submit` and `bench cancel` while Slurm fails, and check that each run is executed exactly once.

    python benchmarks/campaign_submit.py [--kills N] [--seed N] [--slurm SUITE|RELEASE]

The script needs root to start a test cluster. Each round starts two submissions and one `bench status` at
once, in some rounds also `bench cancel`, and kills the submissions and most cancellations at random moments.
Meanwhile a daemon is frozen or stopped, or sbatch is slow, is killed, or is silent after Slurm has accepted
the job. At the end `bench submit --wait` completes the study. Then sacct, the ledger and a file to which each
start of a run appends a line must agree: no name of a job and no attempt exists twice, the ledger knows each
job, and as many jobs have completed as there are runs. The script exits with 1 if they do not agree.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from clusters import DAEMONS, add_release_option, own_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.common import write_program
from tests.jobs.slurm_studies import Study, plan_study
from tests.matrices import command, matrix, slurm

#: Maximum number of jobs that are submitted before each kill.
RUNS_PER_KILL = 3
#: Modes of the wrapper of sbatch.
MODES = ("sbatch slow", "sbatch killed", "sbatch silent")
SBATCH = """#!/bin/bash
case " $* " in *" --parsable "*) ;; *) exec {sbatch} "$@" ;; esac
case $(cat {folder}/mode) in
  *slow) sleep 1 ;;
  *killed) {sbatch} "$@" >/dev/null; kill -9 $$ ;;
  *silent) {sbatch} "$@" >/dev/null; exit 0 ;;
esac
exec {sbatch} "$@"
"""


def planned(folder: Path, cluster: Cluster, *, runs: int) -> Study:
    """Plan a study of short runs; each start appends the folder of its attempt to the file ``starts``."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "mode").write_text("")
    path = cluster.environment.get("PATH", os.environ["PATH"])  # of another release
    own = {"sbatch": shutil.which("sbatch", path=path), "folder": programs}
    write_program(programs / "sbatch", SBATCH.format(**own))
    words = ["bash", "-c", f'echo "$1" >>{folder}/starts; sleep 2', "bash", "{run_dir}"]
    text = matrix(
        "killed",
        cluster=slurm(exclusive=False, mem="100M"),
        axes={"nodes": [1], "tasks_per_node": [1]},
        workload=command(words),
        repeats=runs,
    )
    return plan_study(folder, text, {**cluster.environment, "PATH": f"{programs}:{path}"})


def kill_once(study: Study, dice: random.Random, *, cancel: bool) -> None:
    """Start several commands at once, and kill all but `bench status` at random moments."""
    words = [("submit", "STUDY", "--max-queued", str(dice.randint(4, 12))), ("submit", "STUDY")]
    if cancel:
        words.append(("cancel", "STUDY"))
    ledger = study.folder / "ledger.jsonl"
    size = ledger.stat().st_size if ledger.exists() else 0
    status = study.start("status", "STUDY")
    started = [study.start(*one) for one in words]
    spared = started[2:] if dice.random() < 0.5 else []  # some cancellations succeed
    dice.shuffle(started)
    until = time.monotonic() + dice.uniform(1, 8)  # before the first line, nothing has been submitted
    while time.monotonic() < until and not (ledger.exists() and ledger.stat().st_size > size):
        time.sleep(0.005)
    for process in started:
        time.sleep(dice.uniform(0, 0.8))
        if process not in spared:
            process.kill()
    for process in (status, *started):
        process.communicate(timeout=300)


def campaign(cluster: Cluster, folder: Path, *, kills: int, seed: int) -> bool:
    """Run rounds with at least ``kills`` kills; return whether each run was executed exactly once."""
    dice = random.Random(seed)
    study = planned(folder, cluster, runs=kills * RUNS_PER_KILL)
    began, done, rounds = time.perf_counter(), 0, Counter[str]()
    while done < kills:
        names = ["none", *DAEMONS, *MODES]
        name, cancel = names[sum(rounds.values()) % len(names)], dice.random() < 0.25
        (folder / "bin/mode").write_text(name)
        with DAEMONS[name](cluster) if name in DAEMONS else nullcontext():
            kill_once(study, dice, cancel=cancel)
        done, rounds = done + 2 + cancel, rounds + Counter([name])
    (folder / "bin/mode").write_text("none")
    said = study.start("submit", "STUDY", "--wait").communicate(timeout=1800)[1]
    print(f"{done} kills in {time.perf_counter() - began:.0f} s, seed {seed}; rounds: {dict(rounds)}")
    print(said.splitlines()[-1])
    return _agree(study, cluster, folder)


def _agree(study: Study, cluster: Cluster, folder: Path) -> bool:
    """Compare sacct, the ledger and the starts; print the numbers and what is wrong."""
    key = study.planned.plan["key"]

    def jobs() -> list[list[str]]:
        words = ["sacct", "-nXP", "--starttime=now-1days", "-o", "JobID,JobName%200,State,End"]
        rows = [line.split("|") for line in cluster.run(words).stdout.splitlines()]
        return [row for row in rows if row[1].endswith(f".{key}")]

    wait_for(lambda: all(row[3] != "Unknown" for row in jobs()), what="the ends in sacct")
    found, runs = jobs(), len(study.planned.runs)
    states, names = Counter(row[2].split()[0] for row in found), Counter(row[1] for row in found)
    attempts = [one for of_run in study.planned.ledger.attempts().values() for one in of_run.values()]
    starts = Counter((folder / "starts").read_text().split())
    lost = {row[0] for row in found} ^ {one.job_id for one in attempts if one.job_id}
    print(f"runs {runs}; jobs by sacct: {dict(states)}; attempts {len(attempts)}; starts {len(starts)}")
    wrong = [f"{name}: {count} jobs" for name, count in names.items() if count > 1]
    wrong += [f"{attempt}: {count} starts" for attempt, count in starts.items() if count > 1]
    wrong += [f"job {job_id}: only in sacct or in the ledger" for job_id in sorted(lost)]
    if states["COMPLETED"] != runs:
        wrong.append(f"{states['COMPLETED']} jobs completed, but there are {runs} runs")
    if (ends := Counter(str(one.state) for one in study.status().values())) != {"completed": runs}:
        wrong.append(f"`bench status` shows {dict(ends)}")
    print("".join(f"WRONG: {line}\n" for line in wrong), end="")
    return not wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    add_release_option(parser)
    given = parser.parse_args()
    with own_cluster(slurm=given.slurm) as (own, scratch):
        sys.exit(not campaign(own, scratch, kills=given.kills, seed=given.seed))
