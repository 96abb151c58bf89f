"""Decide whether the ranks of a run train together, or each rank trains a model of its own.

Ranks that exchange gradients move their parameters equally, although their data differ. Each rank therefore
samples some parameters before the first step and after each throughput window, and rank 0 compares the moves.
Values are not compared, because a training can begin with different ones. Sharded parameters cannot be
compared; the strategy or the bytes on the wire can decide.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..measure.exchange import StoreExchange
from ..measure.findings import SeparateTrainings
from ..measure.results import Window
from ..measure.torch_internals import is_whole
from ..train.strategies import Parts
from ..train.strategies.ddp import DdpParts

#: Number of sampled parameters, of elements of each, of tensors of a batch, and of elements of each of these.
_PARAMETERS, _ELEMENTS, _TENSORS, _POINTS = 16, 4, 8, 256
#: Moves are equal if they differ by at most this share of them, and different if by more than the second one.
_EQUAL, _DIFFERENT = 0.001, 0.01
#: A smaller share of its value by which a parameter moves is rounding.
_LEAST_MOVE = 1e-6
#: Moves in proportion to the values, within this share, are those of weight decay alone.
_DECAY_WITHIN = 0.05
#: Losses of ranks with equal data differ by at most this share.
_SAME_LOSS = 1e-4
#: Sent bytes, as a share of the least that an exchange needs: less shows that there is none.
_UNUSED = 0.01
#: Bytes that a rank sends per step if it sends more than numbers for a log, such as a part of a model does.
_MORE_THAN_LOGS = 8192
#: Errors of tensors of other libraries, whose elements cannot be read.
_UNREADABLE = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)

#: The values of the elements of each sampled parameter.
Values = list[list[float]]


class ReplicaSampler:
    """Read some elements of some trainable parameters of ``model``, which may be None."""

    def __init__(self, model: nn.Module | None) -> None:
        trained = [] if model is None else [one for one in model.parameters() if one.requires_grad]
        whole = [one for one in trained if is_whole(one) and one.is_floating_point()]
        places = {place * len(whole) // _PARAMETERS for place in range(_PARAMETERS)}
        #: A checksum of the shapes of all trainable parameters.
        self.shapes = zlib.crc32(repr([tuple(one.shape) for one in trained]).encode())
        self._sampled = [one for place, one in enumerate(whole) if place in places]

    def values(self) -> Values:
        """Return the present values; empty if they cannot be read."""
        with suppress(*_UNREADABLE), torch.no_grad():
            return [_elements(one.detach()) for one in self._sampled]
        return []


def _elements(tensor: Tensor) -> list[float]:
    places = [(2 * number + 1) * tensor.numel() // (2 * _ELEMENTS) for number in range(_ELEMENTS)]
    indices = torch.tensor(sorted(set(places)), device="cpu")
    values = tensor[torch.unravel_index(indices, tensor.shape)] if tensor.dim() else tensor.reshape(1)
    return [float(one) for one in values.tolist()]


def digest(batch: Any) -> int | None:
    """Return a checksum of elements of a batch's tensors, or None if it has none that can be read."""
    with suppress(*_UNREADABLE), torch.no_grad():
        flat = [one.detach().reshape(-1) for one in islice(_tensors(batch), _TENSORS)]
        points = [one[:: max(1, len(one) // _POINTS)].tolist() for one in flat]
        return zlib.crc32(repr(points).encode()) if points else None
    return None


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (list, tuple, Mapping)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


def compare_moves(starts: Sequence[Values], ends: Sequence[Values]) -> tuple[float, bool] | None:
    """Compare the moves of all ranks' parameters; None if nothing moved, or the ranks have other parameters.

    Returns:
        The median spread over the ranks, as a share of the move, and whether any parameter moved equally.
    """
    if len({tuple(map(len, values)) for values in (*starts, *ends)}) > 1:
        return None
    spreads: list[float] = []
    has_equal = False
    for start, end in zip(zip(*starts, strict=True), zip(*ends, strict=True), strict=True):  # one parameter
        own, shares = [], []
        for begins, now in zip(zip(*start, strict=True), zip(*end, strict=True), strict=True):
            moves = [after - before for before, after in zip(begins, now, strict=True)]
            size = max(map(abs, moves))
            if _LEAST_MOVE * abs(begins[0]) < size < math.inf:
                own.append((max(moves) - min(moves)) / size)
                shares.append(moves[0] / begins[0] if begins[0] else math.nan)
        is_equal = bool(own) and max(own) <= _EQUAL
        if is_equal and len(own) > 1 and max(shares) - min(shares) <= _DECAY_WITHIN * abs(shares[0]):
            continue  # weight decay moves a parameter without gradients equally on all ranks
        has_equal |= is_equal
        spreads += own
    return (median(spreads), has_equal) if spreads else None


def _exchanging_ranks(parts: Parts) -> int | None:
    """Return the number of ranks among which a strategy exchanges gradients, or None if it is unknown."""
    group = getattr(parts.model, "process_group", None) if isinstance(parts, DdpParts) else None
    groups = {group} if group else {one.group for one in parts.messages() or () if one.group}
    return math.prod(one.size() for one in groups) if groups else None


class Verdict(NamedTuple):
    """Whether the ranks train together, None if it is unknown; what shows it, and the finding about it."""

    together: bool | None = None
    by: Literal["parameters", "bytes", "strategy"] | None = None
    finding: SeparateTrainings | None = None


class Replicas:
    """The evidence of all ranks, on rank 0. ``steps`` is the length of a complete window."""

    def __init__(self, exchange: StoreExchange, steps: int) -> None:
        self._exchange, self._steps = exchange, steps
        self._complete: list[int] = []  # the windows that are complete on all ranks
        self._windows = 0
        self._collectives: list[int | None] = []
        self._syncs: list[int] = []
        self._sent: list[float] = []
        self._has_other_losses = False

    def add(self, windows: Sequence[Window], sent_bytes: float) -> None:
        """Add the next window of all ranks; ``sent_bytes`` per step of all nodes are NaN if unknown."""
        self._windows += 1
        if all(len(window.step_s) == self._steps for window in windows):
            self._complete.append(self._windows)
        ranks = [(window.conditions or {}).get("rank", {}) for window in windows]
        self._collectives += [rank.get("collectives") for rank in ranks]
        self._syncs += [passes for rank in ranks[:1] if (passes := rank.get("sync_passes")) is not None]
        self._sent.append(sent_bytes)
        losses = [window.loss for window in windows if window.loss is not None] or [0.0]
        self._has_other_losses |= max(losses) - min(losses) > _SAME_LOSS * abs(max(losses))

    @property
    def has_samples(self) -> bool:
        """Whether all ranks have sent the parameters after the last window."""
        return self._exchange.has_all(f"parameters/{self._windows}")

    def verdict(
        self, parts: Parts, needed_bytes: float, *, is_bare: bool, has_nodes: bool, has_layout: bool = False
    ) -> Verdict:
        """Return what the windows so far show; the first rule that applies decides.

        Args:
            parts: what measures the steps of the strategy.
            needed_bytes: the least bytes per step of an exchange; NaN if unknown, or if nothing counts them.
            is_bare: whether the model is in no wrapper.
            has_nodes: whether these are the bytes between several nodes, where other programs send less.
            has_layout: whether several ranks share a replica: ranks have different parts of the model, which
                can start alike and move apart.
        """
        starts = self._exchange.read_all("parameters/0") or []
        # of a model, such as the stages of a pipeline
        has_parts = has_layout or len({one["shapes"] for one in starts}) > 1
        moves, same_starts = self._moves(starts), all(one == starts[0] for one in starts)
        apart, alike = (moves[0] > _DIFFERENT, moves[0] <= _EQUAL) if moves else (False, False)
        is_mixed = has_parts or (moves is not None and moves[1] and not alike)  # such as experts of one rank
        is_silent = bool(self._collectives) and all(one == 0 for one in self._collectives)
        sent = fmean(self._sent or [math.nan])
        is_heard = sent >= _MORE_THAN_LOGS * self._exchange.world_size and has_nodes
        has_replicas = is_bare or isinstance(parts, DdpParts)
        may_differ = is_mixed or is_heard or not has_replicas
        if moves and apart and (same_starts or is_bare) and not may_differ:
            return _separate(SeparateTrainings(by="parameters", spread=round(moves[0], 6)))
        covers_all = _exchanging_ranks(parts) == self._exchange.world_size
        if covers_all and self._syncs and all(self._syncs):
            return Verdict(True, "strategy")
        first = self._exchange.read_all("inputs")
        other_inputs = self._has_other_losses or (None if first is None else len({*first}) > 1)
        if alike and (other_inputs or (covers_all and not self._syncs)):
            return Verdict(True, "parameters")
        if alike and other_inputs is False and is_silent and not has_layout:
            return _separate(SeparateTrainings(by="copies"))
        is_counted = sent > 0 or is_silent  # else a counter sees nothing at all
        if is_counted and not is_heard and not is_mixed and sent < _UNUSED * needed_bytes:
            return _separate(SeparateTrainings(by="bytes", share=round(sent / needed_bytes, 6)))
        return Verdict()

    def _moves(self, starts: Sequence[Any]) -> tuple[float, bool] | None:
        """Return the moves with the largest spread of all windows."""
        found = []
        for number in self._complete:
            ends = self._exchange.read_all(f"parameters/{number}") or []
            if starts and len({one["steps"] for one in ends}) == 1:
                found.append(compare_moves(*([one["values"] for one in each] for each in (starts, ends))))
        return max((one for one in found if one), default=None)


def _separate(finding: SeparateTrainings) -> Verdict:
    return Verdict(False, "parameters" if finding.by == "copies" else finding.by, finding)
