"""The callback in the loop of HuggingFace's Trainer, with and without DDP."""

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddp_scaling_bench.record import RecorderError
from tests.common import raised, read_rows
from tests.record.loops import NAP_S
from tests.train.ranks import torchrun_env

WARM_UP, STEPS, BETWEEN = 3, 5, 2 + 1 + 2

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="the extra `transformers` is not installed"
)


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory):
    """Run all trainings."""
    folder = tmp_path_factory.mktemp("trainers")
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environments = [torchrun | rank for rank in torchrun_env(2)]
    server.start(folder, environments, "tests.record.trainers:on_two_ranks").finish().succeeded()
    return folder


def read(folder: Path) -> tuple[list[dict[str, str]], dict]:
    return read_rows(folder / "metrics.csv"), json.loads((folder / "env.json").read_text())


def counted(folder: Path) -> list[list[tuple[int, list[float]]]]:
    """The samples and the losses of each step, as each rank of the training counted them."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("counted-*.json"))]


def window(epoch: int) -> slice:
    begin = WARM_UP + (epoch - 1) * (STEPS + BETWEEN)
    return slice(begin, begin + STEPS)


def assert_counted(row: dict[str, str], steps: list[tuple[int, list[float]]]) -> None:
    assert (row["steps"], row["samples"]) == ("5", str(sum(samples for samples, _ in steps)))
    losses = [loss for _, own in steps for loss in own]
    assert float(row["train_loss"]) == pytest.approx(sum(losses) / len(losses))


def test_two_ranks_have_the_steps_samples_and_losses_that_the_training_counted(folder):
    rows, env = read(folder / "ddp")
    ranks = counted(folder / "ddp")
    assert [len(steps) for steps in ranks] == [23, 23]
    assert {samples for steps in ranks for samples, _ in steps} == {8, 4}
    assert (env["strategy"], env["world_size"], env["parameters"], len(rows)) == ("ddp", 2, 5, 2)
    for epoch, row in enumerate(rows, start=1):
        assert_counted(row, [step for rank in ranks for step in rank[window(epoch)]])
        # One of the two attributed steps of epoch 1 has one micro-batch.
        assert float(row["forward_time_sec"]) >= 1.5 * NAP_S * 0.95
        for part in ("data_load", "backward", "comm_exposed", "optimizer"):
            assert float(row[f"{part}_time_sec"]) > 0
    assert not {"samples-unknown", "model-not-called", "model-not-wrapped"} & {
        fact["kind"] for fact in env["facts"]
    }


def test_evaluation_and_checkpoints_are_not_measured_on_any_rank(folder):
    rows, _ = read(folder / "evaluated")
    # Each window contains an evaluation, and a checkpoint of rank 0.
    assert [float(row["epoch_time_sec"]) for row in rows] == pytest.approx([5 * 2 * NAP_S] * 2)
    assert len([*(folder / "evaluated" / "out").glob("checkpoint-*")]) > 2


def test_samples_of_packed_batches_are_unknown_unless_the_script_counts_them(folder):
    (row,), env = read(folder / "packed")
    assert (row["steps"], row["samples"], row["throughput_samples_per_sec"]) == ("5", "", "")
    assert {"length": 1, "batch_size": 2} in [fact["values"] for fact in env["facts"]]
    (row,), _ = read(folder / "packed and counted")
    assert row["samples"] == str(2 * 5 * 2)


def test_without_transformers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "ddp_scaling_bench.record.transformers", raising=False)
    assert raised(RecorderError, importlib.import_module, "ddp_scaling_bench.record.transformers") == (
        "Transformers is not installed; pip install 'ddp-scaling-bench[transformers]'"
    )
