"""The rendezvous of ranks, and its errors."""

import json
import socket
from typing import Any

import pytest

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.measure.launch import launch_from
from ddp_scaling_bench.measure.ranks import RankFacts, core_facts, own_facts, threads_per_rank
from ddp_scaling_bench.train.rendezvous import check_size, meeting_place, missing_ranks
from tests.common import raised
from tests.train.ranks import QUICK, srun_env, torchrun_env


def facts(
    rank: int, host: str, *, cores: list[int] | None = None, machine: str = "", **known: Any
) -> RankFacts:
    known = {"node_cores": 64, **known}
    return RankFacts(rank, 0, host, machine or host, cores or [0, 1], 8 * 2**30, "a processor", **known)


def test_srun_places_ranks_on_hosts(run_ranks):
    finished = run_ranks(environments=srun_env({"n1": 2, "n2": 1})).succeeded()
    start = finished.out[0].splitlines()[0]
    assert start.startswith("bench: 3/3 ranks joined on 2 hosts (n1: 0-1, n2: 2) in ")
    assert finished.env["launcher"] == "srun"
    assert [(host["host"], host["ranks"]) for host in finished.env["hosts"]] == [("n1", [0, 1]), ("n2", [2])]
    assert finished.env["joined"]["ranks"] == finished.env["joined"]["expected"] == 3
    assert [row["host"] for row in finished.table("ranks")] == ["n1", "n1", "n2"]
    # One rank per node samples the node.
    (window,) = json.loads((finished.folder / "conditions.json").read_text())["windows"]
    assert [node["node"] for node in window["nodes"]] == ["n1", "n2"]
    assert [rank["rank"] for rank in window["ranks"]] == [0, 1, 2]


def test_a_missing_rank_is_named_with_its_host_and_all_others_end(server, tmp_path):
    environments = srun_env({"n1": 2, "n2": 2})
    three = [environments[rank] for rank in (0, 1, 3)]
    finished = server.train(tmp_path, three, join_timeout=5, **QUICK).finish()
    assert finished.codes == [1, 1, 1]
    words = "3/4 ranks joined in 5 s; missing: rank 2 on n2; joined: ranks 0-1 on n1, rank 3 on n2"
    assert finished.out == [f"bench: {words}\n", "", ""]
    assert finished.err[0].splitlines()[-1] == f"bench: error: {words}"
    assert "Traceback" not in finished.err[0]
    assert finished.err[1:] == ["", ""]


def test_without_rank_0_every_rank_says_that_the_store_did_not_answer(server, tmp_path):
    environments = srun_env({"n1": 1, "n2": 1})
    finished = server.train(tmp_path, environments[1:], join_timeout=1, **QUICK).finish()
    assert finished.codes == [1]
    endpoint = f"127.0.0.1:{environments[0]['MASTER_PORT']}"
    assert f"bench: error: rank 1: the store at {endpoint} (rank 0) did not answer in 1 s" in finished.err[0]
    assert "Traceback" not in finished.err[0]


def test_a_port_in_use_is_named(server, tmp_path):
    environments = torchrun_env(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(environments[0]["MASTER_PORT"])))
        taken.listen()
        finished = server.train(tmp_path, environments[:1], join_timeout=2, **QUICK).finish()
    assert finished.codes == [1]
    assert f"rank 0 cannot serve the store at 127.0.0.1:{environments[0]['MASTER_PORT']}: " in finished.err[0]
    assert "Traceback" not in finished.err[0]


def test_a_job_script_without_srun_is_one_process_whatever_slurm_says():
    env = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}
    launch = launch_from(env)
    assert launch.launcher == "single"
    assert raised(BenchError, check_size, launch, 16, "srun") == (
        "1 of 16 planned processes started; does the launch line lack srun?"
    )
    two = launch_from(srun_env({"n1": 2})[0])
    for one, text in ((launch, "1 of 4"), (two, "2 of 4")):
        text += " planned processes started; check the launch line"
        assert raised(BenchError, check_size, one, 4, "torchrun") == text


