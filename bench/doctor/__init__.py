"""Why a job failed: read its logs, rank the causes, name the line and what to change."""

from __future__ import annotations

from bench.doctor.catalogue import causes
from bench.doctor.model import Cause, CauseInfo, Diagnosis, TellingLine
from bench.doctor.verdict import diagnose, diagnose_text

__all__ = ["Cause", "CauseInfo", "Diagnosis", "TellingLine", "causes", "diagnose", "diagnose_text"]
