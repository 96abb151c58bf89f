"""Each cause, planted in the files of a study, is the first one named, with its share and evidence."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.causes.cells import CauseRow, divide_cell
from analysis.causes.claims import CAUSES, Cause, Reference, RunEvidence, WaitedForCore
from analysis.causes.divide import COMPUTING, Claim, Division, divide
from analysis.causes.evidence import CpuQuota, NodeFacts, RunFacts, WarningLine, read_facts
from analysis.causes.table import PartsUnknown, late_ranks, study_causes
from analysis.checks.scaling_table import scaling_table
from analysis.data.columns import PARTS, part_title
from analysis.data.csv_files import rows_of
from analysis.data.load import RankOfRun, load_study
from analysis.stats.decompose import USEFUL_PARTS
from analysis.stats.measured import measure
from bench.matrix.cell import Cell
from bench.study.findings import ForeignCpu
from bench.study.reasons import LogCause
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.records import columns_of
from ddp_scaling_bench.run_folder import RunFolder
from tests.analysis import studies
from tests.analysis.causes.planted import (
    Planted,
    attempts,
    causes,
    conditions,
    late,
    late_on,
    late_parts,
    plant,
    sampled_step,
    step_s,
)
from tests.common import change_json, edited_csv

#: Seconds per step of a planted cause: 20 % of the step.
MORE = 0.025
SHARE = 0.2


def named(found: Sequence[CauseRow]) -> list[str]:
    return [row.cause for row in found if not row.is_rest]


def share_of(found: Sequence[CauseRow], cause: str) -> float:
    return next(row.share for row in found if row.cause == cause)


def first(found: Sequence[CauseRow], cause: str, *, share: float | None = SHARE) -> CauseRow:
    """Return the first row, after checking its cause, its share and the only named cause."""
    assert named(found) == [cause]
    row = found[0]
    if share is None:
        assert math.isnan(row.share)
    else:
        assert row.share == pytest.approx(share, abs=0.01)
    return row


def without_share(path: Path, cause: str, *, part: str, longer: float = SHARE) -> CauseRow:
    """Return the row of a cause without a share, which is beside the excess of the computation."""
    slower, row = causes(path)[:2]
    assert (slower.cause, slower.part) == ("computation", part)
    assert slower.share == pytest.approx(longer, abs=0.01)
    assert row.cause == cause
    assert math.isnan(row.share)
    return row


def facts_of(row: CauseRow) -> dict[str, dict[str, Any]]:
    """Return the values of the evidence by kind."""
    return {fact.kind: dict(fact.values) for fact in row.evidence}


def test_a_late_rank_in_one_part_is_a_late_rank(tmp_path: Path) -> None:
    path = plant(tmp_path / "s", late_parts(MORE, part="forward"), noise=0.0)
    late(path, 2, MORE, part="forward")
    row = first(causes(path), "late-rank")
    assert (row.node, row.rank, row.part) == ("n3", 2, "forward")
    late_one = facts_of(row)["late"]
    assert late_one.pop("excess_s") == pytest.approx(MORE)
    assert late_one == {"rank": 2, "node": "n3", "part": "forward", "part_share": 1.0}
    assert row.title == f"late ranks: {part_title('forward')}"
    assert facts_of(row)["seen-in"] == {"seen": 3, "runs": 3, "run_id": "n4x1-gloo-srun-b16-r1"}


def test_a_rank_that_loads_data_slowly_is_late_and_the_study_cannot_tell_rank_from_node(tmp_path):
    path = plant(tmp_path / "s", late_parts(MORE, part="data"))
    late(path, 1, MORE, part="data")
    for folder in attempts(path):
        with edited_csv(folder.ranks_csv) as ranks:
            ranks.loc[ranks["rank"] == 1, "forward_time_sec"] *= 1.01
    row = first(causes(path), "late-rank")
    assert (row.part, row.node, row.rank) == ("data", "n2", 1)
    assert "rank-or-node" in facts_of(row)


def test_a_busy_neighbour_on_one_node_is_too_little_cpu_and_so_is_a_quota(tmp_path: Path) -> None:
    path = plant(tmp_path / "neighbour", late_parts(MORE))
    late(path, 2, MORE)
    entry = studies.recorded("foreign-cpu", "n3", share=0.4, limit=0.05)
    for folder in attempts(path):
        studies.change_run(path, folder.path.parent.name, disturbed=[entry])
    row = first(causes(path), "cpu-starved")
    assert (row.node, row.part) == ("n3", "backward")
    assert facts_of(row)["foreign-cpu"]["share"] == 0.4
    assert row.evidence[-1].kind == "all-disturbed"
    path = plant(tmp_path / "quota", {"backward": MORE})
    for folder in attempts(path):
        conditions(folder, ranks=4, node={"throttled_s": 2.5})
    row = without_share(path, "cpu-starved", part="backward")
    assert row.evidence[0] == CpuQuota(node="n1", share=0.25)


def test_threads_that_share_cores_are_too_little_cpu(tmp_path: Path) -> None:
    def env(cell: Any) -> dict[str, Any]:
        entries = [
            {"node": f"n{node + 1}", "cores": 3, "threads_per_rank": [4]} for node in range(cell.nodes)
        ]
        base = studies.environment(cell, cores=3)
        return base | ({"cores": entries} if cell.nodes > 1 else {})

    path = plant(tmp_path / "s", {"forward": 0.01, "backward": 0.02, "optimizer": 0.01 / 3}, env=env)
    row = without_share(path, "cpu-starved", part="backward", longer=0.25)
    assert row.evidence[0].values == {"node": "n1", "threads": 4, "ranks": 1, "cores": 3}
    assert [fact.kind for fact in row.evidence] == [*["few-cores"] * 3, "seen-in"]


def test_low_clocks_are_evidence_for_longer_computation(tmp_path: Path) -> None:
    path = plant(tmp_path / "s", {"forward": 0.3 * MORE, "backward": 0.6 * MORE, "optimizer": 0.1 * MORE})
    for pattern, ranks, mhz in (("n1x1*", 1, 1500), ("n4x1*", 4, 1200)):
        for folder in attempts(path, pattern):
            clocks = {"before": {"sm_mhz": mhz}, "after": {"sm_mhz": mhz}}
            conditions(folder, ranks=ranks, rank={"clocks": clocks})
    row = first(causes(path), "computation")
    assert row.remedy.startswith("Check power limit")
    assert facts_of(row)["low-clock"] == {"mhz": 1200, "base_mhz": 1500, "ratio": 0.8}


def host_times(
    path: Path, launch: dict[int, float | None], lead: float | None, *, load: float = 0.0, more: float = 0.0
) -> None:
    """Write the host's times to ranks.csv, relative to the step; None leaves the cells empty."""
    late(path, 2, more)
    for folder in attempts(path):
        with edited_csv(folder.ranks_csv) as ranks:
            step_s = ranks["step_time_sec"]
            ranks["window_time_sec"] = step_s * ranks["steps"]
            ranks["launch_time_sec"] = step_s * ranks["rank"].map(lambda rank: launch.get(rank, 0.5))
            ranks["host_time_sec"] = ranks["launch_time_sec"] + step_s * load
            ranks["launch_lead_time_sec"] = step_s * (math.nan if lead is None else lead)


