"""Whether ranks train together, and what the recorder counts and reports at pauses and at an early end."""

import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddp_scaling_bench.measure import step_parts
from ddp_scaling_bench.measure.results import Window
from ddp_scaling_bench.record import Recorder
from ddp_scaling_bench.record import recorder as recorder_module
from ddp_scaling_bench.record.replicas import Replicas, compare_moves, digest
from ddp_scaling_bench.train.strategies import Parts
from tests.common import read_rows
from tests.record import apart, loops
from tests.record.test_recorder import kinds
from tests.train.ranks import torchrun_env


@pytest.fixture(scope="module")
def trainings(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("apart") / "run"
    return server.start(folder, torchrun_env(2), "tests.record.apart:trainings").finish().succeeded().within


@pytest.mark.parametrize(
    ("name", "together", "by"),
    [
        *[(name, False, "parameters") for name in apart.TRAININGS if name.startswith("apart")],
        ("copies", False, "parameters"),
        *[
            (name, True, "parameters")
            for name in apart.TRAININGS
            if name.startswith(("gradients", "weights"))
        ],
        *[(name, True, "strategy") for name in apart.TRAININGS if name.startswith("ddp")],
        ("no model", None, None),
    ],
)
def test_ranks_that_do_not_train_together_are_found(trainings, name, together, by):
    env = trainings(name).env
    assert env["exchange"] == {"together": together, "by": by}
    found = kinds(env).get("separate-trainings", {"by": None})["by"]
    assert found == ("copies" if name == "copies" else None if together is not False else by)


def test_collectives_and_bytes_of_evaluations_do_not_count(run_program):
    done = run_program("tests.record.apart:evaluates").succeeded()
    windows = json.loads((done.folder / "conditions.json").read_text())["windows"]
    buckets = len(done.env["ddp"]["bucket_bytes"])
    assert [rank["collectives"] for window in windows for rank in window["ranks"]] == [5 * buckets] * 4
    # Both ranks send 4 MB in each evaluation, and a window has at least two.
    assert all(float(row["wire_bytes_per_step"]) < 1e6 for row in done.table("metrics"))
    assert all(float(row["paused_time_sec"]) > 0 for row in done.table("ranks"))


@pytest.mark.parametrize(("exchange", "together"), [(None, False), ("rare", None)])
def test_the_files_are_complete_when_the_last_rank_has_measured(server, tmp_path, exchange, together):
    own = apart.LENGTHS | {"exchange": exchange}
    done = server.train(tmp_path, torchrun_env(2), "tests.record.apart:one_is_late", **own).finish()
    assert done.succeeded().out[0].endswith(f"{together is False}\n")
    assert done.env["exchange"]["together"] is together


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([[[0.1, 0.2], [0.3, 0.1]]] * 2, (0.0, True)),
        ([[[0.1, 0.2], [0.3, 0.1]], [[0.2, 0.1], [0.2, 0.2]]], (0.5, False)),
        ([[[0.1, 0.2], [0.3, 0.1]], [[0.1, 0.2], [0.1, 0.3]]], (1 / 3, True)),
        ([[[0.1, 0.2], [0.2, 0.4]], [[0.2, 0.2], [0.2, 0.4]]], (0.25, False)),  # decay of the second one
        ([[[0.1, math.nan], [0.0, 0.0]]] * 2, (0.0, True)),
        ([[[0.0, 0.0], [0.0, 0.0]]] * 2, None),
        ([[[0.1, 0.2], [0.3, 0.1]], [[0.1], [0.1, 0.3]]], None),
    ],
)
def test_moves_of_parameters_are_compared(moves, expected):
    start = [[0.5, 3.0], [2.0, 4.0]]
    ends = [
        [[a + b for a, b in zip(*one, strict=False)] for one in zip(start, own, strict=True)] for own in moves
    ]
    assert compare_moves([start] * 2, ends) == (expected and pytest.approx(expected))


@pytest.mark.parametrize(
    ("sent", "calls", "needed", "expected"),
    [
        (6.0, 4, 1e5, "bytes"),
        (0.0, 4, 1e5, None),  # the counter sees nothing
        (0.0, 0, 1e5, "bytes"),
        (2e3, 4, 1e5, None),
        (math.nan, 0, 1e5, None),
        (6.0, 4, math.nan, None),
    ],
)
def test_bytes_decide_if_parameters_cannot(sent, calls, needed, expected):
    replicas = Replicas(SimpleNamespace(read_all=lambda name: None, world_size=2), 5)
    window = Window([0.1] * 5, [1.0], [], None, 0, None, conditions={"rank": {"collectives": calls}})
    replicas.add([window] * 2, sent)
    assert replicas.verdict(Parts(nn.Module()), needed, is_bare=True, has_nodes=True).by == expected


