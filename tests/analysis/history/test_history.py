"""`bench history`: series of studies, the index, and the page."""

import json
import random
import shutil
import sys
import time
from datetime import date, timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest

from analysis.history.evaluate import evaluate
from analysis.history.index import Source, read_studies
from analysis.history.key import cell_settings, key_of, labels_of, shown_settings
from bench.study.layout import StudyFolder, studies
from tests.analysis.studies import StudyBuilder, Timing, environment, strong
from tests.commands.command_line import answer, bench
from tests.common import run_program

ROOT = Path(__file__).parents[3]


def nightly(root: Path, *, nights: int, slow_from: int, factor: float = 1.1) -> Path:
    """Write a study for each night: from ``slow_from`` on, steps are longer and torch is newer."""
    for night in range(nights):
        own = factor if night >= slow_from else 1.0
        timing = Timing(sample_s=1e-3 * own, comm_s=4e-3 * own, fixed_s=1e-3 * own)

        def env(cell, night=night):
            return environment(cell) | {"torch": "2.12.0" if night >= slow_from else "2.11.0"}

        cells, day = strong(sizes=(1, 2)), date(2026, 3, 1) + timedelta(days=night)
        options = {"seed": night, "timing": timing, "env": env, "epochs": 1, "ranks_files": False}
        builder = StudyBuilder(root / f"night-{night:02}", cells, **options)
        ledger = StudyFolder(builder.write()).ledger
        ledger.write_text(ledger.read_text().replace("2026-01-02", str(day)))
    return root


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Return a folder of studies with its index, which is also that of a copy: its files have the same times."""
    results = nightly(tmp_path_factory.mktemp("h") / "results", nights=12, slow_from=9)
    rebuild(results, 1)
    return results


@pytest.fixture
def results(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "results"))


def test_a_slowdown_is_reported_with_what_else_changed(results):
    content = answer("history", cwd=results.parent)
    assert [one["label"] for one in content["series"]] == ["n1x1", "n2x1"]
    for series in content["series"]:
        (change,) = series["changes"]
        assert change["at"] == 9
        assert change["reported"] in (10, 11)
        assert change["ratio"] == pytest.approx(1 / 1.1, rel=0.01)
        assert change["low"] < change["ratio"] < change["high"]
        assert change["differences"] == [{"name": "torch", "before": "2.11.0", "after": "2.12.0"}]
        assert len(series["points"]) == 12
    point = content["series"][1]["points"][0]
    assert point["facts"]["nodes"] == "n1 and n2"
    assert 0 < point["exposed"] < 1
    page = (results / "history.html").read_text()
    assert "torch 2.11.0 → 2.12.0" in page
    assert "<script" not in page
    assert "http" not in page.split("</style>")[1]


def test_check_fails_only_for_a_new_slowdown(results, tmp_path):
    def code(*words: str) -> int:
        return bench("history", "--check", *words, cwd=results.parent).returncode

    reported = answer("history", cwd=results.parent)["series"][0]["changes"][0]["reported"]
    names = [f"night-{night:02}" for night in range(reported + 1)]
    assert code(*names) == 1
    assert code(*names[:-1]) == 0
    assert code("--since", "2026-03-02") == 1
    assert code("--since", "2026-04-01") == 0 or reported == 11
    done = bench("history", "--since", "March", cwd=results.parent)
    assert (done.returncode, done.stderr) == (
        2,
        "error: --since March is not a date; write it as 2026-03-04\n",
    )


def test_a_line_fits_a_terminal_says_what_is_left_out_and_a_copy_counts_once(results):
    StudyBuilder(results / "short", strong(sizes=(1,)), repeats=2).write()
    StudyBuilder(results / "waiting", strong(sizes=(1,)), state=lambda *_: ("queued", "", None)).write()
    shutil.copytree(results / "night-03", results / "a-copy")
    lines = bench("history", cwd=results.parent).stdout.splitlines()
    assert any("n1x1" in line and "since 2026-03-10 (torch 2.11.0 → 2.12.0)" in line for line in lines)
    assert "left out: short/n1x1-gloo-srun-b64 (fewer than 3 measured runs)" in lines
    assert "left out: waiting (3 runs not ended)" in lines
    for number in range(9):
        folder = results / f"broken-{number}"
        folder.mkdir()
        (folder / "plan.json").write_text("{}")
    done = bench("history", cwd=results.parent)
    assert done.stdout.count("left out: ") == 6
    assert "left out for 6 more reasons; --json lists all" in done.stdout
    content = answer("history", cwd=results.parent)
    assert len(content["left_out"]) == 13
    assert all(len(one["points"]) == 12 for one in content["series"])
    assert ["night-03/n1x1-gloo-srun-b64", "the same runs are in a-copy"] in content["left_out"]


def test_only_changed_studies_are_read_again(results):
    messages: list[str] = []
    sources = [Source(study.path) for study in studies(results)]
    first = read_studies(sources, results, rebuild=False, say=messages.append)
    index = json.loads((results / "history.json").read_text())
    index["studies"]["night-01"]["points"][0]["rate"] = 7.0
    index["studies"]["night-02"]["points"][0]["rate"] = 7.0
    (results / "history.json").write_text(json.dumps(index))
    with (results / "night-02/ledger.jsonl").open("a") as file:
        file.write("\n")
    shutil.rmtree(results / "night-00")
    second = read_studies(sources[1:], results, rebuild=False, say=messages.append)
    assert second["night-01"].points[0].rate == 7.0
    assert second["night-02"].points == first["night-02"].points
    assert "night-00" not in json.loads((results / "history.json").read_text())["studies"]
    third = read_studies(sources[1:], results, rebuild=True, say=messages.append)
    assert third["night-01"] == first["night-01"]
    assert messages == []


def test_a_damaged_index_is_written_anew(tmp_path):
    results = nightly(tmp_path / "results", nights=1, slow_from=1)
    for content in ("", "{", '{"version": 1}', '{"version": "x", "studies": {"a": 1}}'):
        (results / "history.json").write_text(content)
        done = bench("history", cwd=tmp_path)
        assert done.returncode == 0
        assert done.stderr == "results/history.json: is damaged, and written anew\n"
        assert bench("history", cwd=tmp_path).stderr == ""


def rebuild(results: Path, times: int = 10**6) -> None:
    for _ in range(times):
        read_studies([Source(study.path) for study in studies(results)], results, rebuild=True, say=str)


def test_a_killed_rebuild_leaves_a_whole_index(tmp_path):
    results = nightly(tmp_path / "results", nights=1, slow_from=1)
    rebuild(results, 1)
    whole = (results / "history.json").read_text()
    for seed in range(8):
        process = get_context("fork").Process(target=rebuild, args=(results,))
        process.start()
        time.sleep(random.Random(seed).uniform(0.05, 0.2))
        process.kill()
        process.join()
        assert (results / "history.json").read_text() == whole


def test_two_at_once_write_the_same_index(results):
    for night in range(2, 12):
        shutil.rmtree(results / f"night-{night:02}")
    rebuild(results, 1)
    whole = (results / "history.json").read_text()
    (results / "history.json").unlink()
    both = [get_context("fork").Process(target=rebuild, args=(results, 2)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert (results / "history.json").read_text() == whole


def test_many_studies_are_read_by_two_processes_with_the_same_result(results, monkeypatch):
    monkeypatch.setattr("analysis.history.index._MANY", 3)
    folders = {name: StudyFolder(results / name) for name in ("night-00", "night-01", "night-02", "night-09")}
    found = read_studies([Source(one.path) for one in folders.values()], results, rebuild=True, say=str)
    assert {name: (entry.points, entry.left_out) for name, entry in found.items()} == evaluate(folders)


def test_a_fresh_index_needs_no_heavy_package(results):
    program = (
        "import sys\nfrom bench.cli import app\n"
        "try:\n app(['history'])\nexcept SystemExit:\n pass\n"
        "print({'pandas', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules))"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = run_program([sys.executable, "-c", program], cwd=results.parent, env=env, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_index_and_the_page_of_a_private_study_are_private(tmp_path):
    results = nightly(tmp_path / "results", nights=1, slow_from=1)
    (results / "night-00/plan.json").chmod(0o600)
    bench("history", cwd=tmp_path)
    modes = {name: (results / name).stat().st_mode & 0o777 for name in ("history.json", "history.html")}
    assert modes == {"history.json": 0o600, "history.html": 0o600}


def stored_cell() -> dict:
    """Return the cell of a stored plan."""
    plan = json.loads((Path(__file__).parent / "plan.json").read_text())
    return dict(plan["cells"][0])


def test_the_key_of_a_stored_plan_stays():
    settings = cell_settings(stored_cell(), executor="slurm", device_name="NVIDIA L40S")
    assert key_of(settings) == "bffb2c7be7381eef"


@pytest.mark.parametrize(
    ("changes", "is_equal"),
    [
        ({"cell_id": "other", "repeats": 9, "packages": ["x"], "series": []}, True),
        ({"argv": ["python", "-P", "-m", "ddp_scaling_bench.train"]}, True),
        ({"tasks_per_node": [1]}, True),
        ({"per_gpu_batch": 7}, False),
        ({"env": {"NCCL_ALGO": "Ring"}}, False),
        ({"backend": "nccl"}, False),
    ],
)
def test_cells_are_equal_if_their_runs_are(changes, is_equal):
    cell = stored_cell()
    keys = [
        key_of(cell_settings(one, executor="slurm", device_name="NVIDIA L40S"))
        for one in (cell, cell | changes)
    ]
    assert (keys[0] == keys[1]) is is_equal


def test_labels_have_only_what_distinguishes_series():
    one = {"nodes": "2", "tasks_per_node": "4", "model": "mlp", "backend": "nccl"}
    other = one | {"backend": "gloo"}
    labels = labels_of({"a": one, "b": other, "c": one | {"nodes": "4"}, "d": other})
    assert (labels["a"], labels["c"]) == ("n2x4, nccl", "n4x4")
    assert labels["b"] != labels["d"]


def test_values_of_variables_that_are_not_documented_are_not_shown():
    settings = {"env.TOKEN": "secret", "env.NCCL_ALGO": "Ring", "env.SWEPT": "1", "nodes": 2}
    shown = {"env.TOKEN": "set", "env.NCCL_ALGO": "Ring", "env.SWEPT": "1", "nodes": "2"}
    assert shown_settings(settings, {"env.SWEPT"}) == shown
