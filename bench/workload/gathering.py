"""All ranks' records of an epoch, gathered over the process group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple

from bench.measurement.parts import PART_FIELDS, StepParts, mean_parts
from bench.measurement.resources import Usage
from bench.measurement.results import RankRecord
from bench.workload.collectives import Collectives
from bench.workload.windows import Throughput


def gather_ranks(
    collectives: Collectives,
    throughput: Throughput,
    attribution: Sequence[StepParts],
    *,
    peak_mem_bytes: float,
) -> list[RankRecord]:
    """Return the record of every rank, on every rank."""
    usage = throughput.usage
    row = [throughput.seconds, throughput.loss, peak_mem_bytes]
    row += [math.nan if value is None else value for value in astuple(usage)]
    if attribution:
        # Wait per step first, then the mean: the rank that waits least changes from step to step.
        exposed = [parts.exposed_s for parts in attribution]
        least = collectives.minima(exposed)
        wait = sum(own - low for own, low in zip(exposed, least, strict=True)) / len(exposed)
        row += [*astuple(mean_parts(list(attribution))), wait]
    return [_record(values, attributed=bool(attribution)) for values in collectives.rows(row)]


def _record(values: Sequence[float], *, attributed: bool) -> RankRecord:
    window_s, loss, peak = values[:3]
    usage = Usage(*(None if math.isnan(value) else value for value in values[3:6]))
    if not attributed:
        return RankRecord(window_s, loss, peak, usage, None, None)
    return RankRecord(window_s, loss, peak, usage, StepParts(*values[6 : 6 + len(PART_FIELDS)]), values[-1])