@pytest.mark.parametrize(
    ("launch", "load", "lead", "ranks"),
    [
        ({2: 0.97}, 0.0, 0.01, [2]),
        ({0: 0.96, 2: 1.0}, 0.0, -0.01, [0, 2]),
        ({2: 0.93}, 0.04, 0.0, [2]),
        ({2: 0.97}, 0.0, 0.04, []),  # the host gets ahead: the device is the limit
        ({2: 0.40, 0: 0.3, 1: 0.3, 3: 0.3}, 0.6, 0.0, []),  # loading data is the limit
        ({2: None}, 0.0, 0.0, []),
        ({2: 0.97}, 0.0, None, []),
    ],
)
def test_a_slow_host_is_named_with_its_rank_and_a_busy_device_never(tmp_path, launch, load, lead, ranks):
    path = plant(tmp_path / "s", {"forward": MORE})
    host_times(path, launch, lead, load=load)
    found = causes(path)
    assert named(found) == (["host-bound"] if ranks else ["computation"])
    if ranks:
        row = next(one for one in found if one.cause == "host-bound")
        assert row.share > 0.03
        assert row.rank == (ranks[0] if len(ranks) == 1 else None)
        limits = facts_of(row)["host-limits"]
        assert list(limits["ranks"]) == ranks
        assert limits["launch_s"] / limits["step_s"] == pytest.approx(max(launch.values()))


