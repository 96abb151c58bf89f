"""Whether the step time was stable at the end of the warm-up."""

from __future__ import annotations

import pytest

from bench.measure.results import is_stable

# The first two steps never count.
START_S = [9.0, 5.0]


@pytest.mark.parametrize(
    ("step_s", "prepares", "stable"),
    [
        ([1.0, 1.05], False, True),
        ([1.0, 1.2], False, False),
        ([1.0, 1.0, 3.0], False, False),
        ([1.0, 1.0, 3.0], True, True),  # the final step contains the writing of files
        ([1.0, 1.2, 1.2], True, False),
        ([1.0, 3.0], True, False),  # without the final step, a single one would remain
        ([1.0], False, False),
    ],
)
def test_the_halves_after_two_steps_agree_within_a_tenth(
    step_s: list[float], prepares: bool, stable: bool
) -> None:
    assert is_stable(START_S + step_s, prepares=prepares) is stable
