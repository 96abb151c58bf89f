"""A user's own data: tensors, layouts, and errors."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.train.data import load_samples, open_feed
from ddp_scaling_bench.train.options import TrainOptions
from tests.common import raised


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


def test_a_tenth_is_held_out_unless_there_are_arrays_for_validation(tmp_path):
    inputs = np.arange(600, dtype=np.float32).reshape(100, 6)
    save(tmp_path, inputs=inputs, targets=np.arange(100) % 3)
    arrays = load(tmp_path)
    assert (len(arrays.training), len(arrays.validation)) == (90, 10)
    assert arrays.validation.__getitems__([0])[0][0].tolist() == inputs[90].tolist()
    assert len(load(tmp_path, hold_out=False).training) == 100
    save(tmp_path, val_inputs=np.ones((5, 6)), val_targets=np.arange(5))
    arrays = load(tmp_path)
    assert (len(arrays.training), len(arrays.validation), arrays.shape.classes) == (100, 5, 5)


def test_a_stream_of_tokens_gives_its_own_targets(tmp_path):
    save(tmp_path, inputs=np.arange(21, dtype=np.int16))
    arrays = load(tmp_path, "transformer", hold_out=False)
    assert len(arrays.training) == 5
    tokens, following = arrays.training.__getitems__([1])
    assert tokens.tolist() == [[4, 5, 6, 7]]
    assert following.tolist() == [[5, 6, 7, 8]]
    assert arrays.shape.classes == 21


def feeds(folder: Path, batch: int, ranks: int, *, val_steps: int = 0) -> list:
    """Return the feed of each rank."""
    options = TrainOptions(device="cpu", model="mlp", data=str(folder), val_steps=val_steps)
    return [open_feed(options, batch, rank, ranks, torch.device("cpu")) for rank in range(ranks)]


def test_every_rank_reads_its_own_samples_and_passes_are_shuffled_anew(tmp_path):
    save(tmp_path, inputs=np.arange(24, dtype=np.float32)[:, None], targets=np.zeros(24, dtype=np.int64))
    both = feeds(tmp_path, 4, 2)
    passes = [
        [sorted(int(v) for v in torch.cat([f.next()[0] for _ in range(3)])) for f in both] for _ in range(2)
    ]
    for ranks in passes:
        assert sorted(ranks[0] + ranks[1]) == list(range(24))
    assert passes[0] != passes[1]


def test_batches_are_full_at_the_end_of_a_pass_and_no_validation_sample_is_counted_twice(tmp_path):
    save(tmp_path, inputs=np.zeros((23, 2), dtype=np.float32), targets=np.zeros(23, dtype=np.int64))
    own = np.arange(7, dtype=np.float32)[:, None].repeat(2, axis=1)
    save(tmp_path, val_inputs=own, val_targets=np.zeros(7, int))
    (first, _) = feeds(tmp_path, 4, 2)
    assert {len(first.next()[0]) for _ in range(20)} == {4}
    ranks = feeds(tmp_path, 2, 3, val_steps=5)
    seen = [int(value) for feed in ranks for inputs, _ in feed.validation() for value in inputs[:, 0]]
    assert sorted(seen) == list(range(7))


def test_a_data_set_smaller_than_one_step_is_refused(tmp_path):
    save(tmp_path, inputs=np.zeros((40, 2)), targets=np.zeros(40, dtype=np.int64))
    assert raised(BenchError, feeds, tmp_path, 10, 4, val_steps=20) == (
        "data set smaller than one step: 36 training samples for 4 ranks x 10 = 40;"
        " use fewer ranks, a smaller batch or more data"
    )


PAIRS, TEN = np.zeros((10, 2)), np.zeros(10, dtype=np.int64)
FEW = "{}/inputs.pt has shape [3]; without targets it must have at least 5 tokens in a row, or samples [samples,"
TOKENS = "model transformer reads tokens: its inputs must be integers, not torch.float64"
CLASSES = "model mlp learns classes: its targets must be integers, not torch.float64"


@pytest.mark.parametrize(
    ("model", "arrays", "message"),
    [
        ("mlp", {}, "data folder {} has no inputs.pt and targets.pt"),
        ("mlp", {"inputs": PAIRS}, "{}/inputs.pt exists, but targets.pt does not"),
        ("mlp", {"inputs": PAIRS[1:], "targets": TEN}, "the data has 9 inputs but 10 targets"),
        ("mlp", {"inputs": PAIRS, "targets": np.zeros(10)}, CLASSES),
        ("transformer", {"inputs": PAIRS, "targets": np.zeros((10, 2), dtype=np.int64)}, TOKENS),
        ("transformer", {"inputs": TEN[:3]}, FEW),
    ],
)
def test_what_does_not_fit_is_said(tmp_path, model, arrays, message):
    said = raised(BenchError, load, save(tmp_path, **arrays), model)
    assert said.startswith(message.format(tmp_path))


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
