"""The verdict of `bench preflight` on rows of nodecheck."""

from pathlib import Path

import pytest

from bench.preflight import UndecidedError, Verdict, judge, read_measurements
from ddp_scaling_bench.train.nodecheck import COLUMNS


def verdict(folder: Path, *rows: str, threshold: float = 0.9) -> Verdict:
    """Judge rows ``pass check node rank partner value reason``; a dash is an empty cell."""
    file = folder / "rows.csv"
    lines = [",".join("" if word == "-" else word for word in row.split(" ", 6)) for row in rows]
    file.write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")
    return judge(read_measurements(file), threshold=threshold)


def computed(nodes: int, *, times: int = 2, **other: float) -> list[str]:
    rows = [(which, f"n{node}") for which in range(1, times + 1) for node in range(1, nodes + 1)]
    return [f"{which} compute {node} 0 - {other.get(node, 1e12)} -" for which, node in rows]


def exchanged(rate: float, *pairs: str, which: int = 1) -> list[str]:
    return [f"{which} exchange n{pair[0]} 0 n{pair[1]} {rate} -" for pair in pairs]


def test_a_slow_node_is_unfit_and_the_better_of_two_measurements_counts(tmp_path):
    found = verdict(tmp_path, *computed(4, n2=8e11))
    assert found.unfit == ["n2"]
    assert list(found.findings()) == ["n2 is unfit: compute 800 GFLOP/s (80 %) of 1 TFLOP/s"]
    busy = [row.replace("1 compute n2 0 - 1000000000000.0", "1 compute n2 0 - 1e11") for row in computed(3)]
    assert not verdict(tmp_path, *busy).unfit


def test_a_node_that_is_slow_with_every_partner_is_unfit_and_else_the_link_is_slow(tmp_path):
    found = verdict(tmp_path, *exchanged(1e9, "12", "14", "24"), *exchanged(5e8, "13", "23", "34"))
    assert (found.unfit, found.links, found.pairs) == (["n3"], [], 6)
    found = verdict(tmp_path, *exchanged(1e9, "12", "13", "24", "34", "14"), *exchanged(5e8, "23"))
    assert (found.unfit, list(found.findings())) == (
        [],
        [
            "the link between n2 and n3 is slow: 500 MB/s, with others at least 1 GB/s; avoid one of these nodes"
        ],
    )
    once = [*exchanged(5e8, "23"), *exchanged(1e9, "12", "13"), *exchanged(1e9, "23", which=2)]
    assert not list(verdict(tmp_path, *once).findings())


def test_a_pair_that_hangs_is_a_broken_link_unless_its_node_reaches_no_other(tmp_path):
    hung = [f"1 exchange n{a} 0 n{b} - no answer in 30 s" for a, b in ("12", "23")]
    (link,) = verdict(tmp_path, *exchanged(1e9, "13", "34"), *hung[:1], *exchanged(1e9, "23")).links
    assert str(link) == "n1 and n2 exchanged no messages: no answer in 30 s; avoid one of these nodes"
    found = verdict(tmp_path, *computed(4), *exchanged(1e9, "13", "34"), *hung)
    assert (found.unfit, found.links) == (["n2"], [])
    assert list(found.findings()) == [
        "n2 is unfit: it exchanged messages with no other node: no answer in 30 s"
    ]


def test_a_device_that_fails_twice_and_a_rank_that_is_silent_make_their_nodes_unfit(tmp_path):
    rows = [f"{which} compute n1 3 - - RuntimeError: CUDA error" for which in (1, 2)]
    silent = ["1 answered n2 0 - 1 -", "1 answered n2 0 - - rank 4 stopped answering"]
    found = verdict(tmp_path, *computed(5), *rows, *silent)
    assert list(found.findings()) == [
        "n1 is unfit: rank 3 could not be measured (compute): RuntimeError: CUDA error",
        "n2 is unfit: rank 0 could not be measured (answered): rank 4 stopped answering",
    ]


def test_two_nodes_and_unmeasured_pairs_are_limits_of_the_result(tmp_path):
    (two,) = verdict(tmp_path, *exchanged(1e9, "12")).limits()
    assert two == "two nodes: the rate of their exchange cannot be compared with that of other pairs"
    (some,) = verdict(tmp_path, *exchanged(1e9, "12", "23")).limits()
    assert some == "2 of 3 pairs of nodes exchanged messages; the links between the other pairs are unknown"


def test_a_verdict_needs_most_of_the_nodes_and_a_readable_file(tmp_path):
    absent = [f"1 answered n{node} {node} - - rank {node} did not join" for node in (2, 3)]
    with pytest.raises(UndecidedError, match="2 of 3 nodes could not be measured: rank 2 did not join"):
        verdict(tmp_path, *computed(1), *absent)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UndecidedError, match="no measurements can be read"):
        read_measurements(tmp_path / "other.csv")
