"""Store the findings about the validity of a study's numbers, for commands that do not compute them.

`bench report` writes them to ``report/validity.json``, and `bench status` shows them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from ..facts import Fact
from .files import read_json
from .layout import StudyFolder
from .ledger import RunRecord

VALIDITY_FILE = "validity.json"


def validity_text(facts: Sequence[Fact], runs: Iterable[tuple[str, int, str]]) -> str:
    """Return the content of validity.json; ``runs`` are the id, the attempt and the state of each run."""
    content = {"schema": 1, "runs_sha256": _digest(runs), "facts": [fact.as_json() for fact in facts]}
    return json.dumps(content, ensure_ascii=False, indent=1, default=str) + "\n"


def read_validity(study: StudyFolder, records: Mapping[str, RunRecord]) -> list[Fact] | None:
    """Return the facts that the last report found; None if there is no report of the present runs."""
    content = read_json(study.report / VALIDITY_FILE) or {}
    runs = ((record.run_id, record.attempt, str(record.state)) for record in records.values())
    if content.get("schema") != 1 or content.get("runs_sha256") != _digest(runs):
        return None
    try:
        return [Fact.from_json(entry) for entry in content["facts"]]
    except (KeyError, TypeError, ValueError):
        return None


def _digest(runs: Iterable[tuple[str, int, str]]) -> str:
    return hashlib.sha256(json.dumps(sorted(runs)).encode()).hexdigest()