def test_a_digest_tells_batches_apart():
    points = torch.rand(8, 3, 9)
    batch = {"x": [points, torch.ones(2)], "text": "a"}
    assert digest(batch) == digest([points.clone(), torch.ones(2)]) != digest([points + 1, torch.ones(2)])
    assert (digest("text"), digest([])) == (None, None)


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Return a function that trains without a model for a number of steps and returns env.json."""
    monkeypatch.delenv("BENCH_RUN_DIR", raising=False)

    def record(loader, steps: int, **lengths) -> dict:
        known = {"warmup_steps": 3, "steps_per_epoch": 4, "attribution_steps": 0, "epochs": 2}
        with Recorder(run_dir=tmp_path, **known | lengths) as recorder:
            for _ in range(steps // 4):
                for _ in recorder.batches(loader):
                    with recorder.step():
                        time.sleep(0.001)
            for _ in range(steps % 4):
                with recorder.step(samples=2):
                    pass
        return json.loads((tmp_path / "env.json").read_text())

    return record


@pytest.mark.parametrize(
    ("steps", "epochs", "fewer"),
    [
        (3 + 4 + 2 + 4, 2, None),
        (3 + 4 + 2, 2, {"epochs": 1, "steps": 4}),
        (3 + 4 + 2 + 3, 2, {"epochs": 2, "steps": 3}),
        (3 + 3, 2, {"epochs": 1, "steps": 3}),
        (3 + 3, None, None),
        (2, 2, None),  # no window has a warning of its own
    ],
)
def test_fewer_windows_than_planned_are_reported(recorded, steps, epochs, fewer):
    env = recorded([torch.ones(2)] * 4, steps, epochs=epochs)
    planned = {"planned_epochs": 2, "planned_steps": 4}
    assert kinds(env).get("fewer-windows") == (fewer and fewer | planned)
    assert env["exchange"] is None, "one rank exchanges nothing"


class Loader:
    """A loader whose first batch comes late."""

    num_workers = 2

    def __init__(self, clock: loops.PlantedClock, nap_s: float, persistent_workers: bool) -> None:
        self.clock, self.nap_s, self.persistent_workers = clock, nap_s, persistent_workers

    def __iter__(self):
        for number in range(4):
            self.clock.sleep(0.001 if number else self.nap_s)
            yield torch.ones(2 + (number == 3), 1)


@pytest.mark.parametrize(("nap_s", "persistent"), [(0.05, False), (0.05, True), (0.001, False)])
def test_a_loader_that_starts_slowly_in_each_loop_is_named(recorded, monkeypatch, nap_s, persistent):
    clock = loops.PlantedClock()
    monkeypatch.setattr(step_parts, "time", clock)
    monkeypatch.setattr(recorder_module, "time", clock)
    env = recorded(Loader(clock, nap_s, persistent), 16)
    found = kinds(env).get("slow-first-steps")
    assert env["global_batch"] == 2, "the last batch of each loop is larger"
    assert (found is not None) == (nap_s > 0.02)
    if found:
        assert (found["steps"], "workers" in found) == (2, not persistent)
        assert found["excess_s"] == pytest.approx(nap_s, rel=0.03)


def test_the_parts_are_empty_if_another_model_is_updated_before_backward(monkeypatch, tmp_path):
    monkeypatch.delenv("BENCH_RUN_DIR", raising=False)
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (generator, critic)]
    lengths = {"warmup_steps": 3, "steps_per_epoch": 4, "attribution_steps": 2, "epochs": 1}
    with Recorder(generator, run_dir=tmp_path, **lengths) as recorder:
        while not recorder.done:
            with recorder.step(samples=2):
                made = generator(torch.rand(2, 4))
                critic(made.detach()).mean().backward()
                optimizers[1].step()
                critic(made).mean().backward()
                optimizers[0].step()
    assert kinds(json.loads((tmp_path / "env.json").read_text()))["parts-not-timed"] == {"several": True}
    (row,) = read_rows(tmp_path / "metrics.csv")
    assert (row["backward_time_sec"], row["other_time_sec"]) == ("", "")
    assert float(row["throughput_samples_per_sec"]) > 0
