"""Communication compared with known values: links of known time or rate, and a late rank."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from statistics import fmean, median

import pandas as pd
import pytest

from analysis.checks.fabric import LARGE_BYTES, RingFit, fit_ring
from analysis.checks.slow_ranks import extent, late_nodes_of, stragglers
from analysis.data.csv_files import rows_of
from analysis.data.load import RankOfRun
from tests.workload import planted_waits as waits
from tests.workload.conftest import QUICK, Finished, torchrun_env
from tests.workload.scenarios import LINK_MS, NAP_S

#: These tests compare times; other tests must not use their cores.
pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]


def number(row: dict[str, str], column: str) -> float:
    return float(row[column])


@pytest.mark.parametrize("bucket_ms", [10, 1, 0])
def test_exposed_communication_is_what_a_link_of_known_time_takes(run_ranks, bucket_ms):
    steps, epochs, before = 12, 3, 5 + 1  # before: the throughput window, and a step that does not count
    environments = [env | {LINK_MS: str(bucket_ms)} for env in torchrun_env(2)]
    words = f"--epochs {epochs} --steps-per-epoch 5 --attribution-steps {steps} --val-steps 0"
    finished = run_ranks(
        *words.split(), environments=environments, target="tests.workload.scenarios:link_of_known_time"
    ).succeeded()
    for rank in ("0", "1"):
        waited = json.loads((finished.folder / f"truth-{rank}.json").read_text())[
            -epochs * (before + steps) :
        ]
        truths = [
            fmean(waited[at + before : at + before + steps]) for at in range(0, len(waited), before + steps)
        ]
        rows = [row for row in finished.table("ranks") if row["rank"] == rank]
        read = [number(row, "comm_exposed_time_sec") for row in rows]
        assert all(truth >= bucket_ms / 1e3 for truth in truths)
        # One window of three is enough: another process may delay the rank after the link's end.
        assert any(r == pytest.approx(t, rel=0.05, abs=2e-3) for r, t in zip(read, truths, strict=True)), (
            read,
            truths,
        )


@pytest.fixture(scope="module")
def planted(server, tmp_path_factory):
    """The parts of the steps of trainings with collectives of known time."""
    folder = tmp_path_factory.mktemp("planted")
    target = "tests.workload.planted_waits:run"
    server.start(folder, ["--per-gpu-batch", "4", *QUICK], torchrun_env(2), target).finish().succeeded()
    return json.loads((folder / "parts.json").read_text())


#: By training, the number of its collectives in forward, in backward and at its end: all-gathers,
#: reduce-scatters, all-reduces and broadcasts.
PLANTED = {
    "fsdp": ((3, 0, 0, 0), (2, 2, 0, 0), (0, 1, 0, 0)),
    "fsdp, accumulated": ((6, 0, 0, 0), (4, 2, 0, 0), (0, 1, 0, 0)),
    "replicas": ((0, 0, 0, 0), (0, 0, 2, 0), (0, 0, 1, 0)),
    "zero1": ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)),
}


@pytest.mark.parametrize("training", PLANTED)
def test_a_planted_wait_is_found_in_its_place(planted, training):
    if training != "zero1" and not waits.TIMES_FSDP:
        pytest.skip("FSDP2 is not timed with this torch")
    steps, naps = planted[training], 2 if "accumulated" in training else 1
    seconds = (waits.GATHER_S, waits.SCATTER_S, waits.REDUCE_S, waits.BROADCAST_S)
    for place, counts in zip(("forward", "backward", "end"), PLANTED[training], strict=True):
        expected = sum(count * one for count, one in zip(counts, seconds, strict=True))
        pairs = [(step[f"comm_{place}_s"], step["truth"][place]) for step in steps]
        assert all(truth >= expected for _, truth in pairs)
        # One step of four is enough: another process may delay the rank after a collective's end.
        assert any(found == pytest.approx(truth, rel=0.05, abs=2e-3) for found, truth in pairs), (
            place,
            pairs,
        )
    for part, one in (("forward", waits.FORWARD_S), ("backward", waits.BACKWARD_S)):
        slept, found = naps * waits.BLOCKS * one, min(step[f"{part}_s"] for step in steps)
        planted = PLANTED[training][part == "backward"]
        waited = sum(count * one for count, one in zip(planted, seconds, strict=True))
        assert slept <= found < slept + max(waited / 2, 20e-3), (part, found)  # without the waits
    assert min(abs(step["other_s"]) / step["step_s"] for step in steps) < 0.02


def test_a_late_rank_is_waited_for_in_communication_and_not_in_forward_with_batch_normalisation(run_ranks):
    finished = run_ranks(target="tests.workload.scenarios:late_rank_with_batch_norm").succeeded()
    ranks = finished.table("ranks")
    # One window of two is enough: another process may take the core during the other.
    assert any(
        number(punctual, "forward_time_sec") < 0.5 * NAP_S
        and number(punctual, "comm_wait_time_sec") > 0.6 * NAP_S
        and number(late, "comm_wait_time_sec") < 0.4 * NAP_S
        for punctual, late in (ranks[0:2], ranks[2:4])
    ), ranks


def test_a_late_rank_is_named_with_its_host_and_the_cause(late_rank_run):
    finished = late_rank_run
    ranks = pd.read_csv(finished.folder / "ranks.csv").assign(run_id="run-1", cell_id="two ranks")
    (late,) = found = stragglers(rows_of(ranks, RankOfRun))
    assert late.rank == 1
    assert late.host == finished.env["hosts"][0]["host"]
    assert late.part == "data"
    assert 0.8 * NAP_S < late.excess_s < 1.5 * NAP_S
    fact = late_nodes_of(found, ["two ranks"])
    assert fact.subject == ("two ranks",)
    (part,) = fact.values["late"][0]["parts"]
    assert (part["rank"], part["host"], part["part"]) == (1, late.host, "data")
    assert part["extent"] == extent(late.part_share)  # "most" if the machine delays other parts, too
    # The step loses its time to the wait for the late rank, not to communication itself.
    rows = finished.table("metrics")
    wait = median(number(row, "comm_wait_time_sec") for row in rows)
    exposed = median(number(row, "comm_exposed_time_sec") for row in rows)
    assert exposed - wait < wait


@pytest.fixture(scope="module")
def shaped(running_cluster, tmp_path_factory):
    """Two nodes with one rank each over links of a random rate; with one bucket nothing overlaps."""
    rate = random.SystemRandom().randrange(210, 480)
    folder = tmp_path_factory.mktemp("shaped link")
    words = (
        "--backend gloo --device cpu --per-gpu-batch 8 --model mlp --parameters 1200k --bucket-cap-mb 64"
        " --steps-per-epoch 3 --epochs 2 --warmup-steps 3 --attribution-steps 5 --val-steps 0"
        " --probe-steps 3 --sweep-time 8"
    )
    env = {"GLOO_SOCKET_IFNAME": "eth0", "BENCH_THREADS_PER_RANK": "1", "PYTHONPATH": str(ROOT)}
    env |= {"MASTER_ADDR": running_cluster.address("n1"), "MASTER_PORT": "29411"}
    command = ["srun", "-N", "2", "--ntasks-per-node=1", "--time=3", sys.executable, "-m", "bench.workload"]
    with running_cluster.linked(f"{rate}mbit"):
        running_cluster.run(
            [*command, "--run-dir", str(folder), *words.split()], timeout_s=150, env=env, cwd=ROOT
        )
    running_cluster.clear()
    return Finished(folder, [0, 0], [], []), rate * 1e6 / 8


def probes(finished: Finished) -> dict:
    return json.loads((finished.folder / "probes.json").read_text())


def test_a_large_all_reduce_runs_at_the_rate_of_the_line(shaped):
    finished, line = shaped
    swept = [size for size in probes(finished)["all_reduce"]["sizes"] if size["bytes"] >= LARGE_BYTES]
    assert len(swept) >= 2
    rates = {size["bytes"]: size["busbw_bytes_per_s"] / line for size in swept}
    assert all(0.85 <= rate <= 1.0 for rate in rates.values()), (line, rates)


def test_alpha_and_beta_predict_a_large_all_reduce_that_was_left_out(shaped):
    finished, line = shaped
    sizes = probes(finished)["all_reduce"]["sizes"]
    fit = fit_ring([s["bytes"] for s in sizes], [s["time_s"] for s in sizes], ranks=2)
    assert isinstance(fit, RingFit), fit
    assert 0.85 <= 1 / fit.beta_s_per_byte / line <= 1.0
    assert fit.worst(from_bytes=LARGE_BYTES) <= 0.15, fit.left_out


def test_communication_without_overlap_takes_the_time_that_its_bytes_take_on_the_line(shaped):
    finished, line = shaped
    content = probes(finished)
    assert content["bucket_bytes"] == [finished.env["gradient_bytes"]], (
        "one bucket is ready when backward ends"
    )
    expected = finished.env["gradient_bytes"] / line  # 2(N − 1)/N is 1
    rows = finished.table("metrics")
    transfers = [number(row, "comm_exposed_time_sec") - number(row, "comm_wait_time_sec") for row in rows]
    # The better of two windows counts, because the nodes of the test cluster share this machine's cores.
    assert min(transfers) == pytest.approx(expected, rel=0.15)
    assert [number(row, "comm_time_sec") for row in rows] == pytest.approx([expected] * 2, rel=0.15)
    assert content["standalone_s"] == pytest.approx(expected, rel=0.15)
    # It is that of the last window.
    assert content["hidden_fraction"] == pytest.approx(1 - transfers[-1] / content["standalone_s"], abs=0.01)


def test_the_counters_of_the_links_show_the_predicted_bytes(shaped):
    finished, _ = shaped
    assert finished.env["wire_bytes"] == {"counted_empty_because": None, "predicted_empty_because": None}
    for row in finished.table("metrics"):
        predicted = number(row, "wire_bytes_predicted_per_step")
        assert predicted == 2 * finished.env["gradient_bytes"]  # both nodes send 2(N − 1)/N = 1
        assert number(row, "wire_bytes_per_step") == pytest.approx(predicted, rel=0.05)
