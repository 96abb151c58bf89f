"""The host is the limit, or not, in simulated time: measured by the recorder, judged by the analysis."""

import math

import pytest

from analysis.checks.host_bound import host_bound
from analysis.data.load import RankOfRun
from ddp_scaling_bench.records import RankRow, text_columns
from tests.common import read_rows
from tests.simulated_gpu.device import Costs, World
from tests.simulated_gpu.training import Ddp, Model, record, train


def ranks_of(folder):
    texts = text_columns(RankRow)
    for row in read_rows(folder / "ranks.csv"):
        values = {
            name: text if name in texts else float(text) if text else math.nan for name, text in row.items()
        }
        yield RankOfRun(**values | {"rank": int(values["rank"]), "run_id": "r"})


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("launch_us", [5, 20, 50, 100, 200])
@pytest.mark.parametrize("kernels", [20, 400])
def test_a_slow_host_is_always_named_and_a_busy_device_never(tmp_path, ranks, launch_us, kernels):
    """A step launches 3 passes of some kernels, which take 25 ms on the device."""
    costs = Costs(launch_s=launch_us * 1e-6)
    model = Model(kernels=kernels)
    record(World(ranks, costs=costs), tmp_path, lambda rank, one: train(one, Ddp(rank, model)))
    is_slow = 3 * kernels * costs.launch_s > 1.05 * model.step_s
    expected = [*range(ranks)] if is_slow else []
    assert [one.rank for one in host_bound(ranks_of(tmp_path))] == expected
