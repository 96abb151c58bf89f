"""Options of the test cluster, and the configuration files of its daemons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.network import CLUSTER, Network
from tests.cluster.releases import INSTALLED, Release

ACCOUNT = "users"
DATABASE_PORT = 3306  # inside the controller's own network
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")


def memory_limits_possible() -> bool:
    """Return whether task/cgroup can limit memory here (Slurm 22.05 without systemd needs cgroup v1)."""
    return (MEMORY_CGROUP / "memory.limit_in_bytes").is_file()


@dataclass(frozen=True)
class Partition:
    """An additional partition. ``settings`` are further options (``MaxTime``, ``PriorityTier``)."""

    name: str
    nodes: str
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """Options of a cluster. ``settings`` are lines of slurm.conf that replace or extend the default ones.

    ``cpus`` and ``memory_mb`` are only declared to Slurm; all nodes share the resources of this machine.
    """

    nodes: int = 4
    gpus: int = 4
    gpu_type: str = "l40s"
    cpus: int = 8
    memory_mb: int = 32_000
    partitions: tuple[Partition, ...] = ()
    accounting: bool = True
    memory_limits: bool = field(default_factory=memory_limits_possible)
    settings: Mapping[str, str] = field(default_factory=dict)
    release: Release = INSTALLED

    @property
    def names(self) -> list[str]:
        """The nodes' names: n1, n2, ..."""
        return [f"n{i}" for i in range(1, self.nodes + 1)]

    @property
    def hostlist(self) -> str:
        """The nodes in Slurm's compressed form (``n[1-4]``)."""
        return f"n[1-{self.nodes}]" if self.nodes > 1 else "n1"

    def as_json(self) -> dict[str, Any]:
        """Return the options as a JSON object, which :meth:`from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Options:
        """Return the options in a JSON object that :meth:`as_json` has written."""
        partitions = tuple(Partition(**p) for p in content["partitions"])
        return cls(**{**content, "partitions": partitions, "release": Release(**content["release"])})


def write_files(folder: Path, *, options: Options, network: Network, settings: Mapping[str, str]) -> None:
    """Write slurm.conf and its companions into ``folder/etc``; ``settings`` override those of the options."""
    etc = folder / "etc"
    etc.mkdir(exist_ok=True)
    _replace(
        etc / "slurm.conf",
        slurm_conf(folder, options=options, network=network, settings={**options.settings, **settings}),
    )
    _replace(
        etc / "gres.conf",
        f"NodeName={options.hostlist} Name=gpu Type={options.gpu_type} "
        f"File={folder}/dev/gpu[0-{options.gpus - 1}]\n"
        if options.gpus
        else "",
    )
    limits = {"ConstrainRAMSpace": "yes" if options.memory_limits else "no", "ConstrainSwapSpace": "no"}
    cgroups = {**options.release.cgroup_settings, **limits, "ConstrainCores": "no"}
    _replace(etc / "cgroup.conf", "".join(f"{key}={value}\n" for key, value in cgroups.items()))
    _replace(etc / "plugstack.conf", "")
    _replace(etc / "slurmdbd.conf", slurmdbd_conf(folder, options.release), mode=0o600)


def _replace(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file in one step: Slurm's commands read it at any time, and a half-written one stops them.

    ``mode`` is 0o600 for slurmdbd.conf, because slurmdbd rejects a file that others can read.
    """
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)


def slurm_conf(folder: Path, *, options: Options, network: Network, settings: Mapping[str, str]) -> str:
    """Return the text of slurm.conf."""
    values = {"folder": folder, "cluster": CLUSTER, "controller": network.address("ctl")}
    accounting = {"AccountingStorageType": "accounting_storage/none"}
    if options.accounting:
        tracked = {"AccountingStorageTRES": "gres/gpu" if options.gpus else "cpu"}
        accounting = _filled("accounting.conf", values) | tracked
    own = _by_options(options)
    lines = {**options.release.settings, **_filled("slurm.conf", values), **own, **accounting, **settings}
    devices = f" Gres=gpu:{options.gpu_type}:{options.gpus}" if options.gpus else ""
    last = f"[11-{10 + options.nodes}]" if options.nodes > 1 else "11"
    nodes = (
        f"NodeName={options.hostlist} NodeAddr=10.77.{network.slot}.{last} CPUs={options.cpus} "
        f"RealMemory={options.memory_mb}{devices} State=UNKNOWN"
    )
    usual = Partition(options.gpu_type, options.hostlist, {"Default": "YES", "MaxTime": "INFINITE"})
    partitions = [
        " ".join(
            [f"PartitionName={p.name}", f"Nodes={p.nodes}", *(f"{k}={v}" for k, v in p.settings.items())]
        )
        for p in (usual, *options.partitions)
    ]
    return "\n".join([*(f"{key}={value}" for key, value in lines.items()), nodes, *partitions, ""])


def _filled(name: str, values: Mapping[str, object]) -> dict[str, str]:
    """Return the settings in a file of ``etc``, with values in place of the braces."""
    lines = Path(__file__).with_name("etc").joinpath(name).read_text(encoding="utf-8").splitlines()
    return dict(line.format_map(values).split("=", 1) for line in lines if not line.startswith("#"))


def _by_options(options: Options) -> dict[str, str]:
    return {
        "TaskPlugin": "task/cgroup,task/affinity" if options.memory_limits else "task/affinity",
        # task/cgroup limits only allocated memory; it is allocated per CPU, so that jobs can share a node.
        "SelectTypeParameters": "CR_CPU_Memory" if options.memory_limits else "CR_CPU",
        "DefMemPerCPU": str(options.memory_mb // options.cpus),
        **({"GresTypes": "gpu"} if options.gpus else {}),
    }


def slurmdbd_conf(folder: Path, release: Release) -> str:
    """Return the text of slurmdbd.conf; the database listens on the loopback of the controller."""
    values = {"folder": folder, "cluster": CLUSTER, "port": DATABASE_PORT}
    lines = {**release.settings, **_filled("slurmdbd.conf", values)}
    return "".join(f"{key}={value}\n" for key, value in lines.items())
