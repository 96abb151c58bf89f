"""A user's own data: tensors, layouts, and errors."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.train.data import load_samples, open_feed
from ddp_scaling_bench.train.options import TrainOptions


def load(folder: Path, model: str = "mlp", *, seq_len: int = 4, hold_out: bool = True):
    found = load_samples(folder, model=model, seq_len=seq_len, hold_out=hold_out)
    return SimpleNamespace(**dict(zip(("training", "validation", "shape"), found, strict=True)))


def save(folder: Path, **arrays: np.ndarray) -> Path:
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        torch.save(torch.from_numpy(array), folder / f"{name}.pt")
    return folder


def test_images_are_scaled_and_a_run_trains_on_them(tmp_path, run_ranks):
    random = np.random.default_rng(0)
    for prefix, count in (("", 60), ("val_", 20)):
        images = random.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        save(tmp_path, **{f"{prefix}inputs": images, f"{prefix}targets": np.arange(count) % 10})
    samples = load(tmp_path, "convnet")
    assert (len(samples.training), len(samples.validation)) == (60, 20)
    assert (samples.shape.inputs, samples.shape.classes) == ((1, 28, 28), 10)
    images, labels = samples.training.__getitems__([3, 17])
    assert labels.tolist() == [3, 7]
    assert (images.dtype, 0.5 < float(images.max()) <= 1) == (torch.float32, True)
    finished = run_ranks(model="convnet", data=str(tmp_path), num_workers=1, batch=7)
    (row,) = finished.succeeded().table("metrics")
    assert int(row["samples"]) == 5 * 2 * 7
    assert row["val_accuracy"] != ""


def test_a_tenth_is_held_out(tmp_path):
    inputs = np.arange(600, dtype=np.float32).reshape(100, 6)
    save(tmp_path, inputs=inputs, targets=np.arange(100) % 3)
    arrays = load(tmp_path)
    assert (len(arrays.training), len(arrays.validation)) == (90, 10)
    assert arrays.validation.__getitems__([0])[0][0].tolist() == inputs[90].tolist()
    assert len(load(tmp_path, hold_out=False).training) == 100


def test_validation_arrays_are_used_where_they_are(tmp_path):
    save(tmp_path, inputs=np.zeros((20, 6)), targets=np.arange(20) % 3)
    save(tmp_path, val_inputs=np.ones((5, 6)), val_targets=np.arange(5))
    arrays = load(tmp_path)
    assert (len(arrays.training), len(arrays.validation)) == (20, 5)
    assert arrays.shape.classes == 5


def test_a_stream_of_tokens_gives_its_own_targets(tmp_path):
    save(tmp_path, inputs=np.arange(21, dtype=np.int16))
    arrays = load(tmp_path, "transformer", hold_out=False)
    assert len(arrays.training) == 5
    tokens, following = arrays.training.__getitems__([1])
    assert tokens.tolist() == [[4, 5, 6, 7]]
    assert following.tolist() == [[5, 6, 7, 8]]
    assert arrays.shape.classes == 21


def test_every_rank_reads_its_own_samples_and_passes_are_shuffled_anew(tmp_path):
    save(tmp_path, inputs=np.arange(24, dtype=np.float32)[:, None], targets=np.zeros(24, dtype=np.int64))
    options = TrainOptions(device="cpu", model="mlp", data=str(tmp_path), val_steps=0)
    feeds = [open_feed(options, 4, rank, 2, torch.device("cpu")) for rank in range(2)]
    passes = [
        [sorted(int(v) for v in torch.cat([f.next()[0] for _ in range(3)])) for f in feeds] for _ in range(2)
    ]
    for ranks in passes:
        assert sorted(ranks[0] + ranks[1]) == list(range(24))
    assert passes[0] != passes[1]


def test_a_pass_that_ends_within_an_epoch_starts_anew_with_full_batches(tmp_path):
    save(tmp_path, inputs=np.zeros((23, 2), dtype=np.float32), targets=np.zeros(23, dtype=np.int64))
    options = TrainOptions(device="cpu", model="mlp", data=str(tmp_path), val_steps=0)
    feed = open_feed(options, 4, 0, 2, torch.device("cpu"))
    assert {len(feed.next()[0]) for _ in range(20)} == {4}


def test_no_validation_sample_is_counted_twice(tmp_path):
    save(tmp_path, inputs=np.zeros((30, 2), dtype=np.float32), targets=np.zeros(30, dtype=np.int64))
    save(
        tmp_path,
        val_inputs=np.arange(7, dtype=np.float32)[:, None].repeat(2, axis=1),
        val_targets=np.zeros(7, int),
    )
    options = TrainOptions(device="cpu", model="mlp", data=str(tmp_path), val_steps=5)
    seen = [
        int(value)
        for rank in range(3)
        for inputs, _ in open_feed(options, 2, rank, 3, torch.device("cpu")).validation()
        for value in inputs[:, 0]
    ]
    assert sorted(seen) == list(range(7))


def test_a_data_set_smaller_than_one_step_is_refused(tmp_path):
    save(tmp_path, inputs=np.zeros((40, 2)), targets=np.zeros(40, dtype=np.int64))
    options = TrainOptions(device="cpu", model="mlp", data=str(tmp_path))
    with pytest.raises(BenchError) as caught:
        open_feed(options, 10, 0, 4, torch.device("cpu"))
    assert str(caught.value) == (
        "data set smaller than one step: 36 training samples for 4 ranks x 10 = 40;"
        " use fewer ranks, a smaller batch or more data"
    )


def bad_folders():
    ints = np.zeros(10, dtype=np.int64)
    yield "neither", "mlp", {}, "data folder {} has no inputs.pt and targets.pt"
    yield "half", "mlp", {"inputs": np.zeros((10, 2))}, "{}/inputs.pt exists, but targets.pt does not"
    yield (
        "lengths",
        "mlp",
        {"inputs": np.zeros((9, 2)), "targets": ints},
        "the data has 9 inputs but 10 targets",
    )
    yield (
        "fractions",
        "mlp",
        {"inputs": np.zeros((10, 2)), "targets": np.zeros(10)},
        "model mlp learns classes: its targets must be integers, not torch.float64",
    )
    yield (
        "real tokens",
        "transformer",
        {"inputs": np.zeros((10, 5)), "targets": np.zeros((10, 5), dtype=np.int64)},
        "model transformer reads tokens: its inputs must be integers, not torch.float64",
    )
    yield (
        "few tokens",
        "transformer",
        {"inputs": np.zeros(3, dtype=np.int64)},
        "{}/inputs.pt has shape [3]; without targets it must have at least 5 tokens in a row,"
        " or samples [samples, time + 1]",
    )


@pytest.mark.parametrize(
    ("model", "arrays", "message"), [pytest.param(*case[1:], id=case[0]) for case in bad_folders()]
)
def test_what_does_not_fit_is_said(tmp_path, model, arrays, message):
    with pytest.raises(BenchError) as caught:
        load(save(tmp_path, **arrays), model)
    assert str(caught.value) == message.format(tmp_path)


def test_objects_are_never_unpickled_and_a_cut_file_is_named(tmp_path):
    save(tmp_path, targets=np.zeros(1))
    torch.save(Path("a"), tmp_path / "inputs.pt")
    with pytest.raises(BenchError, match=r"inputs\.pt cannot be read as a tensor: "):
        load(tmp_path)
    save(tmp_path, inputs=np.zeros((1000, 4)))
    whole = (tmp_path / "inputs.pt").read_bytes()
    (tmp_path / "inputs.pt").write_bytes(whole[:-5000])
    with pytest.raises(BenchError, match=r"inputs\.pt cannot be read as a tensor: "):
        load(tmp_path)


def test_a_shape_that_a_model_cannot_take_is_refused(tmp_path, run_ranks):
    save(tmp_path / "data", inputs=np.zeros((40, 3), dtype=np.int64), targets=np.zeros(40, dtype=np.int64))
    finished = run_ranks(model="convnet", data=str(tmp_path / "data"), batch=2)
    assert finished.codes == [1, 1]
    assert finished.err[0].startswith("bench: error: model convnet takes ")
    assert finished.err[0].endswith("; the data has inputs [3] and targets [] per sample\n")
