"""One rank's run: join, build, measure, leave."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from bench.measure.environment import (
    Device,
    device_of,
    oversubscription_warnings,
    own_facts,
    threads_per_rank,
)
from bench.measure.exchange import Collectives
from bench.measure.peers import Peers, symptom_of
from bench.measure.transport import (
    NcclLogFile,
    gloo_transport,
    nccl_in_use,
    open_interfaces,
)
from bench.units import human_bytes
from bench.workload.arguments import Request
from bench.workload.data.feed import Feed, Place, open_feed
from bench.workload.epochs import measure
from bench.workload.failures import BrokenError, CollectiveError, SetupError, WorkloadError, named, reason
from bench.workload.flops import Utilisation, count_step, precisions, utilisation
from bench.workload.launch import Launch, launch_from
from bench.workload.rendezvous import Joined, join, start_line
from bench.workload.session import Session
from bench.workload.task import DataShape, Task, build_task, parameters_of
from bench.workload.training import STATES_PER_WEIGHT, wrap


def run(request: Request) -> None:
    """Do all that a request asks of this rank; :mod:`bench.workload.main` puts what is raised in words."""
    env = os.environ
    launch = launch_from(env)
    me = own_facts(launch.rank, launch.local_rank, env)
    joined = join(launch, me, timeout_s=request.options.join_timeout)
    threads = threads_per_rank(me, joined.facts, env)
    torch.set_num_threads(threads)
    device = _device(request.options.device, launch)
    session = Session(request, launch, joined, me, device, threads, _warnings(request, launch, joined))
    session.say(start_line(joined, launch, request.backend))
    if session.is_first:
        request.run_dir.mkdir(parents=True, exist_ok=True)
    session.write_environment(env)
    try:
        _train(session, dict(env))
    except CollectiveError:
        raise
    except Exception as error:
        _consult(session, error)
        raise


def _consult(session: Session, error: Exception) -> None:
    """Tell the other ranks why this one fails, or raise what they tell where this one only lost them.

    Raises:
        BrokenError: the others know more than ``error`` says.
    """
    launch, timeout_s = session.launch, session.request.options.join_timeout
    if launch.world_size == 1:
        return
    peers = Peers(
        session.joined.store, launch.rank, session.joined.facts, rank_0_serves=not launch.agent_store
    )
    symptom = symptom_of(error)
    if symptom is None:
        peers.tell(named(error, timeout_s=timeout_s))
        return
    words = peers.explain(symptom, timeout_s=timeout_s, longer="raise --join-timeout")
    if words is not None:
        raise BrokenError(f"{peers.place(launch.rank)}: {words}") from error


def _train(session: Session, told: dict[str, str]) -> None:
    """Build, measure and leave; ``told`` are the variables that env.json is to speak of."""
    request = session.request
    log = (
        NcclLogFile.arrange(os.environ, session.folder, rank=session.launch.rank)
        if request.backend == "nccl"
        else None
    )
    try:
        collectives = _communicate(session)
        feed, model = _set_up(session, collectives)
        try:
            devices = collectives.objects(device_of(session.device, session.me.host))
            used = _utilisation(session, feed.shape, devices, told)
            sizes, flops = parameters_of(model), None if used is None else used.as_json()
            session.write_environment(told, sizes, flops=flops)
            ideal_s = None if used is None else used.ideal_s
            measure(session, collectives, feed, model, devices=devices, ideal_s=ideal_s)
            in_use = _transport_in_use(session, collectives, log, told)
            session.write_environment(told, sizes, in_use, flops)
        finally:
            feed.close()
    finally:
        if log is not None:
            log.remove()
    # Rank 0 may serve the store, which the others still need until here.
    collectives.barrier()
    _leave(model)


def _utilisation(
    session: Session, shape: DataShape, devices: Sequence[Device], env: Mapping[str, str]
) -> Utilisation | None:
    """Return what MFU is computed with, on rank 0, which writes it."""
    if not session.is_first:
        return None
    options = session.request.options
    distinct = {device.identity: device.model for device in devices}
    return utilisation(
        count_step(options, shape, session.request.per_gpu_batch),
        precisions(options.precision, env),
        list(distinct.values()),
        ranks=len(devices),
    )


def _transport_in_use(
    session: Session, collectives: Collectives, log: NcclLogFile | None, env: Mapping[str, str]
) -> dict[str, str | None]:
    """Return what all ranks found in use, and add a warning where it is slower than it need be."""
    facts = session.joined.facts
    if log is None:
        found = collectives.objects(open_interfaces(store_port=session.launch.port))
        by_host: dict[str, list[str]] = {}
        for one, names in zip(facts, found, strict=True):
            by_host[one.host] = sorted({*by_host.get(one.host, []), *names})
        return gloo_transport(by_host)
    transport, warning = nccl_in_use(collectives.objects(log.read()), facts, env)
    if warning:
        session.warn(warning)
    return transport


def _leave(model: DistributedDataParallel) -> None:
    """Give up the process group, in the one order that cannot hang.

    DDP's reducer would destroy the group while it holds the interpreter's lock, and wait for
    a thread of the group that needs the lock to free its last tensor. Without the reducer
    the group's own Python object goes last, and releases the lock for that.
    """
    model.reducer = None  # type: ignore[assignment]
    model.logger = None
    dist.destroy_process_group()


def _device(kind: str, launch: Launch) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise WorkloadError(
            f"rank {launch.rank}: no CUDA device is visible",
            remedy="request GPUs for the job, or set --device cpu",
        )
    # A task that was given one GPU sees it as device 0, whatever its local rank is.
    device = torch.device("cuda", launch.local_rank % count)
    torch.cuda.set_device(device)
    return device


def _communicate(session: Session) -> Collectives:
    """Start the process group, through the store in which the ranks met."""
    request = session.request
    dist.init_process_group(
        request.backend,
        store=PrefixStore("group", session.joined.store),
        rank=session.launch.rank,
        world_size=session.launch.world_size,
        timeout=timedelta(seconds=request.options.join_timeout),
        device_id=session.device if request.backend == "nccl" else None,
    )
    return Collectives(session.device, request.backend)


def _warnings(request: Request, launch: Launch, joined: Joined) -> list[str]:
    options = request.options
    found = oversubscription_warnings(joined.facts)
    if request.launcher and request.launcher != launch.launcher:
        found.append(f"the plan says launcher {request.launcher}, but {launch.launcher} started the ranks")
    if options.pin_memory and options.device == "cpu":
        found.append("pin_memory has no effect on a CPU device")
    if options.parameters and options.model not in ("transformer", "mlp"):
        found.append(f"parameters has no effect on model {options.model}, whose size is fixed")
    if options.data != "synthetic" and options.model == "resnet50":
        found.append("image_size has no effect on a folder's images")
    return found


def _set_up(session: Session, collectives: Collectives) -> tuple[Feed, DistributedDataParallel]:
    """Open the data and build the model; a problem on any rank ends all of them with one message."""
    request, launch = session.request, session.launch
    feed: Feed | None = None
    task: Task | None = None
    problem = ""
    try:
        place = Place(launch.rank, launch.world_size, session.device)
        feed = open_feed(request.options, request.per_gpu_batch, place)
        _check_memory(session, feed)
        if request.options.compile and request.options.bucket_cap_mb < 1:
            # torch splits compiled graphs at the buckets, and takes 1 MiB for the first of them.
            raise SetupError("--compile true needs --bucket-cap-mb of 1 or more")
        task = build_task(request.options, feed.shape).to(session.device)
    except SetupError as error:
        problem = str(error)
    except (MemoryError, RuntimeError) as error:
        problem = reason(error, timeout_s=request.options.join_timeout) or ""
        if not problem:
            raise
    _agree(session, collectives, problem)
    assert feed is not None
    assert task is not None
    return feed, wrap(task, request.options)


def _check_memory(session: Session, feed: Feed) -> None:
    """Refuse a model that cannot fit: the kernel would kill ranks one by one, and other people's jobs."""
    options = session.request.options
    with torch.device("meta"):
        parameters, weight_bytes = parameters_of(build_task(options, feed.shape))
    copies = 2 + STATES_PER_WEIGHT[options.optimizer]
    if session.device.type == "cuda":
        have, ranks = torch.cuda.get_device_properties(session.device).total_memory, 1
    else:
        here = next(host for host in session.joined.hosts if host.host == session.me.host)
        have, ranks = here.memory_bytes, len(here.ranks)
    needed = weight_bytes * copies * ranks
    if needed > have:
        raise SetupError(
            f"out of memory: weights, gradients and {options.optimizer}'s states of {parameters:,} parameters"
            f" need {human_bytes(needed)} for {ranks} rank(s), there are {human_bytes(have)}",
            remedy="lower --parameters",
        )


def _agree(session: Session, collectives: Collectives, problem: str) -> None:
    """Raise on every rank what any rank found, naming the ranks where not all found it."""
    problems = collectives.objects(problem)
    places: dict[str, list[str]] = {}
    for one, words in zip(session.joined.facts, problems, strict=True):
        if words:
            places.setdefault(words, []).append(f"{one.rank} on {one.host}")
    if not places:
        return
    lines = []
    for words, ranks in places.items():
        everywhere = len(ranks) == session.launch.world_size
        named = ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        lines.append(words if everywhere else f"{words} (rank {named})")
    raise CollectiveError("\n".join(lines))
