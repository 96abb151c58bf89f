"""The workload's command line, generated from :class:`WorkloadOptions`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from bench.errors import BenchError
from bench.matrix.workload import WorkloadOptions

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
        raise BenchError(f"arguments: {message}", remedy="see `python -m bench.workload --help`")


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
    return Request(options=options, **fixed)


def _parser() -> argparse.ArgumentParser:
    description = "Train and measure one rank; a launcher (srun or torchrun) starts one process per rank."
    parser = _Parser(prog="python -m bench.workload", description=description, allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True, help="Folder for all files of the run.")
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True, help="Communication backend.")
    parser.add_argument("--per-gpu-batch", type=int, required=True, help="Samples per rank and micro-batch.")
    parser.add_argument(
        "--launcher", choices=("srun", "torchrun"), help="Planned launcher; a different one causes a warning."
    )
    for name, field in WorkloadOptions.model_fields.items():
        text = f"{field.description} Default: {field.default}.".replace("%", "%%")
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
