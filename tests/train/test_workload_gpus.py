"""Ranks that use the same GPU, NCCL's log of a rank that fails, and ranks that wait for a lost one."""

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from ddp_scaling_bench.measure.environment import Device
from ddp_scaling_bench.measure.exchange import Met
from ddp_scaling_bench.measure.findings import SharedGpu, SharedGpus
from ddp_scaling_bench.measure.launch import Launch
from ddp_scaling_bench.measure.ranks import RankFacts
from ddp_scaling_bench.train import gpus
from ddp_scaling_bench.train.failures import WorkloadError
from ddp_scaling_bench.train.rendezvous import OtherRankError
from tests.cluster.containers import wait_for
from tests.train.ranks import QUICK, torchrun_env
from tests.train.scenarios import WARNING

HOST = socket.gethostname()
SHARED = f"ranks 0-1 on {HOST} use the same GPU (00000000:3B:00.0)"


def test_two_ranks_on_a_gpu_end_with_one_line_before_nccl_starts(run_ranks):
    finished = run_ranks(device="cuda", backend="nccl", target="tests.train.scenarios:one_gpu_with_nccl")
    assert finished.codes == [1, 1]
    assert finished.err == [
        f"bench: error: {SHARED}, but NCCL needs a GPU for each rank; request one GPU per rank (gpus_per_node),"
        " start fewer ranks per node, or use backend gloo\n",
        "",
    ]
    assert "NCCL starts" not in "".join(finished.out)


def test_with_gloo_two_ranks_on_a_gpu_cause_a_warning(run_ranks):
    finished = run_ranks(target="tests.train.scenarios:one_gpu_with_gloo")
    warning = f"shared-gpus: {SHARED}: the times are not those of a GPU per rank"
    assert "shared-gpus" in [fact["kind"] for fact in finished.succeeded().env["facts"]]
    assert f"bench: warning: {warning}" in finished.out[0].splitlines()


@pytest.fixture
def choose(monkeypatch):
    """Choose the devices of ranks, one (host, identity, model, variables) per rank, in threads."""
    own = threading.local()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: own.count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(gpus, "device_of", lambda device, host: Device(str(device), own.gpu, own.model))
    monkeypatch.setattr(gpus, "pci_address", lambda index: None)

    def run(*ranks: tuple[str, str, str, dict[str, str]], backend: str = "nccl") -> list:
        store = HashStore()
        facts = [RankFacts(rank, 0, one[0], one[0], [0], 1, None) for rank, one in enumerate(ranks)]

        def choose_own(rank: int):
            _, own.gpu, own.model, env = ranks[rank]
            own.count = 1 if own.gpu else 0
            launch = Launch("srun", rank, 0, len(ranks))
            try:
                joined = Met(launch, store, facts, 0.0)
                return gpus.choose_device("cuda", launch, joined, env, backend=backend, timeout_s=60)
            except WorkloadError as error:
                return error

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(choose_own, range(len(ranks))))

    return run


H100 = "NVIDIA H100"


def test_a_gpu_per_task_is_not_shared_although_each_is_device_0(choose):
    first, second = choose(("n1", "GPU-1", H100, {}), ("n1", "GPU-2", H100, {}))
    assert first == second == (torch.device("cuda", 0), [])


def test_ranks_on_two_hosts_do_not_share_a_gpu_with_the_same_address(choose):
    found = choose(("n1", "n1 0000:3b:00.0", H100, {}), ("n2", "n2 0000:3b:00.0", H100, {}))
    assert [warnings for _, warnings in found] == [[], []]


@pytest.mark.parametrize(
    "variables",
    [
        ({"NCCL_HOSTID": "a"}, {"NCCL_HOSTID": "b"}),
        ({"NCCL_HOSTID": "a"}, {}),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"},) * 2,
    ],
)
def test_nccl_may_share_a_gpu_if_the_user_says_so(choose, variables):
    found = choose(*(("n1", "GPU-1", H100, env) for env in variables))
    shared = SharedGpus(gpus=(SharedGpu(ranks=(0, 1), host="n1", gpu="GPU-1"),))
    assert [findings for _, findings in found] == [[shared], [shared]]


@pytest.mark.parametrize(
    "variables", [({}, {}), ({"NCCL_HOSTID": "a"},) * 2, ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, {})]
)
def test_nccl_is_not_started_otherwise_and_only_rank_0_has_the_message(choose, variables):
    first, second = choose(*(("n1", "GPU-1", H100, env) for env in variables))
    assert not isinstance(first, OtherRankError)
    assert isinstance(second, OtherRankError)
    assert str(first) == str(second)
    assert str(first).startswith(
        "ranks 0-1 on n1 use the same GPU (GPU-1), but NCCL needs a GPU for each rank;"
    )


def test_ranks_without_a_gpu_are_named_and_all_ranks_end(choose):
    found = choose(("n1", "GPU-1", H100, {}), ("n2", "", "", {}), ("n2", "", "", {}))
    assert str(found[0]).startswith("ranks 1-2: no CUDA device is visible")
    assert [type(one) for one in found] == [WorkloadError, OtherRankError, OtherRankError]


def test_a_rank_that_fails_prints_nccls_warnings_and_its_last_error(run_ranks):
    finished = run_ranks(target="tests.train.scenarios:nccl_fails_at_its_start")
    assert finished.codes == [1, 1]
    for rank in (0, 1):
        lines = finished.err[rank].splitlines()
        assert lines.count(WARNING) == 1
        # After it, torch may print that the store has ended with rank 0.
        (line,) = (line for line in lines if line.startswith("bench: "))
        assert line == (
            "bench: error: out of memory: NCCL 2.28.9: Cuda failure 2 'out of memory'; lower the batch per rank,"
            " or set workload.activation_checkpointing to true"
        )
    logs = [Path(out.partition("log: ")[2].strip()) for out in finished.out]
    assert not any(log.parent.exists() for log in logs)
    assert WARNING in (finished.folder / "nccl.log").read_text(), "rank 0's log stays, for people"


def test_with_nccl_a_rank_that_waits_for_a_killed_one_names_it(run_ranks):
    finished = run_ranks(target="tests.train.scenarios:rank_1_is_killed")
    assert finished.codes == [1, -9]
    assert finished.err[0] == (
        f"bench: error: rank 0 on {HOST}: lost the connection to another rank: no report from rank 1 on {HOST}:"
        " it ended or was killed, or the host was lost\n"
    )


def test_with_nccl_a_rank_that_waits_for_a_hanging_one_names_it(server, tmp_path):
    target = "tests.train.scenarios:rank_1_hangs"
    started = server.train(tmp_path, torchrun_env(2), target, **QUICK)
    try:
        wait_for(lambda: "bench: error" in (tmp_path / "0.err").read_text(), what="the message of rank 0")
    finally:
        os.kill(started.pids[1], signal.SIGKILL)
    finished = started.finish()
    assert finished.codes == [1, -9]
    assert finished.err[0] == (
        f"bench: error: rank 0 on {HOST}: a collective did not complete in 300 s: rank 1 on {HOST} did not reach"
        " the collective; find out why, or raise workload.join_timeout\n"
    )
