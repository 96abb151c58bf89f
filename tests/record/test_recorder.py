"""The recorder in users' loops: real ranks over gloo, with known delays, that end well or badly."""

import json
import math
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from bench.study.run_json import read_sampled_step
from ddp_scaling_bench.cell_json import CellFile
from ddp_scaling_bench.measure import step_parts
from ddp_scaling_bench.record import Recorder, RecorderError
from ddp_scaling_bench.record.recorder import batch_size
from ddp_scaling_bench.record.session import launch_of
from ddp_scaling_bench.record.settings import failures_kept, make_folder, recording_folder
from ddp_scaling_bench.records import METRICS_COLUMNS, RANKS_COLUMNS, STEPS_COLUMNS
from ddp_scaling_bench.run_folder import RunFolder
from tests.common import raised, read_rows, write_cell
from tests.measure.test_window_conditions import check_wire_bytes, conditions_of
from tests.record import loops
from tests.train.ranks import Finished, torchrun_env

NAP_S = loops.NAP_S


@pytest.fixture
def run_loop(run_program):
    def run(name: str, **more):
        return run_program(f"tests.record.loops:{name}", **more)

    return run


@pytest.fixture(scope="module")
def loop(server, tmp_path_factory) -> Callable[[str], Finished]:
    """Return a function that returns what one of the loops left; all were executed by the same ranks."""
    folder = tmp_path_factory.mktemp("loops")
    return server.start(folder, torchrun_env(2), "tests.record.loops:loops").finish().succeeded().within


@pytest.fixture(scope="module")
def three_lines(server, tmp_path_factory) -> Finished:
    """One run of the loop with three lines of the recorder, for several tests."""
    folder = tmp_path_factory.mktemp("three_lines") / "run"
    started = server.start(folder, torchrun_env(2), "tests.record.loops:three_lines")
    return started.finish().succeeded()


def value(row: dict[str, str], part: str) -> float:
    return float(row[f"{part}_time_sec"])


def test_three_lines_leave_the_run_folder_of_the_built_in_workload(three_lines):
    done = three_lines
    metrics, ranks, steps = (done.table(name) for name in ("metrics", "ranks", "steps"))
    assert [*map(tuple, (metrics[0], ranks[0], steps[0]))] == [METRICS_COLUMNS, RANKS_COLUMNS, STEPS_COLUMNS]
    rows = [(row["epoch"], row["steps"], row["samples"]) for row in metrics]
    assert rows == [("1", "5", "80"), ("2", "5", "80")]
    rows = [(row["epoch"], row["rank"], row["samples"]) for row in ranks]
    assert rows == [(epoch, rank, "40") for epoch in "12" for rank in "01"]
    assert len(steps) == 10
    for row in metrics:
        assert float(row["throughput_samples_per_sec"]) == pytest.approx(80 / float(row["epoch_time_sec"]))
    env = done.env
    assert (env["world_size"], env["joined"]["ranks"], env["global_batch"]) == (2, 2, 16)
    assert (env["launcher"], env["backend"]) == ("torchrun", "gloo")
    assert env["parameters"] == 16 * 64 + 64 + 64 * 4 + 4
    assert env["recorder"] == loops.LENGTHS


def test_every_rank_samples_one_step(three_lines):
    samples = read_sampled_step(RunFolder(three_lines.folder))
    assert [sample.rank for sample in samples] == [0, 1]
    for sample in samples:
        assert sample.collectives is not None
        calls = {(call.function, call.part) for call in sample.slow_calls}
        assert {("Tensor.backward", "backward"), ("next(generator)", "data_load")} <= calls
        assert all(call.path.endswith("loops.py") for call in sample.slow_calls)


