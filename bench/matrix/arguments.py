"""The command line that hands workload options to a job: written into scripts, read back inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.matrix.options import WorkloadOptions

_FLAGS = {name: "--" + name.replace("_", "-") for name in WorkloadOptions.model_fields}


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the arguments that ``python -m bench.workload`` reads back as ``options``.

    Every option is written, also where it has its default: a script says by itself what it
    measures, and a later default cannot change it. What is unset (None) is left out. The
    words are not quoted: whoever writes them into a script does that.

    Args:
        options: resolved workload options by field name, as ``WorkloadOptions.model_dump()``
            gives them; a field that is absent keeps its default.

    Raises:
        KeyError: a name that is no option.
    """
    words: list[str] = []
    for name, value in options.items():
        flag = _FLAGS[name]
        if value is None:
            continue
        text = ("true" if value else "false") if isinstance(value, bool) else str(value)
        # A value that starts with a dash would be read as the next option.
        words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words
