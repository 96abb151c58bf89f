"""A real Slurm without accounting, and a login node without sacct and scontrol."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_scaling_bench.run_folder import RunFolder
from tests.cluster.bed import Cluster
from tests.cluster.configuration import Options, memory_limits_possible
from tests.cluster.containers import wait_for
from tests.cluster.plugin import StartCluster
from tests.jobs.slurm_studies import MEASURE, Study, run_id, scripted_study

#: Traps that write end.json, as in the real scripts.
TRAPS = """\
note() {{ printf '{{"exit_code": %d, "signal": %s, "time": "%s"}}' "$1" "$2" "$(date -u +%FT%TZ)" >"$RUN/end.json"; }}
RUN=$1
on_term() {{ trap - EXIT TERM; kill $child; note 143 '"TERM"'; exit 143; }}
trap 'note "$?" null' EXIT
trap on_term TERM
{body} & child=$!
touch "$RUN/begun"
wait $child
exit $?"""
MEASURED = TRAPS.format(body=f"{{ {MEASURE}; }}")
LOSS = "ValueError: the loss is nan"
FORGOTTEN = "according to job.err; Slurm has forgotten the job"
#: The bodies of scripts, and what is known of their ends once Slurm has forgotten the jobs.
ENDS = {
    "completed": (MEASURE, ("completed", None, 0, "")),
    "bad-exit": (
        f"(echo '{LOSS}' >&2; exit 3)",
        ("failed", "bad-exit", 3, LOSS),
    ),
    "scancel": ("sleep 300", ("cancelled", "cancelled", 143, f"CANCELLED: was cancelled ({FORGOTTEN})")),
    "time-limit": (
        "sleep 300",
        ("failed", "time-limit", 143, f"TIMEOUT: reached its time limit ({FORGOTTEN})"),
    ),
}
if memory_limits_possible():
    ENDS["memory"] = (
        f"#SBATCH --mem=60M\n{sys.executable} -c \"print(len(bytearray(b'1') * 10**9))\"",
        ("failed", "out-of-memory", 137, f"OUT_OF_MEMORY: ran out of memory ({FORGOTTEN})"),
    )
EXPECTED = {name: end for name, (_, end) in ENDS.items()}


@pytest.fixture(scope="module")
def bare(start_cluster: StartCluster) -> Iterator[Cluster]:
    """Yield a cluster without accounting that forgets ended jobs after two seconds."""
    settings = {"MinJobAge": "2", "KillWait": "2", "CompleteWait": "0"}
    with start_cluster(Options(nodes=2, gpus=0, accounting=False, settings=settings)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def studies(bare: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Study]:
    """Start two studies at once, because Slurm checks time limits only twice a minute."""
    made = {}
    for name in ("asked", "forgotten"):
        made[name] = study_of(tmp_path_factory.mktemp(name), bare, name)
        bring_about(made[name], bare)
    return made


def trapped(body: str) -> str:
    """Return a script with traps around a body; directives stay at the top."""
    lines = body.splitlines()
    head = [line for line in lines if line.startswith("#SBATCH")]
    return "\n".join([*head, TRAPS.format(body="\n".join(lines[len(head) :]))])


def study_of(folder: Path, cluster: Cluster, name: str) -> Study:
    bodies = [trapped(body) for body, _ in ENDS.values()]
    partition = cluster.options.gpu_type
    return scripted_study(folder, bodies, cluster.environment, name=name, partition=partition)


def bring_about(study: Study, cluster: Cluster) -> None:
    """Submit, cancel one run from outside and let another reach its time limit."""
    done = study.bench("submit", "STUDY")
    assert done.returncode == 0, done.stderr
    runs = {name: run_id(i) for i, name in enumerate(ENDS, 1)}
    jobs = {name: study.record(run).job_id for name, run in runs.items()}
    # Slurm shows a job as running before its script begins and sets its traps.
    begun = [study.folder / f"runs/{runs[name]}/attempt-1/begun" for name in ("scancel", "time-limit")]
    wait_for(lambda: all(file.exists() for file in begun), what="the jobs that are to be ended")
    cluster.run(["scontrol", "update", f"JobId={jobs['time-limit']}", "EndTime=now+1"])
    cluster.run(["scancel", jobs["scancel"]])


def ended(study: Study) -> dict[str, tuple[object, ...]]:
    """Wait for the end of all runs, and return their records."""
    shown = study.status()
    found = [shown[run_id(i)] for i in range(1, len(ENDS) + 1)]
    ends = [(run.state, run.failure_class, run.exit_code, run.reason) for run in found]
    return dict(zip(ENDS, ends, strict=True))


def over(study: Study) -> bool:
    return all(run.state not in ("queued", "running") for run in study.status().values())


def test_squeue_shows_the_ends_and_verify_the_missing_accounting(studies):
    study = studies["asked"]
    wait_for(lambda: over(study), what="the ends")
    by_squeue = {
        **EXPECTED,
        "bad-exit": (*EXPECTED["bad-exit"][:3], f"{LOSS}; ended with a bad exit code (NonZeroExitCode)"),
        "scancel": ("cancelled", "cancelled", 143, "was cancelled"),
        "time-limit": ("failed", "time-limit", 143, "reached its time limit (TimeLimit)"),
    }
    found = ended(study)
    known = {name: end[:3] for name, end in by_squeue.items()}
    assert {name: end[:3] for name, end in found.items()} == known
    folder = RunFolder(study.folder / f"runs/{run_id(1)}/attempt-1")
    assert not folder.sacct_summary.exists()
    assert study.record(run_id(1)).end.accounting == "Slurm accounting storage is disabled"
    words = "Slurm accounting storage is disabled; the final state comes from"
    verified = study.bench("verify", run_id(1), "--results", str(study.folder.parent))
    assert f"  --    accounting: not measured ({words}" in verified.stdout
    assert found["bad-exit"] in (by_squeue["bad-exit"], EXPECTED["bad-exit"])


def test_run_folders_show_the_ends_of_jobs_that_squeue_has_forgotten(bare, studies):
    study = studies["forgotten"]  # nobody asked while squeue still knew its jobs
    wait_for(
        lambda: not bare.run(["squeue", "-h", "-t", "all", "-o", "%A"]).stdout.split(),
        what="jobs that Slurm has forgotten",
    )
    done = study.bench("status", "STUDY")
    assert done.returncode == 1, done.stderr
    assert ended(study) == EXPECTED
    verified = study.bench("verify", run_id(4), "--results", str(study.folder.parent))
    assert "  FAIL  state: failed (time-limit): time-limit: slurmstepd" in verified.stdout
    assert f"TIMEOUT: reached its time limit ({FORGOTTEN})" in verified.stdout


def test_without_sacct_and_scontrol_everything_works(bare, tmp_path, monkeypatch):
    """A login node with only sbatch, squeue, scancel and sinfo."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in reversed(os.environ["PATH"].split(":")):
        for path in Path(folder).glob("*"):
            if path.name not in ("sacct", "sacctmgr", "scontrol"):
                (tools / path.name).unlink(missing_ok=True)
                (tools / path.name).symlink_to(path)
    partition = bare.options.gpu_type
    bodies = [MEASURED, "sleep 60"]
    study = scripted_study(tmp_path / "s", bodies, bare.environment, name="alone", partition=partition)
    study.environment = {**study.environment, "PATH": str(tools)}
    assert study.bench("submit", "STUDY").returncode == 0
    wait_for(
        lambda: json.loads(study.bench("status", "STUDY", "--json").stdout)["counts"]["completed"] == 1,
        what="the first run's end",
    )
    assert study.record(run_id(1)).end.accounting == "command not found"
    cancelled = study.bench("cancel", "STUDY")
    assert (cancelled.returncode, cancelled.stdout) == (0, "1 run cancelled\n"), cancelled.stderr
    verified = study.bench("verify", "STUDY")
    assert "Traceback" not in verified.stderr
    matrix = tmp_path / "starter.yaml"
    started = study.bench("init", str(matrix))
    assert started.returncode == 0, started.stderr
    assert f"partition: {bare.options.gpu_type}\n" in matrix.read_text()
