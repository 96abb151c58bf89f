"""Site defaults: choosing the file, inheriting from it, recording and rejecting it."""

import json
from pathlib import Path

import pytest

from bench.matrix.load import find_site, load_matrix
from bench.plan import make_plan, write_plan
from ddp_scaling_bench.errors import BenchError
from tests.commands.command_line import bench
from tests.common import raised

MATRIX = """\
study: s
cluster: {partition: own}
axes: {nodes: [1, 2], tasks_per_node: [1], backend: [gloo]}
scaling: [{mode: weak, per_gpu_batch: [4]}]
workload: {model: mlp, device: cpu}
"""
SITE = """\
# our cluster
cluster:
  partition: gpu
  account: project
  qos: long
  gpu_request: gpus-per-node
  setup: ["module load site"]
  directives: ["--mail-type=END"]
  env: {NCCL_DEBUG: WARN, GLOO_SOCKET_IFNAME: ib0}
workload: {device: cuda}
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def test_a_list_of_the_matrix_replaces_the_sites_and_env_is_merged_by_name(write):
    own = MATRIX.replace(
        "{partition: own}",
        "{setup: [source venv/bin/activate], directives: [], env: {NCCL_DEBUG: INFO, X: '1'}}",
    )
    cluster = load_matrix(write(own, "m.yaml"), site=write(SITE, "site.yaml"))[0].cluster
    assert cluster.setup == ["source venv/bin/activate"]
    assert cluster.directives == []
    assert cluster.env == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "INFO", "X": "1"}


def test_the_defaults_are_for_the_executor_that_the_site_names(write):
    local = MATRIX.replace("{partition: own}", "{executor: local}").replace("[1, 2]", "[1]")
    plan = make_plan(write(local, "m.yaml"), site=write(SITE, "site.yaml"))
    assert plan.document.site.values == {}
    assert not plan.matrix.cluster.env
    here = write("cluster: {executor: local, env: {A: '1'}}\n", "local.yaml")
    bare = MATRIX.replace("{partition: own}", "{}")
    cluster = load_matrix(write(bare, "m.yaml"), site=here)[0].cluster
    assert (cluster.executor, cluster.env) == ("local", {"A": "1"})


def test_the_users_own_file_is_found_unless_another_or_none_is_named_which_must_exist(
    write, tmp_path, monkeypatch
):
    own = write(SITE, "config/ddp-scaling-bench/site.yaml")
    other = write("", "other.yaml")
    monkeypatch.delenv("BENCH_SITE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert find_site() == own
    assert find_site("") is None
    assert find_site(str(other)) == other
    monkeypatch.setenv("BENCH_SITE", str(other))
    assert find_site() == other
    monkeypatch.setenv("BENCH_SITE", "")
    assert find_site() is None
    monkeypatch.setenv("BENCH_SITE", "/nowhere/site.yaml")
    assert raised(BenchError, find_site) == (
        "/nowhere/site.yaml: site file does not exist; "
        "name another file with --site or $BENCH_SITE; an empty BENCH_SITE means no site file"
    )


def test_all_problems_of_a_site_file_are_reported_with_their_lines(write):
    text = (
        "cluster:\n  partion: gpu\n  time_limit: 20\n  env: {RANK: '1'}\naxes: {nodes: [1]}\n"
        "workload: {device: gpu, model: mlp}\n"
    )
    site = write(text, "site.yaml")
    said = raised(BenchError, make_plan, write(MATRIX, "m.yaml"), site=site).splitlines()
    assert [line.removeprefix(f"{site}:")[0] for line in said] == ["2", "3", "4", "5", "6", "6"]
    assert said[0].startswith(f"{site}:2: unknown key 'partion' in cluster; did you mean 'partition'? ")
    assert said[3] == f"{site}:5: unknown key 'axes' in a site file; write it at the top level of the matrix"
    assert said[4] == f"{site}:6: workload.device cannot be 'gpu'; did you mean 'cuda'? allowed: cuda, cpu"
    assert said[5] == f"{site}:6: unknown key 'model' in workload; allowed: device"


def test_a_site_file_is_a_mapping_or_has_only_comments(write):
    site = write("- partition\n", "site.yaml")
    matrix = write(MATRIX, "m.yaml")
    assert raised(BenchError, make_plan, matrix, site=site) == (
        f"{site}:1: a site file must be a mapping (key: value); begin with `cluster:`"
    )
    for empty in ("", "# cluster:\n#   partition: gpu\n", "cluster:\nworkload:\n"):
        plan = make_plan(matrix, site=write(empty, "site.yaml"))
        assert plan.document.site.values == {}


def test_inherited_values_are_stored_and_give_the_same_plan_again(write, tmp_path):
    matrix, site = write(MATRIX, "m.yaml"), write(SITE, "site.yaml")
    folder = write_plan(make_plan(matrix, site=site), tmp_path / "results")
    assert folder.matrix.read_text() == MATRIX
    assert folder.site.read_text() == SITE
    assert json.loads(folder.plan_json.read_text())["inherited"]["cluster.account"] == "project"
    script = next(folder.scripts.iterdir())
    text = script.read_text()
    assert "#SBATCH --account=project\n" in text
    assert "#SBATCH --partition=own\n" in text
    assert str(tmp_path) not in folder.plan_json.read_text() + text
    again = write_plan(make_plan(folder.matrix, site=folder.site), tmp_path / "elsewhere")
    assert (again.scripts / script.name).read_text() == text
    bare = write_plan(make_plan(matrix), tmp_path / "results")
    assert not bare.site.exists()
    assert json.loads(bare.plan_json.read_text())["inherited"] == {}
    assert "#SBATCH --account" not in script.read_text()


def test_plan_prints_the_site_file_and_the_inherited_keys(write, tmp_path):
    matrix, site = write(MATRIX, "m.yaml"), write(SITE, "config/ddp-scaling-bench/site.yaml")
    taken = (
        "cluster.account, cluster.qos, cluster.gpu_request, cluster.setup, cluster.directives, "
        "cluster.env.NCCL_DEBUG, cluster.env.GLOO_SOCKET_IFNAME"
    )
    said = bench("plan", str(matrix), "--site", str(site), cwd=tmp_path)
    assert f"site defaults of {site} (executor slurm): {taken}" in said.stderr.splitlines()
    shown = bench("plan", str(matrix), "--json", cwd=tmp_path, BENCH_SITE=str(site))
    assert json.loads(shown.stdout)["site"]["path"] == str(site)
    none = bench("plan", str(matrix), "--site", "", cwd=tmp_path, BENCH_SITE=str(site))
    assert "site defaults" not in none.stderr
    nothing = bench("plan", "smoke_cpu", "--site", str(site), cwd=tmp_path)
    assert f"site defaults of {site} (executor slurm): nothing inherited" in nothing.stderr.splitlines()
