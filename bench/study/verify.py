"""Verify that a run was executed as planned.

Each check compares a recorded value with the expected value. A run passes if no check fails. A check of a
value that was not measured neither passes nor fails.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import BenchError
from ..facts import facts_of_env
from ..words import sentence, words
from .checksums import find_damage, is_recorded
from .conditions import objects, read_disturbances
from .files import read_json, read_table
from .layout import RunFolder
from .ledger import RunRecord, RunState
from .plan_json import cell_problem
from .processes import started_ranks
from .run_json import REPEATED_MATCHES, VALUES_LEFT_OUT, read_run, read_warnings

#: Kinds of facts in env.json that `bench verify` prints: they compare the cores and threads of ranks
#: and nodes, or name another strategy, or values of a command that were left out.
KINDS = (
    "shared-cores",
    "shared-gpus",
    "unequal-nodes",
    "threads-differ",
    "other-strategy",
    VALUES_LEFT_OUT,
    REPEATED_MATCHES,
)
#: Files that a run must have if it uses the built-in training or the recorder.
_FILES = ("run.json", "metrics.csv", "ranks.csv", "steps.csv", "env.json", "SHA256SUMS")


@dataclass(frozen=True)
class Check:
    """Result of one check: the value that was found and the value that was expected.

    ``passed`` is None if the value was not measured; ``found`` is then empty or contains the reason.
    """

    name: str
    passed: bool | None
    found: str
    expected: str

    @property
    def outcome(self) -> Literal["ok", "failed", "not measured"]:
        """The result in words."""
        return "not measured" if self.passed is None else "ok" if self.passed else "failed"

    def as_json(self) -> dict[str, Any]:
        """Return the check as an object for `bench verify --json`."""
        own = {"check": self.name, "outcome": self.outcome, "passed": self.passed}
        return {**own, "found": self.found or None, "expected": self.expected}

    def __str__(self) -> str:
        if self.passed is None:
            why = f" ({self.found})" if self.found else ""
            return f"--    {self.name}: not measured{why}"
        if self.passed:
            return f"ok    {self.name}: {self.found}"
        return f"FAIL  {self.name}: {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class Verification:
    """All checks of one attempt of one run.

    ``state`` and ``failure_class`` say how the attempt ended, or are None without a readable run.json.
    ``warnings`` has one line for each disturbance of the run, for each fact of env.json of one of the
    :data:`KINDS`, and for each warning in the logs. Warnings do not affect ``passed``.
    """

    run_id: str
    folder: Path
    checks: list[Check]
    warnings: list[str] = field(default_factory=list)
    state: str | None = None
    failure_class: str | None = None

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.passed is False]


def verify_run(path: Path, *, record: RunRecord | None = None) -> Verification:
    """Check the attempt of a run whose folder is ``path``. The state of ``record`` overrides run.json.

    Raises:
        BenchError: run.json is missing, broken, or does not describe a cell, and there is no ``record``.
    """
    folder = RunFolder(path)
    run, problem = read_run(path)
    problem = problem if run is None else _problem_of(run)
    if run is None or problem:
        if record is not None:
            broken = Check("run.json", False, problem, "a description of the run")
            return Verification(
                record.run_id, path, [broken], state=str(record.state), failure_class=record.failure_class
            )
        raise BenchError(
            f"{folder.run_json}: {problem}",
            remedy="specify the folder of a run: results/STUDY/runs/RUN/attempt-N",
        )
    if record is not None:
        end = {"state": str(record.state), "reason": record.reason, "failure_class": record.failure_class}
        run |= end
    run_id, checks = str(run.get("run_id", path.name)), list(_checks(folder, run))
    disturbed = [f"disturbed: {words(one)}" for one in read_disturbances(run) or ()]
    found_in_job = [sentence(fact) for fact in facts_of_env(read_json(folder.env)) if fact.kind in KINDS]
    logged = [
        f"{one['cause']} ({one.get('path')}:{one.get('line')}): {one.get('remedy')}"
        for one in read_warnings(run) or ()
    ]
    warnings = [*disturbed, *found_in_job, *logged]
    return Verification(run_id, path, checks, warnings, str(run.get("state")), run.get("failure_class"))


def _problem_of(run: dict[str, Any]) -> str:
    """Return why the content of run.json cannot be verified, or ``""``."""
    problem = cell_problem(run.get("cell"))
    return f"does not describe a cell: {problem}" if problem else ""


def _checks(folder: RunFolder, run: dict[str, Any]) -> Iterator[Check]:
    cell = run["cell"]
    state = str(run.get("state"))
    reason = f" ({run['reason']})" if run.get("reason") else ""
    if run.get("failure_class"):
        reason += f"; class: {run['failure_class']}"
    if isinstance(run.get("cause"), dict):
        reason += f"; cause: {run['cause'].get('cause')}; {run['cause'].get('remedy')}"
    yield Check("state", state == "completed", f"{state}{reason}", "completed")
    if state in (RunState.QUEUED, RunState.RUNNING):
        return
    files = _files(cell)
    missing = [name for name in files if not os.path.lexists(folder.path / name)]
    damage = find_damage(folder.path) if is_recorded(cell["workload"]) and not missing else ""
    found = f"missing {', '.join(missing)}" if missing else damage or "complete"
    expected = "as the run wrote them" if damage else ", ".join(files)
    yield Check("files", not (missing or damage), found, expected)
    if isinstance(run.get("accounting"), str):
        found = f"{run['accounting']}; the final state comes from squeue and the run's own files"
        yield Check("accounting", None, found, "the final state from sacct")
    if cell["workload"].get("command"):
        started = started_ranks(folder.path, cell["world_size"])
        expected = f"{cell['world_size']} with WORLD_SIZE {cell['world_size']}"
        yield Check("processes", started.as_planned, started.found, expected)
    env = read_json(folder.env)
    yield from _environment_checks(env, cell)
    yield from _script_check(env, run.get("command"))
    if _source(cell) != "none":
        yield from _metrics_checks(folder, cell)


def _source(cell: dict[str, Any]) -> str | None:
    """Return the source of a command's metrics, such as ``recorder``, or None for the built-in training."""
    metrics = cell["workload"].get("metrics") or {}
    return metrics.get("source", "readings") if cell["workload"].get("command") else None


