"""Sharded and compiled models: their parts of a step are right, or empty."""

from importlib.metadata import version

import pytest

from tests.record.loops import BATCH
from tests.train.ranks import Finished, torchrun_env

#: From tests/record/strategies.py, whose import takes seconds.
PARAMETERS, FROZEN, NAP_S = 207, 32, 0.01
SHARDED = {"fsdp1": ("wrapped", None), "a layer of fsdp2": ("fsdp2", 16 * 7 + 7)}
TORCH = tuple(map(int, version("torch").split(".")[:2]))
needs_fsdp2 = pytest.mark.skipif(TORCH < (2, 6), reason="FSDP2 does not work on CPUs with this torch")
UNKNOWN = ("forward", "backward", "compute", "comm_exposed", "comm_wait", "optimizer", "other")


@pytest.fixture(scope="module")
def trained(server, tmp_path_factory):
    """Return a function that returns what one of the trainings left."""
    folder = tmp_path_factory.mktemp("strategies") / "run"
    target = "tests.record.strategies:strategies"
    return server.start(folder, torchrun_env(2), target).finish().succeeded().within


def read(finished: Finished) -> tuple[dict[str, str], dict]:
    (row,) = finished.table("metrics")
    return row, finished.env


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_fsdp2] * (own[0] == "fsdp2")) for name, own in SHARDED.items()]
)
def test_a_model_in_an_unknown_wrapper_has_its_rate_but_cannot_be_timed(trained, name):
    row, env = read(trained(name))
    strategy, parameters = SHARDED[name]
    assert (env["strategy"], env["parameters"], env["world_size"]) == (strategy, parameters, 2)
    assert (row["steps"], row["samples"], env["global_batch"]) == ("4", str(4 * 2 * BATCH), 2 * BATCH)
    assert float(row["throughput_samples_per_sec"]) > 0
    assert {row[f"{part}_time_sec"] for part in UNKNOWN} == {""}
    assert (row["load_balance"], row["comm_efficiency"], row["pop_parallel_efficiency"]) == ("", "", "")
    assert float(row["data_load_time_sec"]) >= NAP_S * 0.95
    kinds = {fact["kind"] for fact in env["facts"]}
    assert not {"model-not-called", "model-not-wrapped"} & kinds
    assert ("parts-not-timed" in kinds) == (strategy == "fsdp2")


@needs_fsdp2
def test_fsdp2_has_the_parts_of_its_steps(trained):
    row, env = read(trained("fsdp2"))
    assert (env["strategy"], env["parameters"], row["samples"]) == ("fsdp2", PARAMETERS, str(4 * 2 * BATCH))
    assert env["gradient_bytes"] == 4 * (PARAMETERS - FROZEN)
    timed = "parts-not-timed" not in {fact["kind"] for fact in env["facts"]}
    assert timed == (TORCH >= (2, 9))
    if not timed:
        assert {row[f"{part}_time_sec"] for part in UNKNOWN} == {""}
        return
    exposed = [float(row[f"comm_{place}_time_sec"]) for place in ("forward", "backward", "end")]
    assert all(seconds > 0 for seconds in exposed)
    assert float(row["forward_time_sec"]) >= NAP_S * 0.95


def test_ddp_has_its_parts_in_a_compiled_model(trained):
    row, env = read(trained("ddp, compiled"))
    assert (env["strategy"], env["parameters"], row["samples"]) == ("ddp", PARAMETERS, str(4 * 2 * BATCH))
    assert float(row["forward_time_sec"]) >= NAP_S * 0.95
    assert all(float(row[f"{part}_time_sec"]) > 0 for part in ("backward", "comm_exposed", "optimizer"))
    assert not {"model-not-called", "model-not-wrapped"} & {fact["kind"] for fact in env["facts"]}


def test_ddp_that_broadcasts_buffers_in_forward_does_not_know_this_wait(trained):
    row, _ = read(trained("ddp with buffers"))
    exposed, *places = (row[f"comm_{name}_time_sec"] for name in ("exposed", "forward", "backward", "end"))
    assert places == ["", "0", exposed]
    assert min(float(exposed), float(row["forward_time_sec"]), float(row["other_time_sec"])) > 0


def test_ddp_that_is_compiled_in_place_has_its_parts_without_compiled_hooks(trained):
    row, env = read(trained("ddp, compiled in place"))
    assert env["strategy"] == "ddp"
    assert all(float(row[f"{part}_time_sec"]) > 0 for part in ("forward", "backward", "comm_exposed"))
