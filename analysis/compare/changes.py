"""What else is not the same between two sets of runs: software, hardware, hosts, variables, time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from analysis.compare.matching import NOT_SET, Difference
from analysis.data.environment import FACTS, TRANSPORT, hosts_of, sampled, value_of
from analysis.data.load import Study
from analysis.text import listed, one_line

#: Variables that tell runs apart, not environments.
_PER_RUN = frozenset(
    {
        *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        *(
            "SLURM_NNODES",
            "SLURM_NTASKS",
            "SLURM_TASKS_PER_NODE",
            "BENCH_PYTHON",
            "BENCH_EXPECTED_WORLD_SIZE",
        ),
    }
)
_PER_RUN_PREFIXES = ("TORCHELASTIC_", "BENCH_STEP_", "BENCH_RUN_")
_NOT_KNOWN = "not known"
#: Told with the settings already.
_SETTINGS = ("Backend", "Launcher")

Facts = dict[str, list[str]]


def environment_changes(
    a: Study, b: Study, *, runs_a: Iterable[str], runs_b: Iterable[str]
) -> list[Difference]:
    """Return the facts of env.json that differ between runs of A and runs of B.

    A fact with several values on a side is compared as a set; of a large study a sample
    of the runs is read.

    Args:
        a: one study.
        b: the other.
        runs_a: the ``run_id`` of the runs of A that are compared.
        runs_b: those of B.
    """
    facts_a, facts_b = _facts(a, runs_a), _facts(b, runs_b)
    names = [*facts_a, *(name for name in facts_b if name not in facts_a)]
    return [
        Difference(name, _told(name, facts_a), _told(name, facts_b))
        for name in names
        if facts_a.get(name, []) != facts_b.get(name, [])
    ]


def _told(name: str, facts: Facts) -> str:
    if facts.get(name):
        return listed(facts[name], limit=4)
    return NOT_SET if name.isupper() else _NOT_KNOWN


def _facts(study: Study, run_ids: Iterable[str]) -> Facts:
    """Return each fact's values over the runs, sorted."""
    wanted = set(run_ids)
    places = [place for place, run_id in enumerate(study.runs["run_id"]) if run_id in wanted]
    chosen = study.runs["run_id"].iloc[sampled(study, places)]
    found: dict[str, set[str]] = {}
    for env in study.envs_of(chosen).values():
        for name, value in _of_one(env):
            found.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in found.items()}


def _of_one(env: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for label, key in FACTS:
        if label not in _SETTINGS and (value := value_of(env, key)):
            yield label, value
    transport = env.get("transport")
    for label, key in TRANSPORT:
        if isinstance(transport, dict) and (value := value_of(transport, key)):
            yield label, value
    for host in hosts_of(env):
        yield "Hosts", one_line(host.get("host"), limit=80)
        yield "CPU", one_line(host.get("cpu_model"), limit=80) or _NOT_KNOWN
        yield "Cores per host", one_line(host.get("cores"), limit=10) or _NOT_KNOWN
    for section in ("env", "slurm"):
        variables = env.get(section)
        for name, value in variables.items() if isinstance(variables, dict) else ():
            if name not in _PER_RUN and not name.startswith(_PER_RUN_PREFIXES):
                yield one_line(name, limit=80), one_line(value, limit=160)


def time_apart(a: Study, b: Study) -> str:
    """Return in words that one study ran wholly before the other; nothing where they overlap."""
    spans = []
    for study in (a, b):
        times = study.runs[["started_at", "ended_at"]].stack().dropna()
        if not len(times):
            return ""
        spans.append((times.min(), times.max()))
    (from_a, to_a), (from_b, to_b) = spans
    if to_a < from_b:
        first, second, end, start = "A", "B", to_a, from_b
    elif to_b < from_a:
        first, second, end, start = "B", "A", to_b, from_a
    else:
        return ""
    return (
        f"{first} had ended ({end:%Y-%m-%d %H:%M} UTC) before {second} began ({start:%Y-%m-%d %H:%M} UTC): "
        "whatever else changed in between counts as part of the difference"
    )
