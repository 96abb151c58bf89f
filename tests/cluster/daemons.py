"""Start and stop the daemons of the test cluster, and wait until they are ready."""

import os
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.configuration import ACCOUNT, DATABASE_PORT, Options
from tests.cluster.containers import ClusterError, Container, daemon_environment, run, wait_for
from tests.cluster.network import CLUSTER
from tests.cluster.releases import Release

#: Required programs by Debian package. install.sh installs these packages.
PROGRAMS = {
    "slurmctld": ("slurmctld",),
    "slurmd": ("slurmd",),
    "slurm-client": ("sbatch", "srun", "squeue", "sacct", "sinfo", "scontrol", "scancel", "sacctmgr"),
    "slurmdbd": ("slurmdbd",),
    "munge": ("munged", "munge"),
    "mariadb-server": ("mariadbd", "mariadb-install-db", "mariadb"),
    "iproute2": ("ip", "tc"),
    "util-linux": ("unshare", "nsenter"),
    "openssh-server": ("sshd",),
    "openssh-client": ("ssh", "ssh-keygen"),
}


@dataclass(frozen=True)
class Daemons:
    """Starts and stops daemons in the machines of the cluster with its state in ``folder``."""

    folder: Path
    release: Release

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the daemons."""
        common = daemon_environment()
        path = self.release.search_path(common["PATH"])
        return {**common, "PATH": path, "SLURM_CONF": str(self.folder / "etc/slurm.conf")}

    def start_munge(self, controller: Container) -> None:
        """Start munged; all machines use its socket, because they share the file system."""
        place = self.folder / "munge"
        place.mkdir(mode=0o755)
        key = place / "key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))
        # munged requires a private log and seed, so they are in its own folder.
        options = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
        words = [f"--{name}={place / value}" for name, value in options.items()]
        controller.run(["munged", *words, f"--seed-file={place / 'seed'}", "--num-threads=4"])

    def start_database(self, controller: Container) -> None:
        """Start MariaDB; the first start creates its data folder."""
        data, scratch = self.folder / "database", self.folder / "database.tmp"
        scratch.mkdir(exist_ok=True)
        # MariaDB names temporary files after its process id, which is not unique across clusters.
        usual = ["--no-defaults", "--user=root", f"--datadir={data}", f"--tmpdir={scratch}"]
        # Test data need not survive a power cut: few syncs and a small log.
        fast = ["--innodb-flush-log-at-trx-commit=0", "--innodb-log-file-size=8M", "--skip-log-bin"]
        if not data.exists():
            bare = ["--skip-test-db", "--auth-root-authentication-method=normal"]
            controller.run(["mariadb-install-db", *usual, *fast, *bare], env=self.environment)
        socket = ["--socket=/run/mariadb.sock", "--pid-file=/run/mariadb.pid"]
        network = ["--bind-address=127.0.0.1", f"--port={DATABASE_PORT}"]
        log = f"--log-error={self.folder}/log/mariadb.log"
        server = ["mariadbd", *usual, *fast, *socket, *network, log, "--innodb-buffer-pool-size=32M"]
        # mariadbd has no daemon mode; the machine's init adopts it.
        controller.run(["sh", "-c", '"$@" </dev/null >/dev/null 2>&1 &', "sh", *server], env=self.environment)
        sql = ["mariadb", "--no-defaults", "--socket=/run/mariadb.sock", "-e"]
        wait_for(
            lambda: controller.run([*sql, "select 1"], check=False).returncode == 0,
            what=f"MariaDB (its log: {self.folder}/log/mariadb.log)",
        )
        user = "slurm@127.0.0.1"
        make = f"create user if not exists {user} identified by '{CLUSTER}'; grant all on *.* to {user}"
        controller.run([*sql, make])

    def start_slurmdbd(self, controller: Container) -> None:
        """Start slurmdbd and wait until it answers."""
        controller.run(["slurmdbd"], env=self.environment)
        ask = ["sacctmgr", "-n", "show", "cluster"]
        wait_for(
            lambda: controller.run(ask, env=self.environment, check=False).returncode == 0,
            what=f"slurmdbd (its log: {self.folder}/log/slurmdbd.log)",
        )

    def register(self, controller: Container) -> None:
        """Add the cluster, the account and the user to slurmdbd."""
        for words in (
            ["cluster", CLUSTER],
            ["account", ACCOUNT, "Description=users", "Organization=bench"],
            ["user", "root", f"Account={ACCOUNT}", f"DefaultAccount={ACCOUNT}"],
        ):
            controller.run(["sacctmgr", "-i", "add", *words], env=self.environment)

    def start_slurmctld(self, controller: Container) -> None:
        """Start slurmctld and wait until it answers."""
        (self.folder / "spool/ctl").mkdir(parents=True, exist_ok=True)
        controller.run(["slurmctld"], env=self.environment)
        ping = ["scontrol", "ping"]
        wait_for(
            lambda: "UP" in controller.run(ping, env=self.environment, check=False).stdout,
            what=f"slurmctld (its log: {self.folder}/log/slurmctld.log)",
        )

    def start_slurmd(self, node: Container) -> None:
        """Start a node's slurmd; the node joins a little later."""
        (self.folder / "spool" / node.name).mkdir(parents=True, exist_ok=True)
        node.run(["slurmd", "-N", node.name, *self.release.slurmd_options], env=self.environment)

    def start_sshd(self, node: Container, keys: Path) -> None:
        """Start a node's sshd, which accepts only the cluster's key, unless it is running."""
        if node.run(["sh", "-c", "kill -0 $(cat /run/sshd.pid)"], check=False).returncode == 0:
            return
        options = {
            "HostKey": keys / "host",
            "AuthorizedKeysFile": keys / "user.pub",
            "StrictModes": "no",  # the keys are below a world-writable folder
            "PermitRootLogin": "prohibit-password",
            "PasswordAuthentication": "no",
            "UsePAM": "no",
            "PidFile": "/run/sshd.pid",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        node.run(
            ["/usr/sbin/sshd", "-f", "/dev/null", "-E", self.folder / f"log/sshd-{node.name}.log", *words]
        )

    def is_running(self, machine: Container, daemon: str) -> bool:
        """Return whether the process in a daemon's pid file exists."""
        return machine.run(["sh", "-c", f"kill -0 $(cat /run/{daemon}.pid)"], check=False).returncode == 0

    def stop(self, machine: Container, daemon: str) -> None:
        """Stop a daemon by the id in its pid file, as a service manager would, and wait until it has ended.

        Processes of jobs keep running, because slurmstepd does not end with slurmd.
        """
        pid_file = f"/run/{daemon}.pid"
        pid = machine.run(["cat", pid_file], check=False).stdout.strip()
        if not pid:
            raise ClusterError(f"{daemon} does not run on {machine.name}")
        machine.run(["kill", pid])
        wait_for(
            lambda: machine.run(["test", "-d", f"/proc/{pid}"], check=False).returncode != 0,
            what=f"the end of {daemon} on {machine.name}",
        )
        machine.run(["rm", "-f", pid_file])


def make_keys(folder: Path) -> None:
    """Create the ssh keys of the cluster: a host key and a user key for all nodes."""
    folder.mkdir(mode=0o755)
    for name in ("host", "user"):
        run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"test cluster {name}", "-f", folder / name]
        )


def make_devices(folder: Path, options: Options) -> None:
    """Create fake GPUs: device files (of /dev/null) that Slurm can count and allocate."""
    folder.mkdir()
    for gpu in range(options.gpus):
        os.mknod(folder / f"gpu{gpu}", 0o666 | 0o020000, os.makedev(1, 3))
