"""The transport in use as observed by the recorder, in a process with its own NCCL settings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.measure.ranks import RankFacts
from bench.measure.transport import (
    NcclLog,
    combine_traces,
    read_nccl_log,
    read_traces,
    request_nccl_log,
    users_variables,
)
from bench.study.layout import RunFolder
from tests.measure.test_transport_in_use import INFINIBAND, SOCKETS


def facts(*hosts: str, infiniband: tuple[str, ...] = ("mlx5_0",)) -> list[RankFacts]:
    return [RankFacts(rank, 0, host, host, [0], 1, None, list(infiniband)) for rank, host in enumerate(hosts)]


def traces_of_nccl(env: dict[str, str], *, rank: int = 0, folder: Path | None = None) -> dict:
    of = None if folder is None else RunFolder(folder)
    return read_traces("nccl", env=env, rank=rank, folder=of)


def scripts_variables(folder: Path) -> dict[str, str]:
    """Return the variables that a job's script sets for a command with the recorder."""
    template = str(folder).replace("%", "%%") + "/nccl.%h.%p.log"
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": template, "BENCH_RUN_DIR": str(folder)}


def log_in(folder: Path, text: str) -> Path:
    path = folder / f"nccl.{os.uname().nodename.partition('.')[0]}.{os.getpid()}.log"
    path.write_text(text)
    return path


def test_gloos_transport_is_that_of_its_configuration():
    env = {"GLOO_SOCKET_IFNAME": "ib0"}
    traces = [read_traces("gloo", env=env, rank=rank, folder=None) for rank in range(2)]
    found, warning = combine_traces(traces, facts("n1", "n2"), backend="gloo", env=env)
    assert (found["interface"], found["network"], found["source"], warning) == (
        *("ib0", "tcp", "configuration"),
        None,
    )


def test_the_scripts_log_of_nccl_is_read_and_rank_0_keeps_its_own(tmp_path):
    folder = tmp_path / "50 %h"
    folder.mkdir()
    env = scripts_variables(folder)
    path = log_in(folder, INFINIBAND)
    found = traces_of_nccl(env, folder=folder)
    assert NcclLog.from_json(json.loads(json.dumps(found["log"]))) == read_nccl_log(INFINIBAND.splitlines())
    assert [one.name for one in folder.iterdir()] == ["nccl.log"]
    path.write_text(INFINIBAND)
    assert traces_of_nccl(env, rank=1) == found
    assert [one.name for one in folder.iterdir()] == ["nccl.log"]


def test_a_log_requested_by_the_user_is_read_and_stays(tmp_path):
    path = tmp_path / "mine.log"
    path.write_text(SOCKETS)
    found = traces_of_nccl({"NCCL_DEBUG": "info", "NCCL_DEBUG_FILE": str(path)}, folder=tmp_path)
    assert found["log"]["chosen"] == ["Socket"]
    assert path.exists()
    (tmp_path / "job.out").write_text(SOCKETS)
    printed = {"NCCL_DEBUG": "INFO", "BENCH_RUN_DIR": str(tmp_path)}
    assert traces_of_nccl(printed, folder=tmp_path)["log"]["chosen"] == ["Socket"]


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({}, "NCCL_DEBUG is not set, and NCCL names its network at INFO only"),
        ({"NCCL_DEBUG": "WARN"}, "NCCL_DEBUG is WARN, and NCCL names its network at INFO only"),
        ({"NCCL_DEBUG": "INFO"}, "NCCL writes its log to standard output: set NCCL_DEBUG_FILE as well"),
        (
            {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/nowhere/nccl.%h.%p.log"},
            "NCCL has written no log to NCCL_DEBUG_FILE",
        ),
    ],
)
def test_an_unavailable_nccl_log_leaves_empty_values_with_the_reason(env, why):
    traces = traces_of_nccl(env)
    assert traces == {"why": why}
    found, warning = combine_traces([traces, traces], facts("g1", "g2"), backend="nccl", env=env)
    assert found == {
        "backend": "nccl",
        "interface": None,
        "network": None,
        "algorithm": None,
        "version": None,
        "gpudirect": None,
        "source": None,
        "not_read_because": why,
    }
    assert warning is None


def test_a_recorder_created_before_nccl_starts_requests_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env: dict[str, str] = {}
    request_nccl_log(env)
    (private,) = tmp_path.iterdir()
    assert private.stat().st_mode & 0o777 == 0o700, "no other user can plant a link that NCCL would follow"
    assert env == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{private}/bench-nccl-%p.log"}
    assert traces_of_nccl(env) == {
        "why": "NCCL had started before the recorder was created: set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE"
        " before the start"
    }
    path = private / f"bench-nccl-{os.getpid()}.log"
    path.write_text(SOCKETS)
    assert traces_of_nccl(env, rank=1)["log"]["chosen"] == ["Socket"]
    assert not private.exists()
    theirs = {"NCCL_DEBUG": "VERSION"}
    request_nccl_log(theirs)
    assert theirs == {"NCCL_DEBUG": "VERSION"}


def test_variables_set_for_the_recorder_are_not_reported_as_the_users(tmp_path):
    env = {**scripts_variables(tmp_path), "NCCL_ALGO": "Ring"}
    assert users_variables(env) == {"BENCH_RUN_DIR": str(tmp_path), "NCCL_ALGO": "Ring"}
    own = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/mine"}
    assert users_variables(own) == own
