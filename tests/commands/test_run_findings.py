"""Every finding of a run is told by status, verify and report: on the terminal, in JSON and on the page."""

import json
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.study.found import findings_of_env
from bench.study.reasons import AfterMeasurement, LogCause
from tests.analysis import studies
from tests.common import change_json
from tests.study.test_findings import ENTRIES

KINDS = "fewer-windows slow-first-steps line-forms lines-left-out separate-trainings model-not-wrapped"
FOUND = {
    one.kind: replace(one, subject=())
    for one in findings_of_env({"facts": ENTRIES})
    if one.kind in KINDS.split()
}
IN_LOG = LogCause(severity="warning", cause="resumed", path="job.out", line=3, explanation="it resumed")
ENDED = AfterMeasurement(said="the time limit was reached")


@pytest.mark.usefixtures("nothing_drawn")
def test_each_finding_is_told_by_status_verify_and_report(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "results" / "s", studies.weak(sizes=(1, 2)))
    change_json(path / "plan.json", executor="local")
    odd = [f"n2x1-gloo-srun-b16-r{repeat}" for repeat in (1, 2)]
    for name, steps in zip(odd, (4, 3), strict=True):
        found = FOUND | {"fewer-windows": replace(FOUND["fewer-windows"], steps=steps)}
        facts, exchange = [one.as_json() for one in found.values()], {"together": False, "by": "parameters"}
        change_json(path / "runs" / name / "attempt-1/env.json", facts=facts, exchange=exchange)
        studies.change_run(path, name, warnings=(IN_LOG,), reasons=(ENDED,))
    run = CliRunner().invoke
    status, verify = (
        json.loads(run(app, [name, str(path), "--json"]).stdout) for name in ("status", "verify")
    )
    (in_status,), (in_verify,) = (
        [one for one in said["runs"] if one["run_id"] == odd[0]] for said in (status, verify)
    )
    lines = run(app, ["report", str(path)]).stderr.splitlines()
    html = (path / "report/index.html").read_text(encoding="utf-8")
    page = unescape(html.replace("<wbr>", "").replace("\N{NO-BREAK SPACE}", " "))
    assert all(ENDED.message in text for text in (in_status["reason"], str(in_verify), page))
    assert [one["check"] for one in in_verify["checks"] if one["passed"] is False] == ["trains together"]
    assert len(FOUND) == len(KINDS.split())
    for one in (*FOUND.values(), IN_LOG):
        told = one.severity != "info"
        assert (one.kind in {fact["kind"] for fact in in_status["findings"]}) == told
        assert (one.kind in {fact["kind"] for fact in in_verify["warnings"]}) == (
            one.kind != "model-not-wrapped"
        )
        of_kind = [line for line in lines if line.endswith(f"[{one.kind}]")]
        assert len(of_kind) == told, lines
        of_study = one.kind == "separate-trainings"
        assert (one.message in page) or of_study
        assert not told or of_study or f"(2 runs: {odd[0]} and {odd[1]})" in of_kind[0]
