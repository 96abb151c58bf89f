"""Packs on a real cluster: many runs in 1 job, and all ways in which runs and job can end."""

import json
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from bench.jobs.slurm.pack import first_host
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.jobs.slurm_studies import MEASURE, Study, plan_study, scripted_study, submitted, with_sbatch
from tests.matrices import matrix


@pytest.fixture(scope="module")
def overrun(running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    """Start a pack that reaches its job's time limit, which Slurm checks twice a minute."""
    folder = tmp_path_factory.mktemp("over")
    go = shlex.quote(str(folder / "go"))
    body = f"[ -e {go} ] && exec sleep 300; touch {go}; {MEASURE}"
    study = scripted_study(folder, [body] * 4, running_cluster.environment, name="overrun")
    with submitted(study, "--pack"):
        _wait_for_states(study, {"completed": 1, "running": 1, "queued": 2})
        # Limits are in minutes, but the end time can be set to the second.
        running_cluster.run(["scontrol", "update", f"JobId={study.job_ids()[0]}", "EndTime=now+1"])
        yield study


def _wait_for_states(study: Study, counts: dict[str, int]) -> None:
    wait_for(lambda: Counter(study.states().values()) == counts, what=f"runs {counts}")


def _wait_for_end(study: Study) -> None:
    active = ("queued", "running", "unknown")
    wait_for(
        lambda: not any(state in active for state in study.states().values()), what="the end of all runs"
    )


def test_over_the_repeats_every_size_uses_every_node_equally_often():
    for nodes, hosts in ((1, 4), (2, 4), (3, 4), (4, 4), (2, 5), (5, 8), (1, 1)):
        firsts = [first_host(seed=7, nodes=nodes, repeat=r, hosts=hosts) for r in range(1, hosts + 1)]
        used = Counter((first + i) % hosts for first in firsts for i in range(nodes))
        assert used == dict.fromkeys(range(hosts), nodes)


def test_each_repeat_runs_on_other_nodes_of_the_same_job_and_sees_only_those(
    scripted, running_cluster, overrun, nothing_drawn
):
    note = 'printf "%s" "$BENCH_STEP_HOSTS" | tr "\\n" " " >"$1/hosts"'
    placed = 'srun -N "$n" -n "$n" --ntasks-per-node=1 -w "${BENCH_STEP_HOSTS//$\'\\n\'/,}" printenv SLURMD_NODENAME'
    body = f'n=$(wc -l <<<"$BENCH_STEP_HOSTS"); {note}; {placed} | sort >"$1/ran"; {MEASURE}'
    study = scripted(body, nodes=(1, 4), repeats=4)
    done = study.bench("submit", "STUDY", "--pack", "--wait")
    assert done.returncode == 0, done.stderr
    assert len(study.job_ids()) == 1
    for size in (1, 4):
        hosts = []
        for repeat in (1, 2, 3, 4):
            folder = study.attempt(f"n{size}x1-gloo-srun-b1-r{repeat}").path
            hosts.append((folder / "hosts").read_text().split())
            assert sorted(hosts[-1]) == hosts[-1] == (folder / "ran").read_text().split()
        assert Counter(host for one in hosts for host in one) == {f"n{i}": size for i in (1, 2, 3, 4)}
    order = [line.split()[1] for line in (study.folder / "packs/pack-1/members").read_text().splitlines()]
    assert order == [run.run_id for run in study.planned.runs]
    assert study.bench("report", "STUDY").returncode == 1, "no run has a throughput"
    page = (study.folder / "report/index.html").read_text()
    assert f"8 runs one after another in the allocation of job {study.job_ids()[0]}" in page


def test_what_a_pack_would_do_is_shown_and_its_cost_is_checked(scripted, running_cluster, tmp_path):
    study = scripted(MEASURE, nodes=(1, 2), repeats=2)
    done = study.bench("submit", "STUDY", "--pack", "--dry-run")
    folder, key = study.folder, study.planned.plan["key"]
    pack = f"{folder}/packs/pack-1"
    starts = {size: first_host(seed=0, nodes=size, repeat=1, hosts=2) for size in (1, 2)}
    assert done.stdout.splitlines()[0] == (
        f"BENCH_PYTHON={sys.executable} sbatch --parsable --job-name=scripted.pack.a1.{key} --output={pack}/job.out --error={pack}/job.err "
        f"--nodes=2 --ntasks-per-node=1 --time=00:08:00 {folder}/scripts/pack.sbatch {pack}"
    )
    shown = [line.split(maxsplit=2) for line in done.stdout.splitlines()[1:-1]]
    assert [(place, run) for place, run, _ in shown] == [
        (str(place), run.run_id) for place, run in enumerate(study.planned.runs, 1)
    ]
    wanted = {f"n1x1-gloo-srun-b1-r{r}": f"on nodes {(starts[1] + r - 1) % 2 + 1} of 2" for r in (1, 2)}
    wanted |= {f"n2x1-gloo-srun-b1-r{r}": "on nodes 1,2 of 2" for r in (1, 2)}
    assert {run: nodes for _, run, nodes in shown} == wanted
    assert done.stdout.splitlines()[-1] == "4 of 4 runs would be started, in 1 job"
    cost = "1 job: 4 runs in 1 pack (up to 2 nodes for 8 min), at most 0.2667 node-hours, no GPU"
    assert done.stderr == f"{cost}\n"
    assert not (folder / "packs").exists()
    assert not (folder / "ledger.jsonl").exists()
    done = study.bench("submit", "STUDY", "--pack", "--max-queued", "2")
    assert done.stderr == (
        "error: --max-queued limits the number of queued jobs, so it has no effect on packs, "
        "which are few; omit --max-queued or --pack\n"
    )


def test_only_slurm_has_packs(tmp_path):
    done = plan_study(tmp_path, matrix("here"), {}).bench("submit", "STUDY", "--pack")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --pack submits many runs as one Slurm job, but the matrix's executor is local; "
        "omit --pack: runs are always executed one after another\n",
    )


