"""Real torch ranks over gloo, forked from one process that has imported torch."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.common import read_rows, write_cell

ROOT = Path(__file__).parents[2]
#: Short windows on a small model with several buckets; no probes.
QUICK = {"device": "cpu", "model": "mlp", "parameters": 100_000, "bucket_cap_mb": 0.1}
QUICK |= {"steps_per_epoch": 5, "epochs": 1, "warmup_steps": 3, "attribution_steps": 4}
QUICK |= {"probe_steps": 0, "sweep_time": 0}


@dataclass
class Finished:
    """The exit codes and outputs of all ranks, and the run's folder."""

    folder: Path
    codes: list[int]
    out: list[str]
    err: list[str]

    def table(self, name: str) -> list[dict[str, str]]:
        return read_rows(self.folder / f"{name}.csv")

    @property
    def env(self) -> dict[str, Any]:
        return json.loads((self.folder / "env.json").read_text(encoding="utf-8"))

    def succeeded(self) -> Finished:
        assert not any(self.codes), "\n".join(self.err)
        return self

    def within(self, name: str) -> Finished:
        """Return the same with a folder in that of the run, in which the ranks recorded."""
        return replace(self, folder=self.folder / name)


class Started:
    """Running ranks."""

    def __init__(self, server: ForkServer, folder: Path, count: int, pids: list[int]) -> None:
        self.folder = folder
        self.pids = pids
        self._server = server
        self._count = count

    def finish(self) -> Finished:
        codes = self._server.read_codes()
        texts = [
            [(self.folder / f"{rank}.{name}").read_text(encoding="utf-8") for rank in range(self._count)]
            for name in ("out", "err")
        ]
        return Finished(self.folder, codes, *texts)


class ForkServer:
    """The client of ``forkserver.py``."""

    def __init__(self) -> None:
        # Other folders of packages stay on the path, for a Python without all of them.
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path}
        # A recorder in this process has set the last two.
        for name in ("SLURM_PROCID", "RANK", "NCCL_DEBUG", "NCCL_DEBUG_FILE"):
            env.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forkserver.py"))],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._unfinished: list[int] = []  # ranks whose exit codes nobody has read
        assert self.read() == {"ready": True}

    def read(self) -> dict[str, Any]:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())

    def read_codes(self) -> list[int]:
        codes = self.read()["codes"]
        self._unfinished = []
        return codes

    def _kill_unfinished(self) -> None:
        """Kill the ranks of a test that failed, for example because they hang."""
        if self._unfinished:
            for pid in self._unfinished:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.read_codes()

    def train(
        self, folder: Path, environments: Sequence[Mapping[str, str]], target: str = "", **cell: Any
    ) -> Started:
        """Start the built-in training, or a scenario of it, with the values of :func:`write_cell`."""
        first = environments[0]
        launcher = "torchrun" if "RANK" in first else "srun" if "SLURM_PROCID" in first else "single"
        ranks = int(first.get("WORLD_SIZE") or first.get("SLURM_NTASKS") or 1)
        write_cell(folder, **{"launcher": launcher, "ranks": ranks, **cell})
        return self.start(folder, [{"BENCH_RUN_DIR": str(folder), **env} for env in environments], target)

    def start(
        self,
        folder: Path,
        environments: Sequence[Mapping[str, str]],
        target: str,
        words: Sequence[str] = (),
        imports: Sequence[str] = (),
    ) -> Started:
        """Start ``target(*words)`` on each rank; :func:`folder_of_test` returns the folder there.

        The module of the target, and ``imports``, are imported once for all ranks.
        """
        self._kill_unfinished()
        folder.mkdir(parents=True, exist_ok=True)
        common = {"GLOO_SOCKET_IFNAME": "lo", "BENCH_THREADS_PER_RANK": "1", "TEST_FOLDER": str(folder)}
        ranks = [
            {"env": common | env, **{name: str(folder / f"{number}.{name}") for name in ("out", "err")}}
            for number, env in enumerate(map(dict, environments))
        ]
        assert self._process.stdin
        module, _, function = target.partition(":")
        content = {"target": target, "words": [*words], "imports": [*imports, *[module] * bool(function)]}
        self._process.stdin.write(json.dumps({**content, "ranks": ranks}) + "\n")
        self._process.stdin.flush()
        self._unfinished = self.read()["pids"]
        return Started(self, folder, len(ranks), self._unfinished)

    def close(self) -> None:
        self._kill_unfinished()
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(timeout=280)
        self._process.stdout.close()


def folder_of_test() -> Path:
    """Return the folder of a rank's test, which is not the run's folder of a recorder."""
    return Path(os.environ["TEST_FOLDER"])


def free_port() -> int:
    """Return a free port below those that the kernel gives to connections, and below those of the jobs.

    Each worker of the tests has its own ports, because others could take one before the training listens.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    while True:
        port = 10_000 + 1_250 * worker + random.SystemRandom().randrange(1_250)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def torchrun_env(ranks: int) -> list[dict[str, str]]:
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(ranks)]


def srun_env(ranks_per_host: Mapping[str, int]) -> list[dict[str, str]]:
    """The variables of srun for invented hosts; all ranks run on this machine."""
    shared = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(sum(ranks_per_host.values())),
        "SLURM_TASKS_PER_NODE": ",".join(str(count) for count in ranks_per_host.values()),
        "BENCH_HOSTS": ",".join(ranks_per_host),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    places = [(host, local) for host, count in ranks_per_host.items() for local in range(count)]
    return [
        {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURMD_NODENAME": host, **shared}
        for rank, (host, local) in enumerate(places)
    ]


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    started = ForkServer()
    yield started
    started.close()


@pytest.fixture(scope="session")
def plain(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of two ranks and two micro-batches, with several buckets, a checkpoint and probes."""
    options = QUICK | {"parameters": 400_000, "bucket_cap_mb": 0.4, "val_steps": 2, "grad_accum": 2}
    options |= {"steps_per_epoch": 6, "epochs": 2, "warmup_steps": 4, "attribution_steps": 8}
    options |= {"probe_steps": 4, "sweep_time": 10, "sweep_max_mb": 1, "checkpoint": True, "batch": 16}
    known = {"NCCL_ALGO": "Ring", "HF_TOKEN": "hidden", "NCCL_X": "http://u:hidden@h"}
    environments = [env | known for env in torchrun_env(2)]
    folder = tmp_path_factory.mktemp("plain run")
    return server.train(folder, environments, launcher="srun", **options).finish().succeeded()


@pytest.fixture
def run_ranks(server: ForkServer, tmp_path: Path) -> Callable[..., Finished]:
    """Run ranks of the training to their end: by default two, with QUICK's options."""

    def run(
        *,
        environments: Sequence[Mapping[str, str]] | None = None,
        target: str = "",
        folder: str = "run",
        **cell: Any,
    ) -> Finished:
        environments = environments or torchrun_env(2)
        return server.train(tmp_path / folder, environments, target, **QUICK | cell).finish()

    return run


@pytest.fixture
def run_program(server: ForkServer, tmp_path: Path) -> Callable[..., Finished]:
    """Run ranks of a program, by default two, to their end."""

    def run(target: str, environments: Sequence[Mapping[str, str]] | None = None) -> Finished:
        return server.start(tmp_path / "run", environments or torchrun_env(2), target).finish()

    return run
