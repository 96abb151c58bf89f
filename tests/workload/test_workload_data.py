"""A user's own data: file formats, layouts, and errors."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.errors import BenchError
from bench.matrix.workload import WorkloadOptions
from bench.workload.data import DataShard, load_arrays, open_feed


def load(folder: Path, model: str = "mlp", *, seq_len: int = 4, hold_out: bool = True):
    return load_arrays(folder, model=model, seq_len=seq_len, hold_out=hold_out)


def save(folder: Path, **arrays: np.ndarray) -> Path:
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def write_idx(path: Path, array: np.ndarray) -> None:
    head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def mnist(tmp_path):
    """A tiny MNIST: the training part gzipped, the test part plain."""
    random = np.random.default_rng(0)
    for part, count, ending in (("train", 60, ".gz"), ("t10k", 20, "")):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{ending}", random.integers(0, 256, (count, 28, 28)))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{ending}", np.arange(count) % 10)
    return tmp_path


@pytest.mark.parametrize("model", ["convnet", "mlp"])
def test_mnists_files_are_read(mnist, model):
    arrays = load(mnist, model)
    assert (len(arrays.training), len(arrays.validation)) == (60, 20)
    assert arrays.shape.classes == 10
    assert arrays.shape.inputs == ((1, 28, 28) if model == "convnet" else (28, 28))
    images, labels = arrays.training.__getitems__([3, 17])
    assert labels.tolist() == [3, 7]
    assert images.dtype == torch.float32
    assert 0.5 < float(images.max()) <= 1


def test_an_image_keeps_its_pixels(tmp_path):
    pixels = np.arange(28 * 28).reshape(1, 28, 28) % 256
    write_idx(tmp_path / "train-images.idx3-ubyte", np.repeat(pixels, 4, axis=0))
    write_idx(tmp_path / "train-labels.idx1-ubyte", np.array([0, 1, 2, 3]))
    image, label = load(tmp_path, "convnet", hold_out=False).training[2]
    assert int(label) == 2
    assert torch.equal((image * 255).round().to(torch.int64), torch.from_numpy(pixels))


def test_a_run_trains_on_mnists_files(mnist, run_ranks):
    finished = run_ranks(
        "--model", "convnet", "--data", str(mnist), "--epochs", "1", "--num-workers", "1", batch=7
    )
    (row,) = finished.succeeded().table("metrics")
    assert int(row["samples"]) == 5 * 2 * 7
    assert row["val_accuracy"] != ""


@pytest.mark.parametrize("names", [("inputs", "targets"), ("x", "y")])
def test_npy_arrays_are_mapped_and_a_tenth_is_held_out(tmp_path, names):
    inputs = np.arange(600, dtype=np.float32).reshape(100, 6)
    save(tmp_path, **{names[0]: inputs, names[1]: np.arange(100) % 3})
    arrays = load(tmp_path)
    assert isinstance(arrays.training._inputs, np.memmap)
    assert (len(arrays.training), len(arrays.validation)) == (90, 10)
    assert arrays.validation[0][0].tolist() == inputs[90].tolist()
    assert len(load(tmp_path, hold_out=False).training) == 100


def test_validation_arrays_are_used_where_they_are(tmp_path):
    save(tmp_path, inputs=np.zeros((20, 6)), targets=np.arange(20) % 3)
    save(tmp_path, val_inputs=np.ones((5, 6)), val_targets=np.arange(5))
    arrays = load(tmp_path)
    assert (len(arrays.training), len(arrays.validation)) == (20, 5)
    assert arrays.shape.classes == 5


def test_a_stream_of_tokens_gives_its_own_targets(tmp_path):
    save(tmp_path, inputs=np.arange(21, dtype=np.uint16))
    arrays = load(tmp_path, "transformer", hold_out=False)
    assert len(arrays.training) == 5
    tokens, following = arrays.training[1]
    assert tokens.tolist() == [4, 5, 6, 7]
    assert following.tolist() == [5, 6, 7, 8]
    assert arrays.shape.classes == 21


@pytest.mark.parametrize("layout", ["sensors first", "time first", "with features"])
def test_traffic_is_read_in_the_layouts_of_its_files(tmp_path, layout):
    random = np.random.default_rng(0)
    inputs, targets = random.random((20, 7, 12)), random.random((20, 7, 3))
    if layout == "time first":
        save(tmp_path, x=inputs.swapaxes(1, 2), y=targets.swapaxes(1, 2))
    elif layout == "with features":
        more = random.random((20, 12, 7))
        after = random.random((20, 3, 7))
        save(
            tmp_path,
            x=np.stack((inputs.swapaxes(1, 2), more), axis=3),
            y=np.stack((targets.swapaxes(1, 2), after), axis=3),
        )
    else:
        save(tmp_path, x=inputs, y=targets)
    arrays = load(tmp_path, "traffic")
    assert (arrays.shape.inputs, arrays.shape.targets) == ((7, 12), (7, 3))
    assert torch.allclose(arrays.training[4][0], torch.from_numpy(inputs[4]).float())
    assert torch.allclose(arrays.training[4][1], torch.from_numpy(targets[4]).float())


def test_every_rank_reads_its_own_samples_and_passes_are_shuffled_anew(tmp_path):
    save(tmp_path, inputs=np.arange(24, dtype=np.float32)[:, None], targets=np.zeros(24, dtype=np.int64))
    options = WorkloadOptions(device="cpu", model="mlp", data=str(tmp_path), val_steps=0)
    feeds = [open_feed(options, 4, DataShard(rank, 2, torch.device("cpu"))) for rank in range(2)]
    passes = [
        [sorted(int(v) for v in torch.cat([f.next()[0] for _ in range(3)])) for f in feeds] for _ in range(2)
    ]
    for ranks in passes:
        assert sorted(ranks[0] + ranks[1]) == list(range(24))
    assert passes[0] != passes[1]


def test_a_pass_that_ends_within_an_epoch_starts_anew_with_full_batches(tmp_path):
    save(tmp_path, inputs=np.zeros((23, 2), dtype=np.float32), targets=np.zeros(23, dtype=np.int64))
    options = WorkloadOptions(device="cpu", model="mlp", data=str(tmp_path), val_steps=0)
    feed = open_feed(options, 4, DataShard(0, 2, torch.device("cpu")))
    assert {len(feed.next()[0]) for _ in range(20)} == {4}


def test_no_validation_sample_is_counted_twice(tmp_path):
    save(tmp_path, inputs=np.zeros((30, 2), dtype=np.float32), targets=np.zeros(30, dtype=np.int64))
    save(
        tmp_path,
        val_inputs=np.arange(7, dtype=np.float32)[:, None].repeat(2, axis=1),
        val_targets=np.zeros(7, int),
    )
    options = WorkloadOptions(device="cpu", model="mlp", data=str(tmp_path), val_steps=5)
    seen = [
        int(value)
        for rank in range(3)
        for inputs, _ in open_feed(options, 2, DataShard(rank, 3, torch.device("cpu"))).validation()
        for value in inputs[:, 0]
    ]
    assert sorted(seen) == list(range(7))


def test_a_data_set_smaller_than_one_step_is_refused(tmp_path):
    save(tmp_path, inputs=np.zeros((40, 2)), targets=np.zeros(40, dtype=np.int64))
    options = WorkloadOptions(device="cpu", model="mlp", data=str(tmp_path))
    with pytest.raises(BenchError) as caught:
        open_feed(options, 10, DataShard(0, 4, torch.device("cpu")))
    assert str(caught.value) == (
        "data set smaller than one step: 36 training samples for 4 ranks x 10 = 40;"
        " use fewer ranks, a smaller batch or more data"
    )


def bad_folders():
    ints = np.zeros(10, dtype=np.int64)
    yield (
        "neither",
        "mlp",
        {},
        (
            "data folder {} has neither inputs.npy and targets.npy (or x.npy and y.npy)"
            " nor MNIST's train-images-idx3-ubyte and train-labels-idx1-ubyte"
        ),
    )
    yield "half", "mlp", {"inputs": np.zeros((10, 2))}, "{}/inputs.npy exists, but targets.npy does not"
    yield (
        "lengths",
        "mlp",
        {"inputs": np.zeros((9, 2)), "targets": ints},
        "the data has 9 inputs but 10 targets",
    )
    yield "empty", "mlp", {"inputs": np.zeros((0, 2)), "targets": ints[:0]}, "the data has no samples"
    yield (
        "text",
        "mlp",
        {"inputs": np.array(["a"] * 10), "targets": ints},
        "{}/inputs.npy contains elements of type <U1, not numbers",
    )
    yield (
        "fractions",
        "mlp",
        {"inputs": np.zeros((10, 2)), "targets": np.zeros(10)},
        "model mlp learns classes: its targets must be integers, not float64",
    )
    yield (
        "negative",
        "mlp",
        {"inputs": np.zeros((10, 2)), "targets": ints - 1},
        "classes and tokens are numbered from 0; the data contains -1",
    )
    yield (
        "real tokens",
        "transformer",
        {"inputs": np.zeros((10, 5)), "targets": np.zeros((10, 5), dtype=np.int64)},
        "model transformer reads tokens: its inputs must be integers, not float64",
    )
    yield (
        "few tokens",
        "transformer",
        {"inputs": np.zeros(3, dtype=np.int64)},
        "{}/inputs.npy has shape [3]; without targets it must have at least 5 tokens in a row,"
        " or samples [samples, time + 1]",
    )
    yield (
        "two classes",
        "mlp",
        {"inputs": np.zeros((10, 2)), "targets": np.zeros((10, 2), dtype=np.int64)},
        "model mlp learns one class per sample; the targets have shape [10, 2]",
    )


@pytest.mark.parametrize(
    ("model", "arrays", "message"), [pytest.param(*case[1:], id=case[0]) for case in bad_folders()]
)
def test_what_does_not_fit_is_said(tmp_path, model, arrays, message):
    with pytest.raises(BenchError) as caught:
        load(save(tmp_path, **arrays), model)
    assert str(caught.value) == message.format(tmp_path)


def test_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "inputs.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "targets.npy", np.zeros(1))
    with pytest.raises(BenchError, match=r"inputs\.npy cannot be read as an array: "):
        load(tmp_path)


def test_a_cut_idx_file_is_named(tmp_path):
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(4))
    write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros((4, 28, 28)))
    whole = (tmp_path / "train-images-idx3-ubyte").read_bytes()
    (tmp_path / "train-images-idx3-ubyte").write_bytes(whole[:-5])
    with pytest.raises(BenchError) as caught:
        load(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    assert str(caught.value) == f"{path} is truncated: it has 3131 of 4 x 28 x 28 elements"


def test_a_file_of_another_kind_is_named(tmp_path):
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(4))
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"PNG!")
    with pytest.raises(BenchError, match=r"is not an IDX file: it begins with 50 4e 47 21$"):
        load(tmp_path)


@pytest.mark.parametrize("model", ["convnet", "resnet50", "traffic", "transformer"])
def test_a_shape_that_a_model_cannot_take_is_refused(tmp_path, run_ranks, model):
    save(tmp_path / "data", inputs=np.zeros((40, 3), dtype=np.int64), targets=np.zeros(40, dtype=np.int64))
    finished = run_ranks("--model", model, "--data", str(tmp_path / "data"), batch=2)
    assert finished.codes == [1, 1]
    assert finished.err[0].startswith(f"bench: error: model {model} takes ")
    assert finished.err[0].endswith("; the data has inputs [3] and targets [] per sample\n")
