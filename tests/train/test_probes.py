"""The probes: their file, their effects on the run, and limits of memory and time."""

import json
import math
import os
from dataclasses import asdict, replace
from statistics import mean, median
from types import SimpleNamespace

import pytest
import torch

from bench.study.ledger import End, Record, RunState
from bench.study.verify import verify_run
from ddp_scaling_bench.checksums import find_damage
from ddp_scaling_bench.measure.node import host_name
from ddp_scaling_bench.measure.step_parts import HostClock
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.train.options import TrainOptions
from ddp_scaling_bench.train.probes import (
    BucketSpan,
    CollectiveSweep,
    Size,
    Sweep,
    _timed_steps,
    hidden_fraction,
    message_sizes,
    union_s,
)
from tests.analysis.studies import make_cell
from tests.common import write_cell
from tests.train.ranks import QUICK, srun_env, torchrun_env

HOST = host_name(os.environ)
MIB = 2**20
PROBES = {"probe_steps": 3, "sweep_time": 5, "sweep_max_mb": 0.1}


def content_of(finished) -> dict:
    return json.loads((finished.folder / "probes.json").read_text(encoding="utf-8"))


def test_probes_json_has_the_documented_keys_and_metrics_the_total_communication(plain):
    content = content_of(plain)
    assert list(content) == [
        *("schema", "world_size", "backend", "seconds", "bucket_bytes", "steps"),
        *("all_reduce", "reasons", "standalone_s", "hidden_fraction"),
    ]
    assert (content["schema"], content["world_size"], content["backend"]) == (1, 2, "gloo")
    assert content["reasons"] == {"steps": None, "all_reduce": None}
    assert content["seconds"]["all"] > 0
    for row in plain.table("metrics"):
        mean_s = sum(content["steps"]["comm_time_s"]) / 2
        assert float(row["comm_time_sec"]) == pytest.approx(mean_s, rel=1e-9)


def test_the_timed_buckets_are_those_that_ddp_says_it_has(plain):
    content = content_of(plain)
    buckets = content["bucket_bytes"]
    assert sum(buckets) == plain.env["gradient_bytes"]
    assert len(buckets) > 2
    steps = content["steps"]["timed_buckets_rank_0"]
    assert len(steps) == 4
    for step, union in zip(steps, content["steps"]["timed_union_s"][0], strict=True):
        assert [size for _, size, _, _ in sorted(step)] == buckets
        spans = [BucketSpan(*span) for span in step]
        assert all(0 < span.begin_s < span.end_s for span in spans)
        assert union_s(spans) == pytest.approx(union)
        assert union <= sum(span.end_s - span.begin_s for span in spans) + 1e-12


def test_the_sweep_times_powers_of_four_and_the_buckets(plain):
    content = content_of(plain)
    sizes = content["all_reduce"]["sizes"]
    buckets = set(content["bucket_bytes"])
    assert {size["bytes"] for size in sizes} == buckets | {4096 * 4**k for k in range(5)}
    assert {size["bytes"] for size in sizes if size["buckets"]} == buckets
    for size in sizes:
        slowest = [max(ranks) for ranks in size["times_s"]]
        assert size["time_s"] == pytest.approx(median(slowest))
        assert len(slowest) >= 3
        assert size["algbw_bytes_per_s"] == pytest.approx(size["bytes"] / size["time_s"])
        assert size["busbw_bytes_per_s"] == pytest.approx(size["algbw_bytes_per_s"])  # 2(N − 1)/N is 1
    alone = {size["bytes"]: size["time_s"] for size in sizes}
    assert content["standalone_s"] == pytest.approx(sum(alone[size] for size in content["bucket_bytes"]))
    # Without the time of waiting for a later rank.
    last = [row for row in plain.table("ranks") if row["epoch"] == "2"]
    exposed, wait = (
        mean(float(row[f"comm_{part}_time_sec"]) for row in last) for part in ("exposed", "wait")
    )
    expected = 1 - (exposed - wait) / content["standalone_s"]
    assert content["hidden_fraction"] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_without_a_launcher_one_rank_has_steps_to_probe_and_nobody_to_communicate_with(run_ranks):
    finished = run_ranks(**PROBES, environments=[{}]).succeeded()
    (row,) = finished.table("metrics")
    assert (finished.env["launcher"], finished.env["world_size"], row["samples"]) == ("single", 1, "40")
    assert (float(row["load_balance"]), float(row["comm_wait_time_sec"])) == (1, 0)
    assert float(row["comm_exposed_time_sec"]) >= 0
    content = content_of(finished)
    assert content["all_reduce"] is None
    alone = "a single rank does not communicate"
    assert content["reasons"] == {"steps": None, "all_reduce": alone}
    assert content["steps"]["comm_time_s"][0] > 0
    assert (content["standalone_s"], content["hidden_fraction"]) == (None, None)


