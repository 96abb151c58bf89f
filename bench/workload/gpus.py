"""Choose the device of a rank, and find ranks that use the same GPU before NCCL starts.

NCCL refuses two ranks on one GPU (init.cc, "Duplicate GPU detected"). With gloo, both ranks run, and each
seems to be slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from ..facts import Fact
from ..measure.environment import device_of
from ..measure.nvml import pci_address
from ..measure.ranks import RankFacts
from ..units import join_names, number_ranges
from .failures import WorkloadError
from .rendezvous import Joined, Launch, OtherRankError, await_readers, gather

_GROUPS_NAMED = 3


@dataclass(frozen=True)
class GpuInUse:
    """The GPU of a rank, or the ``problem`` because of which the rank has none.

    ``identity`` is unique per GPU, and None for a part of a GPU (MIG). ``name`` is the PCI address. NCCL
    accepts a GPU for several ranks if their ``host_id`` (NCCL_HOSTID) differs, or if it ``shares`` GPUs
    (NCCL_MULTI_RANK_GPU_ENABLE, since 2.30).
    """

    problem: str = ""
    identity: str | None = None
    name: str = ""
    host_id: str = ""
    shares: bool = False


def choose_device(
    kind: str, launch: Launch, joined: Joined, env: Mapping[str, str], *, backend: str, timeout_s: float
) -> tuple[torch.device, list[Fact]]:
    """Return the device of this rank, and facts about GPUs that several ranks use.

    Raises:
        WorkloadError: on rank 0, a rank has no GPU, or NCCL would refuse to use a GPU for several ranks.
        OtherRankError: the same on another rank; rank 0 prints the message.
    """
    if kind == "cpu":
        return torch.device("cpu"), []
    device, own = _own_device(launch, joined.facts[launch.rank].host, env)
    uses = [GpuInUse(**one) for one in gather(joined, launch, "gpu", asdict(own), timeout_s=timeout_s)]
    problem = _missing(uses) or (_refusal(uses, joined.facts) if backend == "nccl" else "")
    if problem:
        await_readers(joined, launch, "gpu")
        raise WorkloadError(problem) if launch.rank == 0 else OtherRankError(problem)
    assert device is not None
    return device, _sharing(uses, joined.facts)


def _own_device(launch: Launch, host: str, env: Mapping[str, str]) -> tuple[torch.device | None, GpuInUse]:
    count = torch.cuda.device_count()
    if not count:
        build = (
            ""
            if torch.version.cuda or torch.version.hip
            else f", and torch {torch.__version__} is a build without CUDA"
        )
        remedy = "request GPUs for the job, install torch with CUDA, or set the device to cpu"
        return None, GpuInUse(f"no CUDA device is visible{build}; {remedy}")
    # If a task sees only one GPU, this GPU is device 0, whatever the local rank.
    device = torch.device("cuda", launch.local_rank % count)
    try:
        torch.cuda.set_device(device)
        found = device_of(device, host)
    except RuntimeError as error:
        return None, GpuInUse(f"{device} cannot be used: {str(error).splitlines()[0]}")
    # CUDA reports the UUID of the whole GPU for some MIG devices, whose names contain their size.
    is_part = " MIG " in (found.model or "")
    return device, GpuInUse(
        identity=None if is_part else found.identity,
        name=pci_address(launch.local_rank % count) or found.identity,
        host_id=env.get("NCCL_HOSTID", ""),
        shares=env.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0"),
    )


def _missing(uses: Sequence[GpuInUse]) -> str:
    """Return the problems because of which ranks have no GPU, or ``""``."""
    ranks: dict[str, list[int]] = {}
    for rank, use in enumerate(uses):
        if use.problem:
            ranks.setdefault(use.problem, []).append(rank)
    named = {
        text: f"rank{'s' if len(group) > 1 else ''} {number_ranges(group)}" for text, group in ranks.items()
    }
    return "; ".join(f"{who}: {text}" for text, who in named.items())


def shared_gpus(uses: Sequence[GpuInUse]) -> list[list[int]]:
    """Return the ranks of each GPU that several ranks use."""
    ranks: dict[str, list[int]] = {}
    for rank, use in enumerate(uses):
        if use.identity is not None:
            ranks.setdefault(use.identity, []).append(rank)
    return [group for group in ranks.values() if len(group) > 1]


def _refusal(uses: Sequence[GpuInUse], facts: Sequence[RankFacts]) -> str:
    """Return the reason for which NCCL would not start, or ``""``."""
    groups = [group for group in shared_gpus(uses) if not _is_allowed([uses[rank] for rank in group])]
    if not groups:
        return ""
    named = _named(groups, uses, facts)
    remedy = "request one GPU per rank (gpus_per_node), start fewer ranks per node, or use backend gloo"
    return f"{named}, but NCCL needs a GPU for each rank; {remedy}"


def _is_allowed(uses: Sequence[GpuInUse]) -> bool:
    return all(use.shares for use in uses) or len({use.host_id for use in uses}) == len(uses)


def _sharing(uses: Sequence[GpuInUse], facts: Sequence[RankFacts]) -> list[Fact]:
    found = [
        {"ranks": group, "host": facts[group[0]].host, "gpu": uses[group[0]].name}
        for group in shared_gpus(uses)
    ]
    return [Fact("shared-gpus", values={"gpus": found})] if found else []


def _named(groups: Sequence[Sequence[int]], uses: Sequence[GpuInUse], facts: Sequence[RankFacts]) -> str:
    """Name ranks, host and GPU, such as ``ranks 0-1 on n1 use the same GPU (00000000:3B:00.0)``."""
    named = [
        f"ranks {number_ranges(group)} on {facts[group[0]].host} use the same GPU ({uses[group[0]].name})"
        for group in groups
    ]
    return join_names(named, most=_GROUPS_NAMED)
