"""Meters of processor time."""

from __future__ import annotations

import time

import psutil
import pytest
import torch

from bench.measure.conditions import Meters, Usage


def cpu_meters(*, reads_host: bool) -> Meters:
    return Meters(torch.device("cpu"), reads_host=reads_host, reads_device=True)


def test_usage_is_empty_on_ranks_that_do_not_read_the_host():
    silent = cpu_meters(reads_host=False)
    silent.start()
    assert silent.stop() == Usage(None, None, None)


@pytest.mark.skipif(psutil.cpu_count() is None, reason="the number of cores is not known")
def test_processor_time_is_a_percentage_of_all_cores():
    meter = cpu_meters(reads_host=True)
    meter.start()
    until = time.perf_counter() + 0.2
    while time.perf_counter() < until:
        pass
    percent = meter.stop().cpu_percent
    assert percent is not None
    # One core is busy; other processes may use more.
    assert 0 < percent <= 100
