"""Loops with a recorder, in real ranks."""

from tests.train.conftest import run_program, server

__all__ = ["run_program", "server"]
