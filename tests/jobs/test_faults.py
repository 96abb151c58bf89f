"""Faults and neighbours of runs on the real cluster, and their presentation by status, verify and the report."""

import json
from pathlib import Path

from bench.study.ledger import Record
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.jobs.fault_studies import FAULTS, Scene, differences, fault_study
from tests.jobs.slurm_studies import MEASURE, run_id, scripted_study, submitted

#: Faults that take a few seconds; `make campaign` tests all.
QUICK = ("fine", "out-of-memory", "killed", "requeued")


def test_status_verify_and_report_agree_on_every_fault(cluster, tmp_path):
    study = fault_study(tmp_path, QUICK, cluster.environment)
    study.submit(*QUICK)
    for fault in QUICK:
        FAULTS[fault].strike(Scene(cluster, study, fault))
    study.await_ends(*QUICK)
    assert differences(study, QUICK) == []
    # Discard what earlier tests left.
    again = study.folder("requeued").path
    assert (again / "before-restart-1/metrics.csv").exists()
    assert not (again / "probes.json").exists()
    job_id = study.status()["requeued"]["job_id"]
    ends = [line.split() for line in (again / "sacct_summary.txt").read_text().splitlines()]
    assert [words[1] for words in ends if words[0] == job_id] == ["REQUEUED", "COMPLETED"]
    lines = map(json.loads, (study.study.folder / "ledger.jsonl").read_text().splitlines())
    states = [line["state"] for line in lines if line["run_id"] == study.run_id("requeued")]
    assert states == ["queued", "queued", "completed"]


def test_a_run_waits_for_a_drained_node_and_says_so(cluster, scripted):
    study = scripted(f"#SBATCH -w n3\n{MEASURE}")
    cluster.drain("n3")
    try:
        done = study.bench("submit", "STUDY")
        assert done.returncode == 0
        assert (
            f"\n{run_id(1)} is submitted first, because sbatch --test-only says: "
            "allocation failure: Requested node configuration is not available\n"
        ) in done.stderr
        # The second reason is that of 24.11 and later.
        reasons = ("UnavailableNodes:n3", "May be reserved for other job")
        expected = {f"waits to start (ReqNodeNotAvail, {reason})" for reason in reasons}
        wait_for(lambda: study.status()[run_id(1)].reason in expected, what="the reason")
        why = study.status()[run_id(1)].reason
        verified = json.loads(study.bench("verify", "STUDY", "--json").stdout)
        assert verified["runs"][0]["checks"] == [], "nothing is checked before the end"
        assert study.bench("report", "STUDY").returncode == 1, "no run has a throughput"
        assert why in (study.folder / "report/scaling.csv").read_text()
    finally:
        cluster.resume("n3")
    assert study.bench("submit", "STUDY", "--wait").stderr.splitlines()[-2] == "study scripted: 1 completed"


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