def test_a_pack_that_slurm_rejects_is_an_error_and_leaves_nothing(scripted):
    study = scripted(MEASURE, nodes=(1, 2), partition="short")
    done = study.bench("submit", "STUDY", "--pack")
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: a pack of 2 runs was refused: sbatch --test-only: (?s:.+); nothing was submitted; "
        r"correct the matrix's cluster section, or "
        r"choose fewer runs with --only, lower cluster\.time_limit, or submit without --pack\n",
        done.stderr.split("\n", 1)[1],
    ), done.stderr
    assert not (study.folder / "ledger.jsonl").exists()


def test_packs_end_where_a_partition_or_its_limit_ends_and_none_is_submitted_twice(scripted, tmp_path):
    where = {1: "short", 2: "l40s"}  # partition short: at most five minutes on one node
    study = scripted(MEASURE, nodes=(1, 2), repeats=3, partition=where, max_running=1)
    done = study.bench("submit", "STUDY", "--pack", "--dry-run")
    commands = [line for line in done.stdout.splitlines() if "sbatch" in line]
    found = [re.findall(r"\.pack\.(a\d)\.|--(time|partition)=(\S+)", line) for line in commands]
    assert sorted(" ".join(filter(None, part)) for line in found for part in line) == [
        *("a1", "a2", "a3", "partition l40s", "partition short", "partition short"),
        *("time 00:02:00", "time 00:04:00", "time 00:06:00"),
    ]
    assert done.stdout.splitlines()[-1] == "6 of 6 runs would be started, in 3 jobs"
    assert "3 jobs: 6 runs in 3 packs (up to 2 nodes for 6 min), at most 0.3 node-hours" in done.stderr
    # An sbatch that kills `bench submit` instead of submitting the second pack.
    second = (
        'case " $* " in *--test-only*) ;; *"--job-name=scripted.pack.a2."*) kill -9 "$PPID"; exit 1 ;; esac'
    )
    deadly = with_sbatch(study, tmp_path, f'{second}\nexec {{sbatch}} "$@"\n')
    with deadly.start("submit", "STUDY", "--pack") as killed:
        assert killed.wait(280) == -signal.SIGKILL
    assert len(study.job_ids()) == 1
    done = study.bench("submit", "STUDY", "--pack", "--wait")
    assert done.returncode == 0, done.stderr
    assert set(study.states().values()) == {"completed"}
    assert len(study.job_ids()) == 3
    jobs = Counter(record.job_id for record in study.planned.records().values())
    assert sorted(jobs.values()) == [1, 2, 3]


STEP = 'srun -N1 -n1 -J "$BENCH_STEP_NAME"'
#: The scripts of runs, and their expected ends.
ENDS = {
    "measured": (f"{STEP} true; {MEASURE}", ("completed", None, 0, "")),
    "bad-exit": (
        "echo 'ValueError: the loss is nan' >&2; exit 3",
        ("failed", "bad-exit", 3, "ValueError: the loss is nan; FAILED: exit code 3"),
    ),
    "over-its-limit": (
        f"{STEP} sleep 60 & wait",
        ("failed", "time-limit", None, "TIMEOUT: reached its time limit"),
    ),
    "killed, its step alive": (
        f"{STEP} sleep 60 & sleep 1; kill -9 $$",
        ("failed", "killed", 137, "FAILED: the script was ended by SIGKILL"),
    ),
    "after": (f"{STEP} true; {MEASURE}", ("completed", None, 0, "")),
}


