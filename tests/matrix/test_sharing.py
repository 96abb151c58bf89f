"""Warn about runs of a study that can share a node or the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.errors import InputError
from bench.plan import make_plan
from tests.common import raised

MATRIX = """\
study: s
cluster:
  partition: gpu
  {cluster}
{top}axes: {{nodes: {nodes}, gpus_per_node: [1, 2, 4], backend: [nccl]}}
scaling: [{{mode: weak, per_gpu_batch: [8]}}]
repeats: {repeats}
"""
IS_FALSE = "m.yaml:4: cluster.exclusive is false: other jobs can run on the same nodes and disturb a run"
REMEDY = "remove this line for whole nodes, or use `bench submit --pack` or max_running: 1"
N1, N2, N4 = (f"n1x{number}-nccl-srun-b8" for number in (1, 2, 4))


@pytest.fixture
def warnings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def warnings(
        cluster: str, *, top: str = "", nodes: str = "[1]", repeats: int = 3, site: Path | None = None
    ) -> list[str]:
        Path("m.yaml").write_text(MATRIX.format(cluster=cluster, top=top, nodes=nodes, repeats=repeats))
        found = make_plan(Path("m.yaml"), site=site).warnings
        return [text for text in found if "disturb" in text or "max_running" in text]

    return warnings


def test_whole_nodes_are_the_default_and_need_no_warning(warnings):
    assert warnings("qos: high") == []


@pytest.mark.parametrize(
    ("cluster", "repeats", "meeting"),
    [
        ("exclusive: false", 3, [N1, N2, N4]),  # the number of GPUs of a node is unknown
        ("exclusive: false\n  node_gpus: 4", 3, [N1, N2]),
        ("exclusive: false\n  node_gpus: 4", 1, [N1, N2]),
    ],
)
def test_shared_nodes_give_a_warning_that_names_the_cells_that_meet(warnings, cluster, repeats, meeting):
    names = ", ".join(meeting)
    assert warnings(cluster, repeats=repeats)[0] == (
        f"{IS_FALSE}. Runs of these cells can also share a node: {names}; {REMEDY}"
    )


def test_runs_that_cannot_meet_are_disturbed_by_other_jobs_only(warnings):
    said = warnings("exclusive: false", top="max_running: 1\n")
    assert said[0] == f"{IS_FALSE}; remove this line for whole nodes"


def test_shared_nodes_of_the_site_file_are_named_with_its_path(warnings, tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("cluster: {exclusive: false, node_gpus: 4}\n")
    assert warnings("qos: high", site=site)[0].startswith(f"{site}: cluster.exclusive is false: ")


def test_runs_on_several_nodes_share_the_network(warnings):
    side_by_side = (
        "up to {} runs on several nodes can execute side by side and share the network, which disturbs their "
        "communication times; `bench submit --pack` (one job, one run after another) avoids this, and so does "
        "max_running: 1"
    )
    assert warnings("qos: high", nodes="[1, 2]") == [side_by_side.format(9)]
    assert warnings("qos: high", top="max_running: 1\n", nodes="[1, 2]") == []


@pytest.mark.parametrize("line", ["--dependency=afterok:7", "-dsingleton", "--depend singleton"])
def test_a_dependency_of_the_user_is_refused_with_max_running(warnings, line):
    cluster = f'directives: ["--mail-type=END", "{line}"]'
    assert raised(InputError, warnings, cluster, top="max_running: 1\n") == (
        f"m.yaml:4: {line!r} has no effect with max_running, which sets the dependency of each job; "
        "remove one of these settings"
    )
    assert warnings(cluster) == []


@pytest.mark.parametrize("value", ["2", "0", "true", "one"])
def test_only_one_job_at_a_time_or_all_at_once_are_possible(warnings, value):
    shown = {"true": "True", "one": "'one'"}.get(value, value)
    assert raised(InputError, warnings, "qos: high", top=f"max_running: {value}\n") == (
        f"m.yaml:5: max_running: {shown} is not possible; write 1 for one job after another, or remove the key"
    )
