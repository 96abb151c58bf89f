"""DistributedDataParallel: every rank has the whole model, and buckets of gradients are all-reduced.

On each rank, DDP's logger records the start and end of backward's computation and of its communication.
``backward_comm_time`` is the span from the first bucket's start to the last bucket's end, and includes
computation. The step waits only for the part of this span after the end of the computation:

    exposed = backward_comm_time - backward_compute_comm_overlap_time

Source: ``torch/csrc/distributed/c10d/logger.cpp`` and ``reducer.cpp`` (times in nanoseconds). On torch 2.13
with gloo, compute + exposed differed from the duration of ``loss.backward()`` by 0.1 %.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...measure.findings import PartsNotTimed
from ...measure.step_parts import BackwardReading, StepTimer
from ...measure.torch_internals import ddp_texts, ddp_times, set_ddp_sample_rate, unused_parameter_bytes
from ...measure.wire import Messages
from ..failures import SetupError
from ..options import TrainOptions
from .spec import Parts, Strategy

#: An interval between samples so large that DDP's logger samples no iteration after the tenth.
_NEVER = 2**31 - 1
_SECONDS_PER_TICK = 1e-9
#: torch's hooks, with the share of the bytes of float32 gradients that they send.
_HOOKS = {"": 1.0, "allreduce_hook": 1.0, "fp16_compress_hook": 0.5, "bf16_compress_hook": 0.5}


def wrap(model: nn.Module, options: TrainOptions, *, static_graph: bool = False) -> DistributedDataParallel:
    """Wrap the model in DDP with the settings that the measurement needs.

    Gradients are views of the buckets; otherwise copies would count as communication. Buffers are not
    broadcast in forward; otherwise the wait for a late rank would count as forward.

    Raises:
        SetupError: torch or its build cannot exchange gradients in the type of the options.
    """
    accepted = inspect.signature(DistributedDataParallel.__init__).parameters
    # torch 2.13 renames the argument broadcast_buffers and deprecates the old name.
    settings: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers": False
    }
    if options.bucket_cap_mb is not None:  # given, it is also the size of the first bucket
        settings["bucket_cap_mb"] = options.bucket_cap_mb  # torch accepts a fraction of a MiB
    device = next(model.parameters()).device
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
        **settings,
    )
    if options.wire_dtype != "fp32":
        _send_as(options.wire_dtype, wrapped)
    return wrapped


def _send_as(name: str, model: DistributedDataParallel) -> None:
    # Imported here, because the recorder does not need it.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hook = default_hooks.fp16_compress_hook if name == "fp16" else default_hooks.bf16_compress_hook
    try:
        model.register_comm_hook(None, hook)
    except TypeError as error:
        what = f"gradients cannot be sent as {name}: {error}"
        raise SetupError(what, remedy="use comm_dtype fp16") from None


class DdpParts(Parts):
    """Read the times of backward and of the exchange of gradients from DDP's logger."""

    sees_communication = has_buckets = True
    model: DistributedDataParallel

    @property
    def module(self) -> nn.Module:
        """The model within DDP."""
        module: nn.Module = self.model.module
        return module

    @property
    def sees_forward(self) -> bool:  # type: ignore[override]
        """False if DDP broadcasts the model's buffers in forward."""
        return not (self.model.broadcast_buffers and any(True for _ in self.model.buffers()))

    def start(self, timer: StepTimer) -> PartsNotTimed | None:
        """Make DDP's logger record times in every step."""
        set_ddp_sample_rate(self.model, 1)
        return None

    def stop(self) -> None:
        """Stop DDP's logger from recording times, because on CUDA this costs a synchronisation per step."""
        super().stop()
        set_ddp_sample_rate(self.model, _NEVER)

    def times_backward(self) -> bool:
        """Return False under ``no_sync``, in which the logger is inactive."""
        return self.model.require_backward_grad_sync

    def read(self) -> BackwardReading | None:
        """Return the logger's times of the backward pass that just ended, or None if the logger has no times.

        Normally the logger computes its values when the next forward begins. This function makes the logger
        compute them immediately, which waits for the device on CUDA.
        """
        values = defaultdict(int, ddp_times(self.model))
        span, compute = values["backward_comm_time"], values["backward_compute_time"]
        if compute <= 0 or not (span > 0 or _has_zero_span(values)):
            return None
        exposed = max(0, span - values["backward_compute_comm_overlap_time"])
        return BackwardReading(
            compute * _SECONDS_PER_TICK,
            exposed * _SECONDS_PER_TICK,
            values["backward_compute_time_start"],
            values["forward_compute_time"] * _SECONDS_PER_TICK,
            values["forward_compute_time_start"],
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Return DDP's ``no_sync``."""
        return self.model.no_sync()

    def bucket_bytes(self) -> list[int]:
        """Return the sizes of the buckets, after DDP has rebuilt them; empty with a hook of the user."""
        logged = ddp_texts(self.model)
        share = _HOOKS.get(logged.get("comm_hook", ""))
        if share is None or (share < 1 and logged.get("dtypes") != "float"):
            return []
        return [int(size * share) for size in _bucket_bytes(logged)]

    def messages(self) -> list[Messages] | None:
        """Return the all-reduces of the buckets."""
        sizes = self.bucket_bytes()
        return [Messages("all_reduce", sizes)] if sizes else None

    def hook_buckets(self, state: Any, hook: Callable[..., Any]) -> None:
        """Register ``hook`` as DDP's communication hook."""
        self.model.register_comm_hook(state, hook)

    def facts(self) -> dict[str, Any]:
        """Return ``ddp`` of env.json: what DDP does in each step in addition to reducing gradients.

        On CUDA this function waits for the device.
        """
        model = self.model
        return {
            SPEC.name: {
                "find_unused_parameters": model.find_unused_parameters,
                "unused_parameter_bytes": unused_parameter_bytes(model),
                "gradient_as_bucket_view": model.gradient_as_bucket_view,
                "static_graph": model.static_graph,
                "broadcast_buffers": model.broadcast_buffers,
                "buffer_bytes": sum(one.numel() * one.element_size() for one in model.buffers()),
                "bucket_bytes": _bucket_bytes(ddp_texts(model)),
            }
        }


def _bucket_bytes(logged: Mapping[str, str]) -> list[int]:
    sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
    return [int(size) for size in sizes.replace(",", " ").split()]


def _has_zero_span(values: Mapping[str, int]) -> bool:
    """Return whether communication began and ended in the last backward pass, if its measured time is 0.

    The logger reports 0 for a time that it did not measure, but also for one below the resolution of CUDA's
    events, for example with a single rank. Only the host's stamps tell the two apart: those of an event that
    was not recorded are of an earlier pass.
    """
    names = ("backward_compute_time_start", "backward_comm_time_start", "backward_comm_time_end")
    computes, begins, ends = (values[name] for name in names)
    return 0 < computes <= begins <= ends


SPEC = Strategy(
    "ddp",
    title="DDP",
    options=("bucket_cap_mb", "comm_dtype", "comm_hook"),
    wrap=wrap,
    parts=DdpParts,
    find=lambda modules: next((one for one in modules if isinstance(one, DistributedDataParallel)), None),
)
