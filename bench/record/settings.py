"""What a recorder is to do: the harness's words before the script's, those before the defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from bench.errors import BenchError
from bench.matrix.workload import WorkloadOptions

#: Where standalone recordings land, below the current folder.
HOME = Path("bench-record")


class RecorderError(BenchError):
    """The recorder cannot record as it was asked to."""

    exit_code = 1


@dataclass(frozen=True)
class Lengths:
    """How long the windows are, in optimizer steps, and how many epochs (rows) there are to be.

    An epoch here is one throughput window and one attribution window, whatever the loop calls
    an epoch. After the last the recorder does nothing any more; ``epochs`` None is for ever.
    """

    warmup_steps: int
    steps_per_epoch: int
    attribution_steps: int
    epochs: int | None

    @classmethod
    def of(cls, given: Mapping[str, int | None], env: Mapping[str, str]) -> Lengths:
        """Return the lengths: ``BENCH_WARMUP_STEPS`` and the like, else what the script gives.

        Raises:
            RecorderError: a length that is no whole number or too small.
        """
        least = {"warmup_steps": 3, "steps_per_epoch": 1, "attribution_steps": 0, "epochs": 1}
        found: dict[str, int | None] = {}
        for field in fields(cls):
            name = field.name
            variable = f"BENCH_{name.upper()}"
            if text := env.get(variable):
                if not text.isdigit():
                    raise RecorderError(f"{variable} is {text!r}, not a whole number")
                found[name] = _checked(variable, int(text), least[name])
            elif name in given:
                value = given[name]
                found[name] = None if value is None else _checked(name, value, least[name])
            else:
                found[name] = int(WorkloadOptions.model_fields[name].default)
        return cls(**found)  # type: ignore[arg-type]


def _checked(name: str, value: int, least: int) -> int:
    if value < least:
        raise RecorderError(f"{name} is {value}", remedy=f"it must be {least} or more")
    return value


def recording_folder(given: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Path:
    """Return where the files go: ``BENCH_RUN_DIR``, else what the script gives, else a new folder."""
    if folder := env.get("BENCH_RUN_DIR") or given:
        return Path(folder)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return HOME / f"{stamp}-{os.getpid()}"


@dataclass(frozen=True)
class Place:
    """Which process of which launch this is."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int


_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")


def place_of(env: Mapping[str, str], group: tuple[int, int] | None) -> Place:
    """Return this process's place.

    Args:
        env: the environment's variables.
        group: rank and world size of the process group; None where there is none.

    Raises:
        RecorderError: several processes were started, and no process group joins them; a group of
            another size than the cell's (``BENCH_EXPECTED_WORLD_SIZE``).
    """
    launcher, numbers = _launch(env)
    local_rank = numbers[1]
    if group is not None:
        expected = env.get("BENCH_EXPECTED_WORLD_SIZE", "")
        if expected.isdigit() and int(expected) != group[1]:
            raise RecorderError(
                f"the process group has {group[1]} processes, and the cell {expected}",
                remedy="let the script take its size from the launcher's variables",
            )
        return Place(launcher, group[0], local_rank, group[1])
    if numbers[2] > 1:
        raise RecorderError(
            f"the first step came before torch.distributed was set up, in a job of {numbers[2]} processes",
            remedy="call torch.distributed.init_process_group before the recorder's first step",
        )
    return Place(launcher, 0, local_rank, 1)


def _launch(env: Mapping[str, str]) -> tuple[str, list[int]]:
    """Return the launcher, and rank, local rank and world size by its variables."""
    # A job's script has Slurm's variables too; only what srun started has a step. The scripts of
    # bench give srun's tasks torchrun's names as well.
    in_step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
    by_srun = in_step and "TORCHELASTIC_RUN_ID" not in env
    launcher, names = ("srun", _SRUN) if by_srun else ("torchrun", _TORCHRUN)
    if all(env.get(name, "").isdigit() for name in names):
        return launcher, [int(env[name]) for name in names]
    return "single", [0, 0, 1]
