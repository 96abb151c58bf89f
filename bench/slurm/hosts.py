"""Expand Slurm's compressed lists of host names."""

from __future__ import annotations

import re
from functools import lru_cache

#: Longer lists are not expanded: they are mistakes in a script rather than clusters.
_MAX_HOSTS = 20_000


@lru_cache(maxsize=256)
def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts in a Slurm host list such as ``n[01-04,7],login``, or no hosts if it is invalid."""
    hosts: list[str] = []
    if text.count("[") != text.count("]"):
        return ()
    for item in _split_hosts(text):
        expanded = [""]
        for piece in re.split(r"(\[[^\]]*\])", item):
            choices = _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            if not choices or len(expanded) * len(choices) > _MAX_HOSTS:
                return ()
            expanded = [start + choice for start in expanded for choice in choices]
        hosts.extend(expanded)
        if len(hosts) > _MAX_HOSTS or "$" in item or "<" in item or "{" in item:
            return ()
    return tuple(host for host in hosts if host)


def _split_hosts(text: str) -> list[str]:
    return re.findall(r"(?:[^,\[]++|\[[^\]]*+\])++", text[:10_000])


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item.strip())
        if not match:
            return []
        low, high = match.group(1), match.group(2) or match.group(1)
        if int(high) - int(low) >= _MAX_HOSTS:
            return []
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers
