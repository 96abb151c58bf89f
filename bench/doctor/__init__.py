"""Diagnose failed jobs: find the causes in their logs, with the evidence and a remedy."""

from .catalogue import CauseInfo, causes
from .diagnosis import Cause, Diagnosis, TellingLine, diagnose, diagnose_text

__all__ = ["Cause", "CauseInfo", "Diagnosis", "TellingLine", "causes", "diagnose", "diagnose_text"]
