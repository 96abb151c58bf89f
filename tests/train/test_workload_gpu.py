"""The same promises on a CUDA device."""

import json
import os
import re
import signal
import socket
from contextlib import suppress

import pytest
import torch

from ddp_scaling_bench.measure.conditions import LEAST_ENERGY_S
from tests.cluster.containers import wait_for
from tests.train.ranks import torchrun_env

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

OPTIONS = {"device": "cuda", "model": "mlp", "parameters": 8 * 10**6, "steps_per_epoch": 20, "epochs": 2}
OPTIONS |= {"join_timeout": 30}
WITHOUT_PROBES = OPTIONS | {"probe_steps": 0, "backend": "nccl", "batch": 512}


#: With nccl, steps that are longer on the device than on the host. With gloo, the exchange is the longest part.
LONG_STEPS = {"parameters": 32 * 10**6, "batch": 4096}


@pytest.mark.parametrize(("backend", "ranks", "size"), [("nccl", 1, LONG_STEPS), ("gloo", 2, {"batch": 512})])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_has_all_its_parts_on_a_gpu(server, tmp_path, backend, ranks, size, precision):
    options = OPTIONS | size | {"precision": precision, "backend": backend}
    finished = server.train(tmp_path, torchrun_env(ranks), **options).finish().succeeded()
    for row in finished.table("ranks"):
        parts = ("forward", "backward", "optimizer")
        assert all(float(row[f"{part}_time_sec"]) > 0 for part in parts)
        assert row["device"] == "cuda:0" or torch.cuda.device_count() > 1
    metrics = finished.table("metrics")
    assert all(float(row["throughput_samples_per_sec"]) > 0 for row in metrics)
    assert int(metrics[-1]["peak_mem_bytes"]) > 3 * finished.env["gradient_bytes"]
    assert finished.env["cuda"] == torch.version.cuda


def test_a_gpu_tells_its_energy_and_its_utilisation(server, tmp_path):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    options = WITHOUT_PROBES | {"batch": 4096, "steps_per_epoch": 2000, "epochs": 1, "sweep_time": 0}
    row = server.train(tmp_path, torchrun_env(1), **options).finish().succeeded().table("metrics")[0]
    seconds = float(row["epoch_time_sec"])
    assert bool(row["energy_joules"]) == (seconds > LEAST_ENERGY_S)
    if row["energy_joules"]:
        assert float(row["energy_joules"]) > 0
    if seconds > 2:  # the driver takes a sample every sixth of a second or so
        assert 0 < float(row["gpu_util_avg"]) <= 100


def test_running_out_of_a_gpus_memory_is_one_line(server, tmp_path):
    started = server.train(tmp_path, torchrun_env(1), batch=2**28, backend="nccl", **OPTIONS)
    finished = started.finish()
    assert finished.codes == [1]
    last = finished.err[0].splitlines()[-1]
    assert re.match(
        r"bench: error: rank 0 on \S+: out of memory: CUDA out of memory\. Tried to allocate", last
    )
    assert last.endswith("; lower the batch per rank, or set workload.activation_checkpointing to true")


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2)])
def test_probes_on_a_gpu_time_buckets_and_messages_with_events(server, tmp_path, backend, ranks):
    options = OPTIONS | {"batch": 512, "backend": backend, "sweep_max_mb": 4}
    finished = server.train(tmp_path, torchrun_env(ranks), **options).finish().succeeded()
    content = json.loads((finished.folder / "probes.json").read_text(encoding="utf-8"))
    steps = content["steps"]
    assert [len(step) for step in steps["timed_buckets_rank_0"]] == [len(content["bucket_bytes"])] * 6
    assert all(union > 0 for rank in steps["timed_union_s"] for union in rank)
    if ranks > 1:
        assert all(size["time_s"] > 0 for size in content["all_reduce"]["sizes"])
    assert float(finished.table("metrics")[-1]["comm_time_sec"]) > 0


