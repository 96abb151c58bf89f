"""Choose the device of a rank, and find ranks that use the same GPU before NCCL starts.

NCCL refuses two ranks on one GPU (init.cc, "Duplicate GPU detected"). With gloo, both ranks run, and each
seems to be slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from ..measure.environment import device_of
from ..measure.failures import DuplicateGpu, GpuProblem, NoGpu
from ..measure.findings import SharedGpu, SharedGpus
from ..measure.nvml import pci_address
from ..measure.ranks import RankFacts
from .failures import WorkloadError
from .rendezvous import Joined, Launch, OtherRankError, await_readers, gather


@dataclass(frozen=True)
class GpuInUse:
    """The GPU of a rank; if ``is_missing``, the next three are those of :class:`GpuProblem`.

    ``identity`` is unique per GPU, and None for a part of a GPU (MIG). ``name`` is the PCI address. NCCL
    accepts a GPU for several ranks if their ``host_id`` (NCCL_HOSTID) differs, or if it ``shares`` GPUs
    (NCCL_MULTI_RANK_GPU_ENABLE, since 2.30).
    """

    is_missing: bool = False
    cpu_torch: str = ""
    device: str = ""
    error: str = ""
    identity: str | None = None
    name: str = ""
    host_id: str = ""
    shares: bool = False


def choose_device(
    kind: str, launch: Launch, joined: Joined, env: Mapping[str, str], *, backend: str, timeout_s: float
) -> tuple[torch.device, list[SharedGpus]]:
    """Return the device of this rank, and facts about GPUs that several ranks use.

    Raises:
        WorkloadError: on rank 0, a rank has no GPU, or NCCL would refuse to use a GPU for several ranks.
        OtherRankError: the same on another rank; rank 0 prints the message.
    """
    if kind == "cpu":
        return torch.device("cpu"), []
    device, own = _own_device(launch, joined.facts[launch.rank].host, env)
    uses = [GpuInUse(**one) for one in gather(joined, launch, "gpu", asdict(own), timeout_s=timeout_s)]
    problem = _missing(uses) or (_refusal(uses, joined.facts) if backend == "nccl" else None)
    if problem:
        await_readers(joined, launch, "gpu")
        raise WorkloadError(problem) if launch.rank == 0 else OtherRankError(problem)
    assert device is not None
    return device, _sharing(uses, joined.facts)


def _own_device(launch: Launch, host: str, env: Mapping[str, str]) -> tuple[torch.device | None, GpuInUse]:
    count = torch.cuda.device_count()
    if not count:
        has_cuda = torch.version.cuda or torch.version.hip
        return None, GpuInUse(is_missing=True, cpu_torch="" if has_cuda else torch.__version__)
    # If a task sees only one GPU, this GPU is device 0, whatever the local rank.
    device = torch.device("cuda", launch.local_rank % count)
    try:
        torch.cuda.set_device(device)
        found = device_of(device, host)
    except RuntimeError as error:
        return None, GpuInUse(is_missing=True, device=str(device), error=str(error).splitlines()[0])
    # CUDA reports the UUID of the whole GPU for some MIG devices, whose names contain their size.
    is_part = " MIG " in (found.model or "")
    return device, GpuInUse(
        identity=None if is_part else found.identity,
        name=pci_address(launch.local_rank % count) or found.identity,
        host_id=env.get("NCCL_HOSTID", ""),
        shares=env.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0"),
    )


def _missing(uses: Sequence[GpuInUse]) -> NoGpu | None:
    """Return why ranks have no GPU, or None if all have one."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for rank, use in enumerate(uses):
        if use.is_missing:
            ranks.setdefault((use.cpu_torch, use.device, use.error), []).append(rank)
    problems = tuple(GpuProblem(tuple(group), *why) for why, group in ranks.items())
    return NoGpu(problems=problems) if problems else None


def shared_gpus(uses: Sequence[GpuInUse]) -> list[list[int]]:
    """Return the ranks of each GPU that several ranks use."""
    ranks: dict[str, list[int]] = {}
    for rank, use in enumerate(uses):
        if use.identity is not None:
            ranks.setdefault(use.identity, []).append(rank)
    return [group for group in ranks.values() if len(group) > 1]


def _refusal(uses: Sequence[GpuInUse], facts: Sequence[RankFacts]) -> DuplicateGpu | None:
    """Return the GPUs because of which NCCL would not start, or None."""
    groups = [group for group in shared_gpus(uses) if not _is_allowed([uses[rank] for rank in group])]
    return DuplicateGpu(gpus=tuple(_described(groups, uses, facts))) if groups else None


def _is_allowed(uses: Sequence[GpuInUse]) -> bool:
    return all(use.shares for use in uses) or len({use.host_id for use in uses}) == len(uses)


def _sharing(uses: Sequence[GpuInUse], facts: Sequence[RankFacts]) -> list[SharedGpus]:
    shared = _described(shared_gpus(uses), uses, facts)
    return [SharedGpus(gpus=tuple(shared))] if shared else []


def _described(
    groups: Sequence[Sequence[int]], uses: Sequence[GpuInUse], facts: Sequence[RankFacts]
) -> list[SharedGpu]:
    return [
        SharedGpu(ranks=tuple(group), host=facts[group[0]].host, gpu=uses[group[0]].name) for group in groups
    ]
