"""Checkpoints of an earlier run of the study that a training reads or replaces."""

import os
import sys
from pathlib import Path

import pytest

from ddp_scaling_bench.record import left_files
from ddp_scaling_bench.run_folder import RunFolder

sys.addaudithook(left_files._note_open)  # without effect after each test
#: The start of the earlier run and its first step, the end of that run, and the start of this one.
START_S, STEP_S, END_S, OWN_S = 1000, 1010, 1020, 1030
RUNS = Path("results/study/runs")
STATE = "out/checkpoint-5/trainer_state.json"


@pytest.mark.parametrize(
    ("name", "changed_s", "mode", "replaced", "severity"),
    [
        ("ckpt.pt", END_S, "rb", True, "warning"),
        ("out/model.safetensors", END_S, "ab", True, "info"),
        (STATE, END_S, "r", False, "warning"),
        (STATE, END_S, "ab", False, None),
        ("data/cache.pt", STEP_S, "rb", False, None),  # before the earlier run's first step
        ("data/cache.pt", OWN_S + 1, "rb", False, None),  # of this run
        ("out/state.pkl", END_S, "rb", False, "warning"),
        ("out/log.txt", END_S, "rb", False, None),
        (f"{RUNS}/r2/run.json", END_S, "rb", False, None),
    ],
)
def test_a_checkpoint_of_an_earlier_run(tmp_path, monkeypatch, name, changed_s, mode, replaced, severity):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(left_files, "_opened", set())
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("1")
    path.open(mode).close()
    for run, start_s in (("r1", START_S), ("r2", OWN_S)):
        (tmp_path / RUNS / run / "attempt-1").mkdir(parents=True)
        (tmp_path / RUNS / run / "attempt-1/start").touch()
        os.utime(RUNS / run / "attempt-1/start", (start_s, start_s))
    (RUNS / "r1/attempt-1/heartbeat.0.json").write_text(f'{{"first_time": {STEP_S}.5}}')
    os.utime(path, (changed_s, changed_s))
    left = left_files.LeftFiles(RunFolder(tmp_path / RUNS / "r2/attempt-1"))
    path.write_text("22" if replaced else path.read_text())
    if not replaced:
        os.utime(path, (changed_s, changed_s))
    found = left.finding()
    assert (found and found.severity, found and found.files) == (severity, severity and (name,))
