"""The workload's command line, built from :class:`WorkloadOptions` so that the two cannot disagree."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import ValidationError

from bench.errors import BenchError
from bench.matrix.workload import WorkloadOptions

_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class Request:
    """What one run of the workload was asked to do.

    ``launcher`` is what the plan says (srun or torchrun), None where nothing was said.
    """

    run_dir: Path
    backend: str
    per_gpu_batch: int
    options: WorkloadOptions
    launcher: str | None = None


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise BenchError(f"arguments: {message}", remedy="see `python -m bench.workload --help`")


def parse_arguments(argv: Sequence[str]) -> Request:
    """Return the request that a command line spells.

    Raises:
        BenchError: an unknown option, or a value outside of what is allowed (all of them at once).
        SystemExit: ``--help`` was asked for.
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
        raise BenchError(_in_words(error)) from None
    if fixed["backend"] == "nccl" and options.device == "cpu":
        raise BenchError(
            "arguments: backend nccl needs GPUs, but --device is cpu", remedy="use --backend gloo"
        )
    return Request(options=options, **fixed)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m bench.workload", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True, help="Folder of the attempt; files land here.")
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True, help="Who communicates.")
    parser.add_argument("--per-gpu-batch", type=int, required=True, help="Samples per rank and micro-batch.")
    parser.add_argument("--launcher", choices=("srun", "torchrun"), help="Who was meant to start the ranks.")
    for name, field in WorkloadOptions.model_fields.items():
        text = f"{field.description} Default: {field.default}.".replace("%", "%%")
        parser.add_argument("--" + name.replace("_", "-"), dest=name, metavar="VALUE", help=text)
    return parser


def _typed(name: str, text: str) -> Any:
    """Return the value that ``text`` spells; what fits no type stays text, for pydantic to refuse."""
    kinds = _kinds(WorkloadOptions.model_fields[name].annotation)
    if bool in kinds:
        return _BOOLEANS.get(text.lower(), text)
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def _kinds(annotation: Any) -> set[type]:
    """Return the plain types that an annotation such as ``Annotated[int, ...] | None`` allows."""
    if isinstance(annotation, type):
        return {annotation}
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    return set().union(*(_kinds(part) for part in get_args(annotation) if not _is_constraint(part)))


def _is_constraint(part: Any) -> bool:
    return not isinstance(part, type) and get_origin(part) is None


def _in_words(error: ValidationError) -> str:
    lines = [
        f"arguments: --{str(found['loc'][0]).replace('_', '-')} {found['input']!r}: {found['msg']}"
        for found in error.errors(include_url=False)
    ]
    return "\n".join(lines)
