"""Published scaling tables are reproduced from their raw numbers.

Reported numbers and their raw numbers are rounded or truncated, so the tolerance is that of the
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from analysis.checks.scaling_table import scaling_table
from analysis.stats.columns import ScalingRow, frame_of_records
from tests.analysis.points import frames_of_points


def scaled(sizes: Sequence[int], *, baseline: str | None = None, **columns: Any) -> pd.DataFrame:
    points = pd.DataFrame({"gpus": sizes, **columns})
    rows = scaling_table(frames_of_points(points), baseline=baseline)
    return frame_of_records(ScalingRow, sorted(rows, key=lambda row: row.gpus))


@pytest.mark.parametrize(
    ("rates", "reported"),
    [([4553, 9191, 18119, 35774], [2.02, 3.98, 7.86]), ([2486, 4979, 9859, 19815], [2.00, 3.97, 7.97])],
    ids=["fp16", "tf32"],
)
def test_bert_of_nvidia_deep_learning_examples(rates: list[int], reported: list[float]) -> None:
    # NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT: sequences/s, global batch fixed.
    found = scaled([8, 16, 32, 64], throughput=rates, global_batch=65536)
    assert set(found["mode"]) == {"strong"}
    assert found["speedup"].iloc[1:].to_list() == pytest.approx(reported, abs=0.0051)
    assert set(found["baseline"]) == {"1x8 (8 ranks)"}


@pytest.mark.parametrize(
    ("one", "eight", "reported"),
    [(938, 7248, 7.72), (2470, 16621, 6.72), (367, 2855, 7.76)],
    ids=["a100", "a100-amp", "v100"],
)
def test_resnet50_of_nvidia_deep_learning_examples(one: int, eight: int, reported: float) -> None:
    # NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5: images/s; the source cuts
    # its ratios off.
    found = scaled([1, 8], throughput=[one, eight], per_gpu_batch=256)
    speedup = found["speedup"].iloc[1]
    rounding = speedup * (0.5 / one + 0.5 / eight)
    assert set(found["mode"]) == {"weak"}
    assert reported - rounding <= speedup <= reported + 0.01 + rounding


@pytest.mark.parametrize(("baseline", "reported"), [("plain", 0.930), ("ddp", 0.959)])
def test_resnet50_of_pytorch_benchmarks_has_two_efficiencies_by_baseline(
    baseline: str, reported: float
) -> None:
    # pytorch/pytorch, benchmarks/distributed/ddp: images/s per GPU; one GPU without and with DDP.
    sizes = [1, 1, 2, 4, 8, 16]
    per_gpu = [329, 319, 310, 310, 307, 306]
    found = scaled(
        sizes,
        throughput=[n * rate for n, rate in zip(sizes, per_gpu, strict=True)],
        per_gpu_batch=32,
        cell_id=["plain", "ddp", "2", "4", "8", "16"],
        baseline=baseline,
    )
    assert found["efficiency"].iloc[-1] == pytest.approx(reported, abs=0.0005)
    assert set(found["baseline"]) == {f"1x1 (1 rank), {baseline}"}


def test_weak_scaling_of_mfc() -> None:
    # MFlowCode/MFC#998, weak scaling: seconds on 16 to 8192 nodes.
    found = scaled([16, 128, 1024, 8192], time=[1.040951, 1.047134, 1.063446, 1.068788], per_gpu_batch=1)
    assert found["efficiency"].iloc[1:].to_list() == pytest.approx([0.994095, 0.978847, 0.973955], abs=1e-6)


def test_strong_scaling_of_mfc() -> None:
    # MFlowCode/MFC#998, strong scaling: seconds on 8 to 4096 nodes.
    found = scaled([8, 64, 512, 4096], time=[0.955644, 0.149160, 0.040367, 0.021175], global_batch=4096)
    assert found["speedup"].iloc[1:].to_list() == pytest.approx([6.4068, 23.674, 45.131], rel=5e-5)
    assert found["efficiency"].iloc[1:].to_list() == pytest.approx([0.800852, 0.369908, 0.088146], rel=5e-5)


def test_llm_foundry_7b_weak_scaling() -> None:
    # mosaicml/llm-foundry, scripts/train/benchmarking: tokens/s of the 7b model on 128 to 512 GPUs.
    found = scaled([128, 256, 512], throughput=[1340830, 2590548, 4951479], per_gpu_batch=8192)
    assert found["efficiency"].iloc[1:].to_list() == pytest.approx([0.966, 0.923], abs=0.0005)


def test_torchtitan_llama3_8b_weak_scaling() -> None:
    # pytorch/torchtitan, benchmarks: tokens/s per GPU, 8 to 128 GPUs.
    found = scaled([8, 128], throughput=[8 * 5762, 128 * 5605], per_gpu_batch=8192)
    assert found["efficiency"].iloc[1] == pytest.approx(0.973, abs=0.0005)


def test_megatron_lm_2019_weak_scaling() -> None:
    # Shoeybi et al., arXiv:1909.08053: 39 TFLOP/s on one GPU, 15.1 PFLOP/s on 512.
    found = scaled([1, 512], throughput=[39, 15_100], per_gpu_batch=8)
    assert found["efficiency"].iloc[1] == pytest.approx(0.76, abs=0.01)
