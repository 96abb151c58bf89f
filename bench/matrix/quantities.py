"""What a command's own output may tell, and in which units."""

from __future__ import annotations

from typing import Literal

Quantity = Literal["throughput", "step_time", "loss"]
#: Units of each quantity, the default first.
UNITS: dict[str, tuple[str, ...]] = {
    "throughput": ("samples/s", "it/s"),
    "step_time": ("s", "ms", "us"),
}
