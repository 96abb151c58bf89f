"""What stands beside a loop in case it does not end well: the reason in words, and the windows on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from bench.measure.hosts import RankFacts
from bench.measure.peers import Symptom, symptom_of
from bench.record.exchange import StoreExchange
from bench.record.hang_watch import Progress, Watch, timeout_s
from bench.record.session import Session
from bench.record.stop_signal import Ending


class Guard:
    """Watches one rank's loop from its first step to its end.

    Args:
        session: this rank among all others.
        device: where the model computes.
        progress: tells how far the loop is.
    """

    def __init__(
        self,
        session: Session,
        *,
        device: torch.device,
        progress: Callable[[], Progress],
    ) -> None:
        self._session = session
        self._exchange = session.exchange
        self._timeout_s = timeout_s(device)
        self._watch: Watch | None = None
        if isinstance(self._exchange, StoreExchange) and session.place.world_size > 1:
            self._watch = Watch(
                progress,
                self._exchange.apart(),
                rank=session.place.rank,
                world_size=session.place.world_size,
                listener=self,
                # NCCL's own watchdog aborts the process; gloo raises, and there is time for words.
                deadline_s=self._timeout_s if session.backend == "nccl" else None,
            )
        self._ending = Ending(self._last_words)

    def withdraw(self) -> None:
        """Watch no longer, and leave the process as it was."""
        if self._watch is not None:
            self._watch.stop()
        self._ending.withdraw()

    # -- what the watch tells -------------------------------------------------------------

    def stalled(self, words: str, *, is_surprising: bool) -> None:
        """Write what is whole, and warn: the training may be slow, and nothing else."""
        self._session.look()
        if is_surprising:
            self._session.warn(words)

    def overdue(self, words: str) -> None:
        """Say why, while there is time."""
        self._say(words)

    # -- how it ends ----------------------------------------------------------------------

    def explain(self, error: BaseException) -> None:
        """Say why the program fails, and tell the other ranks, or say what they tell."""
        facts = self._facts()
        if not isinstance(self._exchange, StoreExchange) or len(facts) < 2:
            return
        peers, symptom = self._exchange.peers(facts), symptom_of(error)
        if symptom is None:
            words = _named(error)
            peers.tell(words)
            self._say(f"{words}; see the traceback above")
            return
        seen = None if self._watch is None else self._watch.reason
        if seen is not None and symptom is Symptom.TIMED_OUT:
            limit = "its time-out" if self._timeout_s is None else f"{self._timeout_s:g} s"
            self._say(f"a collective did not complete in {limit}: {seen}")
            return
        longer = "raise the time-out of init_process_group"
        told = peers.explain(symptom, timeout_s=self._timeout_s, longer=longer)
        if told is not None:
            self._say(told)

    def _last_words(self) -> None:
        """Say what was waited for, and have every window written that is whole on all ranks."""
        if self._watch is not None and self._watch.reason is not None:
            self._say(self._watch.reason)
        self._session.look(is_last=True)

    def _facts(self) -> list[RankFacts]:
        contents = self._exchange.read("facts")
        return [] if contents is None else [RankFacts(**one["facts"]) for one in contents]

    def _say(self, words: str) -> None:
        place = self._session.place
        who = f"rank {place.rank} on {self._session.host}"
        print(f"bench: error: {who}: {words}", file=sys.stderr, flush=True)


def _named(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
