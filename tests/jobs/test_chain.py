"""With `max_running: 1`, one run executes at a time, whatever happens to the jobs of the study."""

from __future__ import annotations

import signal

from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.jobs.slurm_studies import MEASURE, Study, lines

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


def test_one_run_executes_at_a_time_through_a_kill_cancellations_and_retries(scripted, running_cluster):
    study = scripted(*([COUNTED] * 5), max_running=1)
    with study.start("submit", "STUDY") as process:
        next(lines(process.stderr))
        process.send_signal(signal.SIGKILL)
    assert study.bench("submit", "STUDY").returncode == 0
    assert set(study.jobs_per_run().values()) == {1}
    in_order = sorted(study.status().values(), key=lambda record: int(record["job_id"]))
    jobs = [record["job_id"] for record in in_order]
    wait_for(lambda: executing(running_cluster) == jobs[:1], what="the first run")

    # Jobs that all later ones wait for disappear while the job before them still executes.
    assert study.bench("cancel", "STUDY", "--only", in_order[1]["run_id"]).stdout == "1 run cancelled\n"
    running_cluster.run(["scancel", jobs[2]])
    let_slurm_schedule(running_cluster)
    assert executing(running_cluster) == jobs[:1]

    # A failed run lets the next job start.
    failed, cancelled = in_order[0]["run_id"], in_order[2]["run_id"]
    (study.folder / f"runs/{failed}/attempt-1/fail").touch()
    wait_for(lambda: executing(running_cluster) == [jobs[3]], what="the next run")
    ends = {failed: "failed", cancelled: "cancelled"}
    wait_for(lambda: {run: study.status()[run]["state"] for run in ends} == ends, what="the ends")
    again = study.bench("submit", "STUDY", "--retry-failed")
    assert again.stderr.splitlines()[-1] == "study scripted: 5 queued"

    (study.folder / "go").touch()
    done = study.bench("submit", "STUDY", "--wait")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "study scripted: 5 completed")
    assert len(counts(study)) == 6
    assert max(counts(study)) == 1


def test_a_pack_and_the_jobs_after_it_are_links_of_the_chain(scripted, running_cluster):
    study = scripted(*(["sleep 300"] * 4), max_running=1)
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
    assert dry.stderr == ("max_running: `bench submit` also lets jobs wait for the end of earlier jobs\n")
