"""All strategies train the same model, and each is refused where torch or its options cannot."""

import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from ddp_scaling_bench.known_strategies import STRATEGIES
from ddp_scaling_bench.measure.ranks import Host
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.train.failures import SetupError
from ddp_scaling_bench.train.memory import check_memory
from ddp_scaling_bench.train.models import DataShape
from ddp_scaling_bench.train.options import TrainOptions
from tests.train.ranks import QUICK, srun_env, torchrun_env

PROGRAM = "tests.train.strategy_curves"
#: Relative differences: fp32 sums in another order, or fp16 and bf16 round.
TOLERANCES = {"fp16 wire": 3e-3, "fp16 root": 3e-3, "llama": 1e-2}
#: Before torch 2.6 there is no public ``fully_shard``; 2.7 does not divide gradients with gloo (2.10 does).
WITHOUT_FSDP = TorchVersion(torch.__version__) < "2.10"
needs_fsdp = pytest.mark.skipif(WITHOUT_FSDP, reason="FSDP2 does not work on CPUs with this torch")


def check_curves(found: dict, ranks: int) -> None:
    """Compare the losses, the validation and the checkpoint of every strategy with DDP's."""
    for setting, strategies in found.items():
        tolerance = TOLERANCES.get(setting, 2e-5)
        ddp = strategies["ddp"]
        assert ddp["losses"][-1] != ddp["losses"][0]
        for name, own in strategies.items():
            at = f"{name}, {setting}"
            if "refused" in own and WITHOUT_FSDP:
                assert "weights" in STRATEGIES[name].sharded, own
                continue
            assert own["losses"] == pytest.approx(ddp["losses"], rel=tolerance), at
            assert own["validation"] == pytest.approx(ddp["validation"], rel=tolerance), at
            assert own["sizes"] == ddp["sizes"], at
            assert own["broadcasts"] == (ranks if name == "zero1" else 0), at
            assert own["state"] == pytest.approx(ddp["state"], rel=50 * tolerance, abs=1e-3), at


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_strategy_has_ddps_losses_and_checkpoint(server, tmp_path, ranks):
    environments = srun_env({"a": 2, "b": 2}) if ranks == 4 else torchrun_env(ranks)
    settings = ["accumulated"] if ranks != 2 else []
    server.start(tmp_path, environments, f"{PROGRAM}:curves", settings).finish().succeeded()
    found = json.loads((tmp_path / "curves.json").read_text())
    check_curves(found, ranks)
    if WITHOUT_FSDP:
        return
    own = {name: one["own"] for name, one in found["accumulated"].items()}
    timeouts = {name for name, one in found["accumulated"].items() if {*one["timeouts"]} == {77}}
    assert timeouts == {name for name in own if "weights" in STRATEGIES[name].sharded}
    shares = {name: count / own["ddp"] for name, count in own.items()}
    whole = dict.fromkeys(("ddp", "zero1", "ddp-static"), 1)
    parts = {
        1: {**whole, "none": 1, "fsdp": 1, "fsdp-keep": 1},
        2: {**whole, "fsdp": 2, "fsdp-keep": 2},
        4: {"ddp": 1, "hsdp": 2},
    }
    assert shares == pytest.approx({name: 1 / count for name, count in parts[ranks].items()}, rel=0.05)


@pytest.mark.skipif(not WITHOUT_FSDP, reason="FSDP2 works with this torch")
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_sharding_is_refused_with_a_torch_that_cannot(run_ranks, strategy):
    run = run_ranks(strategy=strategy, environments=srun_env({"a": 2, "b": 2}))
    reason = "(needs torch 2.6 or newer; this is|cannot average gradients in fp32 with backend gloo of) "
    assert {*run.codes} == {1}
    assert re.search(f"bench: error: strategy {strategy} {reason}", "".join(run.err))


@needs_fsdp
def test_a_sharded_run_has_all_files_and_says_that_one_node_has_no_replicas(server, tmp_path):
    options = {"strategy": "hsdp", "checkpoint": True, "probe_steps": 2, "sweep_time": 0.1, "trace_steps": 1}
    options |= {"model": "transformer", "parameters": 20_000, "seq_len": 6}  # two blocks
    run = server.train(tmp_path, torchrun_env(2), batch=4, **QUICK | options).finish().succeeded()
    (row,) = run.table("metrics")
    assert float(row["val_loss"]) > 0
    warnings = [line for text in run.err for line in text.splitlines() if "Warning" in line]
    assert [line for line in warnings if "Profiler clears events" not in line] == []  # torch 2.10 says so
    facts = {fact["kind"]: fact for fact in run.env["facts"]}
    assert facts["other-strategy"]["severity"] == "warning"  # so that the page shows it
    assert facts["other-strategy"]["values"] == {"strategy": "hsdp", "used": "fsdp", "hosts": 1}
    assert (
        "strategy hsdp needs several nodes with several ranks each: this run uses fsdp on 1 node"
        in run.out[0]
    )
    checkpoint = torch.load(tmp_path / "checkpoint.pt")
    sizes = [one.numel() for one in checkpoint["model"].values()]
    assert (run.env["strategy"], run.env["parameters"]) == ("fsdp", sum(sizes))
    assert run.env["gradient_bytes"] == 4 * sum(sizes)
    moments = [one["momentum_buffer"].numel() for one in checkpoint["optimizer"]["state"].values()]
    assert moments == sizes
    probes = json.loads((tmp_path / "probes.json").read_text())
    assert probes["reasons"]["steps"] == "strategy fsdp has no buckets"
    assert RunFolder(tmp_path).trace.stat().st_size > 0


@needs_fsdp
def test_a_rank_that_alone_cannot_average_names_itself_on_all_ranks(run_ranks):
    target = "tests.train.scenarios:cannot_average_on_rank_1"
    run = run_ranks(strategy="fsdp", join_timeout=600, target=target)
    cause = "strategy fsdp cannot average gradients in fp32 with backend gloo of torch "
    assert run.codes == [1, 1]
    assert cause in run.err[1]
    assert f"failed first: {cause}" in run.err[0]
    assert "newer torch" not in run.err[0].partition("failed first")[0]


@pytest.mark.parametrize(
    ("strategy", "gpu", "fits"), [("ddp", 60, True), ("fsdp", 60, False), ("ddp", 6, False)]
)
def test_the_host_has_memory_for_the_whole_model_of_each_rank(monkeypatch, strategy, gpu, fits):
    options = TrainOptions(device="cuda", strategy=strategy, model="mlp", parameters=1_000_000)
    hosts = [Host("a", [0, 1, 2, 3], 4, [], None, 8 * 10**6)]  # the weights of two ranks
    joined = SimpleNamespace(hosts=hosts)
    session = SimpleNamespace(options=options, device=torch.device("cuda"), host=hosts[0], joined=joined)
    memory = SimpleNamespace(total_memory=gpu * 10**6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    feed = SimpleNamespace(shape=DataShape((32,), (), 10))
    with nullcontext() if fits else pytest.raises(SetupError, match="out of memory"):
        check_memory(session, feed.shape)
