"""Execution on several hosts over ssh; the hosts are the test cluster's nodes, used without Slurm."""

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.jobs.engine import Engine
from bench.shipped import shipped
from bench.study.ledger import Record
from bench.study.plan_json import open_study
from ddp_scaling_bench.run_folder import RunFolder
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.commands.command_line import Command
from tests.common import read_rows, run_program, write_program
from tests.jobs.slurm_studies import MEASURE, Study
from tests.matrices import BARE, command, matrix, planned_study, training

TRAINING = training(parameters="20k", **BARE, join_timeout=120)
#: Two processes in separate sessions, which like ranks outlive their parent.
RANKS = "setsid sleep 500 & setsid sleep 500 &"


@pytest.fixture(scope="module")
def ssh_config(running_cluster: Cluster) -> Path:
    return running_cluster.start_sshd()


@pytest.fixture
def bed(running_cluster: Cluster, ssh_config: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield the cluster with ssh access; check that tests leave no processes on its nodes."""
    monkeypatch.setenv("BENCH_SSH", f"ssh -F {ssh_config}")
    yield running_cluster
    for node in running_cluster.nodes:
        wait_for(lambda node=node: not running(running_cluster, node), what=f"a clean {node}")


def running(cluster: Cluster, node: str) -> list[str]:
    """Return the processes of runs on a node."""
    find = "grep -lz ^BENCH_SSH_JOB= /proc/[0-9]*/environ 2>/dev/null"
    return cluster.run_on_node(node, ["sh", "-c", find], check=False).stdout.split()


Make = Callable[..., Study]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Plan a study in a folder with an awkward name, from which it is submitted."""
    root = tmp_path / "it's a folder"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setenv("PWD", str(root))

    def plan(
        body: str = "",
        *,
        name: str = "hosts",
        nodes: Sequence[int] = (2,),
        tasks: Any = 1,
        workload: dict[str, Any] | None = None,
        repeats: int = 1,
        **cluster: Any,
    ) -> Study:
        section = {"executor": "ssh", "hosts": ["n1", "n2"], "time_limit": "5m", **cluster}
        axes = {"nodes": [*nodes], "tasks_per_node": [tasks]}
        sections = {"cluster": section, "axes": axes, "workload": workload or TRAINING, "repeats": repeats}
        study = Study(planned_study(root, matrix(name, **sections)).folder.path, {})
        if body:
            for script in (study.folder / "scripts").iterdir():
                script.write_text(f"#!/bin/bash\n{body}\n")
        return study

    return plan


def submitted(study: Study, *options: str) -> str:
    """Submit a study; return what `bench` said."""
    return study.bench("submit", "STUDY", *options).stderr


@contextmanager
def submission(study: Study, *words: str) -> Iterator[Command]:
    """Yield a running `bench submit`, which ends with the block; its run is cancelled."""
    with study.start("submit", "STUDY", *words) as process:
        try:
            yield process
        finally:
            process.kill()
            study.bench("cancel", "STUDY")


def records(study: Study) -> list[Record]:
    """Return the present record of each run, in the planned order."""
    return list(Engine(open_study(study.planned.folder)).poll().values())


def states(study: Study) -> dict[int, tuple[str, str]]:
    """Return state and reason by number of hosts."""
    return {
        study.planned.cell_of(record.run_id).nodes: (str(record.state), record.reason)
        for record in records(study)
    }


def process_of(study: Study) -> int:
    """Return the id of the process that connects to the hosts of the study's only active run."""
    (job_id,) = (record.job_id for record in records(study) if record.state.active)
    return int(job_id.split(":")[1])


def only_folder(study: Study, attempt: int = 1) -> RunFolder:
    (run,) = study.planned.runs
    return study.planned.folder.attempt(run.run_id, attempt)


def test_ranks_of_two_hosts_train_together_and_leave_all_files(bed, make):
    text = 'it\'s $(touch planted); `touch planted` "é"\ntwo lines'
    python = f"export PATH={Path(sys.executable).parent}:$PATH"
    study = make(
        hosts=["n1", {"host": "root@n2"}],
        setup=[python, 'env -0 | grep -z ^TEXT= >"$(hostname).$BENCH_PEER"'],
        env={"TEXT": text},
    )
    done = study.bench("submit", "STUDY")
    assert done.returncode == 0, done.stderr
    verified = study.bench("verify", "STUDY")
    assert (verified.returncode, verified.stdout.splitlines()[-1]) == (0, "1 of 1 runs pass"), verified.stdout
    folder = only_folder(study)
    assert [row["host"] for row in read_rows(folder.ranks_csv)] == ["n1", "n2"]
    assert json.loads(folder.end.read_text())["hosts"] == {"n1": 0, "root@n2": 0}
    assert "==> n1 <==\nbench: 2/2 ranks joined on 2 hosts (n1: 0, n2: 1" in folder.out.read_text()
    for host, peer in (("n1", "n2"), ("n2", "n1")):  # set-up lines run on each, in the folder of submission
        assert Path(f"{host}.{bed.address(peer)}").read_text() == f"TEXT={text}\0"
    assert not Path("planted").exists()
    (window,) = json.loads(folder.conditions.read_text())["windows"]
    assert [node["node"] for node in window["nodes"]] == ["n1", "n2"]


def test_a_killed_rank_ends_the_run_on_all_hosts_with_the_reason(bed, make):
    words = 'echo $BASHPID >"$1/.$RANK"; mv "$1/.$RANK" "$1/pid.$RANK"; sleep 500'
    study = make(workload=command(["bash", "-c", words, "bash", "{run_dir}"]))
    folder = only_folder(study).path
    with submission(study) as process:
        wait_for(lambda: len(list(folder.glob("pid.*"))) == 2, what="both ranks")
        bed.run_on_node("n2", ["kill", "-KILL", (folder / "pid.1").read_text().strip()])
        assert process.wait(180) == 1
    (record,) = records(study)
    assert (str(record.state), record.reason) == ("failed", "rank 1 on n2 was killed by SIGKILL")
    assert (record.failure_class, record.exit_code) == ("killed", 1)
    assert not running(bed, "n1")
    assert not running(bed, "n2")


def test_a_run_whose_process_was_killed_ends_on_all_hosts_and_is_not_started_again(bed, make):
    study = make(f'echo "$2" >>started; {RANKS} {MEASURE}; [ -e go ] || wait', repeats=2)
    started = Path("started")
    with submission(study) as process:
        wait_for(lambda: started.exists() and len(started.read_text().split()) == 2, what="a run")
        assert running(bed, "n1")
        process.kill()
        process.wait()
        assert [str(record.state) for record in records(study)] == ["running", "planned"]
        os.kill(process_of(study), signal.SIGKILL)
    wait_for(lambda: str(records(study)[0].state) == "failed", what="the end")
    Path("go").touch()
    # Submitted again at once: the hosts may still be ending the run of the dead process.
    submitted(study)
    first, second = records(study)
    assert (first.failure_class, str(second.state)) == ("killed", "completed")
    submitted(study, "--retry-failed")
    assert [(r.attempt, str(r.state)) for r in records(study)] == [(2, "completed"), (1, "completed")]
    assert sorted(started.read_text().split()) == ["0", "0", "0", "1", "1", "1"]


def test_a_cancelled_run_ends_in_order_and_is_started_again(bed, make):
    study = make(f"{RANKS} touch begun; [ -e go ] || wait; {MEASURE}")
    with submission(study) as process:
        wait_for(lambda: Path("begun").exists() and running(bed, "n2"), what="a run")
        assert study.bench("cancel", "STUDY").stdout == "1 run cancelled\n"
        process.wait(180)
    wait_for(only_folder(study).end.exists, what="the end of the run")
    end = json.loads(only_folder(study).end.read_text())
    assert (end["by"], end["hosts"]) == ("term", {"n1": 143, "n2": 143})
    assert states(study)[2][0] == "cancelled"
    assert not running(bed, "n1")
    assert not running(bed, "n2")
    Path("go").touch()
    submitted(study)
    assert states(study) == {2: ("completed", "")}


def test_the_error_of_one_host_is_the_reason_and_the_others_are_ended(bed, make):
    study = make(
        f'[ "$2" = 0 ] || {{ echo out; echo "bench: error: no such wheel" >&2; exit 3; }}; {RANKS} wait'
    )
    submitted(study)
    assert states(study) == {2: ("failed", "no such wheel")}
    folder = only_folder(study)
    assert json.loads(folder.end.read_text())["exit_code"] == 3
    assert folder.out.read_text() == "==> n2 <==\nout\n"
    # Without the shell's messages about the other processes, which look like a reason.
    assert folder.err.read_text() == "==> n2 <==\nbench: error: no such wheel\n"


def test_a_run_is_ended_on_all_hosts_at_its_time_limit_and_after_its_last_window(bed, make):
    study = make(f"{RANKS} wait", time_limit="1s")
    submitted(study)
    assert states(study) == {2: ("failed", "the time limit was reached")}
    sealed = f'[ "$2" = 0 ] && {{ {MEASURE}; : >"$1/SHA256SUMS"; }}; {RANKS} wait'
    study = make(sealed, name="sealed", stop_after_measurement=True)
    submitted(study)
    end = json.loads(only_folder(study).end.read_text())
    assert (states(study)[2][0], end["exit_code"], end["by"]) == ("completed", 0, "measured")
    assert not running(bed, "n1")
    assert not running(bed, "n2")


def test_a_run_that_needs_a_missing_host_or_one_without_an_address_does_not_start(
    bed, make, ssh_config, monkeypatch
):
    own = Path("ssh config")
    hosts = "Host gone\n  HostName 127.0.0.1\n  Port 1\nHost near\n  HostName 127.0.0.1\n"
    own.write_text(f"{hosts}{ssh_config.read_text()}")
    monkeypatch.setenv("BENCH_SSH", f"ssh -F {shlex.quote(str(own.absolute()))}")
    study = make(MEASURE, hosts=["n1", {"host": "gone", "address": "10.0.0.9"}])
    submitted(study)
    why = "gone cannot be reached: ssh: connect to host 127.0.0.1 port 1: Connection refused"
    remedy = "check that `ssh -o BatchMode=yes gone true` works on this machine"
    (record,) = records(study)
    assert (str(record.state), record.failure_class) == ("failed", "never-started")
    assert record.reason == f"{why}; {remedy}"
    assert only_folder(study).err.read_text().endswith(f"bench: error: {why}; {remedy}\n")
    study = make(MEASURE, name="loopback", hosts=["near", "n1"])
    submitted(study)
    assert states(study)[2] == (
        "failed",
        "near has the address 127.0.0.1, which other hosts cannot reach; "
        "use {host: near, address: ADDRESS} in cluster.hosts",
    )


def test_a_host_without_the_folder_of_submission_is_named(bed, make):
    study = make(MEASURE)
    with hidden(bed, ["n2"], Path.cwd().parent):
        submitted(study)
    assert states(study) == {
        2: (
            "failed",
            f"n2 cannot enter the folder in which `bench submit` was called, {Path.cwd()}: No such file or directory; "
            "run `bench submit` in a folder that every host has: a shared one, or a copy at the same path",
        )
    }


@contextmanager
def hidden(cluster: Cluster, nodes: Sequence[str], folder: Path) -> Iterator[None]:
    """Mount an empty folder over a shared one on some nodes."""
    for node in nodes:
        cluster.run_on_node(node, ["mount", "-t", "tmpfs", "none", folder])
    try:
        yield
    finally:
        for node in nodes:
            cluster.run_on_node(node, ["umount", folder])


def test_results_of_hosts_without_a_shared_folder_are_copied_and_removed(bed, make):
    body = (
        f'[ "$2" = 1 ] || {{ {MEASURE}; head -c 3000000 /dev/zero >"$1/checkpoint.pt"; }}; '
        'echo "$BENCH_HOSTS" >"$1/of $2"; mkdir "$1/inner"; ln -s /etc/passwd "$1/link"; echo done'
    )
    study = make(body)
    with hidden(bed, ["n1", "n2"], Path.cwd()):
        said = submitted(study)
        left = {node: bed.run_on_node(node, ["ls", "-A", Path.cwd()]).stdout for node in ("n1", "n2")}
    assert states(study) == {2: ("completed", "")}, said
    assert left == {"n1": "", "n2": ""}
    folder = only_folder(study).path
    usual = {"run.json", "start", "end.json", "job.out", "job.err", "metrics.csv"}
    assert {path.name for path in folder.iterdir()} == usual | {"checkpoint.pt", "of 0", "of 1"}
    assert (folder / "of 1").read_text() == "n1,n2\n"
    assert (folder / "checkpoint.pt").stat().st_size == 3_000_000


def test_busy_hosts_are_left_alone(bed, make):
    going = make(f"touch begun; [ -e go ] || sleep 500; {MEASURE}", name="going")
    study = make(MEASURE, name="second", hosts=["n2"], nodes=[1])
    with submission(going):
        wait_for(Path("begun").exists, what="a run")
        submitted(study)
        holder = process_of(going)
    job = f"going.{going.planned.runs[0].run_id}.a1.{going.planned.plan['key']}"
    who = f"{job} (process {holder} of root on {os.uname().nodename})"
    why = f"n2 is busy with {who}; wait until that run has ended, or stop it; then run `bench submit` again"
    (record,) = records(study)
    assert (record.failure_class, record.reason) == ("never-started", why)
    submitted(study, "--retry-failed")  # the host may still be ending the other run
    assert states(study) == {1: ("completed", "")}


def test_processes_of_killed_shells_are_ended_before_the_next_run(bed, make):
    study = make(f'[ -e go ] || {{ {RANKS} touch "begun $2"; wait; }}; {MEASURE}', repeats=2)
    # Stopped first: the second shell ends the ranks if it can still run when the first one is gone.
    shells = "pids=$(ps -ww -eo pid,args | grep '[b]ash -s' | cut -c1-8); kill -STOP $pids; kill -KILL $pids"
    with submission(study, "--only", "repeat=1"):
        wait_for(Path("begun 1").exists, what="the ranks on n2")
        process = process_of(study)
        os.kill(process, signal.SIGSTOP)  # it must not end the processes of the lost shells itself
        bed.run_on_node("n2", ["sh", "-c", shells])
        os.kill(process, signal.SIGKILL)
    before = running(bed, "n2")
    assert before, "nobody is left there to end them"
    Path("go").touch()
    submitted(study)
    assert not set(before) & set(running(bed, "n2"))
    assert [str(record.state) for record in records(study)] == ["completed", "completed"]


def test_a_dry_run_shows_the_process_of_each_run(bed, make):
    study = make()
    script, run = next((study.folder / "scripts").iterdir()), only_folder(study).path
    name = study.planned.job_name(study.planned.runs[0].run_id, 1)
    words = [
        sys.executable,
        *"-P -m ddp_scaling_bench.start bench.jobs.ssh".split(),
        str(script),
        str(run),
        name,
    ]
    said = study.bench("submit", "STUDY", "--dry-run")
    assert said.stdout == f"{shlex.join(words)}\n1 of 1 runs would be started\n"
    assert not run.exists()


def test_the_interface_that_leads_to_another_host_is_found(bed):
    words = [sys.executable, "-P", "-m", "ddp_scaling_bench.start", "train.network_interface"]
    assert bed.run_on_node("n1", [*words, "n2"]).stdout == "eth0\n"
    assert bed.run_on_node("n1", [*words, "localhost"]).stdout == "\n"
    failed = bed.run_on_node("n1", [*words, "no-such-host"], check=False)
    assert failed.returncode == 1
    assert failed.stderr == (
        "bench: error: no-such-host cannot be found from n1: Temporary failure in name resolution; "
        "name the interface in cluster.env.GLOO_SOCKET_IFNAME\n"
    )


def test_without_an_ssh_client_the_remedy_is_named(make, monkeypatch):
    monkeypatch.setenv("BENCH_SSH", "no-such-ssh")
    study = make(MEASURE)
    said = " ".join(submitted(study).split())
    assert "no-such-ssh: No such file or directory; install an OpenSSH client, or set BENCH_SSH" in said
    assert not study.planned.folder.has_runs


#: Open the lock and print its path, or what open_lock printed and its exit code.
PROGRAM = '. "$0"; umask 000; open_lock && flock -n 9 && echo "$lock" || echo "no lock: $lock"'
NAME = f"ddp-scaling-bench-locks/ssh-{os.uname().nodename}.lock"
OTHER_USER = 54321


class Host:
    """A host with a runtime folder and a home."""

    def __init__(self, folder: Path) -> None:
        self.home, self.runtime = folder / "home", folder / "runtime"
        for path in (self.home, self.runtime):
            path.mkdir(mode=0o700)
        self.variables = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.runtime)}

    def open_lock(self, **variables: str) -> str:
        script = shipped("slurm_templates") / "ssh_host.sh"
        done = run_program(
            ["bash", "-c", PROGRAM, script],
            env={"PATH": os.environ["PATH"], **self.variables, **variables},
            check=True,
        )
        assert not done.stderr
        return done.stdout.strip()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_the_lock_is_in_the_runtime_folder_or_the_cache_and_only_its_owner_can_write_there(host):
    lock = host.runtime / NAME
    for _ in range(2):
        assert host.open_lock() == str(lock)
    assert (mode(lock.parent), mode(lock)) == (0o700, 0o600)
    assert not list(host.home.iterdir())
    usual, own = host.home / ".cache", host.home / "own cache"
    for cache, variables in ((usual, {}), (own, {"XDG_CACHE_HOME": str(own)})):
        assert host.open_lock(XDG_RUNTIME_DIR=str(host.home / "absent"), **variables) == str(cache / NAME)
        modes = [mode(path) for path in (cache, (cache / NAME).parent, cache / NAME)]
        assert modes == [0o700, 0o700, 0o600]


