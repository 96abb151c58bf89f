"""This rank among all others: what it was asked, where it runs, and what rank 0 tells about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bench.measure.environment import RankFacts, surroundings
from bench.measure.transport import configured_transport
from bench.study.files import write_json
from bench.study.layout import RunFolder
from bench.workload.arguments import Request
from bench.workload.launch import Launch
from bench.workload.rendezvous import Joined


@dataclass(frozen=True)
class Session:
    """This rank among all others, once they have joined."""

    request: Request
    launch: Launch
    joined: Joined
    me: RankFacts
    device: torch.device
    threads: int
    warnings: list[str]

    @property
    def folder(self) -> RunFolder:
        """Where rank 0 writes."""
        return RunFolder(self.request.run_dir)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.launch.rank == 0

    def write_environment(
        self,
        env: Mapping[str, str],
        sizes: tuple[int, int] | None = None,
        in_use: Mapping[str, str | None] | None = None,
        flops: Mapping[str, Any] | None = None,
    ) -> None:
        """Write env.json, where this is rank 0."""
        if self.is_first:
            content = environment(
                self.request,
                self.launch,
                self.joined,
                env,
                device=self.device,
                threads=self.threads,
                warnings=self.warnings,
                sizes=sizes,
                in_use=in_use,
                flops=flops,
            )
            write_json(self.folder.env, content)

    def warn(self, words: str) -> None:
        """Keep a warning for env.json and print it, where this is rank 0."""
        self.warnings.append(words)
        self.say(f"bench: warning: {words}")

    def say(self, line: str) -> None:
        """Print a line, where this is rank 0."""
        if self.is_first:
            print(line, flush=True)


# env.json of the built-in workload: its surroundings, and the resolved options of the run.


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
        transport=in_use or configured_transport(request.backend, env),
    )
    return found | {
        "workload": options.model_dump(),
        "per_gpu_batch": request.per_gpu_batch,
        "global_batch": request.per_gpu_batch * launch.world_size * options.grad_accum,
        "parameters": parameters,
        "gradient_bytes": gradient_bytes,
        "flops": None if flops is None else dict(flops),
        "warnings": warnings,
    }
