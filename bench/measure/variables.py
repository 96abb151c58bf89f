"""The environment variables that env.json contains."""

from __future__ import annotations

import re
from collections.abc import Mapping

_KEPT = re.compile(
    r"(NCCL|GLOO|OMP|KMP|MKL|TORCH|PYTORCH|UCX|FI)_[A-Z0-9_]+|CUDA_VISIBLE_DEVICES|BENCH_[A-Z_]+"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH")
_SLURM = re.compile(
    r"SLURM_(CLUSTER_NAME|CPUS_PER_TASK|JOB_(ID|NAME|NODELIST|PARTITION)|NNODES|NTASKS|RESTART_COUNT|STEP_ID"
    r"|TASKS_PER_NODE)"
)


def kept_variables(env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return ``env`` and ``slurm`` of env.json: variables with known names or prefixes, and no secrets."""
    kept = {name: env[name] for name in sorted(env) if _KEPT.fullmatch(name) and not _SECRET.search(name)}
    return {"env": kept, "slurm": {name: env[name] for name in sorted(env) if _SLURM.fullmatch(name)}}
