"""Locate the example matrices and script templates, in a checkout or in an installed wheel."""

from __future__ import annotations

from pathlib import Path

from ddp_scaling_bench.errors import missing_file

_PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str) -> Path:
    """Return the path of the folder ``matrices`` or ``slurm_templates``."""
    installed = _PACKAGE / "shipped" / folder
    return installed if installed.is_dir() else _PACKAGE.parent / folder


def find_matrix(name: str) -> Path:
    """Return the path of a matrix, given by its path with or without .yaml, or by the name of an example.

    An existing file takes precedence over an example of the same name.

    Raises:
        BenchError: there is no such file or example; the message lists the examples.
    """
    path = Path(name)
    for own in (path, Path(f"{name}.yaml")):
        if own.is_file():
            return own
    examples = {example.stem: example for example in sorted(shipped("matrices").glob("*.yaml"))}
    stem = name.removesuffix(".yaml").removeprefix("matrices/")
    if stem in examples:
        return examples[stem]
    for alike in (path.parent / f"{path.stem}{suffix}" for suffix in (".yaml", ".yml")):
        if alike.is_file() and not path.exists():
            raise missing_file(path, what="matrix file", remedy=f"did you mean {alike}?")
    remedy = f"give the path of a YAML file, or one of the shipped examples: {', '.join(examples)}"
    raise missing_file(path, what="matrix file", remedy=remedy)