def test_probes_time_what_a_hook_sends_once_per_step_in_mixed_precision_with_states_of_the_optimizer(
    run_ranks,
):
    options = {"grad_accum": 3, "precision": "bf16", "optimizer": "adamw", "comm_hook": "fp16"}
    finished = run_ranks(**PROBES | options | {"probe_steps": 1, "sweep_time": 0.1}).succeeded()
    content = content_of(finished)
    (step,) = content["steps"]["timed_buckets_rank_0"]
    assert sorted(size for _, size, *_ in step) == sorted(content["bucket_bytes"])
    assert 2 * sum(content["bucket_bytes"]) == finished.env["gradient_bytes"]
    assert len(content["steps"]["comm_time_s"]) == 2
    assert content["all_reduce"]["dtype"] == "float16"
    assert float(finished.table("metrics")[0]["comm_exposed_time_sec"]) > 0


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="FSDP2 does not work on CPUs with this torch")
def test_hsdp_sweeps_within_and_across_nodes(server, tmp_path):
    options = {"strategy": "hsdp", "optimizer": "adamw", "grad_accum": 2, "batch": 4}
    options |= {"model": "transformer", "parameters": 20_000, "seq_len": 6}  # two blocks
    options |= PROBES | {"probe_steps": 1, "sweep_time": 60, "sweep_max_mb": 0.02}
    options |= {"steps_per_epoch": 2, "attribution_steps": 1}
    run = server.train(tmp_path, srun_env({"a": 2, "b": 2}), **QUICK | options).finish().succeeded()
    content, whole = content_of(run), run.env["gradient_bytes"]
    swept = {name: content[name] for name in ("all_reduce", "all_gather", "reduce_scatter")}
    assert [one["ranks"] for one in swept.values()] == [2, 2, 2]
    across, gathered, scattered = (
        {size["bytes"]: size["buckets"] for size in one["sizes"] if size["buckets"]} for one in swept.values()
    )
    assert whole <= sum(size * count for size, count in scattered.items()) < 1.05 * whole
    assert across == {size // 2: count for size, count in scattered.items()}
    # Both micro-batches gather each block for forward and for backward, and the root once.
    factors = sorted(gathered[size] / count for size, count in scattered.items())
    assert (factors[0], *{*factors[1:]}) == (2, 4)
    for size in swept["all_gather"]["sizes"]:
        assert size["busbw_bytes_per_s"] == pytest.approx(size["bytes"] / 2 / size["time_s"])
    times = [size["buckets"] * size["time_s"] for one in swept.values() for size in one["sizes"]]
    assert content["standalone_s"] == pytest.approx(sum(times))


def test_only_the_sweep_can_be_asked_for(run_ranks):
    content = content_of(run_ranks(**PROBES | {"probe_steps": 0}).succeeded())
    assert content["steps"] is None
    assert content["reasons"]["steps"] == "probe_steps is 0"
    assert {s["bytes"] for s in content["all_reduce"]["sizes"] if not s["buckets"]} == {4096, 16384, 65536}


@pytest.mark.parametrize(("rank", "steps"), [(1, 0), (1, 2), (0, 1)])
def test_a_rank_without_memory_in_a_probe_is_a_reason_and_no_failure(server, tmp_path, rank, steps):
    write_cell(tmp_path, launcher="torchrun", ranks=2, **QUICK | PROBES)
    environments = [{"BENCH_RUN_DIR": str(tmp_path), **env} for env in torchrun_env(2)]
    target, words = "tests.train.scenarios:no_memory_in_a_probe", [str(rank), str(steps)]
    finished = server.start(tmp_path, environments, target, words).finish().succeeded()
    (row,) = finished.table("metrics")
    assert (row["samples"], row["comm_time_sec"]) == ("80", "")
    assert float(row["comm_exposed_time_sec"]) >= 0
    reason = f"rank {rank} on {HOST}: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB"
    content = content_of(finished)
    swept = None if steps else content["all_reduce"]["sizes"]
    assert content["reasons"] == {"steps": reason, "all_reduce": reason if steps else None}
    assert bool(swept) == (not steps)
    assert (content["hidden_fraction"] is None) == bool(steps)
    assert find_damage(tmp_path) == ""
    options = TrainOptions(**QUICK | PROBES)
    planned = make_cell(2, batch=8, mode="weak", per_node=2, launcher="torchrun")
    cell = replace(planned, workload=asdict(options), planned_epochs=1)
    (tmp_path / "run.json").write_text("{}")
    record = Record(run_id="r", attempt=1).ended(End(state=RunState.COMPLETED))
    checks = verify_run(RunFolder(tmp_path), record, cell).checks
    assert [one for one in checks if not one.passed] == []


def test_the_union_counts_no_moment_twice():
    spans = [BucketSpan(1, 4, 2.0, 5.0), BucketSpan(0, 4, 1.0, 3.0), BucketSpan(2, 4, 7.0, 8.0)]
    assert union_s(spans) == pytest.approx(5.0)
    assert union_s([*spans, BucketSpan(3, 4, 0.0, 9.0)]) == pytest.approx(9.0)
    assert union_s([]) == 0.0


def test_sizes_go_as_far_as_the_gradients_within_bounds():
    def powers(gradient_bytes: int, largest: int | None = None) -> int:
        return message_sizes([], gradient_bytes=gradient_bytes, largest=largest)[-1].bytes

    assert powers(1000) == 16 * MIB
    assert powers(40 * MIB) == 16 * MIB
    assert powers(64 * MIB) == powers(10**12) == 64 * MIB
    assert powers(10**12, largest=5 * MIB) == 4 * MIB
    sizes = message_sizes([100, 25 * MIB, 100, 64 * MIB], gradient_bytes=MIB)
    assert [(size.bytes, size.buckets) for size in sizes] == [
        *((100, 2), (4096, 0), (16384, 0), (65536, 0), (262144, 0), (MIB, 0), (4 * MIB, 0), (16 * MIB, 0)),
        *((25 * MIB, 1), (64 * MIB, 1)),
    ]
    shared = message_sizes([12288], gradient_bytes=MIB, largest=70_000, multiple=12)
    assert [size.bytes for size in shared] == [4104, 12288, 16392, 65544]
    many = message_sizes(range(4, 400, 4), gradient_bytes=MIB)
    assert sum(1 for size in many if size.buckets) == 16


class OneRank:
    """Collectives of one rank that pretends to be two; all that a sweep needs."""

    world_size = 2
    barrier = staticmethod(lambda: None)
    maxima = minima = staticmethod(list)
    rows = staticmethod(lambda values: [list(values), list(values)])


def test_a_training_at_85_percent_of_the_memory_has_no_room_for_the_activations_of_a_copy(monkeypatch):
    """In units of the weights of 20 on the GPU: a copy needs 4 and buckets, and each of its steps 13."""
    weights = 4 * 10**6
    held = {"memory_allocated": 4, "memory_reserved": 17.5, "max_memory_allocated": 17}
    for name, value in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: int(value * weights))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(2.5 * weights), 20 * weights))
    host = SimpleNamespace(ranks=[0])
    options, joined = TrainOptions(optimizer="adamw"), SimpleNamespace(hosts=[host])
    session = SimpleNamespace(options=options, device=torch.device("cuda", 0), host=host, joined=joined)
    parts = SimpleNamespace(has_buckets=True)
    trainer = SimpleNamespace(model=torch.nn.Linear(1000, 1000, bias=False), parts=parts)
    assert _timed_steps(session, OneRank(), trainer) == "not enough memory for a copy of the model"


