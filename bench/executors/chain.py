"""Limit how many runs of a study execute at once, by chains of job dependencies.

The jobs of a study form as many chains as runs may execute at once. Each job depends on all jobs of its
chain that have not ended (``--dependency=afterany``), so that only one job of a chain can execute. A
dependency on the preceding job alone is not enough: if that job is cancelled while it waits, Slurm would
start its successor although an earlier job of the chain still executes.

The ledger contains the chain of each job, and squeue shows which jobs have not ended. Nothing else is
remembered between two submissions, so that a killed submission cannot break a chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.slurm.job_states import read_state
from bench.slurm.parsing import QueueRow


@dataclass(frozen=True)
class Place:
    """The place of a new job: its chain (None without a limit), and the jobs that must end first."""

    chain: int | None = None
    after: tuple[str, ...] = ()

    @property
    def event(self) -> dict[str, Any]:
        """The keys to add to the job's ``intent`` event in the ledger."""
        return {} if self.chain is None else {"chain": self.chain}

    @property
    def options(self) -> list[str]:
        """The options for sbatch."""
        return [f"--dependency=afterany:{':'.join(self.after)}"] if self.after else []


class Chains:
    """The chains of a study, with the ids of their jobs that have not ended."""

    def __init__(self, limit: int | None) -> None:
        """``limit`` is the number of runs that may execute at once; None means no limit."""
        self._jobs: list[list[str]] = [[] for _ in range(limit or 0)]

    @classmethod
    def of_queue(cls, limit: int, queue: Iterable[QueueRow], events: Iterable[Mapping[str, Any]]) -> Chains:
        """Return the chains of the jobs in squeue, according to the events of the ledger.

        A job without a chain, or of a chain above the limit, was submitted with another limit. New jobs
        wait for its end in every chain.
        """
        chains = cls(limit)
        chain_of = {event["job_name"]: event.get("chain") for event in events if event["event"] == "intent"}
        for row in sorted(queue, key=lambda row: int(row.key.number)):
            if row.name not in chain_of or read_state(row.state).state.ended:
                continue
            chain, job_id = chain_of[row.name], row.key.job
            for jobs in chains._jobs if chain is None else chains._jobs[chain : chain + 1] or chains._jobs:
                if job_id not in jobs:  # a heterogeneous job has several rows
                    jobs.append(job_id)
        return chains

    def next_place(self) -> Place:
        """Return the place of a new job at the end of the shortest chain."""
        if not self._jobs:
            return Place()
        chain = min(range(len(self._jobs)), key=lambda number: len(self._jobs[number]))
        return Place(chain, tuple(self._jobs[chain]))

    def add(self, place: Place, job_id: str | None) -> None:
        """Add the job that was submitted for ``place``."""
        if place.chain is not None and job_id is not None:
            self._jobs[place.chain].append(job_id)
