"""The replay of DDP's logger against a recording, and what is read from a logger that lacks times."""

from dataclasses import replace

import pytest

from ddp_scaling_bench.record import Recorder
from ddp_scaling_bench.train.strategies.ddp import DdpParts
from tests.simulated_gpu.device import Costs, Link, Rank, World
from tests.simulated_gpu.training import Ddp, Model, record, train

#: Steps on an H100 (torch 2.11, NCCL 2.28, one rank, 8 linear layers of 64 MiB, fp32) at the largest sampling
#: interval: the number of the step from 0, the host's times of forward and of backward (ms), the logger's
#: forward_compute_time, backward_comm_time, overlap and backward_compute_time (ns), and its iteration.
RECORDED = [
    (1, 61.588, 2.282, 21858208, 403744, 1696, 41214144, 1),
    (2, 61.285, 2.802, 22466176, 36087040, 35681824, 41253184, 2),
    (3, 60.858, 2.026, 22045248, 36098528, 35695040, 41265408, 3),
    (9, 60.442, 3.330, 22027648, 36093216, 35689952, 41264096, 9),
    (10, 60.625, 1.984, 21993824, 36054976, 35650304, 41220544, 10),
    (11, 0.564, 1.302, 21993824, 36054976, 35650304, 41220544, 10),
    (12, 0.458, 1.236, 21993824, 36054976, 35650304, 41220544, 10),
    (15, 0.399, 1.249, 21993824, 36054976, 35650304, 41220544, 10),
]
#: The work of these steps: each layer is a bucket, and a single rank needs 0.4 ms for a copy of it.
MODEL = Model(
    *(22.0e-3, 41.24e-3, 0.0, 0.0, 0.0),
    kernels=8,
    buckets=(64 * 2**20,) * 8,
    enter_s=0.15e-3,
    return_s=0.15e-3,
    finalize_s=0.0,
)
LINK = Link(latency_s=0.4e-3, s_per_byte=0.0)


def alone(link: Link = LINK) -> World:
    """Return a single rank."""
    return World(1, link=link, costs=Costs(launch_s=20e-6))


def test_the_replay_reproduces_recorded_steps():
    def program(rank: Rank) -> list[tuple[float, dict[str, int]]]:
        model = Ddp(rank, MODEL)
        DdpParts(model).stop()
        rows = []
        for _ in range(16):
            loss = model()
            rows.append((model.forward_host_s[-1] * 1e3, dict(model.reducer.ints_map)))
            loss.backward()
            rank.spend(1.5e-3)
        return rows

    rows = alone().run(program)[0]
    for number, forward_ms, _, forward, comm, overlap, backward, iteration in RECORDED:
        host_ms, values = rows[number]
        assert host_ms == pytest.approx(forward_ms, rel=0.03, abs=0.2)
        assert values["iteration"] == iteration
        assert values["forward_compute_time"] == pytest.approx(forward, rel=0.03)
        assert values["backward_compute_time"] == pytest.approx(backward, rel=0.01)
        exposed = values["backward_comm_time"] - values["backward_compute_comm_overlap_time"]
        assert exposed == pytest.approx(comm - overlap, rel=0.02)
        if number > 1:  # in the first step, torch has other buckets
            assert values["backward_comm_time"] == pytest.approx(comm, rel=0.015)


#: The forward pass at which the attribution steps begin that are measured.
MEASURED = 19 + 10 + 1 + 1
#: Steps without buckets to speak of, on a network without latency.
TINY, AT_ONCE = replace(MODEL, buckets=(4,)), Link(0.0, 0.0)


def parts_of(folder, model: Model, link: Link, *, missing: str = "", since: int = 0, **options):
    """Train a model whose logger does not record the event ``missing`` from a forward pass on."""

    def program(rank: Rank, recorder: Recorder) -> None:
        ddp = Ddp(rank, model)
        ddp.reducer.missing, ddp.reducer.missing_from = missing, since
        train(recorder, ddp, **options)

    return record(alone(link), folder, program)[0].parts


@pytest.mark.parametrize(("model", "link", "exposed_s"), [(MODEL, LINK, 0.4e-3), (TINY, AT_ONCE, 0.0)])
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_exposed_communication_is_read_after_the_last_pass(tmp_path, model, link, exposed_s, grad_accum):
    """A span below the resolution of the device is measured, too."""
    found = [
        (parts.exposed_s, parts.backward_s)
        for parts in parts_of(tmp_path, model, link, grad_accum=grad_accum)
    ]
    assert found == [pytest.approx((exposed_s, grad_accum * model.backward_s), rel=0.01)] * 10


@pytest.mark.parametrize("missing", ["compute_start", "compute_end", "comm_start", "comm_end"])
def test_without_an_event_nothing_is_measured(tmp_path, missing):
    assert parts_of(tmp_path, MODEL, LINK, missing=missing) == [None] * 10


@pytest.mark.parametrize("missing", ["compute_end", "comm_end"])
def test_an_event_of_an_earlier_pass_is_not_measured(tmp_path, missing):
    parts = parts_of(tmp_path, TINY, AT_ONCE, missing=missing, since=MEASURED + 5)
    assert [one is None for one in parts] == [False] * 5 + [True] * 5