def test_nccls_log_lies_in_the_runs_folder_and_is_understood(server, tmp_path):
    finished = server.train(tmp_path, torchrun_env(1), **WITHOUT_PROBES).finish().succeeded()
    assert "NCCL INFO" in (finished.folder / "nccl.log").read_text(errors="replace")
    transport = finished.env["transport"]
    assert transport["source"] == "NCCL's log"
    assert transport["version"]
    assert transport["network"] is None, "one rank sends nothing over a network"


def test_conditions_contain_the_clocks_of_every_rank(server, tmp_path):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    finished = server.train(tmp_path, torchrun_env(1), **WITHOUT_PROBES).finish().succeeded()
    content = json.loads((finished.folder / "conditions.json").read_text(encoding="utf-8"))
    assert [window["epoch"] for window in content["windows"]] == [1, 2]
    for window in content["windows"]:
        clocks = window["ranks"][0]["clocks"]
        assert list(clocks) == ["before", "after", "loaded"]
        assert all(sample["sm_mhz"] > 0 for sample in clocks.values())
        assert "gpu_idle" not in clocks["loaded"]["reasons"]["other"]
        assert window["ranks"][0]["collectives"] >= 20, "every step reduces its gradients"


#: NCCL accepts two ranks on one GPU if their host identities differ. They communicate over sockets.
TWO_NCCL_RANKS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
SMALL = {"device": "cuda", "backend": "nccl", "model": "mlp", "parameters": 100_000}
SMALL |= {"steps_per_epoch": 5, "epochs": 4000, "attribution_steps": 2, "probe_steps": 0}


def start_two_nccl_ranks(server, folder, **options):
    environments = [
        {**env, **TWO_NCCL_RANKS, "NCCL_HOSTID": f"host{rank}"} for rank, env in enumerate(torchrun_env(2))
    ]
    target = "tests.train.scenarios:naps_in_epochs"
    started = server.train(folder, environments, target, **SMALL | options)
    wait_for((folder / "metrics.csv").exists, what="an epoch", timeout_s=60)
    return started


@pytest.mark.parametrize(
    ("end", "timeout_s", "reason"),
    [
        (
            signal.SIGKILL,
            60,
            "lost the connection to another rank: no report from rank 1 on {host}: killed, or",
        ),
        (signal.SIGSTOP, 15, "a collective did not complete in 15 s: rank 1 on {host} did not reach the"),
    ],
)
def test_with_nccl_the_other_rank_names_the_one_that_is_lost(server, tmp_path, end, timeout_s, reason):
    started = start_two_nccl_ranks(server, tmp_path, join_timeout=timeout_s)
    os.kill(started.pids[1], end)
    try:
        wait_for(lambda: "bench: error" in (tmp_path / "0.err").read_text(), what="the message", timeout_s=60)
    finally:
        with suppress(ProcessLookupError):
            os.kill(started.pids[1], signal.SIGKILL)
    finished = started.finish()
    host = socket.gethostname()
    assert finished.codes == [1, -9]
    last = finished.err[0].splitlines()[-1]
    assert last.startswith(f"bench: error: rank 0 on {host}: {reason.format(host=host)}")
    own = "Last error:" if end is signal.SIGKILL else "Watchdog caught collective operation timeout"
    assert own in finished.err[0]
    (shared,) = (fact["values"]["gpus"] for fact in finished.env["facts"] if fact["kind"] == "shared-gpus")
    assert [gpu["ranks"] for gpu in shared] == [[0, 1]]


def test_two_nccl_ranks_on_one_gpu_end_with_one_line_before_nccl_starts(server, tmp_path):
    environments = [{**env, **TWO_NCCL_RANKS, "CUDA_VISIBLE_DEVICES": "0"} for env in torchrun_env(2)]
    finished = server.train(tmp_path, environments, **SMALL | {"epochs": 1}).finish()
    assert finished.codes == [1, 1]
    (line,) = finished.err[0].splitlines()
    assert line.startswith(f"bench: error: ranks 0-1 on {socket.gethostname()} use the same GPU (")
    assert finished.err[1] == ""
