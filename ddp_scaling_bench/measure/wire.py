"""The bytes that all nodes send in a step: predicted from the strategy's messages, and counted by the kernel.

A collective of S bytes over a ring of N ranks makes each rank send (N − 1)/N · S bytes, and an all-reduce
twice as many. Sources: nccl-tests, doc/PERFORMANCE.md; gloo/allreduce.cc and allgather.cc. gloo's
reduce-scatter is an all-reduce of which each rank keeps a slice (torch's ProcessGroupGloo.cpp). Headers and
acknowledgements are not predicted.

gloo's ring follows the order of the ranks, so as many of its N links leave a node as neighbours are on
different nodes. With one rank per node, a tree sends as many bytes in all as a ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch.distributed import ProcessGroup, get_process_group_ranks

from .findings import WireBytesHigh, WireBytesUnseen

#: Bytes that each rank of a ring sends, in units of (N − 1)/N times the size of the message.
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
#: Ratios of counted to predicted bytes between which the count is plausible.
LOWEST, HIGHEST = 0.7, 1.3
#: If a node sends fewer bytes per step, headers and other traffic of the job count too much for a finding.
LEAST_BYTES = 4e6


@dataclass(frozen=True)
class Messages:
    """The messages of one collective in a step.

    Attributes:
        collective: a key of :data:`ROUNDS`.
        bytes: the size of each message: that of the gathered tensor, or of the tensor before it is scattered.
        group: the ranks that exchange them, one of several groups of equal size; None means all ranks.
        in_each_micro_batch: False if only backward passes that synchronise gradients send them.
    """

    collective: str
    bytes: Sequence[int]
    group: ProcessGroup | None = None
    in_each_micro_batch: bool = False


class UnknownError(Exception):
    """A number of bytes is unknown; the text is the reason."""


@dataclass(frozen=True)
class Placement:
    """The host of each rank, the backend, and the variables that choose NCCL's algorithms."""

    hosts: Sequence[str]
    backend: str
    env: Mapping[str, str]

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(set(self.hosts))

    @property
    def counter(self) -> str:
        """The count in conditions.json with the bytes between the ranks; UnknownError if none has them."""
        if len(self.hosts) == 1:
            raise UnknownError("a single rank does not communicate")
        if self.nodes == 1 and self.backend == "nccl":
            raise UnknownError("NCCL uses memory within a node, which no interface counts")
        return "link_bytes" if self.nodes > 1 else "loopback_bytes"

    def sent_bytes(self, messages: Sequence[Messages], *, syncs: float, micro_batches: float | None) -> float:
        """Return the bytes that all nodes send in a step, on one node those of its loopback interface.

        ``syncs`` backward passes of a step synchronise gradients; ``micro_batches`` is None if unknown.

        Raises:
            UnknownError: the way of the bytes, or the number of messages, is unknown.
        """
        if self.backend not in ("gloo", "nccl"):
            raise UnknownError(f"the algorithms of backend {self.backend} are unknown")
        is_other = self._algorithm() not in ("", "ring", "tree") or self.env.get("NCCL_COLLNET_ENABLE") == "1"
        if self.backend == "nccl" and is_other:
            raise UnknownError("NCCL may use other algorithms than rings and trees")
        if micro_batches is None and any(one.in_each_micro_batch for one in messages):
            raise UnknownError("the number of micro-batches is unknown")
        counts = {True: micro_batches or 0, False: syncs}
        return sum(counts[one.in_each_micro_batch] * self._sent(one) for one in messages)

    def _algorithm(self) -> str:
        return self.env.get("NCCL_ALGO", "").lower()

    def _sent(self, messages: Messages) -> float:
        """Return the bytes that all groups send for each message once."""
        group, collective = messages.group, messages.collective
        hosts = self.hosts if group is None else [self.hosts[one] for one in get_process_group_ranks(group)]
        if self.nodes > 1 and len({*hosts}) == 1:
            return 0.0
        reduces_all = collective == "reduce_scatter" and self.backend == "gloo"
        factor = ROUNDS["all_reduce" if reduces_all else collective] * (len(hosts) - 1) / len(hosts)
        return len(self.hosts) / len(hosts) * factor * sum(messages.bytes) * self._leaving(hosts, collective)

    def _leaving(self, hosts: Sequence[str], collective: str) -> int:
        """Return how many links of a ring leave a node, or on one node use its loopback interface."""
        ranks, nodes = len(hosts), len({*hosts})
        if self.backend == "nccl" and nodes < ranks and self._algorithm() != "ring":
            raise UnknownError("with several ranks per node, NCCL's rings and trees send different bytes")
        if nodes in (1, ranks):
            return ranks
        if collective == "broadcast":
            raise UnknownError("with several ranks per node, the order of a broadcast is unknown")
        if self.backend == "nccl":
            return nodes
        return sum(own != other for own, other in zip(hosts, [*hosts[1:], hosts[0]], strict=True))


