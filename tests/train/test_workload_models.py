"""The networks: sizes, losses, and complete runs."""

from itertools import product

import pytest
import torch

from ddp_scaling_bench.known_models import MODELS
from ddp_scaling_bench.train.data import generator_on, open_feed, signal_for
from ddp_scaling_bench.train.models import DataShape, spec_of
from ddp_scaling_bench.train.models.llama import Llama, LlamaShape
from ddp_scaling_bench.train.models.mlp import Mlp, mlp_width
from ddp_scaling_bench.train.models.transformer import DecoderShape, Transformer, decoder_shape
from ddp_scaling_bench.train.options import TrainOptions
from ddp_scaling_bench.train.training import build_task, parameters_of, use_precision
from tests.train.ranks import torchrun_env


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: The smallest size of each model.
SMALL = {
    "mlp": {"parameters": 20_000},
    "convnet": {},
    "resnet50": {"image_size": 32},
    "transformer": {"parameters": 20_000, "seq_len": 16},
    "llama": {"parameters": 20_000, "seq_len": 16},
    "traffic": {},
}


DECODERS = [(Transformer, DecoderShape), (Llama, LlamaShape)]


def task_and_batch(model: str, samples: int = 2, **options):
    chosen = TrainOptions(device="cpu", model=model, **(SMALL[model] | options))
    shape = spec_of(chosen.model).sample(chosen)
    signal = signal_for(chosen, shape, torch.device("cpu"))
    return build_task(chosen, shape), signal(samples, generator_on("cpu", 1))


def test_resnet50_has_the_parameters_of_the_paper_and_others_about_those_that_were_asked_for():
    with torch.device("meta"):
        task = build_task(TrainOptions(model="resnet50"), DataShape((3, 224, 224), (), 1000))
        assert parameters_of(task) == (25_557_032, 4 * 25_557_032)
        for wanted in (100_000, 8_000_000, 10**9):
            width = mlp_width(wanted, features=784, classes=10)
            network = Mlp(features=784, classes=10, width=width, recompute=False)
            assert parameters_of(network)[0] == pytest.approx(wanted, rel=0.01)
        for (decoder, kind), wanted in product(DECODERS, (1_000, 124_000, 124 * 10**6, 175 * 10**9)):
            shape = decoder_shape(kind, wanted)
            count, _ = parameters_of(decoder(shape, torch.float32, seq_len=4, recompute=False))
            assert count == shape.parameters == pytest.approx(wanted, rel=0.1)
            assert wanted < 10**8 or shape.width % 128 == 0