def test_a_rank_that_is_late_because_of_its_host_has_the_time_of_the_others_wait(tmp_path: Path) -> None:
    path = plant(tmp_path / "s", late_parts(MORE))
    host_times(path, {2: 0.98}, 0.0, more=MORE)
    row = first(causes(path), "host-bound")
    assert (row.rank, row.node, row.part) == (2, "n3", "backward")
    assert facts_of(row)["late"]["excess_s"] == pytest.approx(MORE)
    assert list(facts_of(row)["host-limits"]["ranks"]) == [2]


def test_a_checkpoint_of_rank_0_is_work_outside_the_timers_of_this_rank(tmp_path: Path) -> None:
    path = plant(tmp_path / "s", late_parts(MORE, part="other"))
    late(path, 0, MORE, part="other")
    for folder in attempts(path):
        call = {"line": 57, "function": "torch.save", "seconds": MORE}
        sampled_step(folder, step_s({"other": MORE}), call, ranks=(0,))
    row = first(causes(path), "outside-timers")
    assert (row.rank, row.node) == (0, "n1")
    call = {"function": "torch.save", "path": "/home/me/train.py", "line": 57, "excess_s": MORE}
    assert facts_of(row)["slower-call"] == call


def test_without_the_parts_there_is_only_the_rest_with_the_interval_of_the_efficiency(tmp_path: Path) -> None:
    path = plant(tmp_path / "s", {"exposed": MORE}, noise=0.05)
    for file in path.glob("runs/*/*/metrics.csv"):
        with edited_csv(file) as frame:
            parts = [one for one in frame if one.endswith("_time_sec") and one[:5] not in ("step_", "epoch")]
            frame[parts] = float("nan")
    study = load_study(path)
    (table,) = (row for row in scaling_table(measure(study)) if row.cell_id == "n4x1-gloo-srun-b16")
    (found,) = causes(path)
    assert (found.cause, found.evidence) == ("not-explained", (PartsUnknown(),))
    ends = [1 - table.efficiency_high, 1 - table.efficiency_low]
    assert [found.share_low, found.share_high] == pytest.approx(ends)
    assert found.share == pytest.approx(1 - table.efficiency, abs=0.01)


@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer", "other", "transfer"])
def test_a_part_that_takes_longer_on_all_ranks_is_named_without_a_place(tmp_path: Path, part: str) -> None:
    rows = causes(plant(tmp_path / "s", {"exposed" if part == "transfer" else part: MORE}))
    assert (rows[0].part, rows[0].node, rows[0].rank) == (part, "", None)
    assert rows[0].share == pytest.approx(SHARE, abs=0.01)
    assert sum(abs(row.share) for row in rows if row.is_rest) < 0.1 * SHARE


@pytest.mark.parametrize("part", ["data", "backward"])
def test_all_ranks_of_one_node_that_are_late_are_that_node(tmp_path: Path, part: str) -> None:
    """Two of eight ranks, on the third of four nodes."""
    parts = {part: MORE / 4, "wait": MORE * 3 / 4, "exposed": MORE * 3 / 4}
    cells = studies.weak(sizes=(2, 8), per_node=2)
    path = studies.finished(tmp_path / "s", cells, timing=Planted(parts), noise=0.003)
    late_on(path, (4, 5), MORE, part=part, pattern="n4x2*", per_node=2)
    row = first(causes(path, "n4x2-gloo-srun-b16"), "late-rank")
    assert (row.node, row.rank, row.part) == ("n3", None, part)


@pytest.mark.parametrize(("waited_s", "starved"), [(None, 0.5), (3.0, 0.3), (9.0, 0.5), (0.1, 0.0)])
def test_threads_that_share_cores_cost_at_most_the_time_for_which_the_ranks_waited(
    tmp_path: Path, waited_s: float | None, starved: float
) -> None:
    """Two threads on one core: if they sleep or use a GPU, they do not compete for it."""
    folder = RunFolder(tmp_path)
    cores = [{"node": "n1", "cores": 1, "threads_per_rank": [1, 1]}]
    change_json(folder.env, cores=cores, hosts=[{"host": "n1", "ranks": [0, 1], "cores": 1}])
    conditions(folder, ranks=2, rank={"cpu_wait_s": waited_s})
    assert read_facts(tmp_path, steps=10, step_s=1.0).nodes["n1"].starved == pytest.approx(starved)


