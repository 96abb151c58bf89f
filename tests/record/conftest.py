"""Loops with a recorder, in real ranks."""

from tests.workload.conftest import run_ranks, server

__all__ = ["run_ranks", "server"]
