"""What the runs ran on, from their env.json: software, hardware, hosts, transport."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from analysis.data.load import Study
from analysis.text import count, listed, one_line, whole
from bench.units import human_bytes

#: Up to this many runs every env.json is read, beyond it a sample.
MAX_READ = 500
_MAX_VALUES = 4
_MAX_HOSTS = 64

#: What env.json says of a run's software and hardware: label and key.
FACTS = (
    ("bench", "bench_version"),
    ("PyTorch", "torch"),
    ("Python", "python"),
    ("CUDA", "cuda"),
    ("NCCL", "nccl"),
    ("Device", "device_name"),
    ("Backend", "backend"),
    ("Launcher", "launcher"),
    ("Threads per rank", "threads_per_rank"),
    ("Parameters", "parameters"),
    ("Gradients", "gradient_bytes"),
)
#: The same of its ``transport``.
TRANSPORT = (
    ("Interface", "interface"),
    ("Network", "network"),
    ("Algorithm", "algorithm"),
    ("Transport version", "version"),
    ("GPUDirect", "gpudirect"),
    ("Within a host", "within_host"),
    ("Transport not read", "not_read_because"),
)


@dataclass(frozen=True)
class Host:
    """One host that joined, and in how many runs."""

    name: str
    cpu: str
    cores: str
    memory: str
    runs: int


@dataclass(frozen=True)
class Crowding:
    """More ranks than cores on a host: they measure the sharing of cores, not scaling."""

    ranks: int
    cores: int
    single_host: bool
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        where = "" if self.single_host else " per node"
        cores = count(self.cores, "core")
        return (
            f"{count(self.ranks, 'rank')} on {cores}: efficiency beyond {count(self.cores, 'rank')}{where} "
            "is about sharing cores, not about the network"
        )


@dataclass
class Environment:
    """The summary of the environments read, of those asked for, of the runs started.

    ``facts`` holds label and value; a value that differs lists how often each occurs.
    """

    read: int = 0
    asked: int = 0
    started: int = 0
    facts: list[tuple[str, str]] = field(default_factory=list)
    variables: list[tuple[str, str]] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    hosts_left_out: int = 0
    crowding: Crowding | None = None
    warnings: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        """Where the summary comes from, in words."""
        if self.asked < self.started:
            return f"From a sample: {self.read:,} of {count(self.started, 'started run')} were read."
        rest = self.started - self.read
        others = f"; {count(rest, 'more started run')} left no readable env.json" if rest else ""
        return f"From the env.json of {count(self.read, 'run')}{others}."


def describe_environment(study: Study) -> Environment:
    """Return the environment of the study's runs, from every env.json or from a sample of them."""
    tried = [place for place, folder in enumerate(study.attempts) if folder is not None]
    chosen = sampled(study, tried)
    run_ids = study.runs["run_id"].iloc[chosen]
    envs = list(study.envs_of(run_ids).values())
    found = Environment(read=len(envs), asked=len(chosen), started=len(tried))
    for label, key in FACTS:
        _add_fact(found, label, [value_of(env, key) for env in envs])
    transports = [env.get("transport") for env in envs]
    for label, key in TRANSPORT:
        _add_fact(found, label, [value_of(t, key) if isinstance(t, dict) else None for t in transports])
    if way := _allocations(study):
        found.facts.append(("Run", way))
    _add_variables(found, envs)
    _add_hosts(found, envs)
    found.crowding = _crowding(envs)
    texts = Counter(one_line(text) for env in envs for text in _items(env.get("warnings")))
    found.warnings = [f"{text} ({count(runs, 'run')})" for text, runs in texts.most_common(20)]
    return found


def _allocations(study: Study) -> str:
    """Return in which way the runs were run, where that is known: jobs of their own, or packed into some."""
    runs = study.runs[study.runs["started_at"].notna()]
    own = int((runs["allocation"] == "job").sum())
    packed = runs[runs["allocation"] == "pack"]
    ways = []
    if len(packed):
        jobs = listed([f"job {job}" for job in packed["job_id"].unique()], limit=_MAX_VALUES)
        ways.append(f"{count(len(packed), 'run')} one after another in the allocation of {jobs}")
    if own:
        ways.append(f"{count(own, 'run')} in a job of its own each")
    return "; ".join(ways)