def busy(*, wait: float, foreign: float = 0.5, spare: float = 0.0) -> RunFacts:
    """Return the facts of a node with foreign processes whose ranks waited for a core."""
    return RunFacts(
        nodes={"n1": NodeFacts(foreign=foreign, wait=wait, spare=spare, evidence=(ForeignCpu(),))}
    )


@pytest.mark.parametrize(
    ("own", "base", "share"),
    [
        (busy(wait=0.3), busy(wait=0.01), 0.294),
        (busy(wait=0.3), busy(wait=0.2), 0.18),
        (busy(wait=0.3), busy(wait=0.31), 0.0),
        (busy(wait=0.3), busy(wait=0.6), 0.0),
        (busy(wait=0.01), busy(wait=0.01), 0.0),
        (busy(wait=float("nan")), busy(wait=float("nan")), 0.0),
        (busy(wait=0.3, foreign=0.0), RunFacts(), 0.3),
    ],
)
def test_only_longer_waits_for_cores_than_at_the_baseline_are_too_little_cpu(own, base, share):
    """Each step takes 1 / 0.6 of the time at the rate of the baseline."""
    works = {"forward": 0.4, "backward": 0.5, "optimizer": 0.1}
    reference = Reference(
        base,
        {part: 0.6 * value for part, value in works.items()},
        base.cpu_wait,
        own.cpu_wait > base.cpu_wait or not base.nodes,
        0.5,
    )
    runs = [RunEvidence(works, 0.1, own, reference=reference, run_id=str(number)) for number in range(3)]
    found = divide_cell(runs, runs).rows
    shares = {row.cause: pytest.approx(row.share) for row in found if not row.is_rest}
    assert shares == ({"cpu-starved": share} if share else {}) | {"computation": 0.4 - share}
    longer = next(row for row in found if row.cause == "computation")
    assert ("smaller-batch" in facts_of(longer)) == (
        own.nodes["n1"].wait < 0.05 and base.nodes["n1"].wait < 0.05
    )
    if share:
        starved = next(row for row in found if row.cause == "cpu-starved")
        (_, wait) = starved.evidence
        assert isinstance(wait, WaitedForCore)
        assert (wait.share, wait.seconds) == (0.3, pytest.approx(0.03))
        assert wait.base_seconds == (pytest.approx(0.06 * base.cpu_wait) if base.nodes else None)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_an_all_reduce_of_the_script_is_extra_communication_with_its_line(tmp_path, strategy):
    more = {"other": MORE}
    path = plant(tmp_path / "s", more)
    for folder in attempts(path):
        conditions(folder, ranks=4, rank={"collectives": 300, "sync_passes": 150})
        ddp = {"bucket_bytes": [1024], "find_unused_parameters": False}
        change_json(folder.env, ddp=ddp, strategy=strategy)
        calls = [
            {"line": 55, "function": "torch.distributed.all_reduce", "seconds": 0.02},
            {"line": 56, "function": "Tensor.item", "seconds": 0.005},
        ]
        sampled_step(folder, step_s(more), *calls)
    if strategy == "zero1":  # its broadcasts of weights count, too
        assert "communication" not in named(causes(path))
        return
    row = first(causes(path), "communication")
    assert row.part == "other"
    assert facts_of(row)["collectives"] == {"per_step": 2, "needed": 1}
    assert [call["line"] for call in facts_of(row)["calls"]["calls"]] == [55, 56]


def test_recompilations_take_the_time_that_torch_counts(tmp_path: Path) -> None:
    path = plant(tmp_path / "s", {"forward": MORE}, everywhere=True, noise=0.0)
    for pattern, ranks in (("n1x1*", 1), ("n4x1*", 4)):
        for folder in attempts(path, pattern):
            conditions(folder, ranks=ranks, rank={"recompilations": 150, "compile_s": 3.75})
    row = first(causes(path, "n1x1-gloo-srun-b16"), "computation")
    assert facts_of(row)["compilations"] == pytest.approx({"per_step": 1, "seconds": MORE})
    first(causes(path), "computation", share=None)  # the step is as long as at the baseline