@pytest.mark.parametrize(("decoder", "kind"), DECODERS)
def test_a_decoder_does_not_see_the_future(decoder, kind):
    shape = decoder_shape(kind, 20_000)
    network = decoder(shape, torch.float32, seq_len=8, recompute=False).eval()
    tokens = torch.randint(32, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 32
    with torch.no_grad():
        before, after = network(tokens), network(changed)
    assert torch.allclose(before[0, :5], after[0, :5], atol=1e-5)
    assert not torch.allclose(before[0, 5:], after[0, 5:], atol=1e-5)


# torch 2.4 itself calls a function that it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")
@pytest.mark.parametrize("model", MODELS)
def test_each_model_has_a_loss_and_all_gradients_and_recomputing_changes_none(model):
    results = []
    for recompute in (False, True):
        task, batch = task_and_batch(model, activation_checkpointing=recompute)
        if model == "resnet50":
            task.double()
            batch = (batch[0].double(), batch[1])
        has_norms = any(isinstance(one, torch.nn.BatchNorm2d) for one in task.modules())
        assert has_norms == MODELS[model].fp32_weights
        loss = task(*batch)
        assert loss.shape == ()
        loss.backward()
        results.append([parameter.grad for parameter in task.parameters()])
    for kept, recomputed in zip(*results, strict=True):
        assert torch.isfinite(kept).all()
        assert torch.allclose(kept, recomputed, atol=1e-6)


@pytest.mark.parametrize("model", ["mlp", "transformer", "llama", "traffic"])
def test_the_planted_signal_can_be_learned(model):
    options = TrainOptions(device="cpu", model=model, **(SMALL[model] | {"parameters": 30_000}))
    shape = spec_of(options.model).sample(options)
    signal, generator = signal_for(options, shape, torch.device("cpu")), generator_on("cpu", 2)
    task = build_task(options, shape)
    optimizer = torch.optim.AdamW(task.parameters(), lr=6e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = task(*signal(8, generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


def test_batches_are_fresh_and_ranks_draw_their_own():
    options = TrainOptions(device="cpu", model="mlp", parameters=20_000)
    signal = signal_for(options, spec_of(options.model).sample(options), torch.device("cpu"))
    first, other = generator_on("cpu", 0, 1, 0), generator_on("cpu", 0, 1, 1)
    batches = [signal(4, first)[0], signal(4, first)[0], signal(4, other)[0]]
    assert not torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    assert torch.equal(batches[0], signal(4, generator_on("cpu", 0, 1, 0))[0])


def test_validation_of_values_sums_errors():
    options = TrainOptions(device="cpu", model="traffic")
    task = build_task(options, DataShape((3, 4), (3, 2), None))
    inputs, targets = torch.randn(5, 3, 4), torch.randn(5, 3, 2)
    with torch.no_grad():
        error = task.network(inputs) - targets
    sums = task.validate(inputs, targets)
    assert sums.samples == 5
    assert sums.values == 30
    assert sums.absolute_error / sums.values == pytest.approx(float(error.abs().mean()), rel=1e-5)
    assert sums.squared_error / sums.values == pytest.approx(float(error.square().mean()), rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "convnet", "memory_format": "channels_last"},
        {"model": "traffic", "precision": "bf16", "optimizer": "adam"},
        {"model": "transformer", "seq_len": 16, "precision": "fp16", "optimizer": "adamw"},
        {"model": "mlp", "num_workers": 1, "activation_checkpointing": True, "grad_accum": 2},
    ],
    ids=str,
)
def test_each_model_and_option_runs_to_its_end_and_leaves_no_thread(run_ranks, options):
    short = {"steps_per_epoch": 2, "attribution_steps": 1, "val_steps": 1, "bucket_cap_mb": 1}
    target = "tests.train.scenarios:threads_left"
    finished = run_ranks(**short, **options, batch=2, target=target).succeeded()
    assert finished.out[1].splitlines()[-1] == "left: []"
    (row,) = finished.table("metrics")
    assert float(row["throughput_samples_per_sec"]) > 0
    assert float(row["comm_exposed_time_sec"]) >= 0
    assert (row["val_mae"] != "") == (row["val_rmse"] != "") == (options["model"] == "traffic")
    assert (row["val_accuracy"] != "") == (options["model"] in ("mlp", "convnet"))
    assert row["val_loss"] != ""


def test_batches_of_files_are_stored_in_the_memory_format_of_the_weights(tmp_path):
    torch.save(torch.rand(8, 3, 16, 16), tmp_path / "inputs.pt")
    torch.save(torch.arange(8), tmp_path / "targets.pt")
    words = {"model": "convnet", "data": str(tmp_path), "memory_format": "channels_last", "val_steps": 1}
    feed = open_feed(TrainOptions(device="cpu", **words), 2, 0, 1, torch.device("cpu"))
    for inputs, _ in (feed.next(), *feed.validation()):
        assert inputs.is_contiguous(memory_format=torch.channels_last)


def test_without_a_size_the_buckets_are_those_of_torch(server, tmp_path):
    """torch's first bucket is full after 1 MiB, so it holds the last of the mlp's layers of 4 MiB only."""
    short = {"epochs": 1, "steps_per_epoch": 2, "attribution_steps": 1, "warmup_steps": 3, "probe_steps": 0}
    options = {"device": "cpu", "model": "mlp", "sweep_time": 0, **short}
    finished = server.train(tmp_path, torchrun_env(1), batch=2, **options).finish().succeeded()
    sizes = [size / 2**20 for size in finished.env["ddp"]["bucket_bytes"]]
    assert sizes[0] == pytest.approx(4.1, rel=0.2)
    assert sum(sizes) == pytest.approx(finished.env["gradient_bytes"] / 2**20)


def test_tf32_is_allowed_only_if_the_matrix_says_so(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for precision in ("fp32", "bf16", "fp16"):
        use_precision(precision)
    assert (seen, torch.backends.cudnn.allow_tf32) == ([], False)
    use_precision("tf32")
    assert (seen, torch.backends.cudnn.allow_tf32) == (["high"], True)


def test_a_compiled_model_runs_to_its_end(run_ranks):
    target = "tests.train.scenarios:compiled_without_inductor"
    finished = run_ranks(
        compile=True, bucket_cap_mb=1, environments=torchrun_env(1), target=target
    ).succeeded()
    (row,) = finished.table("metrics")
    assert float(row["comm_exposed_time_sec"]) >= 0
