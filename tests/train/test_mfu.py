"""Counted FLOPs against formulas, and the share of a stated peak."""

import re
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ddp_scaling_bench.train.data import generator_on, signal_for
from ddp_scaling_bench.train.mfu import (
    Precisions,
    StepFlops,
    count_step,
    mfu_basis,
    peaks,
    precisions_in_use,
)
from ddp_scaling_bench.train.models import spec_of
from ddp_scaling_bench.train.options import TrainOptions
from ddp_scaling_bench.train.training import build_task

PRECISE = Precisions("bf16", "bf16")
STEP = StepFlops(matmul=3 * 10**12, convolution=10**12, samples=8)


def options(**given: object) -> TrainOptions:
    return TrainOptions(**{"device": "cpu", **given})


def test_a_decoders_flops_are_those_of_the_palm_formula():
    asked = options(model="transformer", parameters=2_000_000, seq_len=64)
    shape = spec_of(asked.model).sample(asked)
    network = build_task(asked, shape).network
    dimensions, tokens = network.shape, 64
    products = dimensions.layers * 12 * dimensions.width**2 + dimensions.vocabulary * dimensions.width
    per_token = 6 * products + 12 * dimensions.layers * dimensions.width * tokens
    assert count_step(asked, shape, 4).total == 4 * tokens * per_token


@pytest.mark.parametrize("model", ["convnet", "traffic"])
def test_a_step_on_no_data_counts_what_a_real_step_does(model):
    asked = options(model=model, image_size=32)
    shape, cpu = spec_of(asked.model).sample(asked), torch.device("cpu")
    task = build_task(asked, shape)
    with FlopCounterMode(display=False) as counter:
        task(*signal_for(asked, shape, cpu)(2, generator_on(cpu, 0, 1, 0))).backward()
    counted = count_step(asked, shape, 2)
    assert counted.total == counter.get_total_flops()
    assert (counted.convolution > 0.9 * counted.total) == (model != "traffic")


def test_resnet_50_has_the_published_flops():
    # 4.09 billion multiplications with additions forward, twice that backward but for the images' gradient.
    asked = options(model="resnet50")
    counted = count_step(asked, spec_of(asked.model).sample(asked), 1)
    stem = 64 * 3 * 7 * 7 * 112 * 112
    assert counted.total == pytest.approx(6 * 4.09e9 - 2 * stem, rel=0.002)


def test_micro_batches_add_up_and_the_random_state_stays():
    asked = options(model="mlp", parameters=100_000)
    shape = spec_of(asked.model).sample(asked)
    torch.manual_seed(3)
    once, thrice = (count_step(replace(asked, grad_accum=count), shape, 8) for count in (1, 3))
    found = torch.rand(1)
    torch.manual_seed(3)
    assert torch.rand(1) == found
    assert (thrice.total, thrice.samples) == (3 * once.total, 24)


def test_every_peak_is_dense_plausible_and_has_a_source():
    assert {"NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA L40S", "Tesla V100-SXM2-16GB"} <= set(
        peaks()
    )
    assert peaks()["NVIDIA A100-SXM4-80GB"].rates["bf16"] == 312e12
    for name, peak in peaks().items():
        assert re.fullmatch(r"https://\S+", peak.source), name
        assert set(peak.rates) <= {"fp32", "tf32", "bf16", "fp16"}
        assert "fp32" in peak.rates, name
        # Products of half the width run twice as fast, or (tensor cores) up to 32 times; never slower.
        assert 1 < peak.rates["fp16"] / peak.rates["fp32"] < 33, name
        if "tf32" in peak.rates:
            assert peak.rates["bf16"] / peak.rates["tf32"] == pytest.approx(2, rel=0.03), name


def test_the_ideal_time_is_flops_over_the_peaks_of_distinct_devices():
    a100 = "NVIDIA A100-SXM4-80GB"
    one = mfu_basis(STEP, PRECISE, [a100], ranks=1)
    assert one[0] == pytest.approx(4e12 / 312e12)
    assert one[1]["mfu_empty_because"] is None
    # Two ranks on one device compute twice as much on it; on two devices as fast as one.
    assert mfu_basis(STEP, PRECISE, [a100], ranks=2)[0] == pytest.approx(2 * one[0])
    assert mfu_basis(STEP, PRECISE, [a100, a100], ranks=2)[0] == pytest.approx(one[0])
    mixed = mfu_basis(STEP, PRECISE, [a100, "NVIDIA H100 PCIe"], ranks=2)
    assert mixed[0] == pytest.approx(8e12 / (312e12 + 756.5e12))


def test_products_and_convolutions_have_the_peak_of_their_own_precision():
    found = mfu_basis(STEP, Precisions("fp32", "tf32"), ["NVIDIA A100-SXM4-80GB"], ranks=1)
    assert found[0] == pytest.approx(3e12 / 19.5e12 + 1e12 / 156e12)
    # A device from before TF32 computes in fp32.
    old = mfu_basis(STEP, Precisions("fp32", "tf32"), ["Tesla T4"], ranks=1)
    assert old[0] == pytest.approx(4e12 / 8.1e12)


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ([None], "no peak rate is known for CPUs"),
        (["NVIDIA A100-SXM4-40GB MIG 1g.5gb"], "the peak of 'NVIDIA A100-SXM4-40GB MIG 1g.5gb' is not known: see ddp_scaling_bench/train/peaks.csv"),
        (["NVIDIA L4", "GPU X"], "the peak of 'GPU X' is not known: see ddp_scaling_bench/train/peaks.csv"),
        (["Tesla T4"], "no bf16 peak rate is known for 'Tesla T4'"),
    ],
)  # fmt: skip
def test_where_there_is_no_peak_there_is_no_mfu_but_a_reason(devices, reason):
    ideal_s, found = mfu_basis(STEP, PRECISE, devices, ranks=1)
    assert (ideal_s, found["mfu_empty_because"], found["per_sample"]) == (None, reason, 5e11)


def test_the_precision_in_force_is_that_of_torch_and_of_the_libraries_switch():
    assert precisions_in_use("bf16", {}) == Precisions("bf16", "bf16")
    assert precisions_in_use("fp32", {}) == Precisions("fp32", "tf32")
    assert precisions_in_use("fp32", {"NVIDIA_TF32_OVERRIDE": "0"}) == Precisions("fp32", "fp32")
    torch.set_float32_matmul_precision("high")
    try:
        assert precisions_in_use("fp32", {}) == Precisions("tf32", "tf32")
        assert precisions_in_use("tf32", {}) == Precisions("tf32", "tf32")
        assert precisions_in_use("tf32", {"NVIDIA_TF32_OVERRIDE": "0"}) == Precisions("fp32", "fp32")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_run_with_a_stated_peak_has_flops_over_time_and_peak(run_ranks):
    finished = run_ranks(target="tests.train.scenarios:cpu_with_a_peak").succeeded()
    flops = finished.env["flops"]
    assert flops["peaks"]["a CPU"]["flops_per_second"] == {"fp32": 1e12}
    for row in finished.table("metrics"):
        together = 2 * flops["per_step_and_rank"] * int(row["steps"])
        assert float(row["mfu"]) == pytest.approx(together / (float(row["epoch_time_sec"]) * 1e12), rel=1e-9)
