"""Diagnose failed jobs: find the causes in their logs, with the evidence and a remedy."""

from .diagnosis import Cause, Diagnosis, LogLine, diagnose, diagnose_text

__all__ = ["Cause", "Diagnosis", "LogLine", "diagnose", "diagnose_text"]
