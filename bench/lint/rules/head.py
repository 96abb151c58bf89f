"""Rules about the head of a script: its directives, line ends and syntax."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bench.findings import Severity
from bench.lint.engine import LOOKED_AT, MAX_SCRIPT_SIZE, Edit, Remark, rule
from bench.lint.environment import Value
from bench.lint.nodes import ShellError
from bench.lint.script import Script, ignored_directives

_OPENS_STRING = re.compile(r"\\\Z|(?:=|-\w*c\s+|echo\s+|<<<\s*|\()[\"']\Z|\S[ \t]+[\"']\Z")
_MOST_ODD = 200


@rule(Severity.ERROR)
def sbatch_after_command(script: Script) -> Iterator[Remark]:
    """A directive stands below the first command, where sbatch no longer reads.

    sbatch stops reading directives at the first line that is neither blank nor a comment. What
    the directives below ask for is silently not asked for.

    Bad:
        #!/bin/bash
        module load cuda
        #SBATCH --nodes=4

    Good:
        #!/bin/bash
        #SBATCH --nodes=4
        module load cuda
    """
    for number, _ in ignored_directives(script.lines, script.header):
        if any(first <= number <= last for first, last in script.swallowed):
            continue
        first = script.header.end + 1
        yield Remark(
            number,
            f"sbatch ignores this directive: it stopped reading at the first command, in line {first}",
            f"move the line above line {first}",
        )


@rule(Severity.ERROR)
def malformed_directive(script: Script) -> Iterator[Remark]:
    """A directive that sbatch refuses, or takes for a comment.

    sbatch refuses a script with an unknown option, a value that is none, or a stray word; it
    ignores lines that do not start with exactly ``#SBATCH``, and it expands no variables.

    Bad:
        # SBATCH --nodes=4
        #SBATCH --ntasks_per_node=4
        #SBATCH --time=24h

    Good:
        #SBATCH --nodes=4
        #SBATCH --ntasks-per-node=4
        #SBATCH --time=24:00:00
    """
    for number, complaint in script.header.complaints:
        edit = Edit(number, "", complaint.fixed) if complaint.fixed else None
        yield Remark(number, complaint.message, complaint.remedy, complaint.severity, edit)
    if script.size > MAX_SCRIPT_SIZE:
        limit = f"{MAX_SCRIPT_SIZE // 1024**2} MiB"
        yield Remark(
            1,
            f"Slurm refuses scripts of more than {limit}, unless the site raised max_script_size",
            "put the data into a file of its own",
            Severity.WARNING,
        )


@rule(Severity.ERROR)
def crlf_script(script: Script) -> Iterator[Remark]:
    r"""The lines end as on Windows, with CR LF.

    sbatch refuses such a script: "Batch script contains DOS line breaks".

    Bad:
        #!/bin/bash\r\n

    Good:
        #!/bin/bash\n
    """
    if script.dos_line:
        yield Remark(
            script.dos_line,
            "sbatch refuses the script: its lines end with CR LF, as on Windows",
            "convert it: dos2unix SCRIPT, or sed -i 's/\\r$//' SCRIPT",
        )


@rule(Severity.ERROR)
def shell_syntax(script: Script) -> Iterator[Remark]:
    """The shell cannot parse the script.

    bash reads a script piece by piece: what stands before the mistake is run, then the job ends.

    Bad:
        for node in $NODES; do
            echo $node

    Good:
        for node in $NODES; do
            echo $node
        done
    """
    for text, problem in script.walk.broken[:20]:
        yield _in_text(text, problem)
    error = script.error
    if script.size > LOOKED_AT:
        message = f"only the first {LOOKED_AT // 1024} KiB of this script were looked at"
        yield Remark(1, message, "put the data into a file of its own", Severity.INFO)
    if error is None:
        return
    quote = error.quote if error.quote in ("'", '"') else ""
    odd = _unpaired_quote(script.lines, quote, upto=error.line)
    if odd:
        line, quote = odd
        message = f"a {quote} is opened in this line and never closed, so bash cannot parse the script"
        yield Remark(
            line, f"{message} (it stops at line {error.line}: {error.message})", f"close the {quote}"
        )
        return
    line = min(error.line, len(script.lines))
    while line > 1 and script.lines[line - 1].strip()[:1] in ("", "#"):
        line -= 1
    remedy = "check the script with `bash -n SCRIPT`"
    if error.opened and error.opened != line:
        yield Remark(error.opened, f"bash cannot parse the command that starts here: {error.message}", remedy)
        yield Remark(line, f"here bash gives up: {error.message}", remedy, Severity.INFO)
    else:
        yield Remark(line, f"bash cannot parse the script: {error.message}", remedy)


def _in_text(text: Value, error: ShellError) -> Remark:
    """Return the remark on a text that a shell is given, such as that of ``bash -c``."""
    odd = _unpaired_quote(
        text.text.split("\n"), error.quote if error.quote in ("'", '"') else "", upto=10_000
    )
    line = text.lines[min(odd[0], len(text.lines)) - 1] if odd else error.opened or error.line
    message = f"the shell that is given this text cannot parse it: {error.message}"
    sure = None if "\ue000" not in text.text else Severity.WARNING
    return Remark(line, message, "mend the text between the quotes", sure)


def _unpaired_quote(lines: Sequence[str], quote: str, *, upto: int) -> tuple[int, str] | None:
    """Return the line whose quote is missing its partner, and the quote, where quotes are to blame.

    Lines with an odd number of quotes come in pairs where a string spans lines on purpose. Of an
    odd number of such lines, the one is to blame that leaves the most plausible pairs. Where bash
    does not complain of a ``quote``, strings are to blame only if no pairs can be made.
    """
    for kind in (quote,) if quote else ('"', "'"):
        counts = [_quotes(line, kind) for line in lines[: None if quote else upto]]
        odd = [number for number, count in enumerate(counts) if count % 2]
        if not odd or len(odd) > _MOST_ODD or (not quote and len(odd) % 2 == 0):
            continue
        if len(odd) % 2 == 0:
            return odd[0] + 1, kind
        blamed = max(range(0, len(odd), 2), key=lambda index: _pairs(lines, counts, odd, index))
        if quote or _pairs(lines, counts, odd, blamed) * 2 == len(odd) - 1:
            return odd[blamed] + 1, kind
    return None


def _pairs(lines: Sequence[str], counts: Sequence[int], odd: Sequence[int], without: int) -> int:
    """Count the pairs of odd lines that look like strings over several lines, without one line."""
    rest = [*odd[:without], *odd[without + 1 :]]
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return sum(
        bool(_OPENS_STRING.search(lines[first].rstrip())) and not any(counts[first + 1 : last])
        for first, last in pairs
    )


def _quotes(line: str, kind: str) -> int:
    """Count the quotes of a kind in a line that are neither escaped, in a comment, nor in the other kind."""
    count, other, index = 0, "", 0
    text = line[:20_000]
    while index < len(text):
        char = text[index]
        if char == "\\" and other != "'":
            index += 1
        elif char == other:
            other = ""
        elif not other and char == kind:
            count += 1
        elif not other and char in "'\"" and count % 2 == 0:
            other = char if text.find(char, index + 1) > 0 else ""
        elif char == "#" and not other and count % 2 == 0 and (index == 0 or text[index - 1] in " \t"):
            break
        index += 1
    return count
