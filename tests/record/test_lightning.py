"""The callback in Lightning's loop, with and without DDP."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.common import write_cell
from tests.record.loops import LENGTHS
from tests.train.ranks import torchrun_env

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PARTS = ("data_load", "forward", "backward", "optimizer", "comm_exposed")

# Only the scripts import it: its import takes a third of the time in which all tests are collected.
pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="the extra `lightning` is not installed"
)


@pytest.fixture
def fit(server, tmp_path):
    """Return a function that runs a script in one or two ranks, and returns metrics.csv and env.json."""

    def fit(*words: str, ranks: int = 1) -> tuple[list[dict[str, str]], dict]:
        write_cell(tmp_path, ranks=ranks, **LENGTHS)
        env = {"BENCH_RUN_DIR": str(tmp_path)}
        torchrun = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
        environments = [env | torchrun | rank for rank in torchrun_env(ranks)] if ranks > 1 else [env]
        # Its import takes longer than a training.
        done = server.start(tmp_path, environments, "script", words, ["lightning.pytorch"]).finish()
        return done.succeeded().table("metrics"), done.env

    return fit


def test_two_ranks_are_measured_as_any_others(fit):
    script = [str(EXAMPLES / "train_lightning.py"), "--devices", "2", "--samples", "1024", "--width", "64"]
    rows, env = fit(*script, ranks=2)
    counts = [(row["epoch"], row["steps"], row["samples"]) for row in rows]
    assert counts == [("1", "5", "320"), ("2", "5", "320")]
    assert (env["world_size"], env["joined"]["ranks"], env["global_batch"]) == (2, 2, 64)
    for row in rows:
        assert all(float(row[f"{part}_time_sec"]) > 0 for part in PARTS)
        assert float(row["train_loss"]) > 0


SINGLE = """\
import lightning.pytorch as pl
import torch
from ddp_scaling_bench.measure import step_parts
from ddp_scaling_bench.record.lightning import BenchCallback
from tests.record.loops import PlantedClock

clock = step_parts.time = PlantedClock()

class Naps(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        clock.sleep(0.25)
        return self.layer(batch[0]).square().mean() * 0 + 1.5
    def validation_step(self, batch, index):
        clock.sleep(8)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

data = torch.utils.data.TensorDataset(torch.randn(64, 4))
few = torch.utils.data.TensorDataset(torch.randn(4, 4))
loader = torch.utils.data.DataLoader
pl.Trainer(
    accelerator="cpu", devices=1, max_epochs=8, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, accumulate_grad_batches=2, callbacks=[BenchCallback()],
).fit(Naps(), loader(data, batch_size=8), loader(few, batch_size=4))
"""


def test_one_device_without_ddp_has_its_parts_and_no_validation_in_them(fit, tmp_path):
    script = tmp_path / "single.py"
    script.write_text(SINGLE)
    rows, env = fit(str(script))
    assert env["global_batch"] == 16  # two micro-batches of eight are one step
    for row in rows:
        assert (row["epoch_time_sec"], row["forward_time_sec"]) == ("2.5", "0.5")
        empty = ("data_load", "backward", "comm_exposed", "optimizer", "other")
        assert {row[f"{part}_time_sec"] for part in empty} == {"0"}
        assert float(row["train_loss"]) == pytest.approx(1.5)  # of a sample, not a micro-batch's share of it
