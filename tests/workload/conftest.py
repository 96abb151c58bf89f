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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.common import read_rows

ROOT = Path(__file__).parents[2]
#: Short windows on a small model with several buckets; no probes.
QUICK = [
    *("--device", "cpu", "--model", "mlp", "--parameters", "100k", "--bucket-cap-mb", "0.1"),
    *("--steps-per-epoch", "5", "--epochs", "2", "--warmup-steps", "3", "--attribution-steps", "4"),
    *("--probe-steps", "0", "--sweep-time", "0"),
]


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
        for name in ("SLURM_PROCID", "RANK", "BENCH_EXPECTED_WORLD_SIZE", "NCCL_DEBUG", "NCCL_DEBUG_FILE"):
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

    def start(
        self, folder: Path, argv: Sequence[str], environments: Sequence[Mapping[str, str]], target: str = ""
    ) -> Started:
        self._kill_unfinished()
        folder.mkdir(parents=True, exist_ok=True)
        arguments = ["--run-dir", str(folder), "--backend", "gloo", *argv]
        ranks = [
            {
                "env": {"GLOO_SOCKET_IFNAME": "lo", "BENCH_THREADS_PER_RANK": "1", **env},
                "argv": arguments,
                "out": str(folder / f"{number}.out"),
                "err": str(folder / f"{number}.err"),
            }
            for number, env in enumerate(environments)
        ]
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"target": target, "ranks": ranks}) + "\n")
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


def free_port() -> int:
    """Return a free port below those that the kernel gives to connections, and below those of the jobs."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)  # a seed would give all workers the same ports
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
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


def wait_for(condition: Callable[[], object], what: str, *, limit_s: float = 280) -> None:
    """Wait until ``condition`` is true; the limit is generous, for a busy machine."""
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen in {limit_s:g} s"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def late_rank_run(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Three epochs of two ranks, of which rank 1 is late in every step."""
    folder = tmp_path_factory.mktemp("late rank")
    argv = ["--per-gpu-batch", "8", *QUICK, "--epochs", "3"]
    started = server.start(folder, argv, torchrun_env(2), "tests.workload.scenarios:late_rank")
    return started.finish().succeeded()


@pytest.fixture
def run_ranks(server: ForkServer, tmp_path: Path) -> Callable[..., Finished]:
    """Run ranks to their end: by default two, with QUICK's options."""

    def run(
        *words: str,
        batch: int = 8,
        environments: Sequence[Mapping[str, str]] | None = None,
        target: str = "",
        folder: str = "run",
    ) -> Finished:
        argv = ["--per-gpu-batch", str(batch), *QUICK, *words]
        return server.start(tmp_path / folder, argv, environments or torchrun_env(2), target).finish()

    return run
