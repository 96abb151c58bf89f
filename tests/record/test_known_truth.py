"""Planted delays are in their columns, for a user's loop and for the built-in training alike."""

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.record.planted import SECONDS
from tests.train.ranks import QUICK, Finished, srun_env, torchrun_env

#: FSDP2 averages gradients with gloo, and is timed, since this release.
HAS_FSDP = TorchVersion(torch.__version__) >= "2.10"
BLOCKS = 7
#: By training: its options; then the delays that a rank waits for in forward, in backward and at the end.
TRAININGS = {
    "ddp": ({"epochs": 2}, {}, {}, {"all-reduce": 1}),
    "ddp, accumulated": ({"grad_accum": 3}, {}, {}, {"all-reduce": 1}),
    "zero1": ({"strategy": "zero1"}, {}, {}, {"all-reduce": 1, "broadcast": 1}),
    "fsdp2, accumulated": (
        {"strategy": "fsdp", "grad_accum": 2},
        {"all-gather": 2 * (BLOCKS + 1)},
        {"all-gather": 2 * BLOCKS, "reduce-scatter": BLOCKS},
        {"reduce-scatter": 1},
    ),
    "replicas": (
        {"strategy": "hsdp"},
        {"all-gather": BLOCKS + 1},
        {"all-gather": BLOCKS, "reduce-scatter": BLOCKS, "all-reduce": BLOCKS},
        {"reduce-scatter": 1, "all-reduce": 1},
    ),
}


#: A rank of FSDP2 takes seconds, so each of its trainings has one of the loops.
UNSHARDED = ("ddp", "ddp, accumulated", "zero1")
#: On the planted clock, a few steps show as much as many.
CELL = QUICK | {"bucket_cap_mb": None, "parameters": 5_000, "val_steps": 1, "learning_rate": 0.1}
CELL |= {"epochs": 1, "steps_per_epoch": 2, "attribution_steps": 1}


@pytest.fixture(scope="module")
def trained(server, tmp_path_factory):
    """Return a function that returns a finished training, whose loop is ``users`` or ``built_in``."""
    known: dict[tuple[str, str], Finished] = {}

    def train(training: str, loop: str) -> Finished:
        options = TRAININGS[training][0]
        strategy = options.get("strategy", "ddp")
        if strategy in ("fsdp", "hsdp") and not HAS_FSDP:
            pytest.skip("FSDP2 is not timed with this torch")
        if (training, loop) not in known:
            environments = srun_env({"a": 2, "b": 2}) if strategy == "hsdp" else torchrun_env(2)
            folder, target = tmp_path_factory.mktemp("planted"), f"tests.record.planted:{loop}"
            known[training, loop] = server.train(folder, environments, target, **CELL | options).finish()
        return known[training, loop].succeeded()

    return train


def expected(training: str, rank: int) -> dict[str, float]:
    """Return the seconds of each part of a step of a rank."""
    options, *waits = TRAININGS[training]
    micro_batches = options.get("grad_accum", 1)
    late = micro_batches * SECONDS["late rank"]
    found = {
        f"comm_{place}": sum(SECONDS[kind] * count for kind, count in own.items())
        for place, own in zip(("forward", "backward", "end"), waits, strict=True)
    }
    found["comm_forward" if waits[0] else "comm_end"] += 0 if rank == 1 else late
    found["comm_exposed"] = sum(found.values())
    found["data_load"] = micro_batches * SECONDS["loader"] + (late if rank == 1 else 0)
    found |= {part: micro_batches * BLOCKS * SECONDS[part] for part in ("forward", "backward")}
    found |= {"optimizer": SECONDS["optimizer"], "other": micro_batches * SECONDS["outside"]}
    parts = ("data_load", "forward", "backward", "comm_exposed", "optimizer", "other")
    return found | {"step": sum(found[part] for part in parts), "comm_wait": 0 if rank == 1 else late}


@pytest.mark.parametrize(
    ("training", "loop"),
    [
        *[(training, loop) for training in UNSHARDED for loop in ("users", "built_in")],
        ("fsdp2, accumulated", "users"),
        ("replicas", "built_in"),
    ],
)
def test_every_delay_is_in_its_column(trained, training, loop):
    rows = trained(training, loop).table("ranks")
    assert len(rows) == (4 if training in ("ddp", "replicas") else 2)
    for row in rows:
        truth = expected(training, int(row["rank"]))
        found = {name: float(row[f"{name}_time_sec"] or "nan") for name in truth}
        assert found == pytest.approx(truth, rel=1e-6, abs=1e-6), (row["epoch"], row["rank"])
        assert float(row["window_time_sec"]) == pytest.approx(CELL["steps_per_epoch"] * truth["step"])


@pytest.mark.parametrize("training", UNSHARDED)
def test_a_users_program_and_the_built_in_training_give_the_same(trained, training):
    own, built_in = (trained(training, loop) for loop in ("users", "built_in"))
    same = ("epoch", "steps", "samples", "train_loss", "wire_bytes_predicted_per_step")
    rows, others = ([[row[name] for name in same] for row in one.table("metrics")] for one in (own, built_in))
    assert rows == others
    assert all(all(row) for row in rows)
    assert training != "ddp" or rows[0][3] != rows[1][3]
    for name in ("parameters", "gradient_bytes", "global_batch", "backend", "wire_bytes", "exchange"):
        assert own.env[name] == built_in.env[name], name
    assert own.env["exchange"] == {"together": True, "by": "strategy"}
