"""What measures the steps of DDP with ``ZeroRedundancyOptimizer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..facts import Fact
from ..measure.step_parts import StepTimer
from ..measure.torch_internals import observe_parameter_sync
from .strategies.ddp import DdpParts


class Zero1Parts(DdpParts):
    """Add the broadcast of the updated parameters, within the optimizer's step, to the times of DDP."""

    _stop_observing: Callable[[], None] | None = None

    def start(self, timer: StepTimer) -> Fact | None:
        """Time the broadcast of every step, and make DDP's logger record times."""

        def timed(call: Callable[[], Any]) -> Any:
            begin = timer.clock.stamp()
            result = call()
            timer.waited(begin, timer.clock.stamp())
            return result

        found = observe_parameter_sync(self.optimizer, timed)
        if isinstance(found, Fact):
            return found
        self._stop_observing = found
        return super().start(timer)

    def stop(self) -> None:
        """Stop timing the broadcast, and stop DDP's logger from recording times."""
        super().stop()
        if self._stop_observing is not None:
            self._stop_observing()
            self._stop_observing = None
