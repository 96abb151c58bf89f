"""Recorded findings: each says its sentence, and is read as it was written."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from bench.study import findings as runs
from bench.study.found import Unknown, findings_of_env, read_disturbances, read_findings
from ddp_scaling_bench.finding import RECORDED, Recorded
from ddp_scaling_bench.measure import failures
from ddp_scaling_bench.measure import findings as ranks
from ddp_scaling_bench.measure.nccl_errors import NcclError

TEN = tuple(map(str, range(10)))
N1 = (failures.HostRank(0, "n1"), failures.HostRank(1), failures.HostRank(2))
SHARED = ranks.SharedCores(
    ranks=4, threads=8, cores=4, core_ids=(0, 1, 2, 5), machines=(("n1", "n2"), ("n3",)), at_most=1
)
LOSS = {"quantity": "loss", "source": "job.out", "matched": 6}
NO_LOSS = runs.ValuesLeftOut(**LOSS, lines=3, other="throughput", other_matched=3, rows=3, rows_without=3)
SOCKETS = ranks.SocketFallback(interface="eth0", hosts=("g1",), devices=("mlx5_0", "mlx5_1"))

#: Each class with the beginning or the end of its sentence; values that can be unknown are in one of several.
SENTENCES: list[tuple[Recorded, str]] = [
    (SHARED, "8 threads of 4 ranks share 4 cores (0-2,5) on each of n1, n2 and n3: set cluster.cpus_per_tas"),
    (
        ranks.SharedCores(ranks=3, threads=3, cores=1, machines=(("n1",),)),
        "3 ranks share 1 core on n1: adding ranks",
    ),
    (ranks.WaitsForDevice(waits=2), "the loop waits for the GPU 2 times in a step, such as in .item()"),
    (ranks.SideStreams(step_s=0.18), "other CUDA streams still worked for 180 ms per step"),
    (ranks.OtherDdp(), "another model with DDP trains in the same process"),
    (
        ranks.SharedGpus(gpus=(ranks.SharedGpu(ranks=(0, 1), host="n1", gpu="GPU-1"),)),
        "ranks 0-1 on n1 use the same GPU (GPU-1): the times are not those of a GPU per rank",
    ),
    (
        ranks.UnequalNodes(
            nodes=(
                ranks.CoresOfNodes(hosts=("n1", "n2"), cores=64, cores_per_rank=(2,)),
                ranks.CoresOfNodes(hosts=("n3",), cores=1, cores_per_rank=(1, 2), quota=1.5),
                ranks.CoresOfNodes(hosts=("n4",), cores=None, cores_per_rank=(1,)),
            )
        ),
        "n1 and n2: 64 cores, 2 per rank, no quota; n3: 1 core, 1 or 2 per rank, a quota of 1.5; n4: 1 per rank, ",
    ),
    (
        ranks.ThreadsDiffer(
            nodes=tuple(ranks.ThreadsOfNodes(hosts=(f"n{n}",), threads=(n, 9)) for n in range(7))
        ),
        "n0: 0 or 9 per rank; n1: 1 or 9 per rank; n2: 2 or 9 per rank; n3: 3 or 9 per rank; n4: 4 or 9 per "
        "rank; and 2 more",
    ),
    (SOCKETS, "NCCL uses sockets (eth0) between hosts, although InfiniBand devices on g1 have an active por"),
    (SOCKETS, "; check NET/IB in nccl.log, NCCL_IB_HCA, NCCL_NET, `ulimit -l` and the container"),
    (
        ranks.SocketFallback(interface="eth0", hosts=("g1",), devices=("mlx5_0",), disabled="1"),
        "(mlx5_0): expect a fraction of the bandwidth; NCCL_IB_DISABLE=1 is set",
    ),
    (ranks.NoPeerAccess(), "; check `nvidia-smi topo -p2p r` (ACS, IOMMU, virtualization), and let each ra"),
    (ranks.NoPeerAccess(setting="NCCL_P2P_LEVEL=LOC"), "; NCCL_P2P_LEVEL=LOC is set: unset it"),
    (ranks.WireBytesHigh(ratio=1.414), "the nodes sent 1.4 times the bytes that the strategy needs: other t"),
    (ranks.WireBytesUnseen(share=0.25), "show 25 % of the bytes that the strategy needs, so they do not see"),
    (
        ranks.AllocatorRetries(retries=1, rank=3, host="n1"),
        "full 1 time: the allocator freed its cache and tried",
    ),
    (
        ranks.OtherLauncher(planned="srun", used="torchrun"),
        "the plan says launcher srun, but torchrun started the ranks",
    ),
    (
        ranks.OtherStrategy(strategy="hsdp", used="fsdp", hosts=1),
        "strategy hsdp needs several nodes with several ranks each: this run uses fsdp on 1 node",
    ),
    (
        ranks.ScriptChanged(script="a.py", submitted="12", found="34"),
        "a.py has changed since the submission: its ",
    ),
    (ranks.NotStable(steps=1), "the step time was not yet stable after 1 warm-up step"),
    (ranks.ClockWasSet(steps=2), "a host's clock was set during 2 attribution steps: left out, because DDP'"),
    (ranks.PartsNotTimed(torch="3.0", strategy="FSDP2"), ": torch 3.0 does not show when FSDP2 communicates"),
    (
        ranks.PartsNotTimed(several=True),
        "the parts of the step are not measured: an optimizer steps before the b",
    ),
    (ranks.PartsNotTimed(), "the parts of the step are not measured: the recorder's model is a part of a sh"),
    (ranks.ModelNotWrapped(), "the recorder's model is not wrapped in DDP: exposed communication is unknown"),
    (ranks.ModelNotCalled(), "the recorder's model was never called in an instrumented step, so forward and"),
    (
        ranks.SeparateTrainings(by="parameters", spread=0.5),
        "the changes of their parameters differ by 50 %",
    ),
    (
        ranks.SeparateTrainings(by="bytes", share=0.001),
        "was sent between them (0.1 % of the bytes that i",
    ),
    (ranks.SeparateTrainings(by="copies"), "their parameters are equal, but they exchanged nothing: each tr"),
    (
        ranks.FewerWindows(epochs=1, planned_epochs=2, steps=4, planned_steps=10),
        "the training ended early: 1 of 2 windows and a window of 4 of 10 steps",
    ),
    (ranks.SlowFirstSteps(steps=3, excess_s=0.5, share=0.2), "takes 500 ms more (3 steps, 20 % of the measu"),
    (failures.NoStep(), "the training took no step"),
    (
        runs.LineForms(
            quantity="loss", source="job.out", forms=(runs.LineForm("loss #", 2, 1),), first="3", last="2"
        ),
        "loss is read from job.out (first 3, last 2): 2 x 'loss #' from line 1 on",
    ),
    (
        runs.LinesLeftOut(quantity="loss", source="job.out", why="evaluation", lines=(3,), example="e"),
        "loss: 1 line of job.out (from line 3) does not count: evaluation, such as 'e'",
    ),
    (
        ranks.LayoutDoubtful(different=4, replicas=2),
        "the ranks read 4 different first batches, but the plan has",
    ),
    (
        ranks.SamplesOfReplicas(model_parallel=4),
        "the samples that the ranks counted do not fit 4 ranks per re",
    ),
    (ranks.SamplesUnknown(), "the samples of a step are unknown, so there is no throughput: pass samples=.."),
    (ranks.SamplesUnknown(length=8.0, batch_size=4), "the first batch begins with a tensor of length 8, but"),
    (ranks.SamplesUnknown(batch_size=4), "the first batch begins with no tensor, but the batch size is 4, s"),
    (failures.LossNotFinite(epoch=1, ranks=(0,)), "the loss became NaN or infinite in epoch 1 on rank 0"),
    (failures.LossNotFinite(epoch=1, ranks=(0, 1, 5)), "the loss became NaN or infinite in epoch 1 on ranks"),
    (ranks.RankUnfinished(ranks=(1,), timeout_s=0.5), "rank 1 did not finish within 0.5 s: the last records"),
    (ranks.StepsDiffer(most_rank=1, fewest_rank=0, most=3, fewest=2), "ranks took different numbers of step"),
    (failures.RankFailed(text="no memory"), "no memory"),
    (failures.RaisedError(error="E", text="a", failed=N1), "rank 0 on n1, ranks 1-2: E: a"),
    (failures.RaisedError(error="E", nccl=NcclError("", "b")), "E: NCCL: b"),
    (failures.OutOfMemory(), "out of memory: no memory left"),
    (
        failures.ModelTooLarge(states="w", parameters=9, needed_bytes=4096, ranks=2, available_bytes=1024),
        "out of memory: w of 9 parameters need 4.0 KiB for 2 rank(s); only 1.0 KiB are available",
    ),
    (failures.DataTooSmall(samples=36, ranks=4, batch=10), "data set smaller than one step: 36 training sam"),
    (
        failures.NoGpu(
            problems=(failures.GpuProblem((0, 1), "2.13"), failures.GpuProblem((2,), "", "cuda:2", "e"))
        ),
        "ranks 0-1: no CUDA device is visible, and torch 2.13 is a build without CUDA; rank 2: cuda:2 cannot be used: e",
    ),
    (
        failures.DuplicateGpu(gpus=(ranks.SharedGpu(ranks=(0, 1), host="n1", gpu="GPU-1"),)),
        "ranks 0-1 on n1 use the same GPU (GPU-1), but NCCL needs a GPU for each rank",
    ),
    (failures.OtherSize(started=1, planned=4), "1 of 4 planned processes started"),
    (
        failures.RanksMissing(missing=N1[1:], joined=N1[:1], timeout_s=60.0, silent=("n2",)),
        "1/3 ranks joined in 60 s; missing: ranks 1-2; joined: rank 0 on n1; no rank joined from n2",
    ),
    (
        failures.LostConnection(first=N1[0], said="E: a", nccl=NcclError("", "b")),
        "lost the connection to another rank: rank 0 on n1 failed first: E: a; NCCL: b",
    ),
    (
        failures.LostConnection(
            left=(failures.LeftRank(2, "n1", 20), failures.LeftRank(3, "n1", 20)), absent=N1[:1]
        ),
        "lost the connection to another rank: ranks 2-3 on n1 left the loop after 20 steps: they closed their recorders; "
        "no report from rank 0 on n1: it ended or was killed, or the host was lost",
    ),
    (failures.NoStep(), "the training took no step"),
    (
        failures.LateCollective(timeout_s=None, option="x", ended=N1[0]),
        "a collective did not complete in its time-out: rank 0 on n1 has ended, and its own message says why",
    ),
    (ranks.NoWindow(steps=6), "no window was recorded: a rank took fewer than 6 steps, or ended"),
    (ranks.MeasurementsLost(reason="disk full"), "measurements are lost: disk full"),
    (runs.StudyRun(subject=("n1",), jobs=("7",)), "another run of the study (job 7) on n1"),
    (
        runs.StudyRun(subject=("n1", "n2"), start="a", end="b", jobs=TEN, more_jobs=1),
        "another run of the study (job 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 1 more job) on n1 and n2 from a to b",
    ),
    (runs.ForeignJob(), "a job that is not of the study"),
    (runs.ForeignCpu(share=0.15, limit=0.05), "CPU time of foreign processes (15 % of the time of the cores"),
    (runs.ForeignCpu(share=0.15), "CPU time of foreign processes (15 % of the time of the cores in use)"),
    (runs.GpuSlowdown(slowdowns=("a", "b")), "a slowdown of the GPU by its hardware or temperature (a, b)"),
    (runs.GpuSlowdown(start="a"), "a slowdown of the GPU by its hardware or temperature"),
    (runs.LinkErrors(errors=4), "CRC or symbol errors of the link (4)"),
    (runs.LinkErrors(errors=2.5), "CRC or symbol errors of the link (2.5)"),
    (
        runs.AverageOfRun(quantity="throughput", source="job.out", reported=2, lowest=1.0, highest=2.0),
        "throughput is one average of the whole run, including start-up; job.out contains it 2 times, and ",
    ),
    (NO_LOSS, "loss occurs 6 times in job.out (in 3 lines) and throughput 3 times, so it is empty in 3 of 3"),
    (runs.ValuesLeftOut(**LOSS), "loss occurs 6 times in job.out, so the run has no loss. Check its pattern"),
    (runs.ValuesLeftOut(**LOSS, lowest=1.0, highest=2.5), "with different values (1 to 2.5), so the run has"),
    (runs.RepeatedMatches(**LOSS, lines=3), "loss occurs 6 times in job.out (in 3 lines); each counts as a "),
    (
        runs.LineForms(
            quantity="loss", source="a", forms=(runs.LineForm("x #", 2, 1),), first="1", last="2", rank=0
        ),
        "loss is read from a, rank 0 (first 1, last 2): 2 x 'x #' from line 1 on",
    ),
    (
        runs.LinesLeftOut(quantity="loss", source="a", why="zero", lines=(3,), example="x #"),
        "loss: 1 line of a (from line 3) does not count: zero, such as 'x #'",
    ),
]


@pytest.mark.parametrize(("finding", "expected"), SENTENCES, ids=[one.kind for one, _ in SENTENCES])
def test_a_finding_is_read_as_it_was_written_and_says_its_sentence(finding, expected):
    assert expected in finding.message
    assert str(finding).endswith(f": {finding.message}")
    (read,) = findings_of_env(json.loads(json.dumps({"facts": [finding.as_json()]})))
    assert read == finding


def test_every_recorded_class_has_a_sentence_here():
    modules = {module.__name__ for module in (failures, ranks, runs)}
    mine = {kind for kind, one in RECORDED.items() if one.__module__ in modules}
    assert {one.kind for one, _ in SENTENCES} == mine


DAMAGED = [None, 7, 1.5, float("nan"), "x", [], [7], [None], [[]], {"a": 1}]


@pytest.mark.parametrize(
    "finding", {one.kind: one for one, _ in SENTENCES}.values(), ids=lambda one: one.kind
)
def test_damaged_values_are_listed_as_they_are(finding):
    whole = json.loads(json.dumps(finding.as_json()))
    for name in {*(one.name for one in fields(finding)), "of a later version"} - {"subject", "severity"}:
        for value in DAMAGED:
            entry = {**whole, "values": {**whole["values"], name: value}}
            (read,) = read_findings([entry])
            assert isinstance(read.message, str)
            assert read.as_json() == entry or not isinstance(read, Unknown) or value != value


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"steps": 3, "hosts": ["n1"]}, "steps 3, hosts ['n1']"),
        ({"hosts": ["n1"] * 20_000}, f"hosts {str(['n1'] * 20)[:37]}..."),
        (dict.fromkeys(map(str, range(20_000)), 0), "7 0 and 19992 more"),
    ],
)
def test_a_finding_of_a_later_version_lists_its_values_shortened(values, expected):
    (read,) = read_findings([{"kind": "later", "subject": [], "values": values, "severity": "info"}])
    assert read.message.endswith(expected)


def test_what_is_not_a_finding_is_left_out():
    whole = ranks.NoWindow(steps=6).as_json()
    broken = [None, {"kind": 3}, {**whole, "severity": "fatal"}, {**whole, "values": []}]
    assert findings_of_env({"facts": [*broken, whole]}) == [ranks.NoWindow(steps=6)]
    assert [findings_of_env(env) for env in (None, [], {"facts": 3, "warnings": {"a": 1}})] == [[], [], []]


def test_a_disturbance_with_damaged_values_still_disturbs():
    damaged = {**runs.ForeignJob(subject=("n1",)).as_json(), "values": {"jobs": 7}}
    entries = [damaged, {**damaged, "kind": "later"}, ranks.NoWindow(steps=6).as_json(), None]
    assert read_disturbances(entries) == (runs.ForeignJob(subject=("n1",)),)
    assert [read_disturbances(one) for one in (None, 3, [])] == [None, None, ()]


def test_disturbances_of_a_kind_are_summarised():
    several = [
        runs.StudyRun(subject=("n1",), start="a", jobs=("7",)),
        runs.ForeignCpu(subject=("n1",), share=0.1),
    ]
    merged = runs.by_reason([*several, runs.StudyRun(subject=("n2",)), runs.StudyRun(subject=("n1",))])
    assert merged == [runs.StudyRun(subject=("n1", "n2")), runs.ForeignCpu(subject=("n1",))]
