"""Matrices with executor ssh: cells, rejected hosts, and scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.errors import InputError
from bench.plan import Plan, make_plan, plan_content, scripts
from tests.common import run_program, write_program


def plan(folder: Path, cluster: dict[str, Any], **axes: Any) -> Plan:
    path = folder / "m.yaml"
    content = {
        "study": "hosts",
        "cluster": {"executor": "ssh", **cluster},
        "axes": axes,
        "scaling": [{"mode": "weak", "per_gpu_batch": [4]}],
        "workload": {"device": "cpu", "model": "mlp"},
    }
    path.write_text(yaml.safe_dump(content, allow_unicode=True))
    return make_plan(path)


def refusal(folder: Path, cluster: dict[str, Any], **axes: Any) -> str:
    """Return the problems of a matrix without file name and line."""
    with pytest.raises(InputError) as caught:
        plan(folder, cluster, **axes)
    problems = [str(problem).partition(": ")[2] for problem in caught.value.problems]
    return "\n".join(problems)


def test_without_an_axis_each_host_starts_its_own_processes(tmp_path):
    hosts = [{"host": "a", "processes": 4}, {"host": "user@b", "processes": 4}, {"host": "c", "processes": 2}]
    planned = plan(tmp_path, {"hosts": hosts}, nodes=[1, 2, 3])
    assert [(cell.nodes, cell.tasks_per_node, cell.world_size) for cell in planned.cells] == [
        (1, 4, 4),
        (2, 4, 8),
        (3, [4, 4, 2], 10),
    ]
    assert {cell.launcher for cell in planned.cells} == {"torchrun"}
    assert plan_content(planned)["hosts"] == [{**host, "address": None} for host in hosts]


def test_a_plain_name_is_a_host_with_one_rank_or_the_axis_value(tmp_path):
    assert plan(tmp_path, {"hosts": ["a", "b"]}, nodes=[2]).cells[0].tasks_per_node == 1
    assert plan(tmp_path, {"hosts": ["a", "b"]}, nodes=[2], tasks_per_node=[[4, 2]]).cells[0].world_size == 6


NAME_RULE = (
    "allowed: NAME or USER@NAME with letters, digits, '.', '_' and '-' "
    "(set ports, keys and jump hosts in ~/.ssh/config)"
)


@pytest.mark.parametrize(
    "name",
    ["-oProxyCommand=touch planted", "a;touch planted", "$(touch planted)", "a\nb", "a:22", "é", "a\0"],
)
def test_unsafe_host_names_are_rejected(tmp_path, name):
    said = refusal(tmp_path, {"hosts": ["n1", name]})
    assert said == f"cluster.hosts[1].host: {name!r} is not a host name; {NAME_RULE}"
    said = refusal(tmp_path, {"hosts": [{"host": "n1", "address": name}]})
    assert said == (
        f"cluster.hosts[0].address: {name!r} is not an address; allowed: a name or an IPv4 address, "
        "with letters, digits, '.', '_' and '-'"
    )


SEEN = "import json, os, sys; json.dump({'words': sys.argv[1:], 'env': dict(os.environ)}, sys.stdout)"


def launched(script: str, folder: Path, *words: str) -> dict[str, Any]:
    """Return the arguments and the environment of torchrun in a script."""
    python = folder / "python"
    write_program(python, f'#!/bin/bash\nexec {sys.executable} -c "{SEEN}" "$@"\n')
    path = folder / "cell.sh"
    path.write_text(script)
    env = {"PATH": "/usr/bin:/bin", "BENCH_PYTHON": str(python), "GLOO_SOCKET_IFNAME": "eth7"}
    done = run_program(["bash", path, *words], env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_same_script_starts_each_hosts_part_of_a_run(tmp_path):
    planned = plan(tmp_path, {"hosts": ["a", "b"]}, nodes=[2], tasks_per_node=[[4, 2]])
    ((_, text),) = scripts(planned)
    first = launched(text, tmp_path, "run dir", "0", "10.0.0.1:29400", "an-id")["words"]
    second = launched(text, tmp_path, "run dir", "1", "10.0.0.1:29400", "an-id")["words"]
    assert first[: first.index("workload") - 1] == [
        *("-P", "-m", "ddp_scaling_bench.start", "torch.distributed.run"),
        *("--nnodes=2", "--nproc-per-node=4"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29400", "--rdzv-id=an-id"),
        *("--rdzv-conf=join_timeout=300,is_host=true", "--max-restarts=0", "--no-python"),
        *(str(tmp_path / "python"), "-P", "-u", "-m"),
    ]
    assert {(a, b) for a, b in zip(first, second, strict=True) if a != b} == {
        ("--nproc-per-node=4", "--nproc-per-node=2"),
        ("--rdzv-conf=join_timeout=300,is_host=true", "--rdzv-conf=join_timeout=300,is_host=false"),
    }


@pytest.mark.parametrize("value", ["it's $(touch planted)", "`touch planted`", 'two\nlines "quoted"', "; é"])
def test_values_arrive_literally_on_the_hosts(tmp_path, value):
    ((_, text),) = scripts(plan(tmp_path, {"hosts": ["a"], "env": {"VALUE": value}}))
    assert launched(text, tmp_path, "run dir")["env"]["VALUE"] == value
    assert not (tmp_path / "planted").exists()
