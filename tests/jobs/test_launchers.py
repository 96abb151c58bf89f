"""The same matrix with srun and torchrun on a real Slurm, from plan to report; options of sites."""

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.package import package_name
from ddp_scaling_bench.cell_json import read_cell
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.commands.command_line import is_reported
from tests.common import read_rows
from tests.jobs.slurm_studies import (
    MEASURE,
    NAMES,
    add_modules,
    plan_study,
    run_id,
    scripted_study,
    submitted,
)
from tests.matrices import BARE, SHORT, command, matrix, slurm, torchrun_cell, training
from tests.train.ranks import ROOT

ETH0 = {"GLOO_SOCKET_IFNAME": "eth0"}


def test_every_run_of_either_launcher_passes_as_a_job_and_in_a_pack(
    running_cluster: Cluster, tmp_path: Path, plain_torch: str, nothing_drawn: None
) -> None:
    """The jobs have torch, but not bench, and begin in a folder with modules of the user."""
    add_modules(tmp_path, [*NAMES, "torch.py"])
    setup = ["export PYTHONPATH=.", plain_torch]
    text = matrix(
        "launchers",
        cluster=slurm(exclusive=False, time_limit="5m", setup=setup, env=ETH0),
        axes={"nodes": [2], "tasks_per_node": [1], "backend": ["gloo"], "launcher": ["srun"]},
        batch=2,
        include=[torchrun_cell(nodes=2, tasks_per_node=[2, 1], per_gpu_batch=2)],
        workload=training(parameters="100k", **BARE | {"attribution_steps": 0}),
    )
    study = plan_study(tmp_path, text, running_cluster.environment)
    with contextlib.chdir(tmp_path), submitted(study, "--only", "launcher=srun"), submitted(study, "--pack"):
        done = study.bench("submit", "STUDY", "--wait")
        assert done.stderr.splitlines()[-2] == "study launchers: 2 completed", done.stderr
        folders = {name: study.attempt(name) for name in study.status()}
        wait_for(
            lambda: all(folder.sacct_summary.is_file() for folder in folders.values()), what="the accounting"
        )
        runs = study.status()
    verified = study.bench("verify", "STUDY")
    assert verified.stdout.splitlines()[-1] == "2 of 2 runs pass", verified.stdout
    names, others = ({path.name for path in folder.path.iterdir()} for folder in folders.values())
    assert others == names | {"pack_end.json", "heartbeat.2.json"}  # it has three ranks
    assert is_reported(study.bench("report", "STUDY"))
    rows = read_rows(study.folder / "report/runs.csv")
    assert [(row["allocation"], row["allocation_id"]) for row in rows] == [
        (kind, study.record(row["run_id"]).job_id) for kind, row in zip(("job", "pack"), rows, strict=True)
    ]
    # The ranks join on the allocated hosts and report them.
    for name, run in runs.items():
        folder, env = folders[name], json.loads(folders[name].env.read_text())
        hosts, content, cell = env["hosts"], study.run_json(name), read_cell(folder.path)
        assert env["package"] == package_name()
        (window,) = json.loads(folder.conditions.read_text())["windows"]
        assert [node["node"] for node in window["nodes"]] == [host["host"] for host in hosts]
        asked = ["sacct", "-nXPj", run.job_id, "-o", "State,NodeList"]
        state, nodes = running_cluster.run(asked).stdout.strip().split("|")
        given = running_cluster.run(["scontrol", "show", "hostnames", nodes]).stdout.split()
        assert (state, [host["host"] for host in hosts]) == ("COMPLETED", given)
        counts, ranks = cell.tasks_per_node, cell.world_size
        per_node = counts if isinstance(counts, list) else [counts] * len(given)
        assert [host["ranks_here"] for host in hosts] == per_node
        assert (env["joined"]["ranks"], env["joined"]["expected"]) == (ranks, ranks)
        assert content["submitted_at"][:19] <= run.end.started_at <= run.end.ended_at
        steps = [line.split()[0] for line in folder.sacct_summary.read_text().splitlines()[1:]]
        if content["allocation"]["kind"] == "job":
            assert steps == [run.job_id, f"{run.job_id}.batch", f"{run.job_id}.0"]
        said = folder.out.read_text() + folder.err.read_text()
        assert re.search(rf"\b{ranks}/{ranks} ranks? joined", said), said