class WireBytes:
    """The wire bytes of a run, as columns of metrics.csv, and what they reveal.

    ``messages`` returns what a step sends, or None if that is unknown. ``place`` are the ranks and backend.
    """

    def __init__(self, messages: Callable[[], list[Messages] | None], place: Placement) -> None:
        self._messages, self._place = messages, place
        self._ratios: list[float] = []
        self._unknown: dict[str, str | None] = {}
        #: Bytes that all nodes sent per step of the last window, or NaN if no counter has them.
        self.sent_bytes = math.nan

    def columns(self, parts: Sequence[Any], steps: int, micro_batches: float | None) -> dict[str, float]:
        """Return the columns of a throughput window of ``steps`` steps.

        ``parts`` contains each rank's result of
        :meth:`ddp_scaling_bench.measure.conditions.Conditions.stop`, or None.
        """
        counted = self.sent_bytes = self._known("counted", lambda: self._count(parts))
        predicted = self._known("predicted", lambda: self._predict(parts, steps, micro_batches))
        ratio = counted / predicted if predicted else math.nan
        if predicted >= LEAST_BYTES * self._place.nodes and math.isfinite(ratio):
            self._ratios.append(ratio)
        if ratio < LOWEST:
            counted, self._unknown["counted"] = math.nan, "the counters do not see the predicted bytes"
        return {"wire_bytes_per_step": counted, "wire_bytes_predicted_per_step": predicted}

    def finding(self) -> WireBytesHigh | WireBytesUnseen | None:
        """Return a finding if the bytes that were counted differ much from those that were predicted."""
        ratio = round(median(self._ratios), 2) if self._ratios else 1.0
        if ratio < LOWEST:
            return WireBytesUnseen(share=ratio)
        return WireBytesHigh(ratio=ratio) if ratio > HIGHEST else None

    def as_json(self) -> dict[str, str | None]:
        """Return ``wire_bytes`` of env.json: the reasons why the columns are empty in the last window."""
        return {f"{name}_empty_because": reason for name, reason in self._unknown.items()}

    def _known(self, name: str, compute: Callable[[], float]) -> float:
        try:
            self._place.counter  # noqa: B018 (bytes that no interface counts are not predicted either)
            found, self._unknown[name] = compute(), None
        except UnknownError as error:
            found, self._unknown[name] = math.nan, str(error)
        return found

    def _count(self, parts: Sequence[Any]) -> float:
        """Return the bytes that all nodes sent per step."""
        samples = {part["node"]["node"]: part for part in parts if part and part["node"]}
        if len(samples) < self._place.nodes:
            raise UnknownError("not every node was sampled")
        sent = [(part["node"]["net"]["sent"], part["steps"]) for part in samples.values()]
        for one, _ in sent:
            if one[self._place.counter] is None:
                raise UnknownError(one["unknown_because"] or "the loopback interface is not counted")
        return float(sum(one[self._place.counter] / steps for one, steps in sent))

    def _predict(self, parts: Sequence[Any], steps: int, micro_batches: float | None) -> float:
        """Return the bytes that all nodes need to send per step."""
        syncs = None if parts[0] is None else parts[0]["rank"]["sync_passes"]
        if syncs is None:
            raise UnknownError("the number of backward passes that synchronise gradients is unknown")
        if (messages := self._messages()) is None:
            raise UnknownError("the messages of the strategy are unknown")
        return self._place.sent_bytes(messages, syncs=syncs / steps, micro_batches=micro_batches)
