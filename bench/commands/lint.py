"""`bench lint`: find known multi-node mistakes in sbatch scripts."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ddp_scaling_bench.errors import BenchError, missing_file
from ddp_scaling_bench.files import is_binary
from ddp_scaling_bench.units import count

from ..terminal import print_json, read_stdin, say, show
from .options import JsonOption


def lint_command(
    scripts: Annotated[list[str], typer.Argument(help="sbatch scripts; - is standard input.")],
    as_json: JsonOption = False,
) -> int:
    """Find known multi-node mistakes in sbatch scripts before they wait in the queue.

    The command works on any sbatch script and executes nothing. The exit code is 1 if there is an error.
    Example: bench lint job.sbatch
    """
    texts, refused = {}, []
    for path in scripts:
        try:
            texts[path] = _read(path)
        except BenchError as error:
            refused.append(str(error))
    exit_code = _lint(texts, as_json=as_json) if texts else 0
    if refused:
        raise BenchError("\n".join(refused))
    return exit_code


def _lint(texts: Mapping[str, str], *, as_json: bool) -> int:
    """Print the findings in scripts, and return the exit code."""
    from ..lint import lint_script
    from ..lint.mistakes import Severity

    if shutil.which("bash") is None:
        say("bash is not on PATH: the syntax of the scripts is not checked")
    mistakes = [mistake for path, text in texts.items() for mistake in lint_script(text, path=path)]
    counts = Counter(mistake.severity for mistake in mistakes)
    if as_json:
        print_json({"findings": [mistake.as_json() for mistake in mistakes]})
    else:
        for mistake in mistakes:
            show(mistake)
        parts = [count(counts[severity], severity) for severity in Severity if counts[severity]]
        say(f"{count(len(texts), 'script')}: {', '.join(parts) or 'no findings'}")
    return int(counts[Severity.ERROR] > 0)


def _read(path: str) -> str:
    """Return a script's text with its original line endings; invalid UTF-8 is replaced."""
    if path == "-":
        return read_stdin().read().decode("utf-8", errors="replace")
    file = Path(path)
    if file.suffix in (".yaml", ".yml"):
        remedy = "give a script, such as one that `bench plan` wrote"
        raise BenchError(f"{file} is a YAML file, not a script", remedy=remedy)
    if not file.is_file():
        raise missing_file(file, what="the script", remedy="give the path of a sbatch script, or - for stdin")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BenchError(f"{file}: cannot be read: {error.strerror}") from None
    if is_binary(data[:8192]) or b"\0" in data[:8192]:
        remedy = "give a sbatch script, or save it as UTF-8"
        raise BenchError(f"{file} is not a text in UTF-8", remedy=remedy)
    text = data.decode("utf-8", errors="replace")
    if file.suffix == ".py" and "#SBATCH" not in text:
        raise BenchError(
            f"{file} is a Python program, not a sbatch script", remedy="give the script that starts it"
        )
    from ..lint.script import BASH

    if text.startswith("#!") and not BASH.match(text[:500].splitlines()[0]):
        say(f"{file}: its first line names no bash, so only its #SBATCH lines are checked")
    return text
