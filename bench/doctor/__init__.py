"""Diagnose failed jobs: find the causes in their logs, with the evidence and a remedy."""

from bench.doctor.catalogue import CauseInfo, causes
from bench.doctor.diagnosis import Cause, Diagnosis, TellingLine, diagnose, diagnose_text

__all__ = ["Cause", "CauseInfo", "Diagnosis", "TellingLine", "causes", "diagnose", "diagnose_text"]
