"""NVML's real answers on a machine with a GPU."""

from collections.abc import Iterator

import pytest
import torch

from ddp_scaling_bench.measure import nvml

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture(scope="module", autouse=True)
def busy() -> Iterator[None]:
    """Keep the GPU busy, because an idle GPU lowers its clocks."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    nvml._library.cache_clear()
    nvml.open_gpu.cache_clear()
    left = torch.randn(4096, 4096, device="cuda")
    for _ in range(200):
        left = (left @ left).clamp(-1, 1)
    yield
    torch.cuda.synchronize()


def test_the_clocks_of_a_busy_gpu_are_plausible():
    found = nvml.clocks(0)
    print(found)
    assert found["sm_mhz"] is not None
    assert 100 < found["sm_mhz"] < 5_000
    assert found["power_w"] is None or 5 < found["power_w"] < 2_000
    assert found["temperature_c"] is None or 10 < found["temperature_c"] < 110
    assert found["reasons"] is None or set(found["reasons"]) == {"hardware", "thermal", "power_cap", "other"}


def test_the_driver_and_nvml_agree_about_the_gpus_address():
    address, gpu = nvml.pci_address(0), nvml.open_gpu(0)
    assert address is not None
    assert gpu is not None
    info = gpu.read("nvmlDeviceGetPciInfo")
    domain, _, place = address.lower().partition(":")
    assert (int(domain, 16), place) == (info.domain, f"{info.bus:02x}:{info.device:02x}.0")
