"""Choose the device of a rank, and find ranks that use the same GPU before NCCL starts.

NCCL refuses two ranks on one GPU (init.cc, "Duplicate GPU detected"). With gloo, both ranks run, and each
seems to be slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from ..measure.environment import device_of
from ..measure.exchange import Met
from ..measure.failures import DuplicateGpu, GpuProblem, NoGpu
from ..measure.findings import SharedGpu, SharedGpus
from ..measure.launch import Launch
from ..measure.nvml import pci_address
from ..measure.ranks import grouped
from .failures import WorkloadError
from .rendezvous import OtherRankError, await_readers, gather


@dataclass(frozen=True)
class GpuInUse:
    """The GPU of a rank, or if it is ``missing``, the last three values of a :class:`GpuProblem`.

    ``identity`` is unique per GPU, and None for a part of a GPU (MIG). ``name`` is the PCI address. NCCL
    accepts a GPU for several ranks if their ``host_id`` (NCCL_HOSTID) differs, or if it ``shares`` GPUs
    (NCCL_MULTI_RANK_GPU_ENABLE, since 2.30).
    """

    missing: Sequence[str] | None = None
    identity: str | None = None
    name: str = ""
    host_id: str = ""
    shares: bool = False


def choose_device(
    kind: str, launch: Launch, joined: Met, env: Mapping[str, str], *, backend: str, timeout_s: float
) -> tuple[torch.device, list[SharedGpus]]:
    """Return the device of this rank, and facts about GPUs that several ranks use.

    Raises:
        WorkloadError: on rank 0, a rank has no GPU, or NCCL would refuse to use a GPU for several ranks.
        OtherRankError: the same on another rank; rank 0 prints the message.
    """
    if kind == "cpu":
        return torch.device("cpu"), []
    device, own = _own_device(launch, joined.facts[launch.rank].host, env)
    uses = [GpuInUse(**one) for one in gather(joined, "gpu", asdict(own), timeout_s=timeout_s)]

    def described(groups: Sequence[Sequence[int]]) -> tuple[SharedGpu, ...]:
        hosts, gpus = [rank.host for rank in joined.facts], [use.name for use in uses]
        return tuple(SharedGpu(ranks=tuple(one), host=hosts[one[0]], gpu=gpus[one[0]]) for one in groups)

    problems = grouped((tuple(use.missing), rank) for rank, use in enumerate(uses) if use.missing)
    users = grouped((use.identity, rank) for rank, use in enumerate(uses) if use.identity is not None)
    shared = [ranks for ranks in users.values() if len(ranks) > 1]
    refused = [
        ranks for ranks in shared if backend == "nccl" and not _is_allowed([uses[rank] for rank in ranks])
    ]
    problem: NoGpu | DuplicateGpu | None = None
    if problems:
        problem = NoGpu(problems=tuple(GpuProblem(tuple(ranks), *why) for why, ranks in problems.items()))
    elif refused:
        problem = DuplicateGpu(gpus=described(refused))
    if problem:
        await_readers(joined, "gpu")
        raise WorkloadError(problem) if launch.rank == 0 else OtherRankError(problem)
    assert device is not None
    return device, [SharedGpus(gpus=described(shared))] if shared else []


def _own_device(launch: Launch, host: str, env: Mapping[str, str]) -> tuple[torch.device | None, GpuInUse]:
    count = torch.cuda.device_count()
    if not count:
        has_cuda = torch.version.cuda or torch.version.hip
        return None, GpuInUse(missing=("" if has_cuda else torch.__version__, "", ""))
    # If a task sees only one GPU, this GPU is device 0, whatever the local rank.
    device = torch.device("cuda", launch.local_rank % count)
    try:
        torch.cuda.set_device(device)
        found = device_of(device, host)
    except RuntimeError as error:
        return None, GpuInUse(missing=("", str(device), str(error).splitlines()[0]))
    # CUDA reports the UUID of the whole GPU for some MIG devices, whose names contain their size.
    is_part = " MIG " in (found.model or "")
    return device, GpuInUse(
        identity=None if is_part else found.identity,
        name=pci_address(launch.local_rank % count) or found.identity,
        host_id=env.get("NCCL_HOSTID", ""),
        shares=env.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0"),
    )


def _is_allowed(uses: Sequence[GpuInUse]) -> bool:
    return all(use.shares for use in uses) or len({use.host_id for use in uses}) == len(uses)
