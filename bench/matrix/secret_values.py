"""Mask values that may be secrets, by words in their names: key, token, secret, password, credential, auth.

A value follows its name after ``=`` or ``:``, or it is the word after an option. Plain numbers after ``keys``
and ``tokens`` (``--max_tokens 1024``) are shown, and so are values whose names only begin with such a word
(``tokenizer``). The user and password in a URL are masked, too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MASK = "***"
_PRIVATE = (
    r"(?:(?i:secret|passw|passphrase|credential)|(?:[Kk]ey|[Tt]oken)s?(?![a-z])|(?:KEY|TOKEN)S?(?![A-Za-z])"
    r"|(?:[Aa]uth|AUTH|_PASS)(?![A-Za-z]))"
)
_NAME = rf"[\w.-]{{0,100}}{_PRIVATE}[\w.-]{{0,100}}"
_VALUE = r""""(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s'"]+"""
_PRIVATE_NAME = re.compile(_NAME)
_PRIVATE_OPTION = re.compile(rf"--?{_NAME}")
_NAMED_VALUE = re.compile(rf"(?<![\w.-])({_NAME}[\"']?[ \t]*[=:][ \t]*)({_VALUE})")
_OPTION_AND_VALUE = re.compile(rf"(?<![\w.-])(--?{_NAME}(?:[ \t]+|[\"']?,[ \t]*))(?!-)({_VALUE})")
_URL_USER = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")
_PLURAL = re.compile(r"(?i:keys|tokens)(?![A-Za-z])")
_NUMBER = re.compile(r"[0-9][0-9_.,]*[kKMG]?[,\]}]*")
#: Shorter secrets are not searched for in a text: such words also occur with other meanings.
_SHORTEST = 4


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
    return {name: _shown(name, value) for name, value in env.items()}


def _shown(name: str, value: Any) -> Any:
    if is_private(name) and not _is_count(name, str(value)):
        return MASK
    if isinstance(value, list):
        return [mask_text(item) if isinstance(item, str) else item for item in value]
    return mask_text(value) if isinstance(value, str) else value


def cell_without_secrets(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell as JSON, with ``***`` in place of secrets in its commands and its variables."""
    shown = dict(cell)
    if "env" in cell:
        shown["env"] = without_secret_variables(cell["env"])
    for section in ("workload", "swept"):
        words = cell.get(section, {}).get("command")
        if isinstance(words, list):
            shown[section] = {**cell[section], "command": without_secrets(words)}
    return shown


def secrets_in(words: Iterable[str], env: Mapping[str, str]) -> set[str]:
    """Return the words of a command and the values of environment variables that may be secrets."""
    words = list(words)
    pairs = [*zip(words, without_secrets(words), strict=True)]
    pairs += [*zip(env.values(), without_secret_variables(env).values(), strict=True)]
    return {value for value, shown in pairs if shown == MASK}


def mask_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return ``text`` with ``***`` in place of ``secrets`` and of other values that may be secrets."""
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, MASK)
    for pattern in (_NAMED_VALUE, _OPTION_AND_VALUE):
        text = pattern.sub(_masked, text)
    return _URL_USER.sub(MASK, text)


def _masked(found: re.Match[str]) -> str:
    return found[0] if _is_count(found[1], found[2]) else f"{found[1]}{MASK}"


def _is_secret(before: str, word: str) -> bool:
    """Return whether ``word`` is a secret: the value of ``before``, an option such as ``--token``."""
    is_private = _PRIVATE_OPTION.fullmatch(before) is not None and not word.startswith("-")
    return is_private and not _is_count(before, word)


def _is_count(name: str, value: str) -> bool:
    return _PLURAL.search(name) is not None and _NUMBER.fullmatch(value.strip("'\"")) is not None
