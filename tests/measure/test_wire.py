"""Wire bytes: the prediction for a placement of ranks, and its comparison with the counters."""

import math
from dataclasses import replace
from typing import Any

import pytest

from ddp_scaling_bench.measure import wire as wire_module
from ddp_scaling_bench.measure.wire import Messages, Placement, WireBytes

SIZES = [8_000_000, 4_000_000]
REDUCE, SCATTER, CAST = (Messages(name, SIZES) for name in ("all_reduce", "reduce_scatter", "broadcast"))
GATHER = Messages("all_gather", SIZES, in_each_micro_batch=True)
#: Of the shards of two ranks on each node.
ACROSS = Messages("all_reduce", [6_000_000], (0, 2))
WITHIN = replace(GATHER, group=(0, 1))


@pytest.mark.parametrize(
    ("hosts", "backend", "message", "expected"),
    [
        ("a b", "gloo", REDUCE, 2 * 12e6),
        ("a b c", "nccl", REDUCE, 4 * 12e6),
        ("a b c", "gloo", GATHER, 2 * 12e6),
        ("a b c", "nccl", SCATTER, 2 * 12e6),
        ("a b c", "gloo", SCATTER, 4 * 12e6),
        ("a b c", "gloo", CAST, 2 * 12e6),
        ("a a a", "gloo", REDUCE, 4 * 12e6),  # over the loopback interface
        ("a a b b", "gloo", REDUCE, 2 * 3 * 12e6 * 2 / 4),  # two of four links leave a node
        ("a b a b", "gloo", REDUCE, 2 * 3 * 12e6),
        ("a a b b", "gloo", ACROSS, 2 * 12e6),
        ("a a b b c c", "nccl", replace(ACROSS, group=(0, 2, 4)), 4 * 12e6),
        ("a a b b", "nccl", WITHIN, 0),
        ("a a", "gloo", WITHIN, 12e6),
    ],
)
def test_bytes_that_all_nodes_send_for_messages(monkeypatch, hosts, backend, message, expected):
    monkeypatch.setattr(wire_module, "get_process_group_ranks", lambda group: group)
    place, times = Placement(hosts.split(), backend, {}), 3 if message.in_each_micro_batch else 1
    assert place.sent_bytes([message, message], syncs=1, micro_batches=3) == 2 * times * expected


@pytest.mark.parametrize(
    ("hosts", "backend", "algorithm", "message", "reason"),
    [
        ("a", "gloo", "", REDUCE, "a single rank does not communicate"),
        ("a a", "nccl", "", REDUCE, "NCCL uses memory within a node, which no interface counts"),
        ("a b", "mpi", "", REDUCE, "the algorithms of backend mpi are unknown"),
        ("a b", "nccl", "^Ring", REDUCE, "NCCL may use other algorithms than rings and trees"),
        ("a b", "nccl", "NVLSTree", REDUCE, "NCCL may use other algorithms than rings and trees"),
        ("a a b b", "nccl", "NVLS", WITHIN, "NCCL may use other algorithms than rings and trees"),
        (
            *("a a b b", "nccl", "", REDUCE),
            "with several ranks per node, NCCL's rings and trees send different bytes",
        ),
        ("a a b b", "gloo", "", CAST, "with several ranks per node, the order of a broadcast is unknown"),
        ("a b", "gloo", "", None, "the messages of the strategy are unknown"),
        ("a b", "gloo", "", GATHER, "the number of micro-batches is unknown"),
    ],
)
def test_without_a_certain_way_of_the_bytes_there_is_a_reason(hosts, backend, algorithm, message, reason):
    place = Placement(hosts.split(), backend, {"NCCL_ALGO": algorithm})
    wire = WireBytes(lambda: message and [message], place)
    unsampled = {"node": None, "rank": {"sync_passes": 1}}
    assert math.isnan(wire.columns([unsampled], 1, None)["wire_bytes_predicted_per_step"])
    assert wire.as_json()["predicted_empty_because"] == reason


def test_a_chosen_ring_of_nccl_leaves_each_node_once():
    place = Placement(["a", "b", "a", "b"], "nccl", {"NCCL_ALGO": "Ring"})
    assert place.sent_bytes([REDUCE], syncs=1, micro_batches=None) == 2 * 3 * 12e6 * 2 / 4


def parts(*link_bytes: float | None, steps: int = 5, sync_passes: int | None = None) -> list[Any]:
    """Return what the ranks of nodes a, b, ... sampled."""
    sent = [{"link_bytes": size, "unknown_because": size is None and "why"} for size in link_bytes]
    nodes = [{"node": name, "net": {"sent": own}} for name, own in zip("abcd", sent, strict=False)]
    return [{"steps": steps, "node": node, "rank": {"sync_passes": sync_passes}} for node in nodes]


def on_two_nodes(size: float = 12e6) -> WireBytes:
    return WireBytes(lambda: [Messages("all_reduce", [int(size)])], Placement(["a", "b"], "gloo", {}))


@pytest.mark.parametrize(
    ("factor", "size", "kind"),
    [
        (1.0, 12e6, None),
        (1.29, 12e6, None),
        (1.5, 12e6, "wire-bytes-high"),
        (1.5, 3e6, None),
        (0.6, 12e6, "wire-bytes-unseen"),
    ],
)
def test_bytes_far_from_the_prediction_are_a_fact_above_four_megabytes(factor, size, kind):
    wire = on_two_nodes(size)
    # The counters enclose five steps, one more than the window.
    found = wire.columns(parts(5 * factor * size, 5 * factor * size, sync_passes=4), 4, None)
    counted = math.nan if factor < 0.7 else 2 * factor * size
    assert list(found.values()) == pytest.approx([counted, 2 * size], nan_ok=True)
    fact = wire.finding()
    assert (fact and (fact.kind, fact.severity)) == (kind and (kind, "warning"))
    assert (wire.as_json()["counted_empty_because"] is None) == (factor >= 0.7)


@pytest.mark.parametrize(
    ("sampled", "reason"), [(parts(1e6), "not every node was sampled"), (parts(1e6, None), "why")]
)
def test_a_count_that_is_missing_on_a_node_is_empty_with_the_reason(sampled, reason):
    wire = on_two_nodes()
    found = wire.columns(sampled, 5, None)
    assert all(map(math.isnan, found.values()))
    assert wire.as_json() == {
        "counted_empty_because": reason,
        "predicted_empty_because": "the number of backward passes that synchronise gradients is unknown",
    }
