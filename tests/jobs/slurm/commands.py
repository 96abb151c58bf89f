"""Small scripts in place of Slurm's commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.jobs.slurm.client import Slurm
from tests.common import write_program


class Commands:
    """A PATH with scripts in place of Slurm's commands; each records its arguments and environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "bin"
        self.path.mkdir()

    def add(self, name: str, *, out: str = "", err: str = "", code: int = 0, sleep_s: float = 0) -> None:
        script = self.path / name
        write_program(
            script,
            f"#!{sys.executable}\n"
            "import json, os, sys, time\n"
            f"with open({str(self.folder / f'{name}.calls')!r}, 'a') as file:\n"
            "    file.write(json.dumps([sys.argv[1:], dict(os.environ)]) + '\\n')\n"
            f"time.sleep({sleep_s})\n"
            f"sys.stdout.write({out!r})\n"
            f"sys.stderr.write({err!r})\n"
            f"sys.exit({code}) if {code} >= 0 else os.kill(os.getpid(), {-code})\n",
        )

    def calls(self, name: str) -> list[list[str]]:
        return [call[0] for call in self._calls(name)]

    def environments(self, name: str) -> list[dict[str, str]]:
        return [call[1] for call in self._calls(name)]

    def _calls(self, name: str) -> list[tuple[list[str], dict[str, str]]]:
        return [json.loads(line) for line in (self.folder / f"{name}.calls").read_text().splitlines()]

    def slurm(self, *, timeout_s: float = 30, **environment: str) -> Slurm:
        full = {"PATH": str(self.path), **environment}
        return Slurm(timeout_s=timeout_s, submit_timeout_s=timeout_s, environment=full)
