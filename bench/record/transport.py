"""The transport that a user's own script has in use: each rank's traces of it, and what they tell together.

gloo: connections of which both ends are ranks. NCCL: the log that it was asked for before it
started, by the job's script, by the user, or by a recorder that was made early enough. What left no
trace is null, with the reason.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench.measure.hosts import RankFacts
from bench.measure.nccl import NcclLog, NcclLogFile, expanded, fallback_warning, is_disabled, nccl_transport
from bench.measure.transport import between_ranks, gloo_transport, open_connections
from bench.study.layout import RunFolder

#: The end of NCCL_DEBUG_FILE where a job's script has set it for the recorder.
_SCRIPTS_LOG = "/nccl.%h.%p.log"
#: The same where a recorder has set it itself: nobody has told it a folder then.
_OWN_LOG = "bench-nccl-%p.log"
_INFORMATIVE = ("INFO", "TRACE")

Found = dict[str, Any]


def ask_nccl(env: MutableMapping[str, str]) -> None:
    """Ask NCCL for its log, in case it has not started yet; settings of the user's stay."""
    if not env.get("NCCL_DEBUG") and not env.get("NCCL_DEBUG_FILE"):
        folder = tempfile.gettempdir().replace("%", "%%")
        env.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/{_OWN_LOG}"})


def backend_for(device: torch.device) -> str:
    """Return the backend of the default process group that serves ``device``."""
    served = dict(one.split(":", 1) for one in dist.get_backend_config().split(",") if ":" in one)
    return served.get(device.type) or dist.get_backend()


def users_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what was set for the recorder only."""
    ours = env.get("NCCL_DEBUG_FILE", "").endswith((_SCRIPTS_LOG, f"/{_OWN_LOG}"))
    return {name: text for name, text in env.items() if not (ours and name.startswith("NCCL_DEBUG"))}


def own_traces(
    backend: str, *, store_port: int | None, env: Mapping[str, str], rank: int, folder: RunFolder | None
) -> Found:
    """Return what this rank can tell of the transport in use, once something was sent.

    Args:
        backend: who communicates.
        store_port: where the ranks' store listens.
        env: the environment variables.
        rank: this rank.
        folder: the run's, on rank 0, which keeps its log there.
    """
    if backend == "gloo":
        return {"connections": open_connections(store_port=store_port)}
    if backend != "nccl":
        return {"why": f"the backend {backend} does not tell"}
    log = _log_of(env, rank)
    if log.path is None or not log.path.is_file():
        return {"why": log.absent}
    told = NcclLogFile(log.path, ours=False).read()
    if log.ours:
        with suppress(OSError):
            log.path.unlink() if folder is None else shutil.move(log.path, folder.path / "nccl.log")
    return {"log": told.as_json()}


class _Log(NamedTuple):
    """Where NCCL's log is to be, what its absence means, and whether only the recorder asked for it."""

    path: Path | None
    absent: str
    ours: bool = False


def _log_of(env: Mapping[str, str], rank: int) -> _Log:
    level, template = env.get("NCCL_DEBUG", ""), env.get("NCCL_DEBUG_FILE", "")
    if level.upper() not in _INFORMATIVE:
        return _Log(None, f"NCCL_DEBUG is {level or 'not set'}, and NCCL names its network at INFO only")
    path = Path(expanded(template)) if template else None
    if template.endswith(f"/{_OWN_LOG}"):
        early = "set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE before the start"
        return _Log(path, f"NCCL had started before the recorder was made: {early}", ours=True)
    if path is not None:
        return _Log(path, "NCCL has written no log to NCCL_DEBUG_FILE", ours=template.endswith(_SCRIPTS_LOG))
    if env.get("BENCH_RUN_DIR") and rank == 0:
        path = RunFolder(Path(env["BENCH_RUN_DIR"])).out
    return _Log(path, "NCCL writes its log to standard output: set NCCL_DEBUG_FILE, too")


def transport_in_use(
    traces: Sequence[Found], facts: Sequence[RankFacts], *, backend: str, env: Mapping[str, str]
) -> tuple[Found, str | None]:
    """Return the part ``transport`` of env.json from all ranks' traces, and a warning where it is slow."""
    hosts = [one.host for one in facts]
    if backend == "gloo":
        found: Found = gloo_transport(between_ranks([one["connections"] for one in traces], hosts))
        if len(facts) > 1 and found["interface"] is None:
            found["not_read_because"] = "no connection was open of which both ends are ranks"
        return found, None
    logs = [NcclLog.from_json(one["log"]) for one in traces if "log" in one]
    if not logs:
        return _unknown(backend, traces[0]["why"]), None
    merged = NcclLog()
    for log in logs:
        merged.merge(log)
    found = dict(nccl_transport(merged, hosts=len(set(hosts)), env=env))
    if len(set(hosts)) > 1 and found["network"] is None:
        found["not_read_because"] = "NCCL's log does not name its network: is NCCL_DEBUG_SUBSYS set?"
    warning = fallback_warning(found, {one.host: one.infiniband for one in facts}, env)
    if warning and not is_disabled(env):
        found["fallback"] = "sockets beside InfiniBand"
    return found, warning


def _unknown(backend: str, why: str) -> Found:
    keys = ("interface", "network", "algorithm", "version", "gpudirect", "source")
    return {"backend": backend, **dict.fromkeys(keys), "not_read_because": why}
