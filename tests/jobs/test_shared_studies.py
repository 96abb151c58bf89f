"""Faults outside of bench on a real cluster: nothing is started twice, and nothing is lost.

Several users, restored and copied studies, wrong digits in the ledger, jobs that Slurm has forgotten, lost requests.
"""

import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.cluster.bed import Cluster
from tests.cluster.configuration import ACCOUNT
from tests.cluster.containers import wait_for
from tests.common import NOBODY, in_fork, write_program
from tests.jobs.slurm_studies import Study, plan_study, with_sbatch
from tests.matrices import command, matrix, slurm

#: An sbatch that kills bench after Slurm has accepted the job.
DEADLY = """\
case " $* " in *" --test-only "*) exec {sbatch} "$@" ;; esac
{sbatch} "$@" >/dev/null
kill -9 "$PPID"
"""


@pytest.fixture
def folder(cluster: Cluster) -> Iterator[Path]:
    """Yield a folder that other users can enter, which those of pytest are not; cancel its studies' jobs."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


def shared(folder: Path, cluster: Cluster, body: str, *, name: str = "shared", runs: int = 2) -> Study:
    """Plan a study with real scripts; each start of a run appends its folder to the file ``lines``."""
    words = ["bash", "-c", f'echo "$1" >>{folder}/lines; {body}', "bash", "{run_dir}"]
    text = matrix(
        name,
        cluster=slurm(exclusive=False, mem="100M"),
        axes={"nodes": [1], "tasks_per_node": [1]},
        scaling=[{"mode": "weak", "per_gpu_batch": list(range(1, runs + 1))}],
        workload=command(words),
    )
    return plan_study(folder / name, text, cluster.environment)


def starts(folder: Path) -> Counter[str]:
    """Return how often each run has started."""
    lines = folder / "lines"
    return Counter(lines.read_text().splitlines()) if lines.exists() else Counter()


def all_running(study: Study) -> bool:
    return set(study.states().values()) == {"running"}


def as_nobody(study: Study, *words: str) -> subprocess.CompletedProcess[str]:
    """Return the result of ``bench WORDS`` in a process of another user."""
    return in_fork(lambda: study.bench(*words), user=NOBODY)


def test_two_users_of_a_study_see_the_same_and_neither_ends_nor_repeats_the_others_runs(cluster, folder):
    cluster.run(["sacctmgr", "-i", "add", "user", "nobody", f"account={ACCOUNT}"], check=False)
    study = shared(folder, cluster, "sleep 60", runs=3)
    assert study.bench("submit", "STUDY", "--max-queued", "2").returncode == 0
    wait_for(lambda: [*study.states().values()] == ["running", "running", "planned"], what="both runs")
    subprocess.run(["chmod", "-R", "a+rwX", folder], check=True)
    ids = [record.job_id for record in study.status().values()][:2]
    theirs = as_nobody(study, "status", "STUDY", "--json")
    shown = json.loads(theirs.stdout)["runs"]
    assert [run["state"] for run in shown] == ["running", "running", "planned"], theirs.stderr
    assert "user root" in shown[0]["reason"]
    refused = as_nobody(study, "cancel", "STUDY")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert all(f"job {job_id} of user root" in refused.stderr for job_id in ids)
    # The other user starts what is left, and root sees whose it is.
    assert as_nobody(study, "submit", "STUDY").returncode == 0
    wait_for(lambda: all_running(study), what="the third run")
    assert "user nobody" in list(study.status().values())[2].reason
    assert study.bench("submit", "STUDY").stderr.startswith("nothing to start")
    assert set(study.jobs_per_run().values()) == {1}


def test_jobs_whose_ids_were_lost_and_that_slurm_has_forgotten_do_not_run_again(cluster, folder):
    made = {name: shared(folder, cluster, "true", name=name, runs=1) for name in ("away", "fast")}
    with cluster.configured(MinJobAge="2"):
        for study in made.values():
            with with_sbatch(study, study.folder.parent, DEADLY).start("submit", "STUDY") as killed:
                assert killed.wait(280) == -9
        wait_for(
            lambda: not cluster.run(["squeue", "-h", "-t", "all", "-o", "%A"]).stdout.split(),
            what="jobs that Slurm has forgotten",
        )
    assert set(starts(folder).values()) == {1}
    for study in made.values():
        (end,) = study.folder.glob("runs/*/attempt-1/end.json")
        end.unlink()  # as after SIGKILL
    # The clock of this machine was an hour ahead.
    ledger = made["fast"].folder / "ledger.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    for line in lines:
        line["time"] = (datetime.fromisoformat(line["time"]) + timedelta(hours=1)).isoformat()
    ledger.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    cluster.stop_slurmdbd()
    try:
        assert [*made["away"].states().values()] == ["unknown"]
        assert made["away"].bench("submit", "STUDY").stderr.startswith("nothing to start")
    finally:
        cluster.start_slurmdbd()
    for study in made.values():
        wait_for(lambda study=study: [*study.states().values()] == ["completed"], what="the accounting")
        assert study.bench("submit", "STUDY").stderr.startswith("nothing to start")
    assert set(starts(folder).values()) == {1}


def test_a_second_start_in_a_folder_is_refused_or_makes_the_run_invalid(cluster, folder):
    (folder / "bin").mkdir()
    write_program(folder / "bin/srun", "#!/bin/sh\n")
    study = shared(folder, cluster, f"until [ -e {folder}/go ]; do sleep 0.1; done")
    assert study.bench("submit", "STUDY").returncode == 0
    wait_for(lambda: all_running(study) and len(starts(folder)) == 2, what="both commands")
    first, second = study.status().values()
    # A late job of another name arrives in the first folder; the controller starts the second job again.
    ends = []
    for record, job_id in ((first, "99999"), (second, second.job_id)):
        script = study.planned.script(study.planned.cell_of(record.run_id).cell_id)
        env = {"SLURM_JOB_ID": job_id, "SLURM_SUBMIT_DIR": str(folder)}
        path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        words = ["bash", script, study.attempt(record.run_id).path]
        ends.append(cluster.run(words, env=env | path, check=False))
    assert [done.returncode for done in ends] == [1, 0]
    assert "another start owns this folder" in ends[0].stderr
    (folder / "go").touch()
    wait_for(lambda: "running" not in study.states().values(), what="the ends")
    first, second = study.status().values()
    assert str(first.state) == "completed"
    assert (str(second.state), second.failure_class) == ("failed", "started-twice")
    assert second.reason.count(f"job {second.job_id} on ") == 2
    verified = study.bench("verify", "STUDY").stdout.splitlines()
    assert "0 of 2 runs pass; 1 fail; 1 measured in part, without a failed check" in verified