#: Ranks that meet where a process group would, without torch.
RANK = """\
import os, socket, time
rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
print("a rank\\n", end="", flush=True)
if rank == 0:
    server = socket.create_server(("", port))
    joined = [server.accept() for _ in range(size - 1)]
while rank:
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], port))
        break
    except OSError:
        time.sleep(0.1)
"""
PER_NODE = """\
import os, subprocess, sys
ranks, node, world = map(int, sys.argv[1:4])
assert not {"SLURM_PROCID", "SLURM_NTASKS", "RANK", "WORLD_SIZE"} & {*os.environ}
assert sys.argv[4] == f"<{node}> $x", sys.argv
local = [dict(os.environ, RANK=str(node * ranks + i), LOCAL_RANK=str(i), WORLD_SIZE=str(world)) for i in range(ranks)]
started = [subprocess.Popen([sys.executable, *sys.argv[5:]], env=env) for env in local]
sys.exit(max(process.wait() for process in started))
"""
PER_JOB = """\
[ -z "$RANK$NODE_RANK" ] && [ "$(cat "$1")" = $'n1 slots=1\\nn2 slots=1' ] || exit 9
srun --nodes=$2 --ntasks=$2 --mpi=none bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=0 WORLD_SIZE=$SLURM_NTASKS
exec "$@"' bash "${@:3}"
"""


@pytest.mark.parametrize(("per", "tasks"), [("node", 2), ("job", 1)])
def test_a_command_starts_its_own_ranks(per, tasks, tmp_path, running_cluster):
    for name, text in (("rank.py", RANK), ("node.py", PER_NODE), ("job.sh", PER_JOB)):
        (tmp_path / name).write_text(text)
    rank, sizes = [str(tmp_path / "rank.py")], ["{tasks_per_node}", "{node_rank}", "{world_size}"]
    words = {
        "node": [sys.executable, str(tmp_path / "node.py"), *sizes, "<{node_rank}> $x", *rank],
        "job": ["bash", str(tmp_path / "job.sh"), "{hostfile}", "{nodes}", sys.executable, *rank],
    }[per]
    text = matrix(
        "own",
        cluster=slurm(exclusive=False, env=ETH0),
        axes={"nodes": [2], "tasks_per_node": [tasks], "backend": ["gloo"], "launcher": ["own"]},
        batch=2,
        workload=command(words, command_per=per),
    )
    study = plan_study(tmp_path, text, running_cluster.environment)
    if per == "job":
        packed = study.bench("submit", "STUDY", "--pack")
        assert (packed.returncode, "omit --pack" in packed.stderr) == (2, True)
    with submitted(study, "--wait"):
        ((name, run),) = study.status().items()
        folder = study.attempt(name)
        assert run.state == "completed", folder.err.read_text()
        assert folder.out.read_text().count("a rank\n") == 2 * tasks
    # By hand, without a run's folder: the script finds the package beside itself.
    script, outputs = study.planned.script(study.planned.cell_of(name).cell_id), ["-ohand.out", "-ehand.err"]
    done = running_cluster.run(["sbatch", "--wait", *outputs, script], cwd=tmp_path, check=False)
    said = (tmp_path / "hand.err").read_text()
    assert (done.returncode, "package" in said) == (0, False), said


#: A program without an end, of which each rank notes SIGTERM; rank 0 writes what a recorder does after the windows.
ENDLESS = f"""\
trap 'touch "$1/term.$RANK"; exit 1' TERM
[ "$RANK" != 0 ] || {{ {MEASURE}; touch "$1/SHA256SUMS"; }}
while :; do sleep 0.2; done
"""


def test_a_job_ends_after_its_last_window(running_cluster, tmp_path):
    (tmp_path / "endless.sh").write_text(ENDLESS)
    text = matrix(
        "endless",
        cluster=slurm(exclusive=False, time_limit="4m", stop_after_measurement=True),
        axes={"backend": ["gloo"], "nodes": [2], "tasks_per_node": [1], "launcher": ["srun"]},
        include=[torchrun_cell(nodes=1, tasks_per_node=1)],  # which srun does not start
        workload=command(["bash", f"{tmp_path}/endless.sh", "{run_dir}"], metrics="recorder", **SHORT),
    )
    study = plan_study(tmp_path, text, running_cluster.environment)
    with submitted(study, "--pack", "--wait"):
        for run in study.status().values():
            folder, ranks = study.attempt(run.run_id), study.planned.cell_of(run.run_id).world_size
            end = json.loads(folder.end.read_text())
            assert (run.state, end["exit_code"], end["by"]) == ("completed", 0, "measured")
            assert len(list(folder.path.glob("term.*"))) == ranks


#: Without `exclusive`, because the batch shell of a whole node sees all its GPUs.
SITE = {
    "exclusive": False,
    "qos": "bench",
    "reservation": "tonight",
    "constraint": "fast",
    "gpu_type": "l40s",
}


@pytest.fixture
def site(cluster: Cluster) -> Iterator[Cluster]:
    """Add a QOS, a reservation, and a feature on two nodes to the cluster."""
    cluster.run(["sacctmgr", "-i", "add", "qos", "bench"], check=False)  # there already, the second time
    cluster.run(["sacctmgr", "-i", "modify", "user", "root", "set", "qos+=bench"])
    cluster.run(["scontrol", "update", "NodeName=n[3-4]", "AvailableFeatures=fast", "ActiveFeatures=fast"])
    words = ["ReservationName=tonight", "Users=root", "StartTime=now", "Duration=30", "Nodes=n[2-4]"]
    cluster.run(["scontrol", "create", "reservation", *words])
    yield cluster
    cluster.run(["scancel", "--user=root"])  # a reservation in use cannot be deleted

    def deleted() -> bool:
        return cluster.run(["scontrol", "delete", "ReservationName=tonight"], check=False).returncode == 0

    wait_for(deleted, what="the end of the reservation")
    cluster.run(["scontrol", "update", "NodeName=n[3-4]", "AvailableFeatures=", "ActiveFeatures="])


