"""A real Slurm cluster on one machine: by default four nodes, each with its own network, name and processes.

Every node is a set of namespaces (:mod:`tests.cluster.containers`), so that Slurm, ssh and torch see separate
machines with their own addresses, host names, process ids and shared memory. Unlike in a real cluster, the
nodes share this machine's cores. This machine is the login node. The cluster writes all files into one folder
and creates a network bridge; :meth:`Cluster.stop` removes both.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.cluster import network as networks
from tests.cluster.configuration import ACCOUNT, MEMORY_CGROUP, Options, write_files
from tests.cluster.containers import PATIENCE_S, ClusterError, Container, Process, run, wait_for
from tests.cluster.daemons import PROGRAMS, Daemons, make_devices, make_keys
from tests.cluster.network import Network
from tests.cluster.releases import INSTALLED, Release

INSTALL = "tests/cluster/install.sh"


def missing(release: Release = INSTALLED) -> str:
    """Return the reason why no cluster of this release can be started here; empty if one can."""
    if sys.platform != "linux":
        return "the test cluster needs Linux namespaces"
    if os.geteuid() != 0:
        return "the test cluster needs root (for network namespaces)"
    path = release.search_path(os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
    absent = [
        program
        for programs in PROGRAMS.values()
        for program in programs
        if shutil.which(program, path=path) is None
    ]
    if absent:
        return f"the test cluster lacks {', '.join(absent)}: run {INSTALL}"
    tried = run(["unshare", "--net", "--pid", "--mount", "--fork", "true"], check=False)
    return f"no namespaces for the test cluster: {tried.stderr.strip()}" if tried.returncode else ""


class Cluster:
    """A running test cluster. Create it with :meth:`start`; :meth:`attach` uses one that is already running."""

    def __init__(
        self, folder: Path, *, options: Options, network: Network, machines: dict[str, Container]
    ) -> None:
        self.folder = folder
        self.options = options
        self.network = network
        self._machines = machines
        self._daemons = Daemons(folder, options.release)
        self._settings: dict[str, str] = {}

    # ---- start and stop -------------------------------------------------------------------------------

    @classmethod
    def start(
        cls, options: Options | None = None, *, folder: Path | None = None, keep: bool = False
    ) -> Cluster:
        """Start a cluster and wait until its nodes are idle.

        Args:
            options: properties of the cluster; by default four nodes with four fake L40S GPUs each, and
                accounting.
            folder: folder for the files of the cluster; by default /tmp/bench-cluster-<slot>.
            keep: keep the cluster running after this process. The next start removes clusters without
                ``keep`` that a killed process left behind.

        Raises:
            ClusterError: the cluster cannot be started on this machine; nothing is left behind.
        """
        options = options or Options()
        if lacking := missing(options.release):
            raise ClusterError(lacking)
        remove_abandoned()
        network, folder = networks.claim(folder and folder.absolute())
        cluster = cls(folder, options=options, network=network, machines={})
        try:
            cluster._build(owner=None if keep else Process.of(os.getpid()))
        except BaseException as error:
            words = cluster._last_words() if isinstance(error, ClusterError) else ""
            cluster.stop()
            if words:
                raise ClusterError(f"{error}\n{words}") from error
            raise
        return cluster

    @classmethod
    def attach(cls, folder: Path) -> Cluster:
        """Return the running cluster whose state is in ``folder``.

        Raises:
            ClusterError: no cluster has its state there.
        """
        try:
            state = json.loads((folder / "state.json").read_text())
        except (OSError, ValueError) as error:
            raise ClusterError(f"{folder}: no cluster is there ({error})") from error
        machines = {name: Container(name, Process(*init)) for name, init in state["machines"].items()}
        return cls(
            folder,
            options=Options.from_json(state["options"]),
            network=Network(state["slot"]),
            machines=machines,
        )

    def stop(self) -> None:
        """End the processes of the cluster by their ids, and remove its files and network."""
        for machine in self._machines.values():
            machine.kill()
        self._machines.clear()
        _remove_cgroups(self._cgroup)
        if (self.folder / ".bench-cluster").exists():  # never delete another folder
            wait_for(partial(_emptied, self.folder), what=f"the removal of {self.folder}")
        # Last, so that the next user of the slot finds no leftovers.
        self.network.remove()

    def _build(self, *, owner: Process | None) -> None:
        self._make_folder()
        self._save(owner)
        names = ["ctl", *self.options.names]
        (self.folder / "hosts").write_text(self.network.hosts_file(names))
        joins = {name: self._launch(name) for name in names}
        try:
            for name, join in joins.items():
                self._machines[name] = join()
        finally:
            self._save(owner)
        for machine in self._machines.values():
            self.network.attach(machine)
        self._start_daemons()

    def _launch(self, name: str) -> Callable[[], Container]:
        return Container.launch(
            name,
            hosts=self.folder / "hosts",
            folder=self.folder / "machines",
            cgroup=self._cgroup if self.options.memory_limits else None,
        )

    def _make_folder(self) -> None:
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ClusterError(f"{self.folder}: not empty; the cluster's state needs a folder of its own")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        (self.folder / ".bench-cluster").touch()
        for part in ("log", "spool", "machines"):
            (self.folder / part).mkdir()
        make_devices(self.folder / "dev", self.options)
        make_keys(self.folder / "ssh")
        if self.options.memory_limits:
            self._cgroup.mkdir(exist_ok=True)

    def _save(self, owner: Process | None) -> None:
        state = {
            "owner": None if owner is None else [owner.pid, owner.start_ticks],
            "slot": self.network.slot,
            "options": self.options.as_json(),
            "machines": {m.name: [m.init.pid, m.init.start_ticks] for m in self._machines.values()},
        }
        beside = self.folder / "state.json.new"
        beside.write_text(json.dumps(state, indent=1) + "\n")
        beside.replace(self.folder / "state.json")

    def _start_daemons(self) -> None:
        controller, daemons = self._machines["ctl"], self._daemons
        write_files(self.folder, options=self.options, network=self.network, settings={})
        daemons.start_munge(controller)
        if self.options.accounting:
            daemons.start_database(controller)
            daemons.start_slurmdbd(controller)
            daemons.register(controller)
        daemons.start_slurmctld(controller)
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.start_slurmd, self.options.names))
        self.wait_until_idle()

    def _last_words(self) -> str:
        """Return the last lines of the daemons' logs, for the message of a failed start."""
        logs = sorted((self.folder / "log").glob("*.log"))
        return "\n".join(f"{log.name}:\n  " + "\n  ".join(_tail(log)) for log in logs if log.stat().st_size)

    # ---- properties -------------------------------------------------------------------------

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes: n1, n2, ..."""
        return self.options.names

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which Slurm's commands use this cluster."""
        return {"SLURM_CONF": str(self.folder / "etc/slurm.conf"), **self.options.release.environment}

    @property
    def _cgroup(self) -> Path:
        return MEMORY_CGROUP / self.network.bridge

    def address(self, host: str) -> str:
        """Return the address of ``login`` (this machine), ``ctl`` or a node."""
        return self.network.address(host)

    def log(self, daemon: str) -> str:
        """Return a daemon's log: slurmctld, slurmdbd, slurmd-n1, ..."""
        return (self.folder / "log" / f"{daemon}.log").read_text(errors="replace")

    # ---- commands ---------------------------------------------------------------------------

    def run(self, words: Sequence[str | Path], **options: Any) -> CompletedProcess[str]:
        """Run a command on the login node (this machine), as a user of the cluster; options of ``run``."""
        return run(words, **self._with_environment(options))

    def run_on_node(self, node: str, words: Sequence[str | Path], **options: Any) -> CompletedProcess[str]:
        """Run a command on a node (or ``ctl``), with the node's network and process ids."""
        return self._machines[node].run(words, **self._with_environment(options))

    def _with_environment(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, "env": {**os.environ, **self.environment, **(options.get("env") or {})}}

    def command_on_node(self, node: str, words: Sequence[str | Path], *, cwd: Path) -> list[str]:
        """Return the command that runs ``words`` on a node, without starting it."""
        return self._machines[node].command(words, cwd=cwd)

    # ---- network ----------------------------------------------------------------------------

    def link(self, rate: str | None, *, nodes: Sequence[str] | None = None) -> None:
        """Limit the speed of the nodes' links (``400mbit``); None removes the limit."""
        for node in nodes or self.nodes:
            networks.limit_link(self._machines[node], rate)

    @contextmanager
    def linked(self, rate: str, *, nodes: Sequence[str] | None = None) -> Iterator[None]:
        """Limit the speed of the nodes' links within a ``with`` block."""
        self.link(rate, nodes=nodes)
        try:
            yield
        finally:
            self.link(None)

    # ---- daemons and nodes, for tests that break things -------------------------------------

    @contextmanager
    def without_slurmctld(self) -> Iterator[None]:
        """Stop the controller within a ``with`` block: sbatch and squeue fail after 1 s, jobs continue.

        Only the commands get the short ``MessageTimeout``: a controller with it holds jobs that a busy
        machine starts too slowly.
        """
        controller = self._machines["ctl"]
        self._write_files({**self._settings, "MessageTimeout": "1"})
        self._daemons.stop(controller, "slurmctld")
        try:
            yield
        finally:
            self._write_files(self._settings)
            self._daemons.start_slurmctld(controller)

    @contextmanager
    def frozen_slurmctld(self) -> Iterator[None]:
        """Freeze the controller within a ``with`` block: commands connect, but get no answer."""
        controller = self._machines["ctl"]
        pid = controller.run(["cat", "/run/slurmctld.pid"]).stdout.strip()
        controller.run(["kill", "-STOP", pid])
        try:
            yield
        finally:
            controller.run(["kill", "-CONT", pid])

    def stop_slurmdbd(self) -> None:
        """Stop the accounting daemon: sacct fails, but all other commands work."""
        self._daemons.stop(self._machines["ctl"], "slurmdbd")

    def start_slurmdbd(self) -> None:
        """Start the accounting daemon again; the controller then sends its buffered records."""
        self._daemons.start_slurmdbd(self._machines["ctl"])

    def stop_slurmd(self, node: str) -> None:
        """Stop a node's slurmd; its jobs continue."""
        self._daemons.stop(self._machines[node], "slurmd")

    def start_slurmd(self, node: str) -> None:
        """Start a node's slurmd (again)."""
        self._daemons.start_slurmd(self._machines[node])

    def crash_node(self, node: str) -> None:
        """Simulate a power cut: remove all processes and the network link of a node.

        Slurm notices this after SlurmdTimeout, or immediately with :meth:`declare_down`.
        """
        self._machines[node].kill()

    def declare_down(self, node: str, *, reason: str = "crashed") -> None:
        """Set a node down in Slurm: its jobs end as NODE_FAIL or are requeued."""
        self.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", f"Reason={reason}"])

    def boot_node(self, node: str) -> None:
        """Start a crashed node again and wait until it is idle."""
        self._machines[node] = self._launch(node)()
        self.network.attach(self._machines[node])
        owner = json.loads((self.folder / "state.json").read_text())["owner"]
        self._save(owner and Process(*owner))
        self.start_slurmd(node)
        self.resume(node)
        self.wait_until_idle([node])

    def drain(self, node: str, *, reason: str = "maintenance") -> None:
        """Drain a node: no further job starts on it."""
        self.run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"])

    def resume(self, node: str) -> None:
        """Resume a node if it is down or drained."""
        state = self.node_states()[node]
        if "down" in state or "drain" in state:
            # No check: ReturnToService may have resumed the node in between.
            self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)

    def start_sshd(self) -> Path:
        """Start sshd on every node; return the ssh configuration that reaches n1, n2, ..."""
        for node in self.nodes:
            self._daemons.start_sshd(self._machines[node], self.folder / "ssh")
        config = self.folder / "ssh/config"
        hosts = [f"Host {node}\n  HostName {self.address(node)}\n" for node in self.nodes]
        usual = {
            "User": "root",
            "IdentityFile": self.folder / "ssh/user",
            "IdentitiesOnly": "yes",
            "BatchMode": "yes",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": self.folder / "ssh/known_hosts",
            "LogLevel": "ERROR",
        }
        config.write_text("".join(hosts) + "Host *\n" + "".join(f"  {k} {v}\n" for k, v in usual.items()))
        return config

    # ---- settings ---------------------------------------------------------------------------

    @contextmanager
    def configured(self, **settings: str) -> Iterator[None]:
        """Change lines of slurm.conf (``SlurmdTimeout="5"``) within a ``with`` block, without a restart.

        Settings that require a restart of the daemons (plugins) belong in :class:`Options`.
        """
        before = self._settings
        self._configure({**before, **settings})
        try:
            yield
        finally:
            self._configure(before)

    def _configure(self, settings: dict[str, str]) -> None:
        self._settings = settings
        self._write_files(settings)
        self.run(["scontrol", "reconfigure"])
        # A new process takes the place of slurmctld since 23.11.
        wait_for(
            lambda: self._daemons.is_running(self._machines["ctl"], "slurmctld"),
            what="the reconfigured slurmctld",
        )

    def _write_files(self, settings: dict[str, str]) -> None:
        write_files(self.folder, options=self.options, network=self.network, settings=settings)

    @contextmanager
    def limited(self, **limits: int) -> Iterator[None]:
        """Set a limit for the account's root user (``MaxSubmitJobs=2``) within a ``with`` block."""
        self._limit(limits)
        try:
            yield
        finally:
            self._limit(dict.fromkeys(limits, -1))

    @contextmanager
    def qos(self, name: str, **limits: str) -> Iterator[None]:
        """Add a QOS with limits (``MaxWall="1"``: one minute) for the account within a ``with`` block."""
        words = [f"{key}={value}" for key, value in limits.items()]
        self.run(["sacctmgr", "-i", "add", "qos", name, "set", *words])
        self.run(["sacctmgr", "-i", "modify", "account", ACCOUNT, "set", f"qos+={name}"])
        try:
            yield
        finally:
            self.clear()
            self.run(["sacctmgr", "-i", "delete", "qos", name])

    def _limit(self, limits: Mapping[str, int]) -> None:
        words = [f"{name}={value}" for name, value in limits.items()]
        self.run(["sacctmgr", "-i", "modify", "user", "root", "where", f"account={ACCOUNT}", "set", *words])

    # ---- between tests ----------------------------------------------------------------------

    def node_states(self) -> dict[str, str]:
        """Return each node's state in sinfo's long words (idle, mixed, down*, draining, ...)."""
        lines = self.run(["sinfo", "-h", "-N", "-o", "%N %T"]).stdout.splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def wait_until_idle(self, nodes: Sequence[str] | None = None, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the nodes are idle."""
        wanted = nodes or self.nodes

        def idle() -> bool:
            states = self.node_states()
            # 26.05 shows the idle nodes of a reservation as reserved.
            return all(states.get(node) in ("idle", "reserved") for node in wanted)

        wait_for(idle, what=f"idle nodes {', '.join(wanted)}", timeout_s=timeout_s)

    def clear(self) -> None:
        """Cancel all jobs and wait until the nodes are idle, so that the next test starts in a clean state."""
        jobs = self.run(["squeue", "-h", "-o", "%A"]).stdout.split()
        if jobs:
            self.run(["scancel", *sorted(set(jobs))], check=False)
        wait_for(lambda: not self.run(["squeue", "-h", "-o", "%A"]).stdout.split(), what="an empty queue")
        self.wait_until_idle()


def remove_abandoned() -> None:
    """Remove clusters that killed processes left behind."""
    with _only_one("bench-cluster-removal"):
        for folder in networks.claimed().values():
            try:
                owner = json.loads((folder / "state.json").read_text())["owner"]
                abandoned = owner is not None and not Process(*owner).alive
            except (OSError, ValueError):
                continue  # being created, or not a test cluster
            if abandoned:
                Cluster.attach(folder).stop()


@contextmanager
def _only_one(name: str) -> Iterator[None]:
    """Hold a lock of this machine. It is an abstract socket, which needs no file and closes with the process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:

        def taken() -> bool:
            try:
                lock.bind(f"\0{name}")
            except OSError:
                return False
            return True

        wait_for(taken, what=f"another process that holds {name}")
        yield


def _tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-12:]


def _emptied(folder: Path) -> bool:
    """Remove a folder, even if an ending process removes files in it at the same time."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _remove_cgroups(top: Path) -> None:
    """Remove a cgroup and its descendants, the innermost first."""
    folders = [path for path in top.rglob("*") if path.is_dir()] if top.is_dir() else []
    for folder in [*sorted(folders, reverse=True), *([top] if top.is_dir() else [])]:
        wait_for(partial(_removed, folder), what=f"the end of cgroup {folder}")


def _removed(cgroup: Path) -> bool:
    """Remove an empty cgroup; retry, because it stays busy briefly after its last process was killed."""
    try:
        cgroup.rmdir()
    except OSError:
        return not cgroup.exists()
    return True
