"""Verify that a run was executed as planned.

Each check compares a recorded value with the expected value. A run passes if no check fails. A check of a
value that was not measured neither passes nor fails. What a failed run did not write is not measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddp_scaling_bench.checksums import find_damage
from ddp_scaling_bench.files import read_json, read_table
from ddp_scaling_bench.finding import Finding, Recorded
from ddp_scaling_bench.run_folder import RunFolder, read_run

from ..matrix.cell import Cell, canonical
from .conditions import objects
from .found import findings_of_env
from .ledger import End, Record, RunState
from .readings import Readings, readings_of
from .together import REMEDY, together_of

#: Files that a run must have if it uses the built-in training or the recorder. Other runs need the first.
_FILES = ("run.json", "metrics.csv", "ranks.csv", "steps.csv", "env.json", "SHA256SUMS")
_NOT_ENDED = (RunState.PLANNED, RunState.QUEUED, RunState.RUNNING)


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
            return f"--    {self.name}: not measured{f' ({self.found})' if self.found else ''}"
        if self.passed:
            return f"ok    {self.name}: {self.found}"
        return f"FAIL  {self.name}: {self.found}{f', expected {self.expected}' * (self.name != 'state')}"


@dataclass(frozen=True)
class Verification:
    """All checks of one attempt of a run; a run that has not ended has none.

    ``warnings`` has one line for each disturbance of the run, for each finding that is :attr:`verified
    <finding.Recorded.verified>`, and for each warning in the logs. Warnings do not affect ``passed``.
    """

    record: Record
    folder: RunFolder
    checks: Sequence[Check]
    warnings: Sequence[Finding] = ()

    @property
    def passed(self) -> bool:
        """True if the run has ended, and no check failed."""
        return self.has_ended and not self.failures

    @property
    def has_ended(self) -> bool:
        """False if the run has not started, waits, or runs."""
        return self.record.state not in _NOT_ENDED

    @property
    def unmeasured(self) -> list[str]:
        """The names of the checks of values that were not measured."""
        return [check.name for check in self.checks if check.passed is None]

    @property
    def failures(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.passed is False]


def verify_run(
    folder: RunFolder, record: Record, cell: Cell, *, allocated: Collection[str] = ()
) -> Verification:
    """Check an attempt of a run of ``cell``, from its files and its record.

    ``allocated`` contains the names of the hosts that the scheduler gave to the job, if they are known.
    """
    if record.state in _NOT_ENDED:
        return Verification(record, folder, ())
    completed = record.state is RunState.COMPLETED
    state = Check("state", completed, _state(record), "completed")
    end, env = record.end or End(state=record.state), read_json(folder.env) or {}
    readings = readings_of(folder, cell) if cell.reads_values else Readings()
    run, problem = read_run(folder.path)
    is_cut = not env and os.path.lexists(folder.env)
    cut = "env.json cannot be read or is empty (cut short?)" * is_cut
    problem = f"{_FILES[0]} {problem}" if problem else cut
    checks = [state, *_file_checks(folder, cell, problem, needed=completed), *_accounting_check(end)]
    checks += _environment_checks(env, cell, completed=completed and not is_cut)
    checks += _together_check(folder, cell, env, len(readings.rows))
    checks += _options_check(env.get("workload"), cell)
    checks += _host_check([str(host.get("host")) for host in objects(env.get("hosts"))], allocated)
    checks += _script_check(env.get("script_sha256"), (run or {}).get("command"))
    if cell.measures:
        checks += _value_checks(_rows(folder, cell, readings), cell, readings.problem, needed=completed)
    findings = (*findings_of_env(env), *readings.findings)
    verified = [one for one in findings if isinstance(one, Recorded) and one.verified]
    warnings = [*(end.disturbed or ()), *verified, *(end.warnings or ())]
    return Verification(record, folder, checks, warnings)


def _state(record: Record) -> str:
    of_class = f" ({record.failure_class})" if record.failure_class else ""
    remedy = record.end.cause.remedy if record.end and record.end.cause else ""
    text = "; ".join(filter(None, (record.why, remedy)))
    return f"{record.state}{of_class}{f': {text}' if text else ''}"


def _file_checks(folder: RunFolder, cell: Cell, problem: str, *, needed: bool) -> Iterator[Check]:
    """Check the files; ``problem`` says why one of them cannot be read."""
    recorded = not cell.is_unrecorded
    files = _FILES if recorded else _FILES[:1]
    missing = [name for name in files if not os.path.lexists(folder.path / name)]
    damage = find_damage(folder.path) if recorded and not missing else ""
    odd = damage or problem
    found = f"missing {', '.join(missing)}" if missing else odd or "complete"
    passed = None if missing and not needed else not (missing or odd)
    yield Check("files", passed, found, "as the run wrote them" if damage else ", ".join(files))


def _accounting_check(end: End) -> Iterator[Check]:
    if end.accounting:
        found = f"{end.accounting}; the final state comes from squeue and the run's own files"
        yield Check("accounting", None, found, "the final state from sacct")


def _environment_checks(env: Mapping[str, Any], cell: Cell, *, completed: bool) -> Iterator[Check]:
    # If the command does not use the recorder, bench knows its nodes, but has not seen its ranks.
    seen = isinstance(env.get("joined"), dict) or (completed and not cell.is_unrecorded)
    hosts, ranks = objects(env.get("hosts")), cell.world_size
    joined = env["joined"].get("ranks") if isinstance(env.get("joined"), dict) else None
    found = f"{'unknown' if joined is None else joined} of {ranks}" if seen else ""
    if hosts and seen:
        found += f" on {', '.join(str(host.get('host')) for host in hosts)}"
    yield Check("joined", joined == ranks if seen else None, found, f"{ranks} of {ranks}")
    yield _same("world size", env.get("world_size"), ranks, needed=seen)
    yield _same("backend", env.get("backend"), cell.backend, needed=seen)
    yield _same("nodes", len(hosts) or None, cell.nodes, needed=seen)
    batch = env.get("global_batch")
    if batch is None and seen and not cell.follows_plan:
        yield Check("global batch", None, "", str(cell.global_batch))
    else:
        yield _same("global batch", batch, cell.global_batch, needed=seen)
    if seen:
        yield from _transport_check(env.get("transport"), cell)


def _same(name: str, found: Any, expected: Any, *, needed: bool) -> Check:
    """Compare a value; if it is missing although it is ``needed``, the check fails."""
    if found is None:
        return Check(name, False if needed else None, "unknown" if needed else "", str(expected))
    return Check(name, found == expected, str(found), str(expected))


def _together_check(folder: RunFolder, cell: Cell, env: Mapping[str, Any], readings: int) -> Iterator[Check]:
    """Check that several ranks train together, unless the matrix states that they seldom exchange."""
    if cell.world_size == 1:
        return
    together, exchange = together_of(folder, cell, env, readings), env.get("exchange")
    by = exchange.get("by") if isinstance(exchange, dict) else "bytes between the nodes"
    found = {True: f"yes, by {by}", False: f"no, by {by}", None: "exchange: rare" * cell.is_exchange_rare}
    expected = "yes" if together is not False or isinstance(exchange, dict) else f"yes ({REMEDY})"
    yield Check("trains together", together, found[together], expected)


def _transport_check(transport: Any, cell: Cell) -> Iterator[Check]:
    """If env.json names the network that carried the gradients, compare it with the requested network."""
    if not isinstance(transport, dict):
        return
    interface, network = transport.get("interface"), transport.get("network")
    route = " ".join(str(word) for word in (network, interface) if word)
    asked = cell.env.get("GLOO_SOCKET_IFNAME") if cell.backend == "gloo" else None
    passed: bool | None = interface in (asked, None) if asked else cell.nodes == 1 or interface != "lo"
    expected = asked or ("any interface" if cell.nodes == 1 else "an interface that other nodes can reach")
    if transport.get("fallback"):
        passed, expected = False, "InfiniBand, which the hosts have; see the warning in env.json"
    elif not route:
        passed = None
    yield Check("transport", passed, f"{transport.get('backend')} over {route}" if route else "", expected)


def _options_check(options: Any, cell: Cell) -> Iterator[Check]:
    """Compare the options that the program read with the planned ones; a script can be changed."""
    planned = cell.workload
    known = [name for name in planned if name in options] if isinstance(options, dict) else []
    if known:
        differing = [name for name in known if options[name] != planned[name]]
        found, expected = (
            ", ".join(f"{name} {canonical(values[name])}" for name in differing) or "as planned"
            for values in (options, planned)
        )
        yield Check("options", not differing, found, expected)


def _host_check(hosts: Sequence[str], allocated: Collection[str]) -> Iterator[Check]:
    """Compare the hosts of the ranks with those of the job; each name can be short or full."""
    if hosts and allocated:
        full, short = set(allocated), {host.partition(".")[0] for host in allocated}
        others = [h for h in hosts if not {h, h.partition(".")[0]} & full and h not in short]
        found = ", ".join(others or hosts)
        yield Check("hosts", not others, found, f"the hosts of the job: {', '.join(allocated)}")


def _script_check(found: Any, command: Any) -> Iterator[Check]:
    """Compare the script that the run read with the submitted script, if both are known."""
    submitted = command.get("script_sha256") if isinstance(command, dict) else None
    if submitted is not None:
        expected = f"{command.get('script')} with SHA-256 {str(submitted)[:12]}, as submitted"
        shown = f"SHA-256 {str(found)[:12]}" if found else ""
        yield Check("script", None if found is None else found == submitted, shown, expected)


def _rows(folder: RunFolder, cell: Cell, readings: Readings) -> list[Mapping[str, Any]]:
    """Return the rows of metrics.csv, or those of a command without the recorder; losses can be missing."""
    if not cell.reads_values:
        return list(read_table(folder.metrics_csv)[1])
    return [
        {name: "" if value != value else f"{value}" for name, value in asdict(row).items()}
        for row in readings.rows
    ]


def _value_checks(
    rows: Sequence[Mapping[str, Any]], cell: Cell, problem: str, *, needed: bool
) -> Iterator[Check]:
    epochs, samples = cell.planned_epochs, cell.planned_samples
    passed = (bool(rows) if epochs is None else len(rows) == epochs) or (False if needed else None)
    yield Check("epochs", passed, problem or str(len(rows)), str(epochs or "1 or more"))
    if not rows:
        return
    name, wanted = "throughput_samples_per_sec", "a positive number in every epoch"
    bad = _epochs(row for row in rows if not (_is_finite(row.get(name)) and float(row[name]) > 0))
    found = f"not a positive number in epoch {bad}" if bad else "positive in every epoch"
    yield Check("throughput", not bad, found, wanted)
    with_loss = rows if cell.follows_plan else [row for row in rows if row.get("train_loss")]
    bad = _epochs(row for row in with_loss if not _is_finite(row.get("train_loss")))
    found = f"not finite in epoch {bad}" if bad else "finite in every epoch" if with_loss else ""
    yield Check("loss", not bad if with_loss else None, found, "a finite number in every epoch")
    if samples is not None:
        counted = {str(row.get("samples")) for row in rows}
        found = " and ".join(sorted(counted))
        yield Check("samples", counted == {str(samples)}, found, f"{samples} per epoch")


def _epochs(rows: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(str(row.get("epoch", "?")) for row in rows)


def _is_finite(text: Any) -> bool:
    try:
        return math.isfinite(float(text))
    except (TypeError, ValueError):
        return False