@pytest.mark.parametrize(
    ("warning", "longer"), [("slow-gradient-strides", True), ("slow-find-unused-parameters", False)]
)
def test_a_warning_is_evidence_for_longer_computation(tmp_path: Path, warning: str, longer: bool) -> None:
    path = plant(tmp_path / "s", {"backward": MORE} if longer else {})
    for folder in attempts(path):
        line = LogCause(cause=warning, path="job.err", line=14, evidence="Warning: text", remedy="Do this.")
        studies.change_run(path, folder.path.parent.name, warnings=(line,))
    row = first(causes(path), "computation", share=SHARE if longer else None)
    assert row.remedy == "Do this."
    line = WarningLine(warning=warning, path="job.err", line=14, text="Warning: text", change="Do this.")
    assert line in row.evidence
    assert ("longer" in facts_of(row)) is longer


def test_causes_that_do_not_depend_on_times_are_named_although_ranks_share_cores(tmp_path: Path) -> None:
    def env(cell: Cell) -> dict[str, Any]:
        values = {"ranks": 4, "threads": 4, "cores": 2, "machines": [["n1"]]}
        facts = [studies.recorded("shared-cores", **values)] * (cell.world_size > 1)
        return studies.environment(cell) | {"facts": facts}

    path = plant(tmp_path / "s", {"data": 0.025}, env=env)
    for folder in attempts(path):
        conditions(folder, ranks=4, rank={"collectives": 600, "sync_passes": 600})
        ddp = {"bucket_bytes": [1024], "find_unused_parameters": True, "unused_parameter_bytes": 0}
        change_json(folder.env, ddp=ddp)
        line = LogCause(cause="slow-gradient-strides", path="job.err", line=14, evidence="text")
        studies.change_run(path, folder.path.parent.name, warnings=(line,))
    found = study_causes(load_study(path))
    found = [row for row in found if row.cell_id == "n4x1-gloo-srun-b16"]
    assert found[0].cause == "not-valid"
    assert set(named(found)) == {"communication", "computation"}
    assert all(math.isnan(row.share) for row in found)
    assert "synchronising-passes" in {one.kind for row in found for one in row.evidence}


def test_less_work_per_rank_is_slower_computation_per_sample_in_a_strong_series(tmp_path: Path) -> None:
    timing = studies.Timing(comm_s=0, fixed_s=8e-3, imbalance=0)
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 4)), timing=timing, noise=0.002)
    row = first(causes(path), "computation", share=0.25)
    assert facts_of(row)["smaller-batch"] == {"ratio": 0.25}


def test_a_network_far_below_its_nominal_rate_is_slow(tmp_path: Path) -> None:
    more = {"exposed": MORE}
    path = plant(tmp_path / "s", more)
    for folder in attempts(path):
        net = {"net": {"interface": "eth0", "rate_mbit_s": 10000}}
        conditions(folder, ranks=4, node=net)
        times = {size: 6 * 25e-6 + 1.5 * size / 1.25e8 for size in studies.SIZES}
        studies.write_sweep(folder, times, ranks=4)
    row = first(causes(path), "communication")
    assert row.part == "transfer"
    rates = facts_of(row)["slow-all-reduces"]
    assert rates == pytest.approx({"fitted_gbit_s": 1, "nominal_gbit_s": 10}, rel=1e-3)


def test_a_cause_is_added_as_one_class(tmp_path: Path) -> None:
    class Cold(Finding, kind="cold"):
        message = "the room is cold"

    class ColdRoom(Cause, name="cold-room"):
        title, meaning, remedy = "cold room", "The room is cold.", "Heat it."

        def rule(self, run: RunEvidence) -> Iterator[Claim]:
            yield Claim(self.name, (Cold(),), ("backward",), 0.1 * bool(run.reference))

    try:
        rows = causes(plant(tmp_path / "s", {"backward": MORE}))
        row = next(row for row in rows if row.cause == "cold-room")
        assert (row.title, row.remedy, row.part) == ("cold room: backward", "Heat it.", "backward")
        assert row.share == pytest.approx(0.1, abs=0.002)
    finally:
        del CAUSES["cold-room"]
    assert len(CAUSES) <= 8


fractions = st.lists(st.floats(0.0, 1.0), min_size=len(PARTS), max_size=len(PARTS)).filter(sum)
claims = st.lists(
    st.builds(
        Claim,
        cause=st.sampled_from([*CAUSES]),
        evidence=st.just(()),
        pools=st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map(tuple),
        share=st.sampled_from([math.nan, math.inf]) | st.floats(0.0, 1.5),
    ),
    max_size=5,
)


