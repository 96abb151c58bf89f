"""`bench doctor`: why a job failed, from its logs."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bench.doctor import diagnose
from bench.doctor.report import as_text
from bench.doctor.scan import Source
from bench.errors import BenchError, missing_file


def run_doctor(targets: Sequence[Path | Literal["-"]], *, json: bool) -> int:
    """Diagnose the logs of one job together and print the result.

    Args:
        targets: log files; ``-`` is standard input.
        json: print JSON (``verdict``, ``causes``, ``telling_lines``) instead of text.

    Returns:
        0 where nothing shows a failure, 1 otherwise.

    Raises:
        BenchError: there is no log, or one cannot be read.
    """
    if not targets:
        raise BenchError("no log to read", remedy="name the job's logs, or - for standard input")
    logs = dict(_opened(target) for target in targets)
    try:
        diagnosis = diagnose(logs)
    except OSError as error:
        raise BenchError(f"cannot read {error.filename or 'the log'}: {error.strerror}") from error
    text = json_format.dumps(diagnosis.as_json(), indent=2) + "\n" if json else as_text(diagnosis)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    return 1 if diagnosis.verdict in ("cause", "unknown") else 0


def _opened(target: Path | Literal["-"]) -> tuple[str, Source]:
    if not isinstance(target, Path):
        return "-", sys.stdin.buffer
    if not target.exists() or target.is_dir():
        raise missing_file(target, what="log", remedy="give a log file, such as slurm-<job>.out")
    return str(target), target
