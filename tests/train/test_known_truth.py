"""Waits for collectives that are planted in forward, in backward and at the end of a step."""

import json

import pytest

from tests.train import planted_waits as waits
from tests.train.conftest import torchrun_env


def number(row: dict[str, str], column: str) -> float:
    return float(row[column])


@pytest.fixture(scope="module")
def planted(server, tmp_path_factory):
    """The parts of the steps of trainings with collectives of known time."""
    folder = tmp_path_factory.mktemp("planted")
    target = "tests.train.planted_waits:run"
    server.start(folder, torchrun_env(2), target).finish().succeeded()
    return json.loads((folder / "parts.json").read_text())


#: By training, the number of its collectives in forward, in backward and at its end: all-gathers,
#: reduce-scatters, all-reduces and broadcasts.
PLANTED = {
    "fsdp": ((3, 0, 0, 0), (2, 2, 0, 0), (0, 1, 0, 0)),
    "fsdp, accumulated": ((6, 0, 0, 0), (4, 2, 0, 0), (0, 1, 0, 0)),
    "replicas": ((0, 0, 0, 0), (0, 0, 2, 0), (0, 0, 1, 0)),
    "zero1": ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)),
}


@pytest.mark.parametrize("training", PLANTED)
def test_a_planted_wait_is_found_in_its_place(planted, training):
    if training != "zero1" and not waits.TIMES_FSDP:
        pytest.skip("FSDP2 is not timed with this torch")
    steps, naps = planted[training], 2 if "accumulated" in training else 1
    seconds = (waits.GATHER_S, waits.SCATTER_S, waits.REDUCE_S, waits.BROADCAST_S)
    for place, counts in zip(("forward", "backward", "end"), PLANTED[training], strict=True):
        expected = sum(count * one for count, one in zip(counts, seconds, strict=True))
        pairs = [(step[f"comm_{place}_s"], step["truth"][place]) for step in steps]
        assert all(truth >= expected for _, truth in pairs)
        assert all(found >= expected for found, _ in pairs), (place, pairs)
    for part, one in (("forward", waits.FORWARD_S), ("backward", waits.BACKWARD_S)):
        slept, found = naps * waits.BLOCKS * one, min(step[f"{part}_s"] for step in steps)
        assert slept <= found, (part, found)
