"""Samples, replicas and rates of trainings in which several ranks share a replica of the model."""

import pytest

from ddp_scaling_bench.measure.ranks import local_ranks, own_facts
from ddp_scaling_bench.measure.results import samples_of_all
from tests.common import write_cell
from tests.record.test_recorder import kinds
from tests.train.ranks import torchrun_env

LENGTHS = {"warmup_steps": 3, "steps_per_epoch": 4, "attribution_steps": 1, "epochs": 1}
#: Ranks of a replica, by the trainings of tests/record/layouts.py, whose import takes seconds.
MODEL_PARALLEL = {"tensor parallel": 2, "pipeline": 2, "unclear": 2}
MODEL_PARALLEL |= {f"pairs, {model_parallel}": model_parallel for model_parallel in (1, 2, 4)}


@pytest.fixture(scope="module")
def trained(server, tmp_path_factory):
    """Return a function that returns what one of the trainings left."""
    folder = tmp_path_factory.mktemp("layouts")
    for name, parallel in MODEL_PARALLEL.items():
        write_cell(folder / name, launcher="torchrun", ranks=4, model_parallel=parallel, **LENGTHS)
    return server.start(folder, torchrun_env(4), "tests.record.layouts:layouts").finish().succeeded().within


@pytest.mark.parametrize("name", ["tensor parallel", "pipeline"])
def test_the_samples_of_a_replica_count_once(trained, name):
    done = trained(name)
    (row,) = done.table("metrics")
    assert int(row["samples"]) == 2 * 8 * LENGTHS["steps_per_epoch"]
    rate = float(row["samples"]) / float(row["epoch_time_sec"])
    assert float(row["throughput_samples_per_sec"]) == pytest.approx(rate, rel=1e-3)
    assert row["comm_exposed_time_sec"] == "", "nothing times that between ranks of a replica"
    assert (done.env["global_batch"], done.env["world_size"]) == (16, 4)
    assert done.env["exchange"]["together"] is not False
    assert not {"separate-trainings", "samples-unknown", "samples-of-replicas"} & {*kinds(done.env)}


@pytest.mark.parametrize(("model_parallel", "is_doubtful"), [(1, True), (2, False), (4, True)])
def test_a_layout_that_the_data_contradict_is_named(trained, model_parallel, is_doubtful):
    assert ("layout-doubtful" in kinds(trained(f"pairs, {model_parallel}").env)) is is_doubtful


def test_samples_that_fit_no_layout_are_empty_with_the_reason(trained):
    done = trained("unclear")
    (row,) = done.table("metrics")
    assert (row["samples"], row["throughput_samples_per_sec"]) == ("", "")
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
    nodes = [{"SLURMD_NODENAME": host} for host in hosts]
    facts = [own_facts(rank, claimed[rank], node) for rank, node in enumerate(nodes)]
    assert local_ranks(facts) == expected
