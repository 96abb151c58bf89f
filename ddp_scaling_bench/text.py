"""Text for a terminal or a log, without control characters.

Texts of jobs, logs, files and arguments can contain control sequences, which would change the terminal.
"""

from __future__ import annotations

import re
import unicodedata

#: ECMA-48, section 5.4 (control sequences) and 5.6 (control strings), with 7-bit and 8-bit introducers.
_SEQUENCES = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"
    "|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x00-\x1f\x80-\x9f]*(?:\x07|\x1b\\\\|\x9c)"
    "|\x1b[ -/]*[0-~]"
)


def printable(text: str) -> str:
    """Remove escape sequences, and all characters that a terminal does not print; keep tabs and newlines."""
    if text.isprintable():
        return text
    return "".join(filter(_is_shown, _SEQUENCES.sub("", text)))


def one_line(text: str) -> str:
    """Return ``text`` on one line and without the characters that :func:`printable` removes."""
    return " ".join(printable(text.replace("\r", "\n")).split("\n"))


def _is_shown(letter: str) -> bool:
    return letter in "\n\t" or letter.isprintable() or unicodedata.category(letter) == "Zs"
