"""Execute runs one after another on several hosts without Slurm, by starting torchrun on each over ssh.

The ranks rendezvous at the first host. If the study's folder is on a file system that all hosts share, rank 0
writes into it, as with Slurm. Otherwise each host writes to a local folder, and the host's files are copied
to this machine after the run.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.errors import BenchError, UnwritableError, unwritable
from bench.executors import ssh_hosts
from bench.executors.base import Callbacks, HostBusyError, SerialExecutor
from bench.executors.outcome import Outcome, error_line, killed_rank, process_outcome, with_workload_error
from bench.executors.ssh_hosts import Connection, HostError, HostGroup
from bench.matrix.cell import Cell, Run
from bench.matrix.schema import HOST_ADDRESS, Host
from bench.measure.command_conditions import merge_nodes
from bench.study.files import write_json
from bench.study.ledger import FailureClass, RunState, now
from bench.study.plan_json import PlannedStudy
from bench.study.run_json import Attempt, next_attempt
from bench.units import human_duration

#: Maximum time in which hosts must end a run after its `bench submit` process has died.
BUSY_S = 20.0
#: After the first failure, `bench submit` waits this long for errors of the other hosts.
ERRORS_S = 5.0
#: Maximum time in which a host must end a run; the host sends SIGKILL to the ranks after 10 s.
STOP_S = 25.0


class SshExecutor(SerialExecutor):
    """Execute runs of one study on hosts that are reached by ssh."""

    def __init__(self, study: PlannedStudy) -> None:
        super().__init__(study)
        self.hosts = [Host(**host) for host in study.plan.get("hosts") or []]
        self._addresses: dict[str, str] = {}
        #: Errors of unusable hosts, by host. Runs that need such a host wait for the next `bench submit`.
        self._failed_hosts: dict[str, HostError] = {}
        self._waiting: list[Run] = []

    def submit(
        self, runs: Sequence[Run], *, callbacks: Callbacks, max_queued: int | None = None
    ) -> list[Run]:
        """Execute ``runs`` one after another; raise BenchError if some need a host that cannot be used."""
        left = super().submit(runs, callbacks=callbacks, max_queued=max_queued)
        if self._waiting:
            reasons = "\n".join(error.message for error in self._failed_hosts.values())
            runs_need = "run needs" if len(self._waiting) == 1 else "runs need"
            host = "this host" if len(self._failed_hosts) == 1 else "one of these hosts"
            what = f"{reasons}\n{len(self._waiting)} {runs_need} {host} and did not start"
            raise BenchError(what, remedy="fix the problem, then run `bench submit` again")
        return left

    def command_line(self, run: Run) -> str:
        """Return one ssh command per line and host, followed by ``#`` and the command that it executes."""
        attempt = next_attempt(self.study, run, self.study.records()[run.run_id])
        hosts = self._hosts_of(attempt.cell)
        endpoint = f"{self._address(hosts[0], hosts)}:PORT"
        lines = []
        for node, host in enumerate(hosts):
            words = [str(self._script(attempt)), str(attempt.folder.path.absolute()), str(node), endpoint]
            python = f"BENCH_PYTHON={shlex.quote(self._python)} " if self._python else ""
            there = f"cd {shlex.quote(str(_submission_folder()))} && {python}{shlex.join(['bash', *words])}"
            lines.append(f"{shlex.join(ssh_hosts.ssh_command(host.host))}  # {there}")
        return "\n".join(lines)

    def _may_start(self, run: Run) -> bool:
        needed = {host.host for host in self._hosts_of(self.study.cells[run.cell_id])}
        if needed & set(self._failed_hosts):
            self._waiting.append(run)
            return False
        return True

    def _description(self, attempt: Attempt) -> dict[str, Any]:
        return {"hosts": [host.host for host in self._hosts_of(attempt.cell)]}

    def _start_failed(self, attempt: Attempt, error: BenchError) -> None:
        if not isinstance(error, HostError):
            raise error
        self._failed_hosts[error.host] = error

    def _execute(self, attempt: Attempt) -> Outcome:
        mark = f"bench-{secrets.token_hex(8)}"
        limit_s = int(self.study.plan["time_limit_s"])
        with self._prepared(attempt, mark) as group:
            names = ",".join(_host_name(connection) for connection in group.connections)
            group.command(f"go {self._endpoint(attempt, group)} {names}")
            in_time, problems = True, list[str]()
            try:
                in_time = group.follow(lambda: group.over or group.first_failed is not None, limit_s=limit_s)
                if group.first_failed is not None:
                    group.follow(lambda: group.over, limit_s=ERRORS_S)
            finally:  # also after Ctrl-C
                first_failed = group.first_failed
                group.command("stop")
                group.follow(lambda: group.over, limit_s=STOP_S)
                problems = self._collect(group, attempt, mark)
                self._write_end(group, attempt, first_failed)
                if attempt.cell.is_unrecorded:
                    with contextlib.suppress(UnwritableError):
                        merge_nodes(attempt.folder)
            outcome = _outcome(attempt, group, first_failed, limit_s=None if in_time else limit_s)
        outcome.reason = "; ".join(filter(None, (outcome.reason, *problems)))
        return outcome

    def _prepared(self, attempt: Attempt, mark: str) -> HostGroup:
        """Connect to the hosts of an attempt and wait until all are ready; retry while a host is busy."""
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                return self._try_to_prepare(attempt, mark)
            except HostBusyError:
                if time.monotonic() > deadline:
                    raise
                # Random, so that two submissions that block each other do not retry simultaneously.
                time.sleep(random.uniform(0.2, 2.0))

    def _try_to_prepare(self, attempt: Attempt, mark: str) -> HostGroup:
        token = attempt.folder.path / f".{mark}"
        hosts, own_folder = self._hosts_of(attempt.cell), attempt.folder
        variables = [self._variables(attempt, node, mark) for node in range(len(hosts))]
        with contextlib.ExitStack() as undo:
            try:
                token.touch()
                undo.callback(token.unlink, missing_ok=True)
                group = HostGroup(several=len(hosts) > 1, out=own_folder.out, err=own_folder.err)
            except OSError as error:
                raise unwritable(own_folder.path, error) from None
            with contextlib.ExitStack() as undo_connections:
                undo_connections.push(group)
                for host, own in zip(hosts, variables, strict=True):
                    content = ssh_hosts.host_program(own)
                    group.connections.append(Connection(host.host, mark=mark, content=content))
                group.follow(lambda: group.answered, limit_s=ssh_hosts.READY_S)
                job, folder = attempt.job_name, _submission_folder()
                for connection in sorted(group.connections, key=lambda connection: not connection.refused):
                    ssh_hosts.raise_unless_ready(connection, job=job, folder=folder)
                undo_connections.pop_all()
        return group

    def _variables(self, attempt: Attempt, node: int, mark: str) -> dict[str, str]:
        hosts, script = self._hosts_of(attempt.cell), self._script(attempt)
        peer = hosts[0 if node else 1] if len(hosts) > 1 else None
        holder = f"{attempt.job_name} (process {os.getpid()} of {_user()} on {os.uname().nodename})"
        return {
            "mark": mark,
            "job": attempt.job_name,
            "folder": str(_submission_folder()),
            "run_dir": str(attempt.folder.path.absolute()),
            "token": f".{mark}",
            "cell": attempt.cell.cell_id,
            "script": script.read_text(encoding="utf-8"),
            "script_path": str(script),
            "node": str(node),
            "address": self._address(hosts[node], hosts),
            "peer": self._address(peer, hosts) if peer else "",
            "python": self._python,
            "holder": holder,
            "patience": str(ssh_hosts.PATIENCE_S),
        }

    def _endpoint(self, attempt: Attempt, group: HostGroup) -> str:
        """Return the rendezvous endpoint: the first host's address and a free port on it."""
        hosts = self._hosts_of(attempt.cell)
        first = group.connections[0]
        port = first.ready[1] if first.ready else ""
        if not port.isdigit():
            raise HostError(first.host, f"{first.host} did not report a free port: its answer was {port!r}")
        return f"{self._address(hosts[0], hosts)}:{port}"

    def _collect(self, group: HostGroup, attempt: Attempt, mark: str) -> list[str]:
        """Copy the result files of hosts that do not share the run's folder; return error messages."""
        problems = []
        for connection in group.connections:
            if connection.ready is None or connection.ready[0] == "shared" or connection.code is None:
                continue
            remote = f"{_submission_folder()}/.bench-{attempt.job_name}"
            script = f"{attempt.cell.cell_id}.sh"
            why = ssh_hosts.fetch(connection.host, remote, attempt.folder.path, mark=mark, excluded=script)
            if why:
                problems.append(
                    f"the results could not be copied ({why}); they remain in {connection.host}:{remote}"
                )
            connection.command("keep" if why else "done")
        return problems

    @staticmethod
    def _write_end(group: HostGroup, attempt: Attempt, first_failed: Connection | None) -> None:
        codes = {connection.host: connection.code for connection in group.connections}
        code = first_failed.code if first_failed else next((c for c in codes.values() if c), 0)
        end = {"exit_code": code, "signal": None, "stage": "run", "time": now(), "hosts": codes}
        with contextlib.suppress(UnwritableError):
            write_json(attempt.folder.end, end)

    def _hosts_of(self, cell: Cell) -> list[Host]:
        return self.hosts[: cell.nodes]

    def _script(self, attempt: Attempt) -> Path:
        return self.study.script(attempt.cell.cell_id).absolute()

    @property
    def _python(self) -> str:
        """Path of this Python interpreter; empty if cluster.setup or a container provides another."""
        return "" if self.study.plan.get("setup") or self.study.plan.get("container") else sys.executable

    def _address(self, host: Host, hosts: Sequence[Host]) -> str:
        """Return the address at which the other hosts of a run can reach ``host``."""
        if len(hosts) == 1:
            return "localhost"
        if host.host not in self._addresses:
            self._addresses[host.host] = host.address or ssh_hosts.address_of(host.host)
        address = self._addresses[host.host]
        if (
            not HOST_ADDRESS.pattern.fullmatch(address)
            or address == "localhost"
            or address.startswith("127.")
        ):
            what = f"{host.host} has the address {address}, which other hosts cannot reach"
            entry = f"{{host: {host.host}, address: ADDRESS}}"
            raise HostError(host.host, what, remedy=f"use {entry} in cluster.hosts")
        return address


