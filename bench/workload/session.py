"""The command line of the workload, and the state of one rank after all ranks have joined.

Only rank 0 prints messages and writes env.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from pydantic import ValidationError

from ..errors import BenchError
from ..facts import Fact
from ..matrix.workload import WorkloadOptions
from ..measure.environment import shared_environment
from ..measure.ranks import RankFacts
from ..measure.transport import configured_transport
from ..study.files import write_json
from ..study.layout import RunFolder
from ..words import sentence
from .rendezvous import Joined, Launch

_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class Request:
    """The parsed command line of a run; ``launcher`` is the planned launcher (srun or torchrun), if given."""

    run_dir: Path
    backend: str
    per_gpu_batch: int
    options: WorkloadOptions
    launcher: str | None = None


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises a BenchError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise BenchError(
            f"arguments: {message}", remedy="see `python -P -m ddp_scaling_bench.start workload --help`"
        )


def parse_arguments(argv: Sequence[str]) -> Request:
    """Parse the workload's command line.

    Raises:
        BenchError: options are unknown or values are invalid; the message lists all of them.
        SystemExit: the command line contains ``--help``.
    """
    given = vars(_parser().parse_args(argv))
    fixed = {name: given.pop(name) for name in ("run_dir", "backend", "per_gpu_batch", "launcher")}
    if fixed["per_gpu_batch"] < 1:
        raise BenchError(
            f"arguments: --per-gpu-batch is {fixed['per_gpu_batch']}", remedy="it must be 1 or more"
        )
    values = {name: _typed(name, text) for name, text in given.items() if text is not None}
    try:
        options = WorkloadOptions.model_validate(values)
    except ValidationError as error:
        lines = [
            f"arguments: --{str(found['loc'][0]).replace('_', '-')} {found['input']!r}: {found['msg']}"
            for found in error.errors(include_url=False)
        ]
        raise BenchError("\n".join(lines)) from None
    if fixed["backend"] == "nccl" and options.device == "cpu":
        raise BenchError(
            "arguments: backend nccl needs GPUs, but --device is cpu", remedy="use --backend gloo"
        )
    if options.precision == "tf32" and options.device == "cpu":
        raise BenchError(
            "arguments: --precision tf32 needs a GPU, but --device is cpu", remedy="use --precision fp32"
        )
    return Request(options=options, **fixed)


def _parser() -> argparse.ArgumentParser:
    description = "Train and measure one rank; a launcher (srun or torchrun) starts one process per rank."
    parser = _Parser(
        prog="python -P -m ddp_scaling_bench.start workload", description=description, allow_abbrev=False
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="Folder for all files of the run.")
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True, help="Communication backend.")
    parser.add_argument("--per-gpu-batch", type=int, required=True, help="Samples per rank and micro-batch.")
    parser.add_argument(
        "--launcher", choices=("srun", "torchrun"), help="Planned launcher; a different one causes a warning."
    )
    for name, option in WorkloadOptions.model_fields.items():
        text = f"{option.description} Default: {option.default}.".replace("%", "%%")
        parser.add_argument("--" + name.replace("_", "-"), dest=name, metavar="VALUE", help=text)
    return parser


def _typed(name: str, text: str) -> Any:
    """Convert ``text`` to the type of an option's default if possible; otherwise pydantic rejects it."""
    default = WorkloadOptions.model_fields[name].default
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        return _BOOLEANS.get(text.lower(), text)
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


@dataclass(frozen=True)
class Session:
    """One rank of a run: its command line, launch, peers, device, threads, and facts for env.json."""

    request: Request
    launch: Launch
    joined: Joined
    me: RankFacts
    device: torch.device
    threads: int
    found: list[Fact]

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
        in_use: Mapping[str, str | None] | None = None,
        **known: Any,
    ) -> None:
        """Write env.json on rank 0.

        Args:
            env: the environment variables of rank 0.
            in_use: the transport in use, or None before any communication.
            known: the values that are known only after the model exists or has trained.
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
        )
        content |= {
            "workload": options.model_dump(),
            "strategy": options.strategy,
            "per_gpu_batch": request.per_gpu_batch,
            "global_batch": request.per_gpu_batch * self.launch.world_size * options.grad_accum,
            **dict.fromkeys(("parameters", "gradient_bytes", "flops")),
            **known,
            "facts": [fact.as_json() for fact in self.found],
        }
        write_json(self.folder.env, content)

    def add(self, fact: Fact) -> None:
        """Add a fact to env.json, and print it on rank 0."""
        self.found.append(fact)
        self.say(f"bench: {fact.severity}: {sentence(fact)}")

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.is_first:
            print(line, flush=True)
