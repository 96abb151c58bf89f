"""Torch's private interfaces, of which all exist in this release, and its warnings of waits for the device.

The values are empty if an interface is missing.
"""

import enum
import importlib
import warnings
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.measure import torch_internals
from ddp_scaling_bench.measure.conditions import Conditions
from ddp_scaling_bench.measure.exchange import StoreExchange
from ddp_scaling_bench.measure.findings import PartsNotTimed
from ddp_scaling_bench.measure.host_waits import HostWaits
from ddp_scaling_bench.measure.step_parts import HostClock, StepTimer
from ddp_scaling_bench.measure.torch_internals import Symptom
from ddp_scaling_bench.train.strategies.ddp import DdpParts
from ddp_scaling_bench.train.strategies.fsdp2 import ShardedParts
from tests.common import raised

CPU = torch.device("cpu")
#: Keeps the process groups, because the destructor can hang (see ddp_scaling_bench/train/rank.py).
KEPT_GROUPS: list[object] = []


@pytest.fixture
def group() -> Iterator[HashStore]:
    """A process group of this process alone."""
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    KEPT_GROUPS.append(dist.group.WORLD)
    yield store
    dist.destroy_process_group()


@pytest.fixture
def model(group) -> DistributedDataParallel:
    return DistributedDataParallel(torch.nn.Linear(4, 2))


def train(model: DistributedDataParallel) -> None:
    model(torch.ones(3, 4)).sum().backward()


def test_this_release_stops_sampling_on_request(model):
    torch_internals.set_ddp_sample_rate(model, 1000)
    for _ in range(12):
        train(model)
    begin = torch_internals.ddp_times(model)["backward_compute_time_start"]
    train(model)
    assert torch_internals.ddp_times(model)["backward_compute_time_start"] == begin


def test_this_release_counts_compilations():
    conditions = Conditions(CPU, {}, reads_node=False)
    conditions.start()
    before = torch_internals.compilations()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    for size in (2, 2, 3):  # the third call compiles again, for any size
        compiled(torch.ones(size))
    after = torch_internals.compilations()
    assert before is not None
    assert after is not None
    assert after[0] == before[0] + 2
    rank = conditions.stop(steps=1, loaded=None)["rank"]
    assert rank["recompilations"] == 2
    assert rank["compile_s"] == pytest.approx(after[1] - before[1], abs=1e-5) != 0
    conditions.start()
    torch._dynamo.utils.compilation_time_metrics.clear()
    assert conditions.stop(steps=1, loaded=None)["rank"]["recompilations"] is None


def test_this_release_knows_the_parameters_that_a_step_does_not_use(group):
    parts = torch.nn.ModuleList([torch.nn.Linear(4, 2), torch.nn.Linear(3, 1)])
    parts.forward = lambda x: parts[0](x)  # type: ignore[method-assign]
    model = DistributedDataParallel(parts, find_unused_parameters=True)
    for _ in range(3):
        train(model)
    facts = DdpParts(model).facts()["ddp"]
    known = 4 * 4 if torch.__version__ >= (2, 10) else None  # older releases add up the sizes of all steps
    assert (facts["find_unused_parameters"], facts["unused_parameter_bytes"]) == (True, known)


@pytest.mark.parametrize("name", ["_set_ddp_runtime_logging_sample_rate", "_get_ddp_logging_data"])
def test_without_the_log_of_ddp_a_step_has_no_parts(model, monkeypatch, name):
    class Without:
        """The logger of a release without one of the interfaces."""

        def __init__(self, plain):
            self.plain = plain

        def __getattr__(self, wanted):
            if wanted == name:
                raise AttributeError(wanted)
            found = getattr(self.plain, wanted)
            return (lambda: Without(found())) if wanted == "_get_ddp_logging_data" else found

    DdpParts(model).start(StepTimer(HostClock()))
    train(model)
    assert DdpParts(model).read() is not None
    if name.startswith("_set"):
        monkeypatch.delattr(DistributedDataParallel, name)
    else:
        model.logger = Without(model.logger)
    assert (DdpParts(model).read(), torch_internals.ddp_texts(model)) == (None, {})


