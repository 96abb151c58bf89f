"""env.json of the built-in workload: its surroundings, and the resolved options of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bench.measurement.surroundings import surroundings
from bench.workload.arguments import Request
from bench.workload.launch import Launch
from bench.workload.rendezvous import Joined


def environment(
    request: Request,
    launch: Launch,
    joined: Joined,
    env: Mapping[str, str],
    *,
    device: torch.device,
    threads: int,
    warnings: list[str],
    sizes: tuple[int, int] | None = None,
    in_use: Mapping[str, str | None] | None = None,
    flops: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of env.json.

    Args:
        request: what was asked of the workload.
        launch: who started this process.
        joined: the ranks that came.
        env: the environment variables of rank 0.
        device: rank 0's device.
        threads: the threads that rank 0 computes with.
        warnings: what a reader of the results should know.
        sizes: parameters and bytes of their gradients; None before the model exists.
        in_use: the transport that was found in use; None before anything was sent.
        flops: what MFU is computed with; None before the model exists.
    """
    options = request.options
    parameters, gradient_bytes = sizes or (None, None)
    found = surroundings(
        joined.facts,
        env,
        backend=request.backend,
        world_size=launch.world_size,
        launcher=launch.launcher,
        seconds=joined.seconds,
        device=device,
        threads=threads,
    )
    if in_use is not None:
        found["transport"] = dict(in_use)
    return found | {
        "workload": options.model_dump(),
        "per_gpu_batch": request.per_gpu_batch,
        "global_batch": request.per_gpu_batch * launch.world_size * options.grad_accum,
        "parameters": parameters,
        "gradient_bytes": gradient_bytes,
        "flops": None if flops is None else dict(flops),
        "warnings": warnings,
    }
