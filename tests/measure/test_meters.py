"""Meters of processor time and energy: counters that wrap around, cannot be read, or do not exist."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import torch

from bench.measure import conditions
from bench.measure.conditions import Meters, Usage

CPU = torch.device("cpu")
RANGE_UJ = 262_143_328_850


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(conditions, "_POWERCAP", tmp_path)
    return tmp_path


def zone(root: Path, number: str, name: str, energy_uj: object, *, range_uj: object = RANGE_UJ) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    if range_uj is not None:
        (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return folder


def cpu_meters(*, reads_host: bool = True) -> Meters:
    return Meters(CPU, reads_host=reads_host, reads_device=True)


def test_energy_is_that_of_all_packages_without_their_parts_and_the_whole_machine(powercap):
    zones = [zone(powercap, "0", "package-0", 1_000_000), zone(powercap, "1", "package-1", 5_000_000)]
    parts = [
        zone(powercap, "0:0", "core", 10),
        zone(powercap, "0:1", "dram", 10),
        zone(powercap, "2", "psys", 10),
    ]
    meter = cpu_meters()
    meter.start()
    zones[0].joinpath("energy_uj").write_text("3500000\n")
    zones[1].joinpath("energy_uj").write_text("5250000\n")
    for part in parts:
        part.joinpath("energy_uj").write_text("99000000\n")
    assert meter.stop().energy_joules == pytest.approx(2.75)


def test_a_counter_that_wrapped_around_is_unwrapped(powercap):
    package = zone(powercap, "0", "package-0", RANGE_UJ - 1_000_000)
    meter = cpu_meters()
    meter.start()
    package.joinpath("energy_uj").write_text("2000000\n")
    assert meter.stop().energy_joules == pytest.approx(3.0)


def test_a_counter_that_wrapped_around_an_unknown_range_gives_no_energy(powercap):
    package = zone(powercap, "0", "package-0", 9_000_000, range_uj=None)
    meter = cpu_meters()
    meter.start()
    package.joinpath("energy_uj").write_text("1\n")
    assert meter.stop().energy_joules is None


def test_a_counter_that_can_no_longer_be_read_gives_no_energy(powercap):
    package = zone(powercap, "0", "package-0", 1)
    meter = cpu_meters()
    meter.start()
    package.joinpath("energy_uj").unlink()
    assert meter.stop().energy_joules is None


@pytest.mark.parametrize("second", ["no number", None])
def test_energy_is_empty_unless_every_package_can_be_read(powercap, second):
    zone(powercap, "0", "package-0", 1)
    other = zone(powercap, "1", "package-1", second)
    if second is None:
        other.joinpath("energy_uj").unlink()
    meter = cpu_meters()
    meter.start()
    assert meter.stop().energy_joules is None


def test_usage_is_empty_without_counters_and_on_ranks_that_do_not_read_the_host(powercap):
    assert cpu_meters(reads_host=False).stop() == Usage(None, None, None)
    zone(powercap, "0", "package-0", 1)
    silent = cpu_meters(reads_host=False)
    silent.start()
    assert silent.stop() == Usage(None, None, None)


@pytest.mark.skipif(psutil.cpu_count() is None, reason="the number of cores is not known")
def test_processor_time_is_a_percentage_of_all_cores():
    meter = cpu_meters()
    meter.start()
    until = time.perf_counter() + 0.2
    while time.perf_counter() < until:
        pass
    percent = meter.stop().cpu_percent
    assert percent is not None
    # One core is busy; other processes may use more.
    assert 0 < percent <= 100
