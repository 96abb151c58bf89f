"""This rank among all others: what it was asked, where it runs, and what rank 0 tells about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bench.files import write_json
from bench.layout import RunFolder
from bench.measurement.hosts import RankFacts
from bench.workload.arguments import Request
from bench.workload.environment import environment
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