def test_options_of_a_site_reach_slurm(site, tmp_path):
    text = matrix(
        cluster=slurm(**SITE, mem="100M", directives=["--comment=grant:7"]),
        axes={"nodes": [1], "gpus_per_node": [2], "backend": ["gloo"]},
        workload=training(device="cuda"),
    )
    study = plan_study(tmp_path, text, site.environment)
    (run,) = study.planned.runs
    script = study.planned.script(run.cell_id)
    head = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    body = 'nvidia=$CUDA_VISIBLE_DEVICES; echo "devices $nvidia on $(hostname)"'
    script.write_text("\n".join(["#!/bin/bash", *head, body, MEASURE, ""]))
    done = study.bench("submit", "STUDY")
    assert done.returncode == 0, done.stderr
    job_id = study.record(run.run_id).job_id
    fields = "Partition,Account,QOS,Constraints,ReqTRES,NodeList,State"

    def accounting_row() -> list[str]:
        words = ["sacct", "-nXPj", job_id, "-o", fields]
        return site.run(words).stdout.strip().split("|")

    # Some columns are empty until the job's own record follows those of its steps.
    wait_for(
        lambda: accounting_row()[-1] == "COMPLETED" and all(accounting_row()[:4]), what="the job's accounting"
    )
    partition, account, qos, constraint, tres, node, _ = accounting_row()
    assert (partition, account, qos, constraint) == ("l40s", "users", "bench", "fast")
    # sacct does not always know a reservation that replaces a deleted one of the same name.
    assert site.run(["squeue", "-ht", "all", "-j", job_id, "-o", "%v"]).stdout.strip() == "tonight"
    assert "gres/gpu=2" in tres
    assert node in ("n3", "n4")
    assert f"devices 0,1 on {node}" in study.attempt(run.run_id).out.read_text()


def test_a_preempted_and_requeued_job_is_queued_with_the_reason(cluster, tmp_path):
    """The scripts forbid requeueing, but a site's sbatch filter may allow it."""
    body = '#SBATCH -w n4 --exclusive\n#SBATCH --requeue\ntouch "$1/begun"; sleep 300'
    study = scripted_study(tmp_path, [body], cluster.environment, name="requeued")
    assert study.bench("submit", "STUDY").returncode == 0
    wait_for((study.attempt(run_id(1)).path / "begun").exists, what="the job that is pushed out")
    preempting = ["-p", "urgent", "-w", "n4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 60"]
    cluster.run(["sbatch", *preempting])
    wait_for(lambda: study.status()[run_id(1)].state == "queued", what="its return")
    run = study.status()[run_id(1)]
    assert run.job_id == study.record(run_id(1)).job_id
    # squeue of 24.11 gives no reason for this wait, earlier releases give BeginTime.
    assert run.reason.startswith("PREEMPTED: was stopped for another job; waits to start")
    dry = study.bench("submit", "STUDY", "--dry-run").stdout
    assert dry == "0 of 1 runs would be started\n"
    assert study.bench("cancel", "STUDY").stdout == "1 run cancelled\n"
    assert study.status()[run_id(1)].state == "cancelled"


#: Write the affinity that a recorder would write into env.json.
AFFINITY = """\
import os, sys
from ddp_scaling_bench.measure.ranks import own_facts
rank = int(os.environ["RANK"])
open(f"{sys.argv[1]}/cores.{rank}", "w").write(str(own_facts(rank, rank, os.environ).core_ids))
"""


def test_masks_per_rank_arrive_in_a_pack(cluster, tmp_path):
    (tmp_path / "affinity.py").write_text(AFFINITY)
    section = slurm(exclusive=True, time_limit="5m", srun_options=["--cpu-bind=mask_cpu:0x2,0x1"])
    del section["cpus_per_task"]
    workload = command([sys.executable, f"{tmp_path}/affinity.py", "{run_dir}"])
    text = matrix("bindings", cluster=section, axes={"nodes": [1], "tasks_per_node": [2]}, workload=workload)
    study = plan_study(tmp_path, text, {**cluster.environment, "PYTHONPATH": str(ROOT)})
    with submitted(study, "--wait", "--pack"):
        (shown,) = study.status().values()
    folder = study.attempt(shown.run_id)
    assert shown.state == "completed", (shown, folder.err.read_text())
    assert study.run_json(shown.run_id)["allocation"]["kind"] == "pack"
    assert [(folder.path / f"cores.{rank}").read_text() for rank in (0, 1)] == ["[1]", "[0]"]
