"""How much computation one training step is, counted by torch's flop counter.

Counted are the multiplications and additions (two operations each) of matrix products, convolutions
and attention, forward and backward; everything else (norms, activations, the loss, the optimizer)
is left out, as is usual for MFU. The step runs on torch's meta device: shapes without data, so that
counting costs neither memory nor time on the device, and nothing random is drawn.

Attention counts whole [time, time] products though the decoder is causal, and blocks whose activations
are recomputed count once: these are the *model's* FLOPs (PaLM, Chowdhery et al., 2022, appendix B),
whatever a kernel leaves out or does twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.matrix.options import WorkloadOptions
from bench.workload.task import DataShape, Task, build_task


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one optimizer step of one rank, all of its micro-batches.

    Convolutions are kept apart: cuDNN has a precision setting of its own.
    """

    matmul: int
    convolution: int
    samples: int

    @property
    def total(self) -> int:
        """All that was counted."""
        return self.matmul + self.convolution

    @property
    def per_sample(self) -> float:
        """The mean of the step's samples."""
        return self.total / self.samples


def count_step(options: WorkloadOptions, shape: DataShape, per_gpu_batch: int) -> StepFlops:
    """Return the FLOPs of a step; the random state of torch is left as it was."""
    # Precision changes how fast an operation is, not what it is; autocast needs the device itself.
    plain = options.model_copy(
        update={"activation_checkpointing": False, "precision": "fp32", "device": "cpu", "compile": False}
    )
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        task = build_task(plain, shape)
        inputs, targets = _batch(task, shape, per_gpu_batch)
        with FlopCounterMode(display=False) as counter:
            task(inputs, targets).backward()
    counts = counter.get_flop_counts().get("Global", {})
    convolution = sum(flops for operation, flops in counts.items() if "convolution" in str(operation))
    total = sum(counts.values())
    steps = options.grad_accum
    return StepFlops((total - convolution) * steps, convolution * steps, per_gpu_batch * steps)


def _batch(task: Task, shape: DataShape, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets that have shapes and types only."""
    integers, reals = torch.int64, torch.float32
    inputs = torch.empty((samples, *shape.inputs), dtype=integers if task.kind == "tokens" else reals)
    targets = torch.empty((samples, *shape.targets), dtype=reals if task.kind == "values" else integers)
    return inputs, targets
