"""Run a measurement in several ranks on this machine, and compute the typical ratio of pairs of times."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

#: Share of the pairs that the trimmed mean leaves out at each end.
TRIMMED = 0.2


@dataclass(frozen=True)
class Ratio:
    """A ratio of times with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f}, 95 % interval [{self.low:.4f}, {self.high:.4f}]"

    def adds_more_than(self, most: float, *, who: str) -> bool:
        """Return whether the whole interval is above 1 + ``most``; print a sentence about ``who``."""
        if self.low > 1 + most:
            print(f"{who} adds more than {most:.1%}")
            return True
        at_most = f"{who} adds at most {most:.1%}"
        print(
            at_most
            if self.high <= 1 + most
            else f"undecided: {1 + most:g} is inside the interval; measure more or longer blocks"
        )
        return False


def ratio(pairs: Iterable[tuple[float, float]]) -> Ratio:
    """Return the typical ratio second / first of pairs of times, with its 95 % interval.

    The ratio is the trimmed mean of the logarithms of all ratios: the lowest and the highest fifth are left
    out, because other processes may have disturbed one of their times. The interval is that of Tukey and
    McLaughlin for a trimmed mean.
    """
    logs = [math.log(second / first) for first, second in pairs]
    centre = stats.trim_mean(logs, TRIMMED)
    low, high = stats.mstats.trimmed_mean_ci(logs, limits=(TRIMMED, TRIMMED), alpha=0.05)
    return Ratio(math.exp(centre), math.exp(low), math.exp(high))


def in_ranks(measure: Callable[[int, int], Any], *, ranks: int) -> Any:
    """Call ``measure(rank, port)`` in one process per rank; return the result of rank 0, a JSON value.

    ``port`` is a free port for the ranks' store. If a rank fails, this process exits with a message.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        children = [_fork(measure, rank, port, result) for rank in range(ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
        return json.loads(result.read_text())


def _fork(measure: Callable[[int, int], Any], rank: int, port: int, result: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        found = measure(rank, port)
        if rank == 0:
            result.write_text(json.dumps(found))
    except BaseException:  # the child must not return and continue with the parent's code
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
