"""``bench lint SCRIPT...``: known multi-node mistakes in any sbatch script."""

from __future__ import annotations

import difflib
import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.errors import BenchError, missing_file
from bench.findings import Finding, Severity
from bench.lint import edits, lint_script
from bench.units import count


def run_lint(paths: list[str], *, json: bool, diff: bool) -> int:
    """Print the findings of scripts (``-`` is standard input); return 1 where one is an error.

    With ``json``, print ``{"findings": [...]}``; with ``diff``, print a unified patch of the
    changes that need no choice instead of the findings.

    Raises:
        BenchError: a path is not a file that can be read.
    """
    texts = {path: _read(path) for path in paths}
    findings = [finding for path, text in texts.items() for finding in lint_script(text, path=path)]
    if json:
        content = {"findings": [finding.as_json() for finding in findings]}
        print(json_module.dumps(content, ensure_ascii=False, indent=1))
    elif diff:
        for path, text in texts.items():
            sys.stdout.write(patch(text, path=path))
    else:
        for finding in findings:
            print(finding)
        print(_summary(findings, scripts=len(texts)), file=sys.stderr)
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def _read(path: str) -> str:
    """Return a script's text; bytes that are no UTF-8 are replaced, line ends are kept."""
    if path == "-":
        return sys.stdin.buffer.read().decode("utf-8", errors="replace")
    file = Path(path)
    if not file.is_file():
        raise missing_file(file, what="the script", remedy="give the path of a sbatch script, or - for stdin")
    try:
        return file.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise BenchError(f"{file}: cannot be read: {error.strerror}") from None


def patch(text: str, *, path: str) -> str:
    """Return a unified patch that makes the changes which need no choice ("" where there are none)."""
    lines = text.splitlines(keepends=True)
    changed = list(lines)
    touched: set[int] = set()
    for edit in edits(text):
        if edit.line in touched or not 0 < edit.line <= len(lines):
            continue  # one change per line; the next run suggests the next
        touched.add(edit.line)
        ending = lines[edit.line - 1][len(lines[edit.line - 1].rstrip("\r\n")) :]
        changed[edit.line - 1] = edit.apply(lines[edit.line - 1].rstrip("\r\n")) + ending
    return "".join(_unified(lines, changed, path))


def _unified(before: Sequence[str], after: Sequence[str], path: str) -> Sequence[str]:
    rows = list(difflib.unified_diff(before, after, fromfile=f"a/{path}", tofile=f"b/{path}"))
    return [row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows]


def _summary(findings: Sequence[Finding], *, scripts: int) -> str:
    counts = {severity: sum(one.severity is severity for one in findings) for severity in Severity}
    parts = [count(number, severity) for severity, number in counts.items() if number]
    return f"{count(scripts, 'script')}: {', '.join(parts) if parts else 'nothing to say'}"
