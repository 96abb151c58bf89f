"""Samples, replicas and rates of trainings in which several ranks share a replica of the model."""

import json

import pytest

from ddp_scaling_bench.measure.ranks import local_ranks, own_facts
from ddp_scaling_bench.measure.results import samples_of_all
from tests.record.test_recorder import kinds
from tests.train.ranks import torchrun_env

LENGTHS = {"warmup_steps": 3, "steps_per_epoch": 4, "attribution_steps": 1, "epochs": 1}


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline"])
def test_the_samples_of_a_replica_count_once(server, tmp_path, name):
    own = {"model_parallel": 2, **LENGTHS}
    done = server.train(tmp_path, torchrun_env(4), f"tests.record.layouts:{name}", **own).finish().succeeded()
    counted = json.loads((tmp_path / "own.json").read_text())
    rows, window = done.table("metrics"), LENGTHS["steps_per_epoch"]
    assert [int(row["samples"]) for row in rows] == [counted["samples_per_step"] * window] * LENGTHS["epochs"]
    for row in rows:
        rate = float(row["samples"]) / float(row["epoch_time_sec"])
        assert float(row["throughput_samples_per_sec"]) == pytest.approx(rate, rel=1e-3)
    assert {row["comm_exposed_time_sec"] for row in rows} == {
        ""
    }  # nothing times that between ranks of a replica
    assert done.env["global_batch"] == counted["samples_per_step"]
    assert done.env["world_size"] == counted["world_size"]
    assert done.env["exchange"]["together"] is not False
    assert not {"separate-trainings", "samples-unknown", "samples-of-replicas"} & {*kinds(done.env)}


@pytest.mark.parametrize(("model_parallel", "is_doubtful"), [(1, True), (2, False), (4, True)])
def test_a_layout_that_the_data_contradict_is_named(server, tmp_path, model_parallel, is_doubtful):
    own = {"model_parallel": model_parallel, **LENGTHS}
    done = server.train(tmp_path, torchrun_env(4), "tests.record.layouts:pairs", **own).finish().succeeded()
    assert ("layout-doubtful" in kinds(done.env)) is is_doubtful


def test_samples_that_fit_no_layout_are_empty_with_the_reason(server, tmp_path):
    own = {"model_parallel": 2, **LENGTHS}
    done = server.train(tmp_path, torchrun_env(4), "tests.record.layouts:unclear", **own).finish().succeeded()
    assert [(row["samples"], row["throughput_samples_per_sec"]) for row in done.table("metrics")] == [
        ("", "")
    ]
    assert kinds(done.env)["samples-of-replicas"]["model_parallel"] == 2


@pytest.mark.parametrize(
    ("counts", "model_parallel", "expected"),
    [
        ([8, 8, 8, 8], 1, 32),
        ([8, 8, 8, 8], 2, 16),
        ([8, 0, 6, 0], 2, 14),
        ([8, float("nan"), 6, float("nan")], 2, 14),
        ([8, 8, 0, 0, 0, 0, 8, 8] * 2, 8, 16),  # tensor x pipeline: first and last stage read
        ([8, 8, 6, 6], 2, 14),
        ([8, 8, 8, 6], 2, None),
        ([8, 8, 8, 0], 2, None),
        ([0, 0, 0, 0], 2, None),
        ([8, float("nan")], 1, None),
    ],
)
def test_samples_of_all_ranks(counts, model_parallel, expected):
    found = samples_of_all(counts, model_parallel)
    assert found == expected if expected is not None else found != found


@pytest.mark.parametrize(
    ("claimed", "expected"), [([0, 1, 0, 1], [0, 1, 0, 1]), ([0, 0, 0, 0], [0, 1, 0, 1])]
)
def test_processes_without_a_place_are_numbered_on_their_host(claimed, expected):
    hosts = ("n1", "n1", "n2", "n2")
    facts = [
        own_facts(rank, place, {"SLURMD_NODENAME": host})
        for rank, (place, host) in enumerate(zip(claimed, hosts, strict=True))
    ]
    assert local_ranks(facts) == expected
