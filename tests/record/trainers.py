"""Trainings with HuggingFace's Trainer, which count their own steps, samples and losses."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ddp_scaling_bench import TransformersCallback
from ddp_scaling_bench.measure import step_parts
from tests.record import loops
from tests.train.ranks import folder_of_test

LENGTHS = {"warmup_steps": 3, "steps_per_epoch": 5, "attribution_steps": 2, "epochs": 2}
SLOW_S = 1.0
sleep = time.sleep


class Naps(nn.Module):
    """A model whose loss is that of its samples, with a sleep in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        sleep(loops.NAP_S)
        return {"loss": self.layer(points.reshape(-1, 4)).square().mean() * 0 + labels.float().mean()}


class Counting(Trainer):
    """Counts the samples and the losses of each step without the recorder; rank 0 saves slowly."""

    steps: list[tuple[int, list[float]]]

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *values: Any, **named: Any) -> Any:
        loss = super().compute_loss(model, inputs, *values, **named)
        if model.training:
            samples, losses = self.steps[-1]
            self.steps[-1] = (samples + len(inputs["labels"]), [*losses, float(loss.detach())])
        return loss

    def evaluate(self, *values: Any, **named: Any) -> Any:
        sleep(SLOW_S)
        return super().evaluate(*values, **named)

    def save_model(self, *values: Any, **named: Any) -> None:
        if self.args.process_index == 0:
            sleep(SLOW_S)
        super().save_model(*values, **named)


class NextStep(TrainerCallback):
    """Tells the Trainer above that a step begins."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[float]]] = []

    def on_step_begin(self, *values: Any, **named: Any) -> None:
        self.steps.append((0, []))


def train(
    folder: str,
    name: str,
    model: nn.Module,
    data: list[dict[str, Tensor]],
    batch: int,
    lengths: dict[str, int],
    **more: Any,
) -> None:
    """Train and write what the training counted itself."""
    path = Path(folder, name)
    arguments = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 4, **more}
    arguments = TrainingArguments(
        output_dir=str(path / "out"), per_device_train_batch_size=batch, **arguments
    )
    counter = NextStep()
    measured = TransformersCallback(run_dir=path, **lengths)
    trainer = Counting(
        model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[counter, measured]
    )
    trainer.steps = counter.steps
    trainer.train()
    assert not {"get_batch_samples", "training_step"} & set(vars(trainer))
    rank = os.environ.get("RANK", "0")
    (path / f"counted-{rank}.json").write_text(json.dumps(counter.steps))


def points(count: int) -> list[dict[str, Tensor]]:
    return [{"points": torch.randn(4), "labels": torch.tensor(float(number % 7))} for number in range(count)]


def on_two_ranks() -> int:
    """Epochs of four steps of two micro-batches, and a last step of one micro-batch.

    The training with evaluations and checkpoints has a planted clock, so it times no parts of a step.
    """
    global sleep
    torch.set_num_threads(1)
    more = {"max_steps": 23, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    train(folder_of_test(), "ddp", Naps(), points(2 * 35), 4, LENGTHS, save_strategy="no", **more)
    clock = step_parts.time = loops.PlantedClock()
    sleep = clock.sleep
    plans = {"eval_strategy": "steps", "eval_steps": 7, "save_strategy": "steps", "save_steps": 7}
    untimed = {**LENGTHS, "attribution_steps": 0}
    train(folder_of_test(), "evaluated", Naps(), points(2 * 64), 4, untimed, **more, **plans)

    def packed(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([one[name] for one in batch])[None] for name in batch[0]}

    path = folder_of_test() / "packed"
    arguments = TrainingArguments(
        output_dir=str(path / "out"), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=12,
        per_device_train_batch_size=2, save_strategy="no", ddp_backend="gloo",
    )  # fmt: skip
    counts = {"packed": None, "packed and counted": lambda batch: batch["labels"].numel()}
    for name, samples in counts.items():
        lengths = {**LENGTHS, "attribution_steps": 0, "epochs": 1}
        callback = TransformersCallback(samples=samples, run_dir=path.with_name(name), **lengths)
        Trainer(
            Naps(), arguments, train_dataset=points(60), data_collator=packed, callbacks=[callback]
        ).train()
    return loops.leave()