def test_the_conditions_of_every_window_are_sampled(three_lines):
    windows = conditions_of(three_lines)
    assert [window["epoch"] for window in windows] == [1, 2]
    for window in windows:
        assert [node["node"] for node in window["nodes"]] == [socket.gethostname()]
        assert all(rank["cpu_wait_s"] >= 0 for rank in window["ranks"])
        assert [rank["sync_passes"] for rank in window["ranks"]] == [5, 5]
    assert sum(three_lines.env["ddp"]["bucket_bytes"]) == three_lines.env["gradient_bytes"]
    check_wire_bytes(three_lines)


def test_every_pass_that_synchronises_is_read(loop):
    done = loop("synchronises_each")
    assert [row["samples"] for row in done.table("metrics")] == ["160", "160"]
    for row in done.table("ranks"):
        assert value(row, "comm_exposed") > 0
        assert row["data_load_time_sec"] == ""  # no loader was given: it was not measured


@pytest.mark.parametrize(
    ("name", "part", "naps", "others"),
    [
        ("fetches_between", "data_load", 2, ["backward"]),
        ("evaluates_in_the_step", "forward", 3, ["backward", "comm_exposed"]),  # with those of evaluations
        ("closure", "forward", 1, ["optimizer"]),  # a closure does not count as optimizer
    ],
)
def test_time_counts_in_its_part_wherever_it_is_spent(loop, name, part, naps, others):
    rows = loop(name).table("ranks")
    assert len(rows) == 4
    for row in rows:
        assert value(row, part) >= naps * NAP_S * 0.95
        assert all(value(row, other) > 0 for other in others)


def kinds(env: dict[str, Any]) -> dict[str, Any]:
    """The last values of each kind of fact in an env.json."""
    return {fact["kind"]: fact["values"] for fact in env["facts"]}


def test_without_ddp_the_exposed_communication_of_several_ranks_is_unknown(run_loop):
    done = run_loop("own_group_without_ddp").succeeded()
    for row in done.table("metrics"):
        assert row["throughput_samples_per_sec"]
        assert (row["comm_exposed_time_sec"], row["other_time_sec"], row["load_balance"]) == ("", "", "")
        assert value(row, "backward") > 0
    assert "model-not-wrapped" in kinds(done.env)


def test_unknown_samples_leave_the_throughput_empty_with_a_warning(loop):
    done = loop("unknown_samples")
    assert {(row["samples"], row["throughput_samples_per_sec"]) for row in done.table("metrics")} == {
        ("", "")
    }
    assert "samples-unknown" in kinds(done.env)
    message = (
        "the samples of a step are unknown, so there is no throughput: pass samples=... (docs/recorder.md)"
    )
    assert f"bench: warning: samples-unknown: {message}\n" in done.out[0]


def test_ranks_may_have_different_samples_and_a_nan_loss_causes_a_warning(loop):
    done = loop("uneven_batches")
    assert [row["samples"] for row in done.table("metrics")] == ["75", "75"]
    assert [row["samples"] for row in done.table("ranks")] == ["40", "35"] * 2
    assert done.env["global_batch"] == 15
    assert {"epoch": 1, "ranks": [1]} in [fact["values"] for fact in done.env["facts"]]
    assert {row["train_loss"] for row in done.table("metrics")} == {
        "nan"
    }  # an empty cell means that no loss was recorded


def test_the_throughput_window_has_no_hooks(loop):
    out = loop("hooks").out[0]
    # Warm-up, window, attribution (the first step does not count), between, and so on; none at the end.
    assert "...|.....|xxxx|..|.....|xxxx|.......\n".replace("|", "") in out


def test_ranks_with_different_numbers_of_steps_end_and_common_epochs_are_written(loop):
    done = loop("uneven_steps")
    assert [row["epoch"] for row in done.table("metrics")] == ["1"]
    ends = {"most_rank": 0, "most": 2, "fewest_rank": 1, "fewest": 1}
    assert kinds(done.env)["steps-differ"] == ends


def test_an_exception_leaves_the_files_so_far_without_waiting(run_loop):
    done = run_loop("raises").succeeded()
    assert done.table("metrics")[0]["steps"] == "5"
    assert done.env["joined"]["ranks"] == 2


