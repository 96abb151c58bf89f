"""Diagnose failed jobs: find the causes in their logs, with the evidence and a remedy."""

from .catalogue import CauseInfo, causes
from .diagnosis import Cause, Diagnosis, LogLine, diagnose, diagnose_text

__all__ = ["Cause", "CauseInfo", "Diagnosis", "LogLine", "causes", "diagnose", "diagnose_text"]
