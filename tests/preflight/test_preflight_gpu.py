"""A pair of nodes that hangs in NCCL; all nodes are processes on one GPU."""

from __future__ import annotations

import json

import pytest
import torch

from bench.commands.preflight import findings
from tests.workload.conftest import srun_env

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_a_pair_that_hangs_in_nccl_is_named_and_the_others_are_measured(run_ranks):
    environments = srun_env({"n1": 1, "n2": 1, "n3": 1})
    for variables in environments:
        # NCCL refuses several ranks on one GPU, except if they seem to be on different hosts.
        variables |= {"NCCL_HOSTID": variables["SLURMD_NODENAME"], "NCCL_SOCKET_IFNAME": "lo"}
    target = "tests.preflight.programs:hangs_over_nccl"
    done = run_ranks(environments=environments, target=target).succeeded()
    result, measured = (
        json.loads((done.folder / f"{name}.json").read_text()) for name in ("result", "measured")
    )
    if "uplicate GPU" in json.dumps(measured["failures"]):
        pytest.skip(f"NCCL refuses several ranks on one GPU: {measured['failures'][0][2]}")
    assert list(findings(result)) == [
        "n1 and n2 exchanged no messages: the exchange did not end in 12 s; avoid one of these nodes"
    ]
    assert sorted(pair[:2] for pair in measured["exchange"]) == [[0, 2], [1, 2], [2, 0], [2, 1]]
    assert all(rate > 0 for *_, rate in measured["exchange"])
    assert result["exclude"] == []