class SlowSweep(CollectiveSweep):
    """A sweep over a link of 1 MB/s that takes no time at all."""

    def _time(self, payload: torch.Tensor, count: int = 1) -> float:
        return payload.numel() * 4 / 1e6


def slow_sweep(budget_s: float, room_bytes: float = 1e12) -> Sweep:
    sweep = SlowSweep(
        collectives=OneRank(), clock=HostClock(), device=torch.device("cpu"), dtype=torch.float32
    )
    sizes = [Size(bytes=4096 * 4**k) for k in range(7)]
    return sweep.run(sizes, budget_s=budget_s, room_bytes=room_bytes, seed=1)


def test_sizes_that_take_too_long_or_too_much_memory_are_left_out_and_named():
    found = slow_sweep(2.0)
    assert [size.bytes for size in found.sizes] == [4096, 16384, 65536, 262144]
    times = {1048576: "1.05", 4194304: "4.19", 16777216: "16.8"}
    assert {one["bytes"]: one["reason"] for one in found.dropped} == {
        size: f"about {seconds} s per repeat is too long for a sweep of 2 s"
        for size, seconds in times.items()
    }
    assert found.time_s(3) == pytest.approx(0.262144)
    found = slow_sweep(1e3, room_bytes=5 * MIB)
    assert found.sizes[-1].bytes == 4 * MIB
    assert found.dropped == [{"bytes": 16 * MIB, "reason": "not enough memory"}]


def test_the_hidden_fraction_needs_the_times_of_all_buckets():
    sweep = Sweep(2, "float32", [Size(8, buckets=2)], [[[0.5, 1.0], [0.25, 2.0], [1.0, 1.0]]])

    def found(*sizes: list[int], last: Sweep | str = sweep, transfer_s: float = 0.5) -> tuple:
        return tuple(hidden_fraction(sizes, [*[sweep] * (len(sizes) - 1), last], transfer_s).values())

    assert found([8, 8]) == (2.0, 0.75)
    assert found([8], transfer_s=math.nan) == (1.0, None)
    assert found([8, 8], [8, 8], [], last="too slow") == (4.0, 0.875), "the last collective is not used"
    unknown = [found([8, 4]), found([8, 8], [8, 4]), found([8], [8], last="too slow"), found([])]
    assert unknown == [(None, None)] * 4
