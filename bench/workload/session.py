"""The state of one rank after all ranks have joined; only rank 0 prints messages and writes env.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.measure.environment import shared_environment
from bench.measure.ranks import RankFacts
from bench.measure.transport import configured_transport
from bench.study.files import write_json
from bench.study.layout import RunFolder
from bench.workload.arguments import Request
from bench.workload.launch import Launch
from bench.workload.rendezvous import Joined


@dataclass(frozen=True)
class Session:
    """One rank of a run: its command line, launch, peers, device, threads, and warnings for env.json."""

    request: Request
    launch: Launch
    joined: Joined
    me: RankFacts
    device: torch.device
    threads: int
    warnings: list[str]
    #: Each rank's facts about its GPUs, from the moment at which the ranks have exchanged them.
    gpus: list[dict[str, Any]] = field(default_factory=list)

    @property
    def folder(self) -> RunFolder:
        """The run's folder, to which rank 0 writes."""
        return RunFolder(self.request.run_dir)

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self.launch.rank == 0

    def write_environment(
        self,
        env: Mapping[str, str],
        sizes: tuple[int, int] | None = None,
        in_use: Mapping[str, str | None] | None = None,
        flops: Mapping[str, Any] | None = None,
        ddp: Mapping[str, Any] | None = None,
    ) -> None:
        """Write env.json on rank 0.

        Args:
            env: the environment variables of rank 0.
            sizes: the number of parameters and bytes of gradients; None before the model exists.
            in_use: the transport in use; None before any communication.
            flops: the value of ``flops``, the basis of MFU; None before the model exists.
            ddp: the value of ``ddp``; None before the last epoch.
        """
        if not self.is_first:
            return
        request, options = self.request, self.request.options
        content = shared_environment(
            self.joined.facts,
            env,
            backend=request.backend,
            world_size=self.launch.world_size,
            launcher=self.launch.launcher,
            join_s=self.joined.seconds,
            device=self.device,
            threads=self.threads,
            transport=in_use or configured_transport(request.backend, env),
            gpus=self.gpus,
        )
        parameters, gradient_bytes = sizes or (None, None)
        content |= {
            "workload": options.model_dump(),
            "per_gpu_batch": request.per_gpu_batch,
            "global_batch": request.per_gpu_batch * self.launch.world_size * options.grad_accum,
            "parameters": parameters,
            "gradient_bytes": gradient_bytes,
            "ddp": None if ddp is None else dict(ddp),
            "flops": None if flops is None else dict(flops),
            "warnings": self.warnings,
        }
        write_json(self.folder.env, content)

    def warn(self, text: str) -> None:
        """Add a warning to env.json, and print it on rank 0."""
        self.warnings.append(text)
        self.say(f"bench: warning: {text}")

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.is_first:
            print(line, flush=True)
