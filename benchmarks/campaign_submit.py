"""Kill `bench submit` repeatedly and check that each run has exactly one job.

The script needs root to start a test cluster. Each round starts `bench submit` and kills it with SIGKILL at a
random moment; the sbatch process that it started survives. In every fifth round slurmctld is frozen during
the kill, so that sbatch is still waiting for its answer. After the last round, `bench submit` completes the
submission, and the jobs in Slurm are counted by name. The script exits with 1 if a run has no job or more
than one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

from clusters import own_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.bed import Cluster, missing
from tests.jobs.slurm_studies import MEASURE, Study, lines, scripted_study

#: Maximum number of jobs that are submitted before each kill.
RUNS_PER_KILL = 8


def kill_once(study: Study, cluster: Cluster, dice: random.Random, *, frozen: bool) -> None:
    """Start `bench submit` and kill it at a random moment; ``frozen`` freezes slurmctld during the kill."""
    process = study.start("submit", "STUDY")
    said = lines(process.stderr)
    for _ in range(dice.randint(0, RUNS_PER_KILL)):
        next(said, None)
    if frozen:
        next(said, None)
        with cluster.frozen_slurmctld():
            time.sleep(dice.uniform(0.05, 0.5))
            process.kill()
            process.wait()
    else:
        time.sleep(dice.uniform(0, 0.05))
        process.kill()
        process.wait()
    assert process.stderr is not None
    process.stderr.close()


def campaign(cluster: Cluster, folder: Path, *, kills: int, seed: int) -> bool:
    """Kill `bench submit` `kills` times at random moments; return whether each run has exactly one job."""
    dice = random.Random(seed)
    repeats = kills * RUNS_PER_KILL // 8
    study = scripted_study(folder, [MEASURE] * 8, cluster.environment, repeats=repeats)
    began = time.perf_counter()
    done, frozen, unanswered = 0, 0, 0
    while done < kills and sum(study.jobs_per_run().values()) < len(study.planned.runs):
        freeze = done % 5 == 4
        kill_once(study, cluster, dice, frozen=freeze)
        done, frozen = done + 1, frozen + freeze
        records = study.planned.records().values()
        unanswered += any(record.state.active and record.job_id is None for record in records)
    last = study.bench("submit", "STUDY")
    assert last.returncode == 0, last.stderr
    took = time.perf_counter() - began
    jobs = study.jobs_per_run()
    runs = [run.run_id for run in study.planned.runs]
    lost = [run for run in runs if not jobs[run]]
    twice = [run for run in runs if jobs[run] > 1]
    events = Counter(event["event"] for event in study.planned.ledger.events())
    print(f"{done} kills ({frozen} of them while the controller was frozen) in {took:.0f} s, seed {seed}")
    print(f"{unanswered} kills came before a job id was recorded (sbatch had not started or not answered)")
    print(f"runs {len(runs)}, jobs {sum(jobs.values())}, lost {len(lost)}, submitted twice {len(twice)}")
    print(f"ledger: {', '.join(f'{count} {event}' for event, count in sorted(events.items()))}")
    for run in [*lost, *twice]:
        print(f"WRONG: {run} has {jobs[run]} jobs")
    return not lost and not twice


def main() -> int:
    """Run the campaign on a fresh cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if lacking := missing():
        print(f"not run: {lacking}")
        return 1
    with own_cluster() as (cluster, folder):
        fine = campaign(cluster, folder, kills=options.kills, seed=options.seed)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
