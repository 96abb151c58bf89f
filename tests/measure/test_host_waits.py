"""Waits for the device, counted with Python's real warnings and a replay of torch's sync debug mode."""

import warnings

import pytest
import torch

from ddp_scaling_bench.measure.host_waits import HostWaits

PROTOTYPE = "Synchronization debug mode is a prototype feature and does not yet detect all operations"


class Cuda:
    """torch's mode, its warning about itself, and what ``tensor.item()`` does."""

    def __init__(self, mode: int) -> None:
        self.mode, self.has_warned = mode, False

    def set_mode(self, mode: int) -> None:
        self.mode = mode
        if not self.has_warned:
            warnings.warn(PROTOTYPE, stacklevel=1)
        self.has_warned = True

    def item(self) -> None:
        if self.mode:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)


@pytest.mark.parametrize(("mode", "filter_"), [(0, "always"), (0, "error"), (1, "always")])
def test_waits_are_counted_and_the_users_settings_stay(monkeypatch, mode, filter_):
    cuda = Cuda(mode)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: cuda.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", cuda.set_mode)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    synchronize, waits = torch.cuda.synchronize, HostWaits()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(filter_)
        filters = list(warnings.filters)
        waits.start()
        cuda.item()
        torch.cuda.synchronize()
        if filter_ == "error":
            with pytest.raises(UserWarning, match="own"):
                warnings.warn("own", stacklevel=1)
        else:
            warnings.warn("own", stacklevel=1)
        assert waits.stop() == 2
        assert waits.stop() is None
        assert warnings.filters == filters
    assert (cuda.mode, torch.cuda.synchronize) == (mode, synchronize)
    words = [str(one.message).split()[0] for one in shown]
    assert words == ["called"] * mode + ["own"] * (filter_ == "always")
