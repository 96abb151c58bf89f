"""Whether the ranks of a run train together: the recorder's answer, or the bytes between the nodes."""

import json
from typing import Any

import pytest

from bench.matrix.workload import options_in_file
from bench.study.ledger import End, Record, RunState
from bench.study.together import together_of
from bench.study.verify import verify_run
from ddp_scaling_bench.run_folder import RunFolder
from tests.matrices import command, matrix, plan_of

PATTERN = {"output": {"throughput": r"rate (\S+)"}}
RECORDER, RARE = {"metrics": "recorder", "parameters": None}, {"exchange": "rare"}
NO_INFINIBAND = {"env": {"NCCL_IB_DISABLE": "1"}}
#: An all-reduce of a million parameters moves 8 MB between 2 nodes; a hundredth of it for 10 values: 800 kB.
FEW, ENOUGH = [200_000, 200_000], [800_000, 800_000]


def recorded(together: bool | None, by: str | None) -> dict[str, Any]:
    return {"exchange": {"together": together, "by": by}}


@pytest.mark.parametrize(
    ("options", "env", "sent", "expected", "found"),
    [
        ({}, {}, FEW, False, "no, by bytes between the nodes"),
        ({}, {}, ENOUGH, None, ""),
        ({}, {}, [*FEW[:1], None], None, ""),
        ({"parameters": None}, {}, FEW, None, ""),
        ({"grad_accum": 100}, {}, FEW, None, ""),
        ({**RARE}, {}, FEW, None, "exchange: rare"),
        ({"device": "cuda"}, {}, FEW, None, ""),
        ({"device": "cuda"}, NO_INFINIBAND, FEW, False, "no, by bytes between the nodes"),
        ({}, recorded(True, "parameters"), FEW, True, "yes, by parameters"),
        (RECORDER, recorded(True, "strategy"), [], True, "yes, by strategy"),
        (RECORDER, recorded(False, "parameters"), [], False, "no, by parameters"),
        (RECORDER | RARE, recorded(None, None), [], None, "exchange: rare"),
        (RECORDER, {}, FEW, None, ""),
    ],
)
def test_ranks_that_do_not_train_together_fail_the_run(tmp_path, options, env, sent, expected, found):
    axis = "gpus_per_node" if options.get("device") == "cuda" else "tasks_per_node"
    given = command("x {per_gpu_batch}", **{"metrics": PATTERN, "parameters": "1M", **options})
    workload = {name: value for name, value in given.items() if value is not None}
    text = matrix(cluster={"executor": "slurm"}, axes={"nodes": [2], axis: [1]}, workload=workload)
    plan = plan_of(tmp_path, text)
    assert not [one for one in plan.warnings if one.kind == "not-in-command"]
    (cell,), folder = plan.cells, RunFolder(tmp_path)
    is_rare = "exchange" in options
    assert [cell.metrics.get("exchange"), options_in_file(cell).get("exchange")] == [
        "rare" if is_rare else None
    ] * 2
    assert ("parameters" in cell.workload) == ("parameters" in workload)
    nodes = [{"node": f"n{n}", "net": {"sent": {"link_bytes": size}}} for n, size in enumerate(sent, 1)]
    folder.conditions.write_text(json.dumps({"windows": [{"nodes": nodes}]}))
    folder.out.write_text("rate 5\n" * 10)
    folder.env.write_text(json.dumps(env))
    assert together_of(folder, cell, env) is expected
    verdict = verify_run(folder, Record(run_id="r", attempt=1).ended(End(state=RunState.COMPLETED)), cell)
    (check,) = (check for check in verdict.checks if check.name == "trains together")
    assert (check.passed, check.found) == (expected, found)
    by_bytes = "bytes" in found
    assert by_bytes == all(
        word in check.expected for word in ("LoRA", "compressed gradients", "exchange: rare")
    )
