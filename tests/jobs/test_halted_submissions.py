"""`bench cancel` of a whole study during a `bench submit` in another terminal."""

from __future__ import annotations

from tests.jobs.slurm_studies import MEASURE, lines, scripted_study

HALTED = "the study was cancelled: no more runs are started; `bench submit` starts the remaining runs"


def test_a_cancelled_study_stops_a_waiting_submission_and_the_next_continues(cluster, tmp_path):
    study = scripted_study(tmp_path, [f"sleep 60; {MEASURE}"] * 3, cluster.environment)
    with study.start("submit", "STUDY", "--wait", "--max-queued", "1") as waiting:
        assert waiting.stderr is not None
        said = lines(waiting.stderr)
        assert "2 runs held back until other runs end" in said
        assert study.bench("cancel", "STUDY").stdout == "1 run cancelled\n"
        assert list(said) == [HALTED, "study scripted: 2 planned, 1 cancelled"]
    assert waiting.returncode == 1
    assert sum(study.jobs_per_run().values()) == 1
    again = study.bench("submit", "STUDY", "--max-queued", "2")
    assert again.returncode == 0, again.stderr
    assert again.stderr.splitlines()[-1] == "study scripted: 1 planned, 2 queued"


def test_a_running_submission_stops(cluster, tmp_path):
    study = scripted_study(tmp_path, ["sleep 60"], cluster.environment, repeats=300)
    with study.start("submit", "STUDY") as submission:
        assert submission.stderr is not None
        said = lines(submission.stderr)
        assert next(said).startswith("[1/300] ")
        cancelled = study.bench("cancel", "STUDY")
        assert cancelled.returncode == 0, cancelled.stderr
        last = list(said)[-2:]
    assert submission.returncode == 1
    assert last[0] == HALTED
    states = [run.state for run in study.status().values()]
    assert set(states) == {"planned", "cancelled"}
    assert cancelled.stdout == f"{states.count('cancelled')} runs cancelled\n"
