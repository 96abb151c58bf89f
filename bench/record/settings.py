"""Settings of a recorder, from the harness's environment variables, else the script, else the defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from bench.errors import BenchError
from bench.matrix.workload import WorkloadOptions

_MINIMA = {"warmup_steps": 3, "steps_per_epoch": 1, "attribution_steps": 0, "epochs": 1}
_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")


class RecorderError(BenchError):
    """The recorder cannot record with these settings."""

    exit_code = 1


@dataclass(frozen=True)
class Lengths:
    """Lengths of the windows in optimizer steps, and the number of epochs (rows of metrics.csv).

    An epoch here is one throughput window and one attribution window. The epochs of the training loop do not
    matter. After the last epoch the recorder is idle. If ``epochs`` is None, it records until the end.
    """

    warmup_steps: int
    steps_per_epoch: int
    attribution_steps: int
    epochs: int | None

    @classmethod
    def of(cls, given: Mapping[str, int | None], env: Mapping[str, str]) -> Lengths:
        """Return the lengths from ``BENCH_WARMUP_STEPS`` and similar variables, else from ``given``.

        Raises:
            RecorderError: a length is not a whole number or is too small.
        """
        found: dict[str, int | None] = {}
        for field in fields(cls):
            name = field.name
            variable = f"BENCH_{name.upper()}"
            if text := env.get(variable):
                if not text.isdigit():
                    raise RecorderError(f"{variable} is {text!r}, not a whole number")
                found[name] = _checked(variable, int(text), _MINIMA[name])
            else:
                value = given.get(name, int(WorkloadOptions.model_fields[name].default))
                found[name] = None if value is None else _checked(name, value, _MINIMA[name])
        return cls(**found)  # type: ignore[arg-type]


def _checked(name: str, value: int, least: int) -> int:
    if value < least:
        raise RecorderError(f"{name} is {value}", remedy=f"it must be {least} or more")
    return value


def recording_folder(given: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Path:
    """Return ``BENCH_RUN_DIR`` if set, else ``given``, else a new folder below the current folder."""
    if folder := env.get("BENCH_RUN_DIR") or given:
        return Path(folder)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("bench-record", f"{stamp}-{os.getpid()}")


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, its ranks and the world size."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int


def launch_from(env: Mapping[str, str], group: tuple[int, int] | None) -> Launch:
    """Detect how this process was launched; ``group`` is (rank, world size) of its process group, if any.

    Raises:
        RecorderError: several processes were started without a process group, or the group's size differs
            from the cell's (``BENCH_EXPECTED_WORLD_SIZE``).
    """
    launcher, _, local_rank, processes = _launcher_of(env)
    if group is not None:
        expected = env.get("BENCH_EXPECTED_WORLD_SIZE", "")
        if expected.isdigit() and int(expected) != group[1]:
            raise RecorderError(
                f"the process group has {group[1]} processes, but the cell has {expected}",
                remedy="let the script take its size from the launcher's variables",
            )
        return Launch(launcher, group[0], local_rank, group[1])
    if processes > 1:
        raise RecorderError(
            f"the first step came before torch.distributed was set up, in a job of {processes} processes",
            remedy="call torch.distributed.init_process_group before the recorder's first step",
        )
    return Launch(launcher, 0, local_rank, 1)


def _launcher_of(env: Mapping[str, str]) -> tuple[str, int, int, int]:
    """Return the launcher's name, and the rank, local rank and world size from the launcher's variables."""
    # A job's script has Slurm's variables as well, but only tasks of srun have a step id. The scripts that
    # bench generates also set torchrun's variables for tasks of srun.
    in_step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
    is_srun = in_step and "TORCHELASTIC_RUN_ID" not in env
    launcher, names = ("srun", _SRUN_VARIABLES) if is_srun else ("torchrun", _TORCHRUN_VARIABLES)
    if all(env.get(name, "").isdigit() for name in names):
        rank, local_rank, world_size = (int(env[name]) for name in names)
        return launcher, rank, local_rank, world_size
    return "single", 0, 0, 1