def _outcome(
    attempt: Attempt, group: HostGroup, first_failed: Connection | None, *, limit_s: int | None
) -> Outcome:
    """Determine how a run ended; ``limit_s`` is the time limit if the run reached it, else None."""
    if first_failed is not None and first_failed.lost:
        what = f"the connection to {first_failed.host} was lost: {first_failed.last_lines}"
        return Outcome(RunState.FAILED, what, FailureClass.NODE_FAILURE)
    silent = [connection.host for connection in group.connections if not connection.over]
    if silent:  # no answer to the command to stop
        what = f"{', '.join(silent)} stopped answering"
        reason = "; ".join(filter(None, (what, error_line(attempt.folder))))
        return Outcome(RunState.FAILED, reason, FailureClass.NODE_FAILURE)
    if limit_s is not None:
        reason = f"the time limit of {human_duration(limit_s)} was reached"
        reason = with_workload_error(attempt.folder, reason)
        return Outcome(RunState.FAILED, reason, FailureClass.TIME_LIMIT)
    code = first_failed.code if first_failed else 0
    outcome = process_outcome(attempt.folder, attempt.cell, code)
    if outcome.state is RunState.FAILED and (killed := killed_rank(attempt.folder, "torchrun")):
        return Outcome(RunState.FAILED, killed, FailureClass.KILLED, code)
    if first_failed and outcome.reason == f"exit code {code}":
        outcome.reason = f"exit code {code} on {first_failed.host}"
    return outcome


def _host_name(connection: Connection) -> str:
    """Return the host name that a host's ranks report; the configured name if the reported one is invalid."""
    name = connection.ready[2] if connection.ready else ""
    return name if HOST_ADDRESS.pattern.fullmatch(name) else connection.host.rpartition("@")[2]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _submission_folder() -> Path:
    """Return the current folder as ``$PWD`` names it, without resolving links or automounts."""
    shown = Path(os.environ.get("PWD", ""))
    try:
        return shown if shown.is_absolute() and shown.samefile(Path.cwd()) else Path.cwd()
    except OSError:
        return Path.cwd()