def test_a_rank_that_does_not_finish_is_named(run_loop):
    done = run_loop("one_rank_is_lost").succeeded()
    assert kinds(done.env)["rank-unfinished"] == {"ranks": [1], "timeout_s": 0.3}
    assert len(done.table("metrics")) == 2


def test_too_few_steps_cause_a_warning(loop):
    done = loop("too_few_steps")
    assert "no window was recorded: a rank took fewer than 4 steps" in done.out[0]
    assert not (done.folder / "metrics.csv").exists()


def test_several_processes_need_a_process_group(run_loop):
    said = (
        "the first step came before torch.distributed was set up, in a job of 2 processes; "
        "call torch.distributed.init_process_group before the recorder's first step\n"
    )
    assert run_loop("before_the_group").succeeded().out == [said] * 2


def test_the_backend_of_a_group_without_a_named_one_follows_from_the_device(loop):
    done = loop("hooks")
    assert (done.env["backend"], done.env["transport"]["network"]) == ("gloo", "tcp")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_STEP_ID", "BENCH_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Return a function that trains in this process and returns the rows of metrics.csv."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads are slow on a busy machine

    def train(*, with_model: bool = True, folder: str | None = "run", **lengths) -> list[dict[str, str]]:
        model, optimizer = loops.trained(loops.network())
        with Recorder(
            model if with_model else None, run_dir=folder, **{**loops.LENGTHS, **lengths}
        ) as recorder:
            for points, labels in recorder.batches(loops.batches()):
                with recorder.step():
                    cross_entropy(model(points), labels).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        (path,) = tmp_path.glob(f"{folder or 'bench-record/*'}/metrics.csv")
        return read_rows(path)

    yield train
    torch.set_num_threads(threads)


def test_one_process_without_ddp_communicates_exactly_nothing(alone):
    for row in alone():
        exact = [row[name] for name in ("comm_exposed_time_sec", "load_balance", "pop_parallel_efficiency")]
        assert exact == ["0", "1", "1"]
        assert all(value(row, part) > 0 for part in ("data_load", "forward", "backward", "optimizer"))


