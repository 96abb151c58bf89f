"""Nodes of a preflight, as processes on this machine."""

from tests.workload.conftest import run_ranks, server

__all__ = ["run_ranks", "server"]