def sampled(study: Study, places: list[int]) -> list[int]:
    """Return all places, or one run of each size, launcher and backend and others spread over the study."""
    if len(places) <= MAX_READ:
        return places
    cells = study.cells.set_index("cell_id")[["nodes", "gpus_per_node", "launcher", "backend"]]
    kinds = cells.loc[study.runs["cell_id"].iloc[places]].reset_index(drop=True)
    first = np.flatnonzero(~kinds.duplicated().to_numpy())[:MAX_READ]
    spread = np.linspace(0, len(places) - 1, MAX_READ - len(first)).astype(int)
    return [places[i] for i in sorted({*first.tolist(), *spread.tolist()})]


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def value_of(mapping: dict[str, Any], key: str) -> str | None:
    """Return a fact of env.json (or of its transport) as text; None where it is not known."""
    value = mapping.get(key)
    if value is None or isinstance(value, (dict, list)):
        return None
    if key == "gradient_bytes" and isinstance(value, int):
        return human_bytes(value)
    if key == "parameters" and isinstance(value, int):
        return whole(value)
    return one_line(value, limit=120)


def _add_fact(found: Environment, label: str, values: list[str | None]) -> None:
    counts = Counter(value for value in values if value)
    if not counts:
        return
    if len(counts) == 1:
        found.facts.append((label, next(iter(counts))))
        return
    if label not in ("Backend", "Launcher"):
        found.differing.append(label)
    shown = [f"{value} ({count(runs, 'run')})" for value, runs in counts.most_common()]
    found.facts.append((label, listed(shown, limit=_MAX_VALUES)))


def _add_variables(found: Environment, envs: list[dict[str, Any]]) -> None:
    """Add the variables of all runs; one that differs in every run (a job's id) is only counted."""
    values: dict[str, Counter[str]] = {}
    for env in envs:
        for section in ("env", "slurm"):
            content = env.get(section)
            for name, value in content.items() if isinstance(content, dict) else ():
                values.setdefault(one_line(name, limit=80), Counter())[one_line(value, limit=160)] += 1
    for name, counts in sorted(values.items()):
        if len(counts) > _MAX_VALUES:
            found.variables.append((name, f"{len(counts)} different values"))
        elif len(counts) == 1 and counts.total() == len(envs):
            found.variables.append((name, next(iter(counts))))
        else:
            shown = [f"{value} ({count(runs, 'run')})" for value, runs in counts.most_common()]
            found.variables.append((name, listed(shown, limit=_MAX_VALUES)))


def hosts_of(env: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entries of the hosts that joined a run."""
    return (host for host in _items(env.get("hosts")) if isinstance(host, dict))


def _add_hosts(found: Environment, envs: list[dict[str, Any]]) -> None:
    hosts: Counter[tuple[str, str, str, str]] = Counter()
    for env in envs:
        for host in hosts_of(env):
            memory = host.get("memory_bytes")
            key = (
                one_line(host.get("host"), limit=80),
                one_line(host.get("cpu_model"), limit=80),
                one_line(host.get("cores"), limit=10),
                human_bytes(memory) if isinstance(memory, (int, float)) else "",
            )
            hosts[key] += 1
    # n2 before n10.
    ordered = sorted(hosts.items(), key=lambda item: (_natural(item[0][0]), item[0]))
    found.hosts = [Host(*key, runs) for key, runs in ordered[:_MAX_HOSTS]]
    found.hosts_left_out = max(0, len(ordered) - _MAX_HOSTS)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts names by the numbers in them."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", name)]


def _crowding(envs: list[dict[str, Any]]) -> Crowding | None:
    """Return the most crowded host of all runs, where ranks outnumber cores anywhere."""
    worst: tuple[float, int, int, bool] | None = None
    sizes: set[int] = set()
    for env in envs:
        hosts = list(hosts_of(env))
        for host in hosts:
            ranks, cores = host.get("ranks_here"), host.get("cores")
            if not (isinstance(ranks, int) and isinstance(cores, int)) or cores < 1 or ranks <= cores:
                continue
            if isinstance(size := env.get("world_size"), int):
                sizes.add(size)
            case = (ranks / cores, ranks, cores, len(hosts) == 1)
            worst = max(worst, case) if worst else case
    if worst is None:
        return None
    return Crowding(worst[1], worst[2], worst[3], tuple(sorted(sizes)))