def test_time_between_loops_and_in_pauses_does_not_count(monkeypatch, tmp_path):
    clock = loops.PlantedClock()
    monkeypatch.setattr(step_parts, "time", clock)
    with Recorder(run_dir=tmp_path, **loops.LENGTHS) as recorder:
        for _ in range(loops.ALL_STEPS // 2 + 1):
            for number, _ in enumerate(recorder.batches(loops.batches(100))):
                with recorder.step():
                    clock.sleep(1)
                with recorder.pause():
                    clock.sleep(50)
                if number == 1:
                    break
            clock.sleep(100)
    rows = [(row["steps"], row["epoch_time_sec"]) for row in read_rows(tmp_path / "metrics.csv")]
    assert rows == [("5", "5")] * 2
    paused = [row["paused_time_sec"] for row in read_rows(tmp_path / "ranks.csv")]
    assert paused == [str(5 * 50 + loops_between * 100) for loops_between in (2, 3)]


def test_a_removed_folder_does_not_end_the_training(tmp_path, capsys):
    with Recorder(run_dir=tmp_path / "run", **loops.LENGTHS) as recorder:
        for number, _ in enumerate(recorder.batches(loops.batches())):
            with recorder.step():
                if number == 5:
                    shutil.rmtree(tmp_path / "run")
    warned = re.findall("bench: warning: measurements-lost: (.*)", capsys.readouterr().out)
    assert len(warned) >= 1
    assert str(tmp_path / "run") in warned[0]


def test_without_the_model_its_parts_are_empty(alone):
    for row in alone(with_model=False):
        assert (row["forward_time_sec"], row["backward_time_sec"], row["other_time_sec"]) == ("", "", "")
        assert value(row, "optimizer") > 0


def test_the_harness_takes_precedence_over_the_script(alone, monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_RUN_DIR", str(tmp_path / "run"))
    write_cell(tmp_path / "run", **loops.LENGTHS | {"steps_per_epoch": 2, "epochs": 3})
    assert [row["steps"] for row in alone()] == ["2", "2", "2"]
    assert recording_folder("elsewhere", {"BENCH_RUN_DIR": "here"}) == Path("here")


def test_two_trainings_cannot_record_into_the_folder_of_a_run_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_RUN_DIR", str(tmp_path))
    read, write = os.pipe()
    first = os.fork()
    if not first:
        make_folder(None)
        os.write(write, b"1")
        signal.pause()
    os.read(read, 1)
    said = raised(RecorderError, make_folder, None)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    assert f"process {first} on" in said
    assert "the command started several trainings" in said
    for _ in range(2):  # the other training has ended; trainings of one process can follow each other
        make_folder(None)
    assert json.loads(RunFolder(tmp_path).recorder.read_text())["pid"] == os.getpid()


def test_misuse_is_refused_with_what_to_do(tmp_path):
    assert raised(RecorderError, Recorder, warmup_steps=2) == (
        "warmup_steps is 2; it must be a whole number, at least 3 and at most 1000000"
    )
    allowed = (
        "optimizer, run_dir, device, warmup_rounds, warmup_steps, steps_per_epoch, attribution_steps, epochs"
    )
    unknown = raised(RecorderError, Recorder, warmup=2)
    assert unknown == f"Recorder has no option 'warmup'; allowed: {allowed}"
    for samples in (-4, "32", math.nan, torch.ones(2)):
        assert raised(RecorderError, Recorder().step, samples) == (
            f"recorder.step(samples={samples!r}): not a valid number of samples; pass the number of samples that "
            "this rank trains on in the step"
        )
    once = "; write `with recorder.step():` around one step's forward, backward and update"
    recorder = Recorder(run_dir=tmp_path)
    recorder.step()
    assert raised(RecorderError, recorder.step) == "recorder.step() was called without `with`" + once
    with Recorder(run_dir=tmp_path) as recorder:
        with recorder.step(samples=1):
            said = raised(RecorderError, recorder.step)
        with recorder.step(samples=1):
            pass
    assert said == "recorder.step() was called within another step" + once


def test_values_of_wrong_kinds_are_refused_with_what_to_do(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    Recorder(model, optimizer)  # as for `watch`
    assert raised(RecorderError, Recorder, optimizer) == (
        "the model of the recorder is a SGD, not a torch.nn.Module; pass the model that the loop calls: Recorder(model)"
    )
    assert raised(RecorderError, Recorder, model, device="gpu") == (
        'Recorder(device=\'gpu\'): torch has no such device; pass "cuda" if the process has a GPU, else "cpu", or omit it'
    )
    assert raised(RecorderError, Recorder, warmup_rounds=-1) == (
        "warmup_rounds is -1; it must be a whole number, at least 0"
    )
    number = "is not a number; pass a number, or a tensor with one value"
    recorder = Recorder(model)
    said = raised(RecorderError, recorder.set_columns, 1, val_loss="low")
    assert said == f"recorder.set_columns(val_loss=...): 'low' {number}"
    assert raised(RecorderError, recorder.loss, None) == f"recorder.loss(): None {number}"


def take_steps(recorder: Recorder, number: int) -> None:
    for _ in range(number):
        with recorder.step(samples=1):
            pass


def test_a_training_that_failed_can_begin_again_in_the_same_folder(tmp_path, capsys):
    first = Recorder(run_dir=tmp_path, **loops.LENGTHS)
    take_steps(first, loops.ALL_STEPS)
    child = os.fork()
    if not child:  # the recorder of another process
        take_steps(Recorder(run_dir=tmp_path, **loops.LENGTHS), 1)
        os._exit(0 if not first._is_closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    second = Recorder(run_dir=tmp_path / ".", **loops.LENGTHS | {"epochs": 1})
    take_steps(second, 1)
    take_steps(first, 1)  # which records no longer
    take_steps(second, loops.ALL_STEPS)
    second.close()
    assert len(read_rows(tmp_path / "metrics.csv")) == 1
    warned = f"bench: warning: a new Recorder replaces the records of another one in {tmp_path}\n"
    assert capsys.readouterr().err == warned


def test_a_recorder_closed_before_its_first_step_records_and_no_round_is_the_least_warm_up(tmp_path):
    recorder = Recorder(run_dir=tmp_path, warmup_rounds=0, **loops.LENGTHS)
    with recorder:
        pass
    with recorder:
        take_steps(recorder, loops.ALL_STEPS)
    assert len(read_rows(tmp_path / "metrics.csv")) == loops.LENGTHS["epochs"]


def test_a_context_may_be_a_decorator_or_entered_later_or_never(tmp_path):
    with Recorder(run_dir=tmp_path) as recorder:
        validate, later, _ = recorder.pause()(list), recorder.optimizer(), recorder.pause()
        with recorder.step(), later:
            pass
        assert validate() == []


@pytest.mark.parametrize(
    ("then", "warned"),
    [
        ("", "bench: warning: the training took no step; put each step into `with recorder.step():`\n"),
        ("with first.step():\n    pass\nfirst.close()", ""),
        ("try:\n    first.describe(torch=1)\nexcept RecorderError:\n    raise SystemExit", ""),
    ],
)
def test_a_process_in_which_no_recorder_takes_a_step_says_so_once(server, tmp_path, then, warned):
    script = tmp_path / "own.py"
    script.write_text(
        "import os\nfrom ddp_scaling_bench import Recorder, RecorderError\nos.chdir(os.environ['TEST_FOLDER'])\n"
        f"first, second = Recorder(), Recorder()\n{then}\n"
    )
    assert server.start(tmp_path, [{}], "script", [str(script)]).finish().succeeded().err == [warned]


def test_a_step_in_a_worker_of_a_data_loader_is_refused(monkeypatch):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
    assert raised(RecorderError, Recorder().step) == (
        "recorder.step() was called in a worker of a DataLoader; call it in the training loop only"
    )


def test_the_samples_may_be_a_tensor(tmp_path):
    lengths = {"warmup_steps": 3, "steps_per_epoch": 4, "attribution_steps": 0, "epochs": 1}
    with Recorder(run_dir=tmp_path, **lengths) as recorder:
        for _ in range(7):
            with recorder.step(torch.tensor([True, False, True]).sum()):
                pass
    assert [row["samples"] for row in read_rows(tmp_path / "metrics.csv")] == ["8"]


def test_a_model_that_the_loop_does_not_call_causes_a_warning(tmp_path):
    lengths = {"warmup_steps": 3, "steps_per_epoch": 4, "attribution_steps": 3, "epochs": 1}
    given, called = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with Recorder(given, run_dir=tmp_path, **lengths) as recorder:
        for _ in range(20):
            with recorder.step(samples=1):
                called(torch.ones(1, 2)).sum().backward()
    assert "model-not-called" in kinds(json.loads((tmp_path / "env.json").read_text()))


@pytest.mark.parametrize(
    "loss",
    [torch.ones((), dtype=torch.bfloat16), torch.tensor([0.5, 1.5]), 1.0],
    ids=["bf16", "several", "float"],
)
def test_the_mean_loss_includes_all_steps_for_every_type_of_loss(tmp_path, loss):
    steps = 400  # a sum of ones in bf16 stops growing at 256
    lengths = {"warmup_steps": 3, "steps_per_epoch": steps, "attribution_steps": 0, "epochs": 1}
    with Recorder(run_dir=tmp_path, **lengths) as recorder:
        for _ in range(3 + steps):
            with recorder.step(samples=1):
                recorder.loss(loss)
    assert [float(row["train_loss"]) for row in read_rows(tmp_path / "metrics.csv")] == [1.0]


def test_a_row_that_the_loop_ends_has_the_steps_so_far_and_no_split(tmp_path):
    with Recorder(run_dir=tmp_path, **loops.LENGTHS) as recorder:
        for number in range(3 + 4 + 2 + 5 + 4):
            with recorder.step(samples=1):
                time.sleep(0.001)
            if number == 3 + 4 - 1:
                recorder.end_epoch()
    rows = read_rows(tmp_path / "metrics.csv")
    assert [(row["epoch"], row["steps"]) for row in rows] == [("1", "4"), ("2", "5")]
    assert [bool(row["other_time_sec"] or row["load_balance"]) for row in rows] == [False, True]


def test_epochs_none_records_to_the_end(alone):
    rows = alone(epochs=None, attribution_steps=0)
    assert [row["steps"] for row in rows] == ["5", "5", "5", "1"]


def slurm_step(rank: str, local: str, tasks: str) -> dict[str, str]:
    names = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    return dict(zip(names, ("0", rank, local, tasks), strict=True))


def test_the_launcher_is_recognised_by_its_variables():
    in_step = slurm_step("3", "1", "4") | {"RANK": "3"}
    elastic = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "LOCAL_RANK": "2", "WORLD_SIZE": "8"}
    found = [launch_of(in_step, (3, 4)), launch_of(slurm_step("0", "0", "2") | elastic, (5, 8))]
    places = [(one.launcher, one.rank, one.local_rank, one.world_size) for one in found]
    assert places == [("srun", 3, 1, 4), ("torchrun", 5, 2, 8)]


def test_a_group_of_another_size_than_the_cells_is_refused(monkeypatch, tmp_path):
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    cells = [CellFile("torchrun", "gloo", ranks, ranks, 1, {}) for ranks in (1, 2, 4)]
    assert raised(RecorderError, launch_of, env, (0, 2), cells[0]) == (
        "2 of 1 planned processes started; check the launch line; the command must not contain another launcher"
    )
    monkeypatch.setenv("BENCH_RUN_DIR", str(tmp_path))
    with pytest.raises(RecorderError, match=r"^2 of 4 planned processes started"), failures_kept():
        launch_of(env, (0, 2), cells[2])
    (failure,) = json.loads((tmp_path / "failure.0.json").read_text())["findings"]
    assert (failure["kind"], failure["values"]["started"]) == ("other-size", 2)
    assert launch_of(env, (0, 2), cells[1]).world_size == 2


def test_under_launcher_own_the_process_group_and_torchruns_variables_count_and_not_those_of_slurm():
    cell = CellFile("own", "gloo", 2, 4, 1, {})
    step = slurm_step("1", "0", "2")
    spawned = launch_of(step, (3, 4), cell)
    assert (spawned.launcher, spawned.rank, spawned.world_size) == ("own", 3, 4)
    started = step | {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    assert launch_of(started, (3, 4), cell).local_rank == 1
    with pytest.raises(
        RecorderError, match=r"^1 of 4 planned processes started; the command starts the ranks"
    ):
        launch_of(step, None, cell)


def test_the_size_of_a_batch_is_that_of_its_first_tensor():
    points = torch.zeros(3, 2)
    assert [
        batch_size(batch)
        for batch in (points, [points], {"x": points}, ("a", (points,)), "a", torch.tensor(1))
    ] == [*(3.0, 3.0, 3.0, 3.0), *(None, None)]


def test_what_only_the_program_knows_reaches_the_files(tmp_path, monkeypatch):
    monkeypatch.delenv("BENCH_RUN_DIR", raising=False)
    model = torch.nn.Linear(4, 2)
    recorder = Recorder(run_dir=tmp_path, warmup_steps=3, steps_per_epoch=2, attribution_steps=1, epochs=2)
    recorder.watch(model, micro_batches=1)
    recorder.set_columns(comm_time_sec=0.5)  # before the first step
    recorder.describe(note=["a"], global_batch=8)
    recorder.flush()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in recorder.batches([torch.rand(8, 4)] * 99):
        with recorder.step():
            loss = model(batch).square().mean()
            loss.backward()
            with recorder.optimizer():
                optimizer.step()
                optimizer.zero_grad()
            recorder.loss(loss)
        if recorder.done:
            break
    recorder.set_columns(recorder.epochs, val_loss=torch.tensor(0.25))
    recorder.close()
    rows, env = read_rows(tmp_path / "metrics.csv"), json.loads((tmp_path / "env.json").read_text())
    assert [(row["comm_time_sec"], row["val_loss"]) for row in rows] == [("0.5", ""), ("0.5", "0.25")]
    assert (env["note"], env["global_batch"], recorder.last_row.val_loss) == (["a"], 8, 0.25)
    assert float(rows[1]["train_loss"]) == pytest.approx(recorder.last_loss)
    refusals = {
        "samples cannot be set": lambda: recorder.set_columns(samples=3),
        "joined is measured by the recorder": lambda: recorder.describe(joined=None),
        "recorder.describe(x=...): Tensor is no value of JSON": lambda: recorder.describe(x=torch.ones(2)),
        "recorder.watch() was called after the first step": lambda: recorder.watch(model),
    }
    for text, call in refusals.items():
        assert raised(RecorderError, call).startswith(text)


def errors(err: str) -> list[str]:
    """Return the causes that were printed, without the hosts' names."""
    return [re.sub(r"(rank \d) on [^\s,:]+", r"\1", one) for one in re.findall("bench: error: (.*)", err)]


def test_a_signal_ends_the_process_as_without_the_recorder_and_earlier_windows_are_on_disk(run_program):
    done = run_program("tests.record.loops:gets_sigterm", environments=[{}])
    assert done.codes == [-signal.SIGTERM]
    assert "handler SIG_DFL, wakeup -1, threads ['MainThread']\n" in done.out[0]
    assert [row["epoch"] for row in done.table("metrics")] == ["1"]


def test_a_time_out_names_the_late_rank(server, tmp_path):
    started = server.start(tmp_path / "run", torchrun_env(2), "tests.record.loops:times_out")
    until = time.monotonic() + loops.DEADLINE_S
    output = started.folder / "0.err"
    while (
        not output.exists() or "bench: error" not in output.read_text()
    ):  # it is created when the rank starts
        assert time.monotonic() < until, "rank 0 never printed the cause"
        time.sleep(0.05)
    os.kill(started.pids[1], signal.SIGTERM)
    done = started.finish()
    assert errors(done.err[0]) == [
        "rank 0: a collective did not complete in 5 s: rank 1 did not reach the collective; find out why, or raise"
        " the time-out of init_process_group"
    ]
    assert "Timed out" in done.err[0]


SCRIPT = """\
import torch, torch.distributed as dist
from ddp_scaling_bench.record import Recorder

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
recorder = Recorder(model)
for number in range(100):
    with recorder.step(samples=1):
        loss = model(torch.ones(1, 4)).sum()
        if number == 20 and dist.get_rank() == 1:
            raise ValueError("planted")
        loss.backward()
"""


def test_a_rank_that_raises_is_named_by_the_other_one(server, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    write_cell(tmp_path, ranks=2, warmup_steps=3, steps_per_epoch=5, attribution_steps=3)
    environments = [rank | {"BENCH_RUN_DIR": str(tmp_path)} for rank in torchrun_env(2)]
    done = server.start(tmp_path, environments, "script", [str(script)]).finish()
    assert done.codes == [1, 1]
    first, second = done.err
    assert "Traceback (most recent call last)" in second.partition("bench: error")[0]
    assert errors(second) == ["rank 1: ValueError: planted; see the traceback above"]
    assert errors(first) == [
        "rank 0: lost the connection to another rank: rank 1 failed first: ValueError: planted"
    ]
    assert [row["epoch"] for row in done.table("metrics")] == ["1", "2"]
