"""Mask values that may be secrets, by the names of options, variables and keys: :data:`NAMES`.

A value follows its name after ``=`` or ``:``, or it is the word after an option. Plain numbers after ``keys``
and ``tokens`` (``--max_tokens 1024``) are shown, and so are values whose names only begin with such a word
(``tokenizer``), and messages of errors (``KeyError: 'lr'``). The user and password in a URL are masked, too.
docs/recorder.md describes the names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

MASK = "***"
#: A name with one of these words belongs to a secret. The words of the first line count anywhere in a name
#: and in any case. No letter in lower case follows those of the second (``api_key``, ``authKey``, but not
#: ``keyboard``). Those of the third are a whole part of the name (``DB_PASS``, ``GH_PAT``, but not ``path``).
NAMES = (
    "secret passw passphrase credential cookie bearer webhook pwd sshpass pgpass authorization",
    "key keys token tokens auth jwt",
    "pass pat",
)


def _pattern(anywhere: str, ends: str, parts: str) -> str:
    written = "|".join(f"{word}|{word.capitalize()}" for word in ends.split())
    upper = "|".join(ends.upper().split())
    whole = "".join(f"|(?<![A-Za-z])(?i:{word})(?![A-Za-z])" for word in parts.split())
    return f"(?:(?i:{'|'.join(anywhere.split())})|(?:{written})(?![a-z])|(?:{upper})(?![A-Za-z]){whole})"


_PRIVATE = _pattern(*NAMES)
#: The end of a name before a colon and a space, which can also follow a word of a sentence.
_PRIVATE_END = (
    rf"(?:(?i:{'|'.join(NAMES[0].split())})\w*|(?:[Tt]oken|[Aa]uth|[Jj]wt|(?<=[\w.-])[Kk]ey)"
    "|TOKEN|AUTH|JWT|(?<=[A-Z0-9_])KEY)"
)
_NAME = rf"[\w.-]{{0,100}}{_PRIVATE}[\w.-]{{0,100}}(?<!Error)(?<!Exception)(?<!Warning)"
#: A value can have a scheme, as in ``Authorization: Bearer abc``.
_VALUE = (
    r"(?:(?i:basic|bearer|digest|token)[ \t]+)?"
    r"""(?:\*\*\*(?=[\s,;&}\])'"]|$)|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s'"]+)"""
)
_PRIVATE_NAME = re.compile(_NAME)
_PRIVATE_OPTION = re.compile(rf"--?{_NAME}")
_SEPARATED = (
    rf"{_NAME}[\"']?[ \t]*=[ \t]*|{_NAME}[\"'][ \t]*:[ \t]*|{_NAME}:(?=\S)"
    rf"|[\w.-]{{0,100}}{_PRIVATE_END}[ \t]*:[ \t]+|(?=[A-Z0-9_]+:){_NAME}:[ \t]+"
)
_NAMED_VALUE = re.compile(rf"(?<![\w.-])({_SEPARATED})({_VALUE})")
_OPTION_AND_VALUE = re.compile(rf"(?<![\w.-])(--?{_NAME}(?:[ \t]+|[\"']?,[ \t]*))(?!-)({_VALUE})")
#: A slash is part of a password only if it does not follow the digits of a port.
_URL_USER = re.compile(r"(?<=://)(?:[^/\s'\"]+|[^/:\s'\"]*:(?!\d*/)[^\s'\"]{1,500})(?=@)")
_PLURAL = re.compile(r"(?i:keys|tokens)(?![A-Za-z])")
_NUMBER = re.compile(r"[0-9][0-9_.,]*[kKMG]?[,\]}]*")
_WORDS = " ".join(NAMES).split()


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command, with ``***`` in place of values that may be secrets."""
    return [
        MASK if before is not None and _is_secret(before, word) else mask_text(word)
        for before, word in zip([None, *words], words, strict=False)
    ]


def shown_command(words: Sequence[str]) -> str:
    """Return a command as it is typed in a shell, with ``***`` in place of values that may be secrets."""
    shown = without_secrets(words)
    unmasked = [re.sub(r"[{}]", "x", word.replace(MASK, "x")) for word in shown]  # no shell reads the braces
    return " ".join(
        word if shlex.quote(plain) == plain else shlex.quote(word)
        for word, plain in zip(shown, unmasked, strict=True)
    )


def is_private(name: str) -> bool:
    """Return whether the value of a variable or an option with this name may be a secret."""
    return _PRIVATE_NAME.fullmatch(name) is not None


def without_secret_variables(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return environment variables or other settings, with ``***`` in place of values that may be secrets."""
    return {name: masked_value(name, value) for name, value in env.items()}


def masked_value(name: str, value: Any) -> Any:
    """Return the value of a variable or a key, or ``***`` if it may be a secret."""
    if is_private(name) and not _is_count(name, str(value)):
        return MASK
    if isinstance(value, list):
        return [mask_text(item) if isinstance(item, str) else item for item in value]
    return mask_text(value) if isinstance(value, str) else value


def cell_without_secrets(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell as JSON, with ``***`` in place of secrets in its commands and its variables.

    A section without secrets is not copied, so that cells can still share it.
    """
    shown = dict(cell)
    for section in ("env", "swept"):
        if section in cell and (masked := without_secret_variables(cell[section])) != cell[section]:
            shown[section] = masked
    for section in ("workload", "swept"):
        words = cell.get(section, {}).get("command")
        if isinstance(words, list) and without_secrets(words) != words:
            shown[section] = {**shown[section], "command": without_secrets(words)}
    return shown


@lru_cache(maxsize=2000)
def mask_text(text: str) -> str:
    """Return ``text`` with ``***`` in place of values that may be secrets."""
    lower = text.lower()
    if any(word in lower for word in _WORDS):  # the expressions are slow
        for pattern in (_NAMED_VALUE, _OPTION_AND_VALUE):
            text = pattern.sub(_masked, text)
    return _URL_USER.sub(MASK, text) if "://" in text else text


def mask_texts(content: Any) -> Any:
    """Return JSON content with ``***`` in place of values in its texts that may be secrets."""
    if isinstance(content, str):
        return mask_text(content)
    if isinstance(content, Mapping):
        return {name: mask_texts(value) for name, value in content.items()}
    return [mask_texts(value) for value in content] if isinstance(content, list | tuple) else content


def _masked(found: re.Match[str]) -> str:
    return found[0] if _is_count(found[1], found[2]) else f"{found[1]}{MASK}"


def _is_secret(before: str, word: str) -> bool:
    """Return whether ``word`` is a secret: the value of ``before``, an option such as ``--token``."""
    is_private = _PRIVATE_OPTION.fullmatch(before) is not None and not word.startswith("-")
    return is_private and not _is_count(before, word)


def _is_count(name: str, value: str) -> bool:
    return _PLURAL.search(name) is not None and _NUMBER.fullmatch(value.strip("'\"")) is not None
