"""Jobs that share nodes with a run are found, and disturb it only while it measures."""

import json
from pathlib import Path

from bench.study.ledger import Record
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.jobs.slurm_studies import MEASURE, run_id, scripted_study, submitted


def body(node: str, *, jobs: int = 1) -> str:
    """Return the script of a run on a node, on which in all so many ``jobs`` of this study execute at once."""
    # Slurm's times are whole seconds, and the accounting database can learn of a start some seconds later.
    begun = f'"$1/../../../begun-{node}-"'
    both = f"until [ $(ls {begun}* | wc -l) -ge {jobs} ]; do sleep 0.2; done; sleep 6"
    return f"#SBATCH --nodelist={node}\ntouch {begun}$SLURM_JOB_ID; {both}; {MEASURE}"


def shown(run: Record) -> set[tuple[str, str, str]]:
    return {(one.kind, *one.subject, *one.values["jobs"]) for one in run.end.disturbed}


def test_all_jobs_on_the_nodes_of_runs_are_found(tmp_path: Path, cluster: Cluster) -> None:
    study = scripted_study(
        tmp_path, [body("n1", jobs=2)] * 2 + [body("n2"), body("n3")], cluster.environment, name="neighbours"
    )
    options = ["--account=users", "--partition=l40s", "--output=/dev/null", "--parsable"]
    foreign = cluster.run(["sbatch", *options, "--nodelist=n2,n4", "--nodes=2", "--wrap=sleep 300"])
    job_id = foreign.stdout.strip()
    try:
        # The accounting database can learn of the start later than squeue.
        asked = ["sacct", "-nXP", "-j", job_id, "-o", "State,NodeList"]
        wait_for(lambda: cluster.run(asked).stdout.strip() == "RUNNING|n[2,4]", what="the foreign job")
        with submitted(study, "--wait"):
            runs = [study.record(run_id(number)) for number in (1, 2, 3, 4)]
            jobs = [run.job_id for run in runs]
            status = {
                run["run_id"]: run
                for run in json.loads(study.bench("status", "STUDY", "--json").stdout)["runs"]
            }
    finally:
        cluster.run(["scancel", job_id])
    expected = [
        {("study-run", "n1", jobs[1])},
        {("study-run", "n1", jobs[0])},
        {("foreign-job", "n2", job_id)},
        set(),
    ]
    assert [shown(run) for run in runs] == expected, [run.end.neighbours for run in runs]
    (neighbour,) = runs[2].end.neighbours
    assert neighbour.keys() == {"job_id", "start", "end", "nodes"}
    assert (neighbour["job_id"], neighbour["end"], neighbour["nodes"]) == (job_id, None, ["n2"])
    assert status[run_id(3)]["disturbed"] == "a job that is not of the study on n2"
    assert status[run_id(4)]["disturbed"] == ""


def test_disturbed_runs_run_again_once(tmp_path: Path, cluster: Cluster) -> None:
    study = scripted_study(tmp_path, [body("n1", jobs=2)] * 2 + [body("n2")], cluster.environment)
    with submitted(study, "--wait"):
        again = study.bench("submit", "STUDY", "--dry-run")
        assert "0 of 3 runs would be started" in again.stdout
        done = study.bench("submit", "STUDY", "--retry-disturbed", "--max-queued=1", "--wait")
        assert done.returncode == 0, done.stderr
        records = study.status()
        attempts = {run: (one.attempt, one.state, one.is_disturbed) for run, one in records.items()}
        assert attempts == {
            run_id(1): (2, "completed", False),
            run_id(2): (2, "completed", False),
            run_id(3): (1, "completed", False),
        }
        assert study.planned.ledger.attempts()[run_id(1)][1].is_disturbed
        assert study.jobs_per_run() == {run_id(1): 2, run_id(2): 2, run_id(3): 1}
        last = study.bench("submit", "STUDY", "--retry-disturbed")
        assert "nothing to start" in last.stderr
