"""`bench preflight`: a study whose command measures the nodes, on a real cluster and as processes."""

import shlex
import sys
from types import SimpleNamespace

from bench.preflight import ROWS, judge, read_measurements
from ddp_scaling_bench.train.nodecheck import Member, Outcome, Rows, Task, rounds
from tests.cluster.bed import Cluster
from tests.commands import command_line
from tests.common import read_rows, write_program
from tests.matrices import matrix, slurm
from tests.train.ranks import torchrun_env

#: The measurement with shorter windows and messages; the tests need no precise rates.
SHORT = """\
import os, signal, sys, time
import ddp_scaling_bench.train.nodecheck as nodecheck
nodecheck.WINDOW_S, nodecheck._EXCHANGED, nodecheck._EXCHANGING_S = 0.2, (2**20, 2**22), 0.2
nodecheck.EXCHANGE_S = float(os.environ.get("EXCHANGE_S", "30"))
"""
#: A stand-in for python, which receives ``-m ddp_scaling_bench.train.nodecheck FILE --device cpu``.
PYTHON = """\
#!/bin/bash
[ "$1" = -m ] && [ "$2" = ddp_scaling_bench.train.nodecheck ] || exec %(python)s "$@"
shift 2
exec %(python)s -c %(program)s "$@"
"""


def test_a_node_with_a_slow_link_is_found_and_the_next_call_measures_again(cluster: Cluster, tmp_path):
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    # Compute and memory are compared with a limit that a busy machine passes, too.
    program = shlex.quote(
        f"{SHORT}nodecheck.compute_rate = nodecheck.memory_rate = lambda device: 1e9\nnodecheck.main()"
    )
    write_program(python, PYTHON % {"python": shlex.quote(sys.executable), "program": program})
    path = f"PATH={shlex.quote(str(python.parent))}:$PATH"
    axes = {"nodes": [1, 3], "tasks_per_node": [1], "backend": ["gloo"]}
    cluster_of = {"exclude": "n4", "setup": [path], "mem": "800M", "partition": {1: "short", 3: "l40s"}}
    text = matrix("nodes", cluster=slurm(**cluster_of), axes=axes)
    (tmp_path / "nodes.yaml").write_text(text)
    words = ("preflight", "nodes.yaml", "--threshold", "0.5")
    with cluster.linked("80mbit", nodes=["n3"]):
        first = command_line.bench(*words, cwd=tmp_path, **cluster.environment)
    write_program(python, "#!/bin/bash\nexit 9\n")
    second = command_line.bench(*words, cwd=tmp_path, **cluster.environment)
    assert first.returncode == 1, first.stderr
    assert "n3 is unfit: exchange " in first.stdout
    assert first.stdout.count('in the matrix, below cluster:\n  exclude: "n4,n3"\n') == 1
    (rows,) = tmp_path.glob(f"results/preflight/nodes-1/runs/*/attempt-1/{ROWS}")
    found = judge(read_measurements(rows), threshold=0.5).as_json()
    assert {one["node"]: one["fit"] for one in found["nodes"]} == {"n1": True, "n2": True, "n3": False}
    assert (found["exclude"], found["links"], found["pairs"]) == (["n3"], [], 3)
    assert second.returncode == 3, second.stderr
    names = ["nodes-1", "nodes-2"]
    assert sorted(one.name for one in (tmp_path / "results/preflight").iterdir()) == names


#: The memory of n0 fails, that of n1 hangs, and n2 loses its process in every exchange. No exchange depends on
#: the speed of the machine: a partner of n2 sees a key in the store instead of waiting for the time limit.
FAULTY = """
nodecheck.compute_rate = lambda device: 1e9
rank = int(os.environ["RANK"])
def rate(store, place, device):
    if rank == 2:
        store.set("gone", "")
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"here/{place}", "")
    while not store.check([f"here/{1 - place}"]):
        if store.check(["gone"]):
            raise RuntimeError("connection closed by peer")
        time.sleep(0.05)
    time.sleep(0.5)  # the process of rank 0 serves the store
    return 1e9
def memory(device):
    if rank == 0:
        raise RuntimeError("CUDA error: uncorrectable ECC error")
    if rank == 1:
        time.sleep(600)
    return 1e9
nodecheck.exchange_rate, nodecheck.memory_rate, nodecheck.MEASURE_S = rate, memory, 8.0
nodecheck.main()
"""


def test_a_fault_or_a_hang_is_a_row_with_its_reason_and_the_others_are_measured(server, tmp_path):
    script, file = tmp_path / "faulty.py", tmp_path / "rows.csv"
    script.write_text(SHORT + FAULTY)
    nodes = [{**env, "LOCAL_RANK": "0", "EXCHANGE_S": "120"} for env in torchrun_env(4)]
    environments = [{**env, "SLURMD_NODENAME": f"n{rank}"} for rank, env in enumerate(nodes)]
    server.start(
        tmp_path, environments, "script", [str(script), str(file), "--device", "cpu"]
    ).finish().succeeded()
    rows = read_rows(file)
    assert {row["pass"] for row in rows} == {"1", "2"}
    memory = {row["node"]: row["value"] or row["reason"] for row in rows if row["check"] == "memory"}
    assert memory == {
        "n0": "RuntimeError: CUDA error: uncorrectable ECC error",
        "n1": "no answer in 8 s",
        "n2": "1e+09",
        "n3": "1e+09",
    }
    exchanges = [row for row in rows if row["check"] == "exchange"]
    failed = [row for row in exchanges if not row["value"]]
    assert failed
    assert all("n2: the process ended by SIGKILL" in row["reason"] for row in failed)
    assert all("n2" in (row["node"], row["partner"]) for row in failed)
    measured = {(row["node"], row["partner"]) for row in exchanges if row["value"]}
    assert measured == {("n0", "n1"), ("n0", "n3"), ("n1", "n3")}


def test_a_node_that_only_waited_for_its_partner_does_not_hide_the_reason(tmp_path):
    launch = SimpleNamespace(job_hosts=("n0", "n1"), world_size=2)
    members = {0: Member("n0", 0), 1: Member("n1", 0)}
    job = SimpleNamespace(launch=launch, members=members, sender_of={"n0": 0, "n1": 1}.__getitem__)
    rows = Rows(job, tmp_path / "rows.csv")
    waited, ended = Outcome(None, "no answer in 30 s", hung=True), Outcome(None, "the process ended")
    rows.add(Task(1, 1, "exchange", [("n0", "n1")]), {0: waited, 1: ended})
    rows.add(Task(2, 2, "exchange", [("n0", "n1")]), {0: waited, 1: waited})
    rows.close()
    reasons = [row["reason"] for row in read_rows(tmp_path / "rows.csv") if row["check"] == "exchange"]
    assert reasons == ["n1: the process ended", "no answer in 30 s"]


def test_every_node_meets_its_neighbours_in_rounds_of_disjoint_pairs():
    for nodes in range(1, 20):
        for pairs in rounds(nodes):
            members = [node for pair in pairs for node in pair]
            assert len(set(members)) == len(members)
        met = [pair for pairs in rounds(nodes) for pair in pairs]
        distances = {min(b - a, nodes - b + a) for a, b in met}
        assert len(set(met)) == len(met) == min(2 * nodes, nodes * (nodes - 1) // 2)
        assert distances <= {1, 2}
