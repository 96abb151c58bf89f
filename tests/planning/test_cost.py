"""The cost of a study, at most and as expected: from stated step times, from finished runs, and by partition."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bench.commands.submit import check_cost
from bench.cost import Cost, Costs, named, parse_step_times, total
from bench.matrix.cell import Cell
from bench.plan import make_plan, write_plan
from bench.shipped import find_matrix
from bench.study.ledger import End, Record, RunState
from bench.study.plan_json import PlannedStudy, open_study
from ddp_scaling_bench.errors import BenchError
from tests.common import raised
from tests.matrices import matrix, planned_study


def planned(folder: Path, text: str, *, site: str = "") -> PlannedStudy:
    (folder / "site.yaml").write_text(site)
    return planned_study(folder, text, site=folder / "site.yaml" if site else None)


def study_of(folder: Path, *, strong: bool = True, device: str = "cuda", **options: object) -> PlannedStudy:
    axes = {"nodes": [1, 2, 4], "gpus_per_node" if device == "cuda" else "tasks_per_node": [4]}
    scaling = [{"mode": "strong", "global_batch": [64]} if strong else {"mode": "weak", "per_gpu_batch": [8]}]
    cluster = {"executor": "slurm", "time_limit": "10m", "node_gpus": 4}
    lengths = {"steps_per_epoch": 40, "attribution_steps": 0, "epochs": 2, "warmup_steps": 20}
    sections = {
        "cluster": cluster,
        "axes": axes,
        "scaling": scaling,
        "workload": {"device": device, **lengths},
    }
    return planned(folder, matrix("s", **sections, **options))


def of_all(study: PlannedStudy, *step_times: str) -> dict[str, Cost]:
    jobs = ([study.cells[run.cell_id]] for run in study.runs)
    return Costs(study, parse_step_times(step_times)).of(jobs)


def durations(study: PlannedStudy, *step_times: str) -> list[float | None]:
    costs = Costs(study, parse_step_times(step_times))
    return [costs.expected_s(cell) for cell in study.cells.values()]


def finish(study: PlannedStudy, cell_id: str, seconds: float, *, state: str = "completed") -> None:
    """Record a run of a cell that took some seconds."""
    run = next(run for run in study.runs if run.cell_id == cell_id)
    study.folder.attempt(run.run_id, 1).path.mkdir(parents=True)
    begin = datetime(2026, 1, 2, 3, tzinfo=UTC)
    end = begin + timedelta(seconds=round(seconds))
    times = {"started_at": begin.isoformat(), "ended_at": end.isoformat()}
    record = Record(run_id=run.run_id, attempt=1, state=RunState.QUEUED, job_name="j", job_id="1")
    study.ledger.append([record.ended(End(state=RunState(state), **times))])


def simulated_s(cell: Cell, *, steps: int) -> float:
    """Return the duration of a run whose computation scales, unlike its communication and its start-up."""
    doublings = math.log2(cell.nodes)
    step_s = 3.7 * 4 / cell.size + 0.03 + 0.004 * doublings
    return min(65 + 7 * doublings + steps * step_s, cell.resources.time_limit_s)


def test_the_expected_cost_of_a_large_request_is_close_to_that_of_a_simulated_study(tmp_path):
    study = open_study(write_plan(make_plan(find_matrix("large_request")), tmp_path))
    assert {cell.nodes for cell in study.cells.values()} == {2**i for i in range(9)}
    costs = Costs(study)
    assert {costs.steps(cell) for cell in study.cells.values()} == {100}
    cells = [study.cells[run.cell_id] for run in study.runs]
    took = sum(cell.nodes * 4 * simulated_s(cell, steps=100) for cell in cells) / 3600
    by_partition = of_all(study)
    cost = total(by_partition)
    assert cost.gpu_hours <= 900
    assert (cost.jobs, cost.known) == (38, 38)
    assert cost.expected_gpu_hours == pytest.approx(took, rel=0.2)
    assert [line.partition(",")[0] for line in named(by_partition)] == [
        "partition small: 30 jobs",
        "partition large: 8 jobs",
    ]
    for cell in study.cells.values():  # the small sizes have finished
        if cell.nodes <= 8:
            finish(study, cell.cell_id, simulated_s(cell, steps=100))
    again = total(of_all(study)).expected_gpu_hours
    assert again == pytest.approx(took, rel=0.2)


# 100 steps: the sizes have 4, 8 and 16 GPUs, and a start-up of 60 s.
@pytest.mark.parametrize(
    ("strong", "step_times", "expected"),
    [
        (True, ["4.0"], [460, 260, 160]),
        (False, ["4.0"], [460, 460, 460]),
        (True, ["4=4.0", "16=2.0"], [460, 260, 260]),
        (True, ["5=1"], [260, 160, 110]),  # the first size from 5 on is 8; smaller sizes follow from it
        (True, ["9.0"], [600, 510, 285]),  # at most the time limit
        (True, [], [None, None, None]),
    ],
)
def test_a_step_time_is_scaled_by_the_samples_of_a_replica(tmp_path, strong, step_times, expected):
    assert durations(study_of(tmp_path, strong=strong), *step_times) == expected


def test_a_finished_run_says_more_than_the_matrix_and_less_than_the_command(tmp_path):
    study = study_of(tmp_path, expected={"step_time": {1: 1.0, 16: 0.5}, "start_up": 10}, repeats=1)
    assert durations(study) == [110, 60, 60]
    first, second, _ = study.cells
    finish(study, second, 50)
    assert durations(study) == [110, 50, 60]
    finish(study, first, 300, state="failed")  # only completed runs count
    assert durations(study) == [110, 50, 60]
    assert durations(study, "2") == [210, 110, 60]


def test_the_duration_of_a_command_is_known_only_from_its_runs(tmp_path):
    workload = {"device": "cpu", "command": "python a.py", "metrics": "none"}
    cluster = {"executor": "slurm", "time_limit": "1h"}
    axes = {"nodes": [1, 2], "tasks_per_node": [1]}
    text = matrix("s", cluster=cluster, axes=axes, workload=workload, batch=1, repeats=1)
    study = planned(tmp_path, text)
    assert durations(study, "1.0") == [None, None]
    assert str(total(of_all(study))) == "at most 3 node-hours, no GPU"
    finish(study, next(iter(study.cells)), 1800)
    text = "at most 3 node-hours, no GPU, expected about 2.5 (1 job of unknown duration at the time limit)"
    assert str(total(of_all(study))) == text


def test_other_step_times_are_refused():
    for text in ("", "x", "0", "-1", "0=1", "4=", "a=1", "inf", "nan"):
        said = raised(BenchError, parse_step_times, [text])
        assert said.startswith(
            f"--step-time {text!r} is not a step time; write seconds, such as 0.25, or SIZE=SECONDS"
        )


def test_without_a_terminal_a_cost_above_the_limit_of_the_site_is_an_error(tmp_path):
    study_of(tmp_path, repeats=3)  # 9 runs, 14 GPU-hours
    text, options = (tmp_path / "m.yaml").read_text(), {"budget": None, "step_time": None}
    study = planned(tmp_path, text)
    check_cost(study, study.runs, ask=True, **options)
    for site, asks in (
        ("gpu_hours: 13", "gpu_hours: 13"),
        ("jobs: 8, node_hours: 3", "node_hours: 3, jobs: 8"),
    ):
        study = planned(tmp_path, text, site=f"ask_above: {{{site}}}")
        check_cost(study, study.runs, ask=False, **options)
        assert raised(BenchError, check_cost, study, study.runs, ask=True, **options) == (
            f"this is above ask_above ({asks}; a site file can change it): 9 runs, at most 14 GPU-hours; "
            "give --yes if this is intended"
        )