def parts_of(values: list[float]) -> dict[str, float]:
    return {part: value / sum(values) for part, value in zip(PARTS, values, strict=True)}


def loss_of(division: Division) -> float:
    return math.fsum(share for parts in division.values() for share in parts.values())


@given(fractions, fractions, claims, st.floats(0.05, 1.5))
@settings(max_examples=30, deadline=None)
def test_the_shares_add_up_to_the_loss(base, larger, found, efficiency):
    alone = divide(parts_of(base), found)
    work = sum(parts_of(base)[part] for part in COMPUTING)
    taken = sum(own.get(part, 0.0) for own in alone.values() for part in COMPUTING)
    assert loss_of(alone) == pytest.approx(1 - work + taken, abs=1e-9)
    reference = {part: efficiency * value for part, value in parts_of(base).items()}
    second = divide(parts_of(larger), found, reference=reference)
    assert loss_of(second) == pytest.approx(1 - efficiency, abs=1e-9)


#: Fractions of the work of a healthy rank.
WORK = {"data": 0.02, "forward": 0.3, "backward": 0.6, "optimizer": 0.05, "other": 0.03}
STUDIES, RUNS, RANKS, EPOCHS = 300, 3, 4, 3


def healthy_ranks(rng: np.random.Generator) -> pd.DataFrame:
    """Return ranks.csv of the runs of all studies: 90 ms of work with 1.4 % noise, 10 ms of communication."""
    shape = (STUDIES, RUNS, EPOCHS, RANKS)
    study, run, epoch, rank = (grid.ravel() for grid in np.indices(shape))
    noise = rng.normal(0, 0.01, shape) + rng.normal(0, 0.01, (STUDIES, RUNS, 1, RANKS))
    work = 0.09 * np.exp(noise)
    latest = np.broadcast_to(work.max(axis=3, keepdims=True), shape).ravel()
    work = work.ravel()
    frame = pd.DataFrame({"cell_id": study.astype(str), "epoch": epoch, "rank": rank})
    frame["run_id"] = [f"{one}-{two}" for one, two in zip(study, run, strict=True)]
    frame["host"] = [f"n{one}" for one in rank]
    frame["step_time_sec"] = latest + 0.01
    frame["comm_exposed_time_sec"], frame["comm_wait_time_sec"] = latest + 0.01 - work, latest - work
    for part, share in WORK.items():
        frame[USEFUL_PARTS[part]] = share * work
    return frame


def test_at_most_2_percent_of_healthy_studies_have_another_cause_than_communication() -> None:
    """Weak scaling, three runs of one and of four ranks; the runs' throughput has 2 % noise."""
    rng = np.random.default_rng(7)
    ranks = healthy_ranks(rng)
    late = late_ranks(rows_of(ranks.reindex(columns=columns_of(RankOfRun)), RankOfRun))
    means = ranks.groupby("run_id")[[*USEFUL_PARTS.values(), "comm_wait_time_sec"]].mean()
    means.columns = pd.Index([*USEFUL_PARTS, "wait"])
    planted = {run: row | {"transfer": 0.01} for run, row in means.to_dict("index").items()}
    alone = WORK | {"transfer": 0.0, "wait": 0.0}
    wrong = 0
    for study in range(STUDIES):
        times = np.exp(rng.normal(0, 0.02, (2, RUNS)))
        base, large = times / times.mean(axis=1, keepdims=True)
        base_runs = [RunEvidence(alone, 0.1, run_id=str(n), factor=t) for n, t in enumerate(base)]
        efficiency = 0.9 * times[0].mean() / times[1].mean()
        reference = Reference(parts={part: efficiency * value for part, value in alone.items()})
        names = [f"{study}-{run}" for run in range(RUNS)]
        runs = [
            RunEvidence(
                parts_of([*map(planted[one].get, PARTS)]),
                0.1,
                late=late.get(one, ()),
                run_id=one,
                factor=t,
                reference=reference,
            )
            for one, t in zip(names, large, strict=True)
        ]
        found = divide_cell(runs, base_runs)
        assert found.loss == pytest.approx(1 - efficiency)
        wrong += any(not row.is_rest and row.part not in ("transfer", "wait") for row in found.rows)
    assert wrong <= STUDIES // 50
