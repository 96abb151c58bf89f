"""How a study is cited: a BibTeX entry of what is known about it, and nothing that is not."""

from __future__ import annotations

import hashlib
import re

import pandas as pd

from analysis.data.environment import Environment
from analysis.data.load import Study
from analysis.report.tables import latex
from analysis.stats.measured import Frames
from analysis.text import count, one_line


def matrix_digest(study: Study) -> str:
    """Return the SHA-256 of matrix.yaml, which fixes what was asked for; empty where it is missing."""
    try:
        return hashlib.sha256(study.folder.matrix.read_bytes()).hexdigest()
    except OSError:
        return ""


def citation(study: Study, frames: Frames, environment: Environment) -> str:
    """Return a BibTeX entry: no author and no address are made up, both are left to who cites."""
    known = [name for name in ("started_at", "ended_at") if name in frames.runs]
    times = pd.concat(
        [pd.Series(dtype="datetime64[ns, UTC]"), *(frames.runs[name].dropna() for name in known)]
    )
    key = re.sub(r"[^a-z0-9]+", "-", study.name.lower()).strip("-") or "study"
    version = one_line(study.plan.get("bench_version"), limit=40)
    facts = dict(environment.facts)
    what = "" if study.plan.get("table") else " of distributed data parallel training"
    notes = [f"{count(int(frames.runs['measured'].sum()), 'run')}"]
    notes += [f"{name} {facts[name]}" for name in ("Device", "PyTorch") if facts.get(name)]
    if digest := matrix_digest(study):
        notes.append(f"matrix SHA-256 {digest[:16]}")
    fields = {
        "title": f"{study.name}: a scaling study{what}",
        "year": f"{times.max():%Y}" if len(times) else "",
        "howpublished": f"Measured with ddp-scaling-bench {version}" if version else "",
        "note": ", ".join(notes),
    }
    lines = [f"  {name} = {{{latex(text)}}}," for name, text in fields.items() if text]
    return "\n".join([f"@misc{{{key},", *lines, "}"])
