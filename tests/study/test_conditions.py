"""A run is disturbed only by causes outside its job that conditions.json or other jobs show."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bench.study.conditions import FOREIGN_CPU_LIMIT, Occupation, assess
from bench.study.findings import ForeignCpu, GpuSlowdown, LinkErrors
from ddp_scaling_bench.run_folder import RunFolder

NOON = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)
ENV = {
    "cores": [{"node": "n1", "threads_per_rank": [2, 2]}, {"node": "n2", "threads_per_rank": [2, 2]}],
    "hosts": [{"host": "n1", "ranks": [0, 1], "cores": 4}, {"host": "n2", "ranks": [2, 3], "cores": 2}],
}


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def window(start: float, *, nodes: Any = (), ranks: Any = (), seconds: float = 10) -> dict[str, Any]:
    times = {"start": at(start).isoformat(), "end": at(start + seconds).isoformat()}
    return {"epoch": 0, **times, "nodes": list(nodes), "ranks": list(ranks)}


def write(folder: Path, *windows: dict[str, Any]) -> RunFolder:
    (folder / "conditions.json").write_text(json.dumps({"schema": 1, "windows": windows}))
    (folder / "env.json").write_text(json.dumps(ENV))
    return RunFolder(folder)


def found(folder: RunFolder, jobs: Sequence[Occupation] | None = None) -> tuple[Any, ...]:
    content = assess(folder, start=at(0), end=at(100), jobs=jobs)
    disturbances: tuple[Any, ...] = content["disturbed"]
    return disturbances


def job(job_id: str, start: float, end: float | None, *nodes: str, of_study: bool = False) -> Occupation:
    return Occupation(job_id, nodes, at(start), None if end is None else at(end), of_study)


def test_foreign_cpu_time_disturbs_above_the_limit_of_the_cores_in_use(tmp_path: Path) -> None:
    # n1: 4 threads on 4 cores; n2: 4 threads on 2 cores. The limits are thus 2 s and 1 s of 10 s.
    folder = write(
        tmp_path,
        window(0, nodes=[{"node": "n1", "foreign_cpu_s": 1.9}, {"node": "n2", "foreign_cpu_s": 0.9}]),
        window(20, nodes=[{"node": "n1", "foreign_cpu_s": 1.9}, {"node": "n2", "foreign_cpu_s": 3.0}]),
        window(40, nodes=[{"node": "n1", "foreign_cpu_s": None}, {"node": "n2", "foreign_cpu_s": 2.0}]),
    )
    times = {"start": "2026-11-22T12:00:20Z", "end": "2026-11-22T12:00:50Z"}
    assert found(folder) == (ForeignCpu(subject=("n2",), **times, share=0.15, limit=FOREIGN_CPU_LIMIT),)


def test_conditions_that_a_run_can_cause_itself_do_not_disturb_it(tmp_path: Path) -> None:
    net = {"rx_drops": 5, "rx_errors": 2, "crc_errors": None}
    node = {"node": "n1", "foreign_cpu_s": 0, "throttled_s": 9.0, "pressure": {"cpu": 80.0}, "net": net}
    clocks = {"reasons": {"hardware": ["hw_slowdown"], "thermal": [], "power_cap": ["sw_power_cap"]}}
    assert not found(write(tmp_path, window(0, nodes=[node], ranks=[{"rank": 0, "clocks": clocks}])))


def test_a_slowdown_by_heat_within_a_window_disturbs(tmp_path: Path) -> None:
    for before, after in ((5.0, 6.0), (5.0, 5.01), (None, 6.0), (5.0, None)):
        clocks = {"before": {"thermal_s": before}, "after": {"thermal_s": after}}
        shown = found(write(tmp_path, window(0, ranks=[{"rank": 0, "clocks": clocks}])))
        expected = ["thermal_slowdown"] * ((before, after) == (5.0, 6.0))
        assert [reason for one in shown for reason in one.slowdowns] == expected


def test_slowdowns_of_gpus_and_errors_of_links_disturb(tmp_path: Path) -> None:
    clocks = {"after": {"reasons": {"hardware": ["hw_slowdown"], "thermal": ["hw_thermal_slowdown"]}}}
    net = {"crc_errors": 1, "infiniband": {"mlx5_0/1": {"symbol_error": 3}}}
    first = window(0, nodes=[{"node": "n1", "net": net}], ranks=[{"rank": 2, "clocks": clocks}])
    entries = found(write(tmp_path, first, window(20, nodes=[{"node": "n1", "net": {"crc_errors": 2}}])))
    errors, slowdown = (replace(one, start=None, end=None) for one in entries)
    assert errors == LinkErrors(subject=("n1",), errors=6)
    assert slowdown == GpuSlowdown(subject=("n2",), slowdowns=("hw_thermal_slowdown",))


def test_a_job_disturbs_only_if_it_is_there_during_a_window(tmp_path: Path) -> None:
    folder = write(tmp_path, window(10), window(30))
    before, between, after = job("1", 0, 8, "n1"), job("2", 21, 28, "n1"), job("3", 40, 60, "n1")
    assert not found(folder, [before, between, after])
    during = job("4", 15, 35, "n1", "n2", of_study=True)
    running = job("5", 35, None, "n1")
    entries = found(folder, [before, during, running])
    assert [(one.kind, *one.subject, one.start[-4:-1], one.end[-4:-1]) for one in entries] == [
        ("study-run", "n1", ":15", ":36"),
        ("study-run", "n2", ":15", ":36"),
        ("foreign-job", "n1", ":35", ":40"),
    ]
    assert entries[0].jobs == ("4",)


def test_what_is_not_known_is_not_called_undisturbed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert assess(folder, start=at(0), end=at(9)) == {}
    unknown = assess(folder, start=at(0), end=at(9), jobs=[], unknown="no sacct")
    assert unknown == {"neighbours": "unknown: no sacct"}
    known = assess(folder, start=at(0), end=at(9), jobs=[job("7", 9, 20, "n1")])
    assert known == {
        "disturbed": (),
        "neighbours": [
            {"job_id": "7", "start": "2026-11-22T12:00:09Z", "end": "2026-11-22T12:00:20Z", "nodes": ["n1"]}
        ],
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"windows": null}',
        '{"windows": [1, {"start": "x", "end": 3}, {"start": 1e99, "end": 2e99, "nodes": 5}]}',
        '{"windows": [{"start": 9, "end": 5, "nodes": [{"node": "n1", "foreign_cpu_s": 9}]}]}',
        '{"windows": [{"start": 5, "end": 9, "nodes": [{"foreign_cpu_s": "x", "net": 3}], "ranks": [{}, 1]}]}',
    ],
)
def test_a_broken_file_disturbs_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "conditions.json").write_text(text)
    assert assess(RunFolder(tmp_path), start=None, end=None).get("disturbed", ()) == ()