@pytest.mark.parametrize("name", ["_all_gather_comm", "_reduce_scatter_comm"])
def test_without_the_calls_of_fsdp2_a_step_has_no_parts_and_a_reason(group, monkeypatch, name):
    fsdp = importlib.import_module("torch.distributed.fsdp")  # takes seconds
    fully_shard = getattr(fsdp, "fully_shard", None)
    if fully_shard is None or torch.__version__ < (2, 9):
        pytest.skip("the release has no such calls")
    model = fully_shard(torch.nn.Linear(4, 2), mesh=init_device_mesh("cpu", (1,)))
    timer, own = StepTimer(HostClock()), model._get_fsdp_state()._fsdp_param_group
    before, parts = dict(vars(own)), ShardedParts(model)
    assert parts.start(timer) is None
    assert vars(own) != before
    parts.stop()
    assert vars(own) == before
    monkeypatch.delattr(own, name)
    reason = ShardedParts(model).start(timer)
    assert reason == PartsNotTimed(torch=torch.__version__, strategy="FSDP2")


def test_a_model_of_torchs_composable_replicate_has_no_parts_and_a_reason(group):
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("replicas",))  # torch 2.10 needs a name
    model = replicate(torch.nn.Linear(4, 2), mesh=mesh)
    reason = ShardedParts(model).start(StepTimer(HostClock()))
    assert reason == PartsNotTimed(torch=torch.__version__, strategy="replicate")


def test_without_the_store_the_recorder_names_the_release(group, monkeypatch):
    monkeypatch.delattr(distributed_c10d, "_get_default_store")
    assert raised(BenchError, StoreExchange) == (
        f"torch {torch.__version__} does not give access to the store of the process group, which the recorder"
        " needs; use a release of torch from the table in docs/measuring.md"
    )


def test_without_a_group_or_its_interfaces_the_values_are_unknown(monkeypatch):
    def values() -> tuple[object, ...]:
        return (
            torch_internals.group_store(),
            torch_internals.count_collectives(),
            torch_internals.collective_timeout_s(CPU),
        )

    assert values() == (None, None, None)
    monkeypatch.delattr(distributed_c10d, "_get_default_group")
    assert values() == (None, None, None)


def test_this_release_has_a_spin_of_the_device(monkeypatch):
    assert callable(torch.cuda._sleep)
    monkeypatch.delattr(torch.cuda, "_sleep")
    assert not torch_internals.spin_device(1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SUCCESS", Symptom.NONE),
        ("TIMEOUT", Symptom.TIMED_OUT),
        ("COMM_ERROR", Symptom.LOST),
        ("REMOTE_ERROR", Symptom.LOST),
        (None, None),
    ],
)
def test_the_state_of_the_nccl_group_is_that_of_the_watchdog(monkeypatch, name, expected):
    """Only builds with CUDA have the group: tests/train/test_workload_gpu.py uses it."""
    backend = SimpleNamespace() if name is None else SimpleNamespace(get_error=lambda: ErrorType[name])
    group = SimpleNamespace(_get_backend=lambda device: backend)
    monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: group)
    assert torch_internals.group_error() is expected


class ErrorType(enum.Enum):
    """The states of torch._C._distributed_c10d.ErrorType."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    REMOTE_ERROR = 3


PROTOTYPE = "Synchronization debug mode is a prototype feature and does not yet detect all operations"


class Cuda:
    """torch's mode, its warning about itself, and what ``tensor.item()`` does."""

    def __init__(self, mode: int) -> None:
        self.mode, self.has_warned = mode, False

    def set_mode(self, mode: int) -> None:
        self.mode = mode
        if not self.has_warned:
            warnings.warn(PROTOTYPE, stacklevel=1)
        self.has_warned = True

    def item(self) -> None:
        if self.mode:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)


@pytest.mark.parametrize(("mode", "filter_"), [(0, "always"), (0, "error"), (1, "always")])
def test_waits_are_counted_and_the_users_settings_stay(monkeypatch, mode, filter_):
    cuda = Cuda(mode)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: cuda.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", cuda.set_mode)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    synchronize, waits = torch.cuda.synchronize, HostWaits()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(filter_)
        filters = list(warnings.filters)
        waits.start()
        cuda.item()
        torch.cuda.synchronize()
        if filter_ == "error":
            with pytest.raises(UserWarning, match="own"):
                warnings.warn("own", stacklevel=1)
        else:
            warnings.warn("own", stacklevel=1)
        assert waits.stop() == 2
        assert waits.stop() is None
        assert warnings.filters == filters
    assert (cuda.mode, torch.cuda.synchronize) == (mode, synchronize)
    words = [str(one.message).split()[0] for one in shown]
    assert words == ["called"] * mode + ["own"] * (filter_ == "always")
