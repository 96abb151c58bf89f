"""Recorded findings: each says its sentence, and is read as it was written."""

import json
from dataclasses import fields
from itertools import product
from pathlib import Path

from bench.study import findings as runs
from bench.study.found import Unknown, findings_of_env, read_disturbances, read_findings
from ddp_scaling_bench.finding import RECORDED
from ddp_scaling_bench.measure import failures
from ddp_scaling_bench.measure import findings as ranks

#: Entries of findings, each with the beginning or the end of its sentence; values that can be unknown are in one of
#: several.
SENTENCES = [
    json.loads(line) for line in Path(__file__).with_name("sentences.jsonl").read_text().splitlines()
]
ENTRIES = [one["finding"] for one in SENTENCES]


def test_a_finding_is_read_as_it_was_written_and_says_its_sentence():
    for one in SENTENCES:
        (read,) = findings_of_env({"facts": [one["finding"]]})
        assert one["sentence"] in read.message
        assert str(read).endswith(f": {read.message}")
        assert json.loads(json.dumps(read.as_json())) == one["finding"]


def test_every_recorded_class_has_a_sentence_here():
    modules = {module.__name__ for module in (failures, ranks, runs)}
    mine = {kind for kind, one in RECORDED.items() if one.__module__ in modules}
    assert {entry["kind"] for entry in ENTRIES} == mine


DAMAGED = [None, 7, float("nan"), "x", [None], {"a": 1}]


def test_damaged_values_are_listed_as_they_are():
    for whole in {one["kind"]: one for one in ENTRIES}.values():
        names = {one.name for one in fields(RECORDED[whole["kind"]])}
        for name, value in product({*names, "of a later version"} - {"subject", "severity"}, DAMAGED):
            entry = {**whole, "values": {**whole["values"], name: value}}
            (read,) = read_findings([entry])
            assert isinstance(read.message, str)
            assert read.as_json() == entry or not isinstance(read, Unknown) or value != value


def test_a_finding_of_a_later_version_lists_its_values_shortened():
    for values, expected in (
        ({"steps": 3, "hosts": ["n1"]}, "steps 3, hosts ['n1']"),
        ({"hosts": ["n1"] * 20_000}, f"hosts {str(['n1'] * 20)[:37]}..."),
        (dict.fromkeys(map(str, range(20_000)), 0), "7 0 and 19992 more"),
    ):
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