def _files(cell: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the files that a run of the cell must have (fewer without the recorder)."""
    fewer = {"none": _FILES[:1], "readings": _FILES[:2]}
    return fewer.get(_source(cell) or "", _FILES)


def _environment_checks(env: Any, cell: dict[str, Any]) -> Iterator[Check]:
    env = env if isinstance(env, dict) else {}
    expected = cell["world_size"]
    hosts_seen = objects(env.get("hosts"))
    nodes = len(hosts_seen) or None
    if not env.get("backend") and _source(cell) in ("none", "readings"):
        # The command does not use the recorder, so bench knows its nodes, but not its ranks.
        yield Check("ranks joined", None, "", f"{expected} of {expected}")
        yield Check("world size", None, "", str(expected))
        yield Check("backend", None, "", str(cell["backend"]))
        yield _same("nodes", nodes, cell["nodes"]) if nodes else Check("nodes", None, "", str(cell["nodes"]))
        yield Check("global batch", None, "", str(cell["global_batch"]))
        return
    joined = env["joined"].get("ranks") if isinstance(env.get("joined"), dict) else None
    hosts = ", ".join(str(host.get("host")) for host in hosts_seen)
    found = f"{joined} of {expected}" if joined is not None else f"unknown of {expected}"
    yield Check(
        "ranks joined",
        joined == expected,
        f"{found}{f' on {hosts}' if hosts else ''}",
        f"{expected} of {expected}",
    )
    yield _same("world size", env.get("world_size"), expected)
    yield _same("backend", env.get("backend"), cell["backend"])
    yield _same("nodes", nodes, cell["nodes"])
    if env.get("global_batch") is not None or _source(cell) is None:
        yield _same("global batch", env.get("global_batch"), cell["global_batch"])
    else:
        yield Check("global batch", None, "it differs between steps", str(cell["global_batch"]))
    yield from _transport_check(env.get("transport"), cell)


def _script_check(env: Any, command: Any) -> Iterator[Check]:
    """Compare the script that the run read with the submitted script, if both are known."""
    found = env.get("script_sha256") if isinstance(env, dict) else None
    submitted = command.get("script_sha256") if isinstance(command, dict) else None
    if submitted is None:
        return
    submitted = str(submitted)
    expected = f"{command.get('script')} with SHA-256 {submitted[:12]}, as submitted"
    found = None if found is None else str(found)
    passed = None if found is None else found == submitted
    yield Check("script", passed, f"SHA-256 {found[:12]}" if found else "", expected)


def _transport_check(transport: Any, cell: dict[str, Any]) -> Iterator[Check]:
    """If env.json names the network that carried the gradients, compare it with the requested network."""
    if not isinstance(transport, dict):
        return
    interface, network = transport.get("interface"), transport.get("network")
    route = " ".join(str(word) for word in (network, interface) if word)
    asked = (cell.get("env") or {}).get("GLOO_SOCKET_IFNAME") if cell["backend"] == "gloo" else None
    passed: bool | None = interface in (asked, None) if asked else cell["nodes"] == 1 or interface != "lo"
    expected = asked or ("any interface" if cell["nodes"] == 1 else "an interface that other nodes can reach")
    if transport.get("fallback"):
        passed, expected = False, "InfiniBand, which the hosts have; see the warning in env.json"
    elif not route:
        passed = None
    found = f"{transport.get('backend')} over {route}" if route else ""
    yield Check("transport", passed, found, expected)


def _same(name: str, found: Any, expected: Any) -> Check:
    return Check(name, found == expected, "unknown" if found is None else str(found), str(expected))


def _metrics_checks(folder: RunFolder, cell: dict[str, Any]) -> Iterator[Check]:
    rows = read_table(folder.metrics_csv)[1]
    expected = int(cell["workload"]["epochs"])
    built_in = _source(cell) is None
    if built_in:
        yield Check("epochs", len(rows) == expected, str(len(rows)), str(expected))
    else:
        yield Check("epochs", bool(rows), str(len(rows)), "1 or more")
    if not rows:
        return
    yield _throughput_check(rows)
    yield _loss_check(rows if built_in else [row for row in rows if row.get("train_loss")])
    if built_in:  # a command determines its own number of steps
        yield _samples_check(rows, cell)


def _throughput_check(rows: list[dict[str, str]]) -> Check:
    rates = ((row, row.get("throughput_samples_per_sec")) for row in rows)
    bad = _epochs(row for row, rate in rates if not (_is_finite(rate) and float(rate or 0) > 0))
    found = f"not a positive number in epoch {bad}" if bad else "positive in every epoch"
    return Check("throughput", not bad, found, "a positive number in every epoch")


def _loss_check(rows: list[dict[str, str]]) -> Check:
    """Check that all losses are finite; without losses, the result is "not measured"."""
    bad = _epochs(row for row in rows if not _is_finite(row.get("train_loss")))
    found = f"not finite in epoch {bad}" if bad else "finite in every epoch" if rows else ""
    return Check("loss", not bad if rows else None, found, "a finite number in every epoch")


def _samples_check(rows: list[dict[str, str]], cell: dict[str, Any]) -> Check:
    samples = cell["global_batch"] * int(cell["workload"]["steps_per_epoch"])
    counted = {str(row.get("samples")) for row in rows}
    return Check("samples", counted == {str(samples)}, " and ".join(sorted(counted)), f"{samples} per epoch")


def _epochs(rows: Iterable[dict[str, str]]) -> str:
    return ", ".join(row.get("epoch", "?") for row in rows)


def _is_finite(text: Any) -> bool:
    try:
        return math.isfinite(float(text))
    except (TypeError, ValueError):
        return False