def test_torchruns_agent_wins_over_srun_and_srun_over_the_variables_that_scripts_set():
    both = srun_env({"n1": 2})[1] | torchrun_env(3)[2]
    assert launch_from(both).launcher == "srun"
    launch = launch_from(both | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "7"})
    assert (launch.launcher, launch.rank, launch.local_rank, launch.world_size) == ("torchrun", 2, 2, 3)
    assert launch.agent_store


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"MASTER_ADDR": ""},
            "MASTER_ADDR not set for 2 processes;"
            " export MASTER_ADDR (the job's first host) and MASTER_PORT before the launch line",
        ),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set, although other variables of the launcher are"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a number"),
        ({"SLURM_PROCID": "2"}, "rank 2 is too high for 2 processes; check the launch line"),
    ],
)
def test_variables_that_contradict_each_other_are_named(changes, message):
    env = srun_env({"n1": 2})[0] | changes
    known = {key: one for key, one in env.items() if one is not None}
    assert raised(BenchError, lambda: meeting_place(launch_from(known))) == message


def test_hosts_of_ranks_follow_slurms_short_form_and_are_unknown_unless_srun_fills_them_in_order():
    env = srun_env({"a": 2, "b": 2, "c": 1})[0] | {"SLURM_TASKS_PER_NODE": "2(x2),1"}
    hosts = ("a", "a", "b", "b", "c")
    for distribution in (None, "block:cyclic", "cyclic", "cyclic:block", "plane=2"):
        found = launch_from(env | ({"SLURM_DISTRIBUTION": distribution} if distribution else {}))
        assert found.expected_hosts == (hosts if distribution in (None, "block:cyclic") else ())


def test_a_silent_host_is_named_if_its_ranks_are_not_known():
    env = torchrun_env(4)[0] | {"BENCH_HOSTS": "n1,n2"}
    line = missing_ranks([facts(0, "n1"), facts(1, "n1")], launch_from(env), 60).message
    assert line == (
        "2/4 ranks joined in 60 s; missing: ranks 2-3; joined: ranks 0-1 on n1; no rank joined from n2"
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [facts(rank, f"n{rank}", machine="the same") for rank in range(4)],
            "shared-cores: 4 ranks share 2 cores (0-1) on n0, n1, n2, n3: adding ranks measures how cores are"
            " shared, not the network",
        ),
        ([facts(rank, f"n{rank}") for rank in range(4)], None),
        (
            [facts(rank, f"n{rank // 2}", cores=[0, 1, 2, 3], threads=4) for rank in range(12)],
            "shared-cores: 8 threads of 2 ranks share 4 cores (0-3) on each of n0, n1, n2 and 3 more:"
            " set cluster.cpus_per_task or OMP_NUM_THREADS to 2 or less",
        ),
        ([facts(rank, "n0", cores=[2 * rank, 2 * rank + 1], threads=2) for rank in (0, 1)], None),
        (
            [facts(0, "n1"), facts(1, "n2", cores=[2, 3]), facts(2, "n3", quota=1.5)],
            "unequal-nodes: n1 and n2: 64 cores, 2 per rank, no quota; n3: 64 cores, 2 per rank, a quota of 1.5",
        ),
        (
            [facts(0, "n1", cores=[0, 1, 2], threads=2), facts(1, "n2", node_cores=32, threads=2)],
            "unequal-nodes: n1: 64 cores, 3 per rank, no quota; n2: 32 cores, 2 per rank, no quota",
        ),
        (
            [facts(rank, f"n{rank // 2 + 1}", threads=rank // 2 + 1) for rank in range(3)],
            "threads-differ: n1: 1 per rank; n2: 2 per rank",
        ),
        (
            [facts(rank, "n1", threads=rank + 1, cores=list(range(8))) for rank in range(2)],
            "threads-differ: n1: 1 or 2 per rank",
        ),
    ],
)
def test_cores_that_are_shared_or_differ_are_named_with_the_values(ranks, words):
    assert [str(one) for one in core_facts(ranks)] == ([words] if words else [])


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        ({"BENCH_THREADS_PER_RANK": "3", "OMP_NUM_THREADS": "1"}, 3),
        ({"OMP_NUM_THREADS": "5,2"}, 5),
        ({"OMP_NUM_THREADS": "none"}, 4),
        ({}, 4),
    ],
)
def test_threads_are_the_same_under_every_launcher(env, threads):
    me = own_facts(0, 0, env)
    assert me.threads == (threads if threads != 4 else None)
    here = [facts(rank, "n1", cores=list(range(8)), threads=me.threads) for rank in range(2)]
    assert threads_per_rank(here[0], [*here, facts(2, "n2")]) == threads
