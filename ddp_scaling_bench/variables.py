"""What is shown of environment variables and URLs: values of documented names only, and no users of URLs.

docs/matrix.md lists the names.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

#: Variables with these prefixes are shown with their values; of others only the name is shown.
PREFIXES = (
    *("NCCL_", "RCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_"),
    *("CUDA_", "HIP_", "HSA_", "ROCR_", "CCL_", "UCX_", "FI_"),
)
#: The variables of Slurm in env.json.
SLURM = re.compile(
    r"SLURM_(CLUSTER_NAME|CPUS_PER_TASK|JOB_(ID|NAME|NODELIST|PARTITION)|NNODES|NTASKS|RESTART_COUNT|STEP_ID"
    r"|TASKS_PER_NODE)"
)
_OF_CLUSTER = "cluster.env."
#: A slash is part of a password only if it does not follow the digits of a port.
_URL_USER = re.compile(r"(?<=://)(?:[^/?#\s'\"]+|[^/:?#\s'\"]*:(?!\d*/)[^\s'\"]{1,500})@")


def is_shown(name: str) -> bool:
    """Return whether a variable is shown with its value."""
    return name.startswith(PREFIXES)


def shown_variables(env: Mapping[str, str], axes: Container[str]) -> dict[str, str | None]:
    """Return the variables; values are None unless they are shown, or ``env.NAME`` is one of ``axes``."""
    return {name: value if is_shown(name) or f"env.{name}" in axes else None for name, value in env.items()}


def shown_settings(inherited: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings from a site file; values of variables are None unless they are shown."""
    return {
        key: None if key.startswith(_OF_CLUSTER) and not is_shown(key.removeprefix(_OF_CLUSTER)) else value
        for key, value in inherited.items()
    }


def without_users(text: str) -> str:
    """Return ``text`` without the users and passwords of its URLs."""
    return _URL_USER.sub("", text) if "://" in text else text
