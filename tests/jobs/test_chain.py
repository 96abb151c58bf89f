"""At most `concurrent_runs` runs execute at once, whatever happens to the jobs of a chain."""

from __future__ import annotations

import signal

from bench.jobs.slurm.parsing import JobKey, QueueRow
from bench.jobs.slurm.scheduler import Chains, Place
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.jobs.slurm_studies import MEASURE, Study, lines

# -- chains of known jobs --------------------------------------------------------------------


def row(job: int, state: str = "PENDING") -> QueueRow:
    return QueueRow(JobKey(str(job)), state, "", None, None, None, 1, "", "gpu", f"job{job}")


def intents(**chains: int | None) -> list[dict]:
    """Return the events of jobs by name; None stands for a submission without a limit."""
    return [
        {"event": "intent", "job_name": name, **({} if chain is None else {"chain": chain})}
        for name, chain in chains.items()
    ]


def test_each_job_depends_on_the_jobs_n_2n_3n_places_before_it():
    chains = Chains(2)
    places = []
    for job in range(1, 7):
        places.append(chains.next_place())
        chains.add(places[-1], str(job))
    assert [place.after for place in places] == [(), (), ("1",), ("2",), ("1", "3"), ("2", "4")]
    assert places[4].options == ["--dependency=afterany:1:3"]
    assert (places[0].event, places[5].event, places[0].options) == ({"chain": 0}, {"chain": 1}, [])


def test_without_a_limit_no_job_depends_on_another():
    chains = Chains(None)
    chains.add(chains.next_place(), "1")
    assert (chains.next_place(), chains.next_place().event) == (Place(), {})


def test_only_jobs_that_have_not_ended_are_in_a_chain():
    queue = [row(1, "COMPLETED"), row(2, "COMPLETING"), row(3, "CANCELLED"), row(4), row(9)]
    events = [*intents(job1=0, job2=1, job3=1, job4=1), {"event": "submitted", "job_id": "4"}]
    chains = Chains.of_queue(2, queue, events)
    for job, place in (("5", Place(0)), ("6", Place(0, ("5",))), ("7", Place(0, ("5", "6")))):
        assert chains.next_place() == place
        chains.add(place, job)
    assert chains.next_place() == Place(1, ("2", "4"))


def test_jobs_of_another_limit_hold_back_every_chain():
    queue = [row(1, "RUNNING"), row(2), row(3)]
    chains = Chains.of_queue(2, queue, intents(job1=None, job2=2, job3=0))
    assert chains.next_place() == Place(1, ("1", "2"))


# -- a real cluster ----------------------------------------------------------------------------

#: A script that records how many runs execute. It ends when the study's folder contains a file `go`,
#: and fails when its own folder contains a file `fail`.
COUNTED = f"""\
study="${{1%/runs/*}}"
mkdir -p "$study/inside"
touch "$study/inside/$SLURM_JOB_ID"
ls "$study/inside" | wc -l >>"$study/counts"
until [ -e "$study/go" ] || [ -e "$1/fail" ]; do sleep 0.1; done
sleep 0.3
rm "$study/inside/$SLURM_JOB_ID"
[ -e "$1/fail" ] && exit 3
{MEASURE}
"""


def counts(study: Study) -> list[int]:
    """Return the number of executing runs, as recorded at the start of each."""
    return [int(line) for line in (study.folder / "counts").read_text().split()]


def executing(cluster: Cluster) -> list[str]:
    """Return the ids of the jobs that execute."""
    return sorted(cluster.run(["squeue", "-h", "-tRUNNING", "-o%i"]).stdout.split(), key=int)


def let_slurm_schedule(cluster: Cluster) -> None:
    """Return when Slurm has started a job that was submitted after all others."""
    job = cluster.run(["sbatch", "--parsable", "-o/dev/null", "--wrap=true"]).stdout.strip()
    wait_for(
        lambda: cluster.run(["squeue", "-h", "-tall", "-j", job, "-o%T"]).stdout.strip() == "COMPLETED",
        what="the last job",
        timeout_s=60,
    )


def test_two_runs_execute_at_once_through_a_kill_cancellations_and_retries(scripted, running_cluster):
    study = scripted(*([COUNTED] * 6), concurrent_runs=2)
    with study.start("submit", "STUDY") as process:
        next(lines(process.stderr))
        process.send_signal(signal.SIGKILL)
    assert study.bench("submit", "STUDY").returncode == 0
    assert set(study.jobs_per_run().values()) == {1}
    in_order = sorted(study.status().values(), key=lambda record: int(record["job_id"]))
    jobs = [record["job_id"] for record in in_order]
    wait_for(lambda: executing(running_cluster) == jobs[:2], what="two runs")

    # The jobs that all later ones wait for disappear while the jobs before them still execute.
    assert study.bench("cancel", "STUDY", "--only", in_order[2]["run_id"]).stdout == "1 run cancelled\n"
    running_cluster.run(["scancel", jobs[3]])
    let_slurm_schedule(running_cluster)
    assert executing(running_cluster) == jobs[:2]

    # A failed run lets the next job of its chain start.
    failed, cancelled = in_order[0]["run_id"], in_order[3]["run_id"]
    (study.folder / f"runs/{failed}/attempt-1/fail").touch()
    wait_for(lambda: executing(running_cluster) == [jobs[1], jobs[4]], what="the next run")
    ends = {failed: "failed", cancelled: "cancelled"}
    wait_for(lambda: {run: study.status()[run]["state"] for run in ends} == ends, what="the ends")
    again = study.bench("submit", "STUDY", "--retry-failed")
    assert again.stderr.splitlines()[-1] == "study scripted: 6 queued"

    (study.folder / "go").touch()
    done = study.bench("submit", "STUDY", "--wait")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "study scripted: 6 completed")
    assert len(counts(study)) == 7
    assert max(counts(study)) == 2


def test_a_pack_and_the_jobs_after_it_are_links_of_the_chain(scripted, running_cluster):
    study = scripted(*(["sleep 300"] * 4), concurrent_runs=1)
    one, two, three, four = (run.run_id for run in study.planned.runs)
    for words in (("--only", one), ("--pack", "--only", two), ("--pack", "--only", three), ()):
        assert study.bench("submit", "STUDY", *words).returncode == 0
    jobs = {run: record["job_id"] for run, record in study.status().items()}
    shown = running_cluster.run(["squeue", "-h", "-o%i %E"]).stdout.splitlines()
    waits = dict(line.split(maxsplit=1) for line in shown)
    ids = [jobs[run] for run in (one, two, three)]
    after = [",".join(f"afterany:{job}(unfulfilled)" for job in ids[:number]) for number in (1, 2, 3)]
    assert [waits[jobs[run]] for run in (two, three, four)] == after
    record = study.status()[four]
    assert record["state"] == "queued"
    assert "Dependency" in record["reason"]
    assert not record["details"]["stuck"]
    dry = study.bench("submit", "STUDY", "--dry-run")
    assert dry.stderr == ("concurrent_runs: `bench submit` also lets jobs wait for the end of earlier jobs\n")