def test_a_failed_run_does_not_end_others(scripted, running_cluster):
    study = scripted(*(body for body, _ in ENDS.values()), time_limit="10s")
    names = dict(zip(_in_order(study, *(f"b{i}" for i in range(1, len(ENDS) + 1))), ENDS, strict=True))
    assert study.bench("submit", "STUDY", "--pack").returncode == 0
    _wait_for_end(study)
    shown = study.status()
    ends = {
        names[run_id]: (run.state, run.failure_class, run.exit_code, run.reason)
        for run_id, run in shown.items()
    }
    assert ends == {name: end for name, (_, end) in ENDS.items()}
    (job,) = study.job_ids()
    assert {run.job_id for run in shown.values()} == {job}
    verified = study.bench("verify", job, "--results", str(study.folder.parent), "--json")
    assert {run["run_id"] for run in json.loads(verified.stdout)["runs"]} == set(names)
    for run_id, name in names.items():
        content = study.run_json(run_id)
        assert content["allocation"]["kind"] == "pack"
        assert shown[run_id].end.started_at <= shown[run_id].end.ended_at
        if name in ("measured", "after"):
            wait_for(
                lambda r=run_id, job_name=content["job_name"]: _accounted_steps(study, r) == [job_name, r],
                what="the accounting",
            )
    # Failed runs are submitted on request only, as another pack.
    assert study.bench("submit", "STUDY", "--pack").stderr.splitlines()[0] == "nothing to start"
    dry = study.bench("submit", "STUDY", "--pack", "--retry-failed", "--dry-run").stdout.splitlines()
    assert ".pack.a2." in dry[0]
    assert dry[-1] == "3 of 5 runs would be started, in 1 job"


def _accounted_steps(study: Study, run_id: str) -> list[str]:
    """Return the names of the rows of a run's accounting after a refresh."""
    study.status()
    summary = study.attempt(run_id).sacct_summary
    return [row.split()[-1] for row in summary.read_text().splitlines()[1:]] if summary.is_file() else []


def test_bench_cancel_ends_whole_packs_only(scripted, running_cluster):
    study = scripted(MEASURE, "sleep 60", MEASURE)
    first, running, waiting = _in_order(study, "b1", "b2", "b3")
    assert study.bench("submit", "STUDY", "--pack").returncode == 0
    _wait_for_states(study, {"completed": 1, "running": 1, "queued": 1})
    (job,) = study.job_ids()
    part = study.bench("cancel", "STUDY", "--only", waiting)
    assert (part.returncode, part.stderr) == (
        2,
        f"error: job {job} is a pack; cancelling it also ends {running} and maybe others; "
        "cancel without --only, or wait until the runs have ended\n",
    )
    assert study.bench("cancel", "STUDY").stdout == "2 runs cancelled\n"
    by = ("cancelled", "cancelled by bench cancel")
    wait_for(lambda: not _queue(running_cluster, job), what="the end of the job")
    for accounted in (False, True):
        if accounted:  # which corrects what had come to another end
            wait_for(lambda: all(one.settled for one in study.status().values()), what="the accounting")
        shown = study.status()
        states = [(shown[run].state, shown[run].reason) for run in (first, running, waiting)]
        assert states == [("completed", ""), by, by]
    dry = study.bench("submit", "STUDY", "--dry-run").stdout
    assert dry.splitlines()[-1] == "2 of 3 runs would be started"


def _in_order(study: Study, *batches: str) -> list[str]:
    """Exchange the scripts of cells so that the N-th run in the seeded order runs the N-th batch's body."""
    scripts = [study.folder / f"scripts/n1x1-gloo-srun-{batch}.sbatch" for batch in batches]
    texts = [script.read_text() for script in scripts]
    runs = study.planned.runs
    assert len(runs) == len(batches)
    for run, text in zip(runs, texts, strict=True):
        study.planned.script(run.cell_id).write_text(text)
    return [run.run_id for run in runs]


def _queue(cluster: Cluster, job: str) -> list[str]:
    return cluster.run(["squeue", "-h", "-o", "%A", "-j", job], check=False).stdout.split()


def test_the_jobs_time_limit_keeps_finished_runs_and_the_rest_is_started_again(overrun, running_cluster):
    study = overrun
    _wait_for_end(study)
    (job,) = study.job_ids()
    shown = [study.status()[run.run_id] for run in study.planned.runs]
    limit = "TIMEOUT: reached its time limit"
    assert [(run.state, run.failure_class, run.reason) for run in shown] == [
        ("completed", None, ""),
        ("failed", "time-limit", f"ended with its pack (job {job}); {limit}"),
        *[("planned", None, f"not started: its pack (job {job}) ended before its turn; {limit}")] * 2,
    ]
    dry = study.bench("submit", "STUDY", "--pack", "--dry-run").stdout.splitlines()
    assert [line.split()[1] for line in dry[1:-1]] == [run.run_id for run in study.planned.runs[2:]]
