"""Write env.json and conditions.json, and compare the script of the command with the submitted one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import file_sha256, write_json
from ..run_folder import RunFolder
from ..version import __version__
from .findings import ScriptChanged

_HOME = Path(__file__).parents[2]
_PACKAGE = _HOME.name if _HOME.suffix == ".zip" else None
#: The keys of env.json, in this order.
KEYS = (
    *("schema", "bench_version", "package", "torch", "python", "cuda", "nccl"),
    *("device_name", "device_memory_bytes", "device", "backend", "world_size", "launcher", "joined"),
    *("hosts", "cores", "transport", "threads_per_rank", "env", "slurm"),
    *("workload", "recorder", "strategy", "per_gpu_batch", "global_batch", "parameters", "gradient_bytes"),
    *("flops", "wire_bytes", "exchange", "ddp", "script_sha256", "facts"),
)


def write_environment(folder: RunFolder, **known: Any) -> None:
    """Write env.json with the values that are ``known``; those of :data:`KEYS` that are not are null.

    ``package`` is the name of the zip file with this module, or null if the package is installed.

    Raises:
        UnwritableError: the file cannot be written.
    """
    own = {"schema": 1, "bench_version": __version__, "package": _PACKAGE}
    write_json(folder.env, {**dict.fromkeys(KEYS), **own, **known})


def write_conditions(folder: RunFolder, windows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write conditions.json.

    Raises:
        UnwritableError: the file cannot be written.
    """
    write_json(folder.conditions, {"schema": 1, "windows": windows, **more})


def changed_script(run: Mapping[str, Any], found: str | None) -> ScriptChanged | None:
    """Return a finding if a script had another SHA-256 in the job (``found``) than at the submission."""
    command = run.get("command") or {}
    submitted = command.get("script_sha256")
    if submitted is None or found is None or submitted == found:
        return None
    return ScriptChanged(script=command["script"], submitted=submitted[:12], found=found[:12])


def script_sha256(run: Mapping[str, Any], folder: str | Path) -> str | None:
    """Return the SHA-256 of the script of a command executed in ``folder``, or None if it is not readable."""
    script = (run.get("command") or {}).get("script")
    return file_sha256(Path(folder, script)) if script else None
