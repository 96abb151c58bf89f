"""All strategies train the same model, and each is refused where torch or its options cannot."""

from __future__ import annotations

import json

import pytest

from tests.workload.conftest import srun_env, torchrun_env

TARGET = "tests.workload.strategy_curves:curves"
#: Relative differences: fp32 sums in another order, and what fp16 rounds.
TOLERANCES = {"fp16": 1e-3, "fp16 wire": 3e-3}


def check_curves(found: dict) -> None:
    """Compare the losses, the validation and the checkpoint of every strategy with DDP's."""
    for setting, strategies in found.items():
        tolerance = TOLERANCES.get(setting, 2e-5)
        ddp = strategies["ddp"]
        assert ddp["losses"][-1] != ddp["losses"][0]
        for name, own in strategies.items():
            at = f"{name}, {setting}"
            assert own["losses"] == pytest.approx(ddp["losses"], rel=tolerance), at
            assert own["validation"] == pytest.approx(ddp["validation"], rel=tolerance), at
            assert own["sizes"] == ddp["sizes"], at
            assert own["state"] == pytest.approx(ddp["state"], rel=50 * tolerance, abs=1e-3), at


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_strategy_has_ddps_losses_and_checkpoint(server, tmp_path, ranks):
    environments = srun_env({"a": 2, "b": 2}) if ranks == 4 else torchrun_env(ranks)
    settings = ["plain", "accumulated"] if ranks != 2 else []
    server.start(tmp_path, settings, environments, TARGET).finish().succeeded()
    found = json.loads((tmp_path / "curves.json").read_text())
    check_curves(found)
    whole = found["plain"]["ddp"]["own"]
    shares = {name: own["own"] / whole for name, own in found["plain"].items()}
    parts = {1: {"none": 1, "fsdp": 1}, 2: {"fsdp": 2}, 4: {"fsdp": 4, "hsdp": 2}}[ranks]
    for name, count in {"zero1": 1, "ddp-static": 1, **parts, "fsdp-keep": parts["fsdp"]}.items():
        assert shares[name] == pytest.approx(1 / count, rel=0.05), name
    assert {*shares} == {"ddp", "zero1", "ddp-static", "fsdp-keep", *parts}
