"""Time the exchange of messages between adjacent nodes, so that one slow node or link can be named.

An all-reduce over a ring is as fast as its slowest link, and does not show which one that is. Here, the first
rank of each node exchanges messages with those of the next and the previous node, in both directions at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench.measure.exchange import Collectives
from bench.measure.pairs import exchange_steps

_REPEATS = 3
#: Time of one exchange on the slowest link, and bounds of the message: a smaller one would measure the credit
#: of a traffic shaper.
_EXCHANGE_S = 0.1
_MIN_BYTES, _MAX_BYTES = 2**20, 64 * 2**20


def neighbour_steps(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pair each rank with the next one, and the last with the first one; a rank is in one pair per step."""
    count = len(ranks)
    pairs = [(ranks[place], ranks[(place + 1) % count]) for place in range(count if count > 2 else count - 1)]
    steps = [pairs[0::2], pairs[1::2]]
    if count > 2 and count % 2:
        steps.append([steps[0].pop()])  # the last pair and the first one share a rank
    return [step for step in steps if step]


def exchange_with_neighbours(
    collectives: Collectives,
    nodes: Mapping[int, str],
    device: torch.device,
    *,
    bytes_per_s: float,
    budget_s: float,
) -> dict[str, Any]:
    """Return the value of ``neighbours`` in probes.json; all ranks must call this function.

    Args:
        collectives: exchanges the results.
        nodes: the name of each node by its first rank, which exchanges the messages.
        device: the device of the messages.
        bytes_per_s: the expected rate of the slowest link.
        budget_s: the time after which no exchange begins.
    """
    began = time.monotonic()
    size = max(_MIN_BYTES, min(_MAX_BYTES, round(bytes_per_s * _EXCHANGE_S)))
    own: list[dict[int, float]] = []
    if collectives.rank in nodes:
        steps = neighbour_steps(sorted(nodes))
        for _ in range(_REPEATS):
            deadline = began + budget_s
            own.append(exchange_steps(steps, collectives.rank, device, count=size, deadline=deadline))
    rates: dict[tuple[str, str], list[float]] = {}
    for receiver, repeats in enumerate(collectives.objects(own)):
        for sender, rate in (pair for received in repeats for pair in received.items()):
            rates.setdefault((nodes[sender], nodes[receiver]), []).append(rate)
    pairs = [
        {"sender": sender, "receiver": receiver, "bytes_per_s": found}
        for (sender, receiver), found in rates.items()
    ]
    return {"bytes": size, "seconds": time.monotonic() - began, "pairs": pairs}
