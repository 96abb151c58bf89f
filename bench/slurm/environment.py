"""What Slurm's commands may inherit of the caller's environment."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: They filter what a query shows, or change how it is printed.
_QUERY_NOISE = re.compile(r"(?:SQUEUE|SACCT|SINFO|SCANCEL)_\w+|SLURM_TIME_FORMAT")
#: What a submission may inherit of SLURM_*. The rest describes the allocation that bench may itself
#: run in, and would reach the job: SLURM_MEM_PER_CPU from outside makes srun inside fail.
_SUBMISSION_KEEPS = {"SLURM_CONF", "SLURM_CLUSTERS"}


def for_query(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command that asks: everything is shown, and times are UTC."""
    kept = {name: value for name, value in environment.items() if not _QUERY_NOISE.fullmatch(name)}
    return {**kept, "TZ": "UTC"}


def for_submission(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of sbatch, which jobs inherit; a run of a pack may submit others."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "BENCH_STEP_")) or name in _SUBMISSION_KEEPS
    }


def overriding(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that win over the directives of a script, silently."""
    return {name: environment[name] for name in sorted(environment) if name.startswith("SBATCH_")}
