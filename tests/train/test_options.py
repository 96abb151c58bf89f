"""The cell.json of a run: what ranks read, and errors in it."""

from dataclasses import asdict

import pytest

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.train.options import OPTIONS, TrainOptions
from ddp_scaling_bench.train.session import read_task
from tests.common import change_json, raised, write_cell

WRITER = "correct the lines `cell_json=(` of the run's script, or write the script again with `bench plan`"


def test_every_option_has_a_help_and_a_default_that_is_valid(tmp_path):
    options = asdict(TrainOptions())
    sizes = {"parameters": 124_000_000, "seq_len": 1024}  # None in a matrix
    assert {name: one.default for name, one in OPTIONS.items()} | sizes == options
    assert all(one.help.endswith((".", ")")) for one in OPTIONS.values())
    write_cell(tmp_path, backend="nccl", **options)
    cell, read = read_task(RunFolder(tmp_path))
    assert (read, cell.backend, cell.per_gpu_batch) == (TrainOptions(), "nccl", 8)


WHOLE = "it must be a whole number, at least 1 and at most 100000"
GPUS = "precision tf32 is a mode of NVIDIA's GPUs, but workload.device is cpu; use fp32, or device: cuda"
NCCL = "backend nccl needs GPUs, but workload.device is cpu; use gloo, or device: cuda"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        *[({"epochs": value}, f"workload.epochs is {value}; {WHOLE}") for value in (0, True, 2.0)],
        (
            {"learning_rate": "0.1"},
            "workload.learning_rate is '0.1'; it must be a number, greater than 0 and ",
        ),
        ({"compile": 1}, "workload.compile is 1; it must be true or false"),
        ({"data": ""}, "workload.data is ''; it must be a text that is not empty"),
        ({"optimizer": None}, "workload.optimizer is None; it must be one of sgd, adam, adamw"),
        ({"fast": 1}, f"workload.fast is not an option of the training; allowed: {', '.join(OPTIONS)}"),
        ({"backend": "mpi"}, "backend is 'mpi'; it must be nccl or gloo"),
        ({"batch": 0}, "per_gpu_batch is 0; it must be 1 or more"),
        ({"backend": "nccl"}, NCCL),
        ({"precision": "tf32"}, GPUS),
    ],
)
def test_a_wrong_value_is_named(tmp_path, values, problem):
    write_cell(tmp_path, **{"device": "cpu", **values})
    assert raised(BenchError, read_task, RunFolder(tmp_path)).startswith(f"{tmp_path}/cell.json: {problem}")


def test_all_wrong_options_are_named_and_a_whole_number_can_be_a_float(tmp_path):
    write_cell(tmp_path, device="cpu", seed=-1, bucket_cap_mb=0)
    assert len(raised(BenchError, read_task, RunFolder(tmp_path)).splitlines()) == 2
    write_cell(tmp_path, device="cpu", sweep_time=3)
    assert repr(read_task(RunFolder(tmp_path))[1].sweep_time) == "3.0"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "{",
            "is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ("[]", "is not a JSON object"),
        ("{}", "launcher is missing"),
    ],
)
def test_a_damaged_file_is_one_line_with_a_remedy(tmp_path, text, problem):
    path = RunFolder(tmp_path).cell
    path.write_text(text)
    assert raised(BenchError, read_task, RunFolder(tmp_path)) == f"{path}: {problem}; {WRITER}"
    write_cell(tmp_path)
    change_json(path, world_size="1")
    assert raised(BenchError, read_task, RunFolder(tmp_path)) == f"{path}: world_size is '1'; {WRITER}"
    options = {name: one.default for name, one in OPTIONS.items() if name != "device"}
    change_json(path, world_size=1, workload=options)
    assert raised(BenchError, read_task, RunFolder(tmp_path)) == f"{path}: workload has no device; {WRITER}"


UNSET = (
    "BENCH_RUN_DIR is not set; start the training with `bench run MATRIX`, or with a script of `bench plan`"
)
ARGUMENTS = "the training has no arguments; write its options below `workload` of a matrix: bench run MATRIX"


@pytest.mark.parametrize(
    ("words", "has_folder", "problem"),
    [
        ([], False, UNSET),
        (["--epochs"], False, ARGUMENTS),
        ([], True, f"{{}}/cell.json: workload.epochs is 0; {WHOLE}"),
    ],
)
def test_a_bad_start_is_one_line_and_exit_code_2(server, tmp_path, words, has_folder, problem):
    write_cell(tmp_path, device="cpu", epochs=0)
    env = {"BENCH_RUN_DIR": str(tmp_path)} if has_folder else {}
    done = server.start(tmp_path, [env], "tests.train.scenarios:with_arguments", words).finish()
    assert (done.codes, done.err) == ([2], [f"bench: error: {problem.format(tmp_path)}\n"])
