"""Fewer of many, spread evenly: what a figure, a legend or a sample has room for."""

from __future__ import annotations

import numpy as np


def spread(length: int, most: int) -> list[int]:
    """Return the places of at most ``most`` of ``length`` things, the first and the last among them."""
    places = np.linspace(0, length - 1, min(most, length)).round().astype(int)
    return [int(place) for place in np.unique(places)]
