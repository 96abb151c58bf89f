"""Write why a rank fails to ``failure.RANK.json`` in the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..errors import UnwritableError
from ..study.files import write_json
from .failures import FAILURES, Failure


def write_failures(found: Iterable[Failure], rank: int | None = None) -> None:
    """Write why this rank fails, unless it has done so before; a disk that is full is no further error."""
    number = next((os.environ[name] for name in ("RANK", "SLURM_PROCID") if name in os.environ), "0")
    folder = os.environ.get("BENCH_RUN_DIR")
    path = Path(folder or ".") / FAILURES.format(number if rank is None else rank)
    if folder and not path.exists():
        with suppress(OSError, UnwritableError):
            write_json(path, {"time": time.time(), "findings": [one.as_json() for one in found]})