def test_an_unsafe_folder_is_not_used_and_without_a_safe_one_there_is_no_lock(host):
    lock, cache = host.runtime / NAME, host.home / ".cache"
    lock.parent.mkdir()
    lock.parent.chmod(0o777)  # writable by others
    assert host.open_lock() == str(cache / NAME)
    if os.geteuid() == 0:  # only root can make a folder of another user
        lock.parent.rmdir()
        host.runtime.chmod(0o777)
        os.chown(host.runtime, OTHER_USER, OTHER_USER)
        assert host.open_lock() == str(cache / NAME)
    assert not lock.exists()
    for parent in (host.runtime, cache):
        shutil.rmtree(parent / Path(NAME).parent, ignore_errors=True)
        (parent / NAME).parent.symlink_to(host.home)
    assert host.open_lock() == f"no lock: {cache / NAME}"


def test_a_lock_that_is_held_differs_from_a_file_system_without_locks(host, tmp_path):
    refusal = f"refused cannot lock {host.runtime / NAME} (No locks available); check"
    for flock, answer in (
        ("exit 1", "busy "),
        ("echo 'flock: 9: No locks available' >&2; exit 71", refusal),
    ):
        write_program(tmp_path / "flock", f"#!/bin/bash\n{flock}\n")
        script = shipped("slurm_templates") / "ssh_host.sh"
        done = run_program(
            ["bash", "-c", '. "$0"; mark=M job=x holder=y; prepare', script],
            env={**host.variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        )
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.startswith(f"M {answer}")
