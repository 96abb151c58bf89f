"""The optional parts of the installation, which a command names if their packages are missing."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

#: The packages of the extras in pyproject.toml that commands check.
EXTRAS = {"report": ("numpy", "pandas", "pyarrow", "scipy", "matplotlib"), "train": ("numpy", "torch")}


def install_line(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'ddp-scaling-bench[{extra}]'"


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return the packages that this Python interpreter does not find."""
    return [name for name in names if find_spec(name) is None]
