"""The rendered scripts: whole texts, and hostile values in a real shell.

The golden scripts are in ``golden/``. After an intended change, write them again with
``python tests/planning/test_scripts.py`` and read the difference.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from bench.matrix.field_types import env_name
from bench.package import package_name
from bench.plan import make_plan, pack_script, scripts
from bench.shipped import shipped
from ddp_scaling_bench.cell_json import read_cell
from tests.common import run_program, write_program
from tests.matrices import plan_of

GOLDEN = Path(__file__).parent / "golden"

#: Matrices with all settings of a cluster, and of a command with words that a shell would change.
SITE, COMMAND = ((GOLDEN.with_name("matrices") / name).read_text() for name in ("site.yaml", "own.yaml"))
#: Options of srun, with one mask for all ranks of a node, as torchrun needs it.
BINDING = """\
switches: 1@2:00:00
  srun_options: ["--cpu-bind=mask_cpu:0xff*2", "--gpu-bind=none", "--distribution=block:*", "--mem-bind=local"]"""
CONTAINERS = {
    "apptainer": "container: {runtime: apptainer, image: '/images/py torch.sif', mounts: ['/scratch:/data'], options: [--cleanenv]}",
    "pyxis": "container: {runtime: pyxis, image: 'nvcr.io#nvidia/pytorch:25.01', mounts: ['/scratch:/data']}",
}


def site(more: str) -> str:
    """Return the matrix with another key of the cluster."""
    return SITE.replace("axes:\n", f"  {more}\naxes:\n", 1)


def golden_scripts(tmp_path: Path) -> dict[str, str]:
    """Return a script of each launcher, executor and container, one of a command, and a pack, by file name."""
    found = {}
    for name in ("l40s", "mixed_nodes", "smoke_cpu", "ssh_hosts"):
        with patch("bench.matrix.load.usable_cores", return_value=4):
            plan = make_plan(shipped("matrices") / f"{name}.yaml")
        cell, text = list(scripts(plan))[-1]
        found[f"{name}-{Path(plan.script_name(cell)).name}"] = text
    for name, launcher in (("apptainer", "srun"), ("pyxis", "torchrun")):
        texts = {cell.launcher: text for cell, text in scripts(plan_of(tmp_path, site(CONTAINERS[name])))}
        found[f"{name}-{launcher}.sbatch"] = texts[launcher]
    found["unrecorded-srun.sbatch"] = next(scripts(plan_of(tmp_path, COMMAND + "  metrics: none\n")))[1]
    own = COMMAND.replace("[srun, torchrun]", "[own], model_parallel: [2]").replace("per_gpu", "per_replica")
    line = "{executor: slurm, container: 'shifter --image=a:b',"
    for name, text in (
        ("node", own + "    - 'n{node_rank}:{hostfile}'\n"),
        ("job", own + "  command_per: job\n"),
        ("container", own.replace("{executor: slurm,", line) + "    - '{node_rank}'\n"),
    ):
        found[f"own-{name}.sbatch"] = next(scripts(plan_of(tmp_path, text)))[1]
    found["pack.sbatch"] = pack_script(plan_of(tmp_path, site(BINDING)))
    # The digest changes with each change of what runs in a job.
    return {
        name: text.replace(package_name(), "ddp_scaling_bench-DIGEST.zip") for name, text in found.items()
    }


def test_the_scripts_equal_the_golden_scripts(tmp_path):
    found = golden_scripts(tmp_path)
    assert sorted(found) == sorted(path.name for path in GOLDEN.iterdir())
    for name, text in found.items():
        assert text == (GOLDEN / name).read_text(), f"{name} differs from its golden script"


FAKE_SRUN = """\
#!/bin/bash
# Print the arguments and the environment as JSON.
exec {python} -c '
import json, os, sys
print(json.dumps({{"words": sys.argv[1:], "env": dict(os.environ)}}))' "$@"
"""


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script like Slurm's batch shell, with an srun that only prints its arguments."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "srun").write_text(FAKE_SRUN.format(python=os.sys.executable))
    (tools / "scontrol").write_text("#!/bin/bash\nprintf 'n1\\nn2\\n'\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    script = folder / "job.sbatch"
    script.write_text(text)
    env = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_SUBMIT_DIR": str(folder),
        "HOME": str(folder),
    }
    shutil.rmtree(folder / "run dir", ignore_errors=True)
    (folder / "run dir").mkdir()
    return run_program(["bash", str(script), str(folder / "run dir")], env=env, cwd=folder)


def one_script(folder: Path, *, launcher: str = "srun", nodes: int = 2, **cluster: Any) -> str:
    """Return the script of the only cell of a matrix."""
    content = {
        "study": "one",
        "cluster": cluster,
        "axes": {"nodes": [nodes], "gpus_per_node": [2], "launcher": [launcher]},
        "workload": {"data": "/data/x"},
        "scaling": [{"mode": "weak", "per_gpu_batch": [2]}],
    }
    ((_, text),) = scripts(plan_of(folder, content))
    return text


def test_the_job_writes_a_provisional_end_even_if_it_is_terminated(tmp_path):
    text = one_script(tmp_path)
    run_script(text, tmp_path)
    end = json.loads((tmp_path / "run dir" / "end.json").read_text())
    assert (end["exit_code"], end["signal"], end["stage"]) == (0, None, "run")
    terminated = text.replace("child=$!\n", "child=$!\nkill -TERM $$\n")
    assert terminated != text
    assert run_script(terminated, tmp_path).returncode == 143
    end = json.loads((tmp_path / "run dir" / "end.json").read_text())
    assert (end["exit_code"], end["signal"], end["stage"]) == (143, "TERM", "run")


def test_a_requeued_job_writes_cell_json_again_and_moves_the_earlier_one_aside(tmp_path):
    text = one_script(tmp_path)
    earlier = f"export SLURM_RESTART_COUNT=1\ncd '{tmp_path}/run dir'\n"
    earlier += "for name in cell.json SHA256SUMS nccl.n1.log; do echo earlier >$name; done\n"
    assert run_script(earlier + text, tmp_path).returncode == 0
    folder = tmp_path / "run dir"
    moved = {path.name: path.read_text() for path in (folder / "before-restart-1").iterdir()}
    assert moved == dict.fromkeys(("cell.json", "SHA256SUMS", "nccl.n1.log"), "earlier\n")
    assert read_cell(folder).workload["data"] == "/data/x"
    assert not list(folder.glob(".cell*"))


def srun_words(text: str) -> list[str]:
    """Return the words after the srun that starts the ranks."""
    step = text.partition("\nstep=(\n")[2].partition("\n)\n")[0]
    return shlex.split(step, comments=True)[1:]


def test_other_words_are_accepted(tmp_path):
    words = (
        "--mem-bind=local --mpi=none --gres-flags=allow-task-sharing -v --network=x,y -mblock --distribution=*:block "
        "--cpu-bind=mask_cpu:fe000000000000,FE*4 --gpu-bind=closest --hint=nomultithread"
    ).split()
    given = srun_words(one_script(tmp_path, srun_options=words))
    first = given.index(words[0])
    assert given[first : first + len(words)] == words


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_explicit_bindings_get_a_step_with_all_cpus_of_its_nodes(tmp_path, launcher, nodes):
    """With --cpus-per-task, a step has only these CPUs, and Slurm rejects a mask outside of them."""
    for binding, explicit in (("mask_cpu:0x3", True), ("verbose,rank", True), ("quiet,cores", False)):
        options = {"srun_options": [f"--cpu-bind={binding}"], "exclusive": True, "cpus_per_task": 2}
        text = one_script(tmp_path, launcher=launcher, nodes=nodes, **options)
        words = srun_words(text)
        assert f"--cpu-bind={binding}" in words
        assert any(word.startswith("--cpus-per-task") for word in words) is not explicit
        unset = "SLURM_EXACT SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SRUN_CPUS_PER_TASK"
        assert (f"\nunset {unset}\n" in text) is explicit


EXECUTORS = {
    "slurm": "{executor: slurm}",
    "apptainer": "{executor: slurm, container: {runtime: apptainer, image: x.sif}}",
    "podman": "{executor: slurm, container: \"podman-hpc run -v {run_dir}:/run -v {package} '$(id) x' {{}}\"}",
    "local": "{executor: local}",
    "ssh": "{executor: ssh, hosts: [a, b]}",
}


@pytest.mark.parametrize("name", EXECUTORS)
def test_the_folder_of_the_run_is_a_word_of_every_command_and_container(tmp_path, name):
    launchers = "[srun, torchrun]" if "slurm" in EXECUTORS[name] else "[torchrun]"
    text = COMMAND.replace("{executor: slurm, time_limit: 10m,", EXECUTORS[name][:-1] + ",")
    text = text.replace("[srun, torchrun]", launchers).replace(
        "nodes: [2]", f"nodes: [{1 if name == 'local' else 2}]"
    )
    text = text.replace('    - "{master_addr}:{master_port}"\n', "")
    for _, script in scripts(plan_of(tmp_path, text)):
        before, _, rest = script.partition("\ncommand=(\n")
        assert re.search(r"^ *run_dir=", before, re.MULTILINE)
        arrays, _, ranks = rest.partition("\nranks=(\n")
        words = f"command=(\n{arrays}\nranks=(\n" + ranks.partition("\n)\n")[0] + "\n)\n"
        shown = (
            "python=python run_dir='/a $(b)' package='/p q'\n"
            + words
            + 'printf \'%s\\n\' "${command[@]}" - "${ranks[@]}"'
        )
        command, _, ranks = run_program(["bash", "-c", shown]).stdout.partition("\n-\n")
        assert "/a $(b)/it's $HOME" in command.splitlines()
        if name == "podman":
            lines = ranks.splitlines()
            at = lines.index("podman-hpc")
            assert lines[at : at + 7] == ["podman-hpc", "run", "-v", "/a $(b):/run", "-v", "/p q", "$(id) x"]


AWAY = """\
#!/bin/bash
# A controller that answers the second request.
echo "$*" >>asked
[ "$(wc -l <asked)" -lt 3 ] || exit 0
echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_the_script_waits_for_an_absent_controller_before_srun(tmp_path, launcher):
    text = one_script(tmp_path, launcher=launcher)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "squeue").write_text(AWAY)
    (tools / "sleep").write_text('#!/bin/bash\necho "sleep $*" >>asked\n')
    done = run_script(text, tmp_path)
    question = "--noheader --jobs=1234567"
    assert (tmp_path / "asked").read_text().splitlines() == [question, "sleep 5", question, "sleep 15"]
    waits = "bench: Slurm's controller does not answer: waiting for it"
    assert done.stderr.splitlines()[-1] == waits
    assert json.loads(done.stdout)["words"]
    assert done.returncode == 0


def test_a_matrix_cannot_set_a_variable_of_the_scripts():
    templates = [path for path in shipped("slurm_templates").glob("*.j2") if path.stem != "pack.sbatch"]
    texts = [path.read_text(encoding="utf-8") for path in templates]
    bodies = re.compile(r"^\w+\(\) {.*?^}", re.MULTILINE | re.DOTALL)  # of functions: theirs are local
    texts = [bodies.sub("", text) for text in texts]
    names = {name for text in texts for name in re.findall(r"^ *([a-z_]+)=", text, re.MULTILINE)}
    assert {"run_dir", "python", "hosts", "rdzv_id"} < names
    for name in names:
        with pytest.raises(ValueError, match=f"^{name} is a variable of the job's script"):
            env_name(name)


def test_a_set_up_line_that_fails_ends_the_job_before_the_launch(tmp_path):
    done = run_script(one_script(tmp_path, setup=["touch before", "false", "touch after"]), tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert (tmp_path / "before").exists()
    assert not (tmp_path / "after").exists()
    assert json.loads((tmp_path / "run dir" / "end.json").read_text())["stage"] == "set-up"


AGENT = """\
#!/bin/bash
trap 'kill "$!"; echo asked to end; exit 7' TERM
printf '%s\\n' "$@"
[ -z "$WAITS" ] || { sleep 60 & kill -TERM "$PPID"; wait; }
exit 5
"""


@pytest.mark.parametrize(("waits", "said", "code"), [("", "", 5), ("yes", "asked to end\n", 143)])
def test_torchrun_on_one_node_starts_without_srun_and_its_exit_code_is_the_jobs(tmp_path, waits, said, code):
    text = one_script(tmp_path, launcher="torchrun", nodes=1)
    agent = tmp_path / "agent"
    write_program(agent, AGENT)
    done = run_script(f"export BENCH_PYTHON={agent} WAITS={waits}\n{text}", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)  # the study's folder is not here
    assert done.stdout.startswith("-c\nimport os, sys; ")
    assert "\n--nnodes=1\n--nproc-per-node=2\n--standalone\n" in done.stdout
    assert done.stdout.endswith(f"--no-python\n{agent}\n-m\nddp_scaling_bench.train\n{said}")
    end = json.loads((tmp_path / "run dir/end.json").read_text())
    assert (end["exit_code"], end["stage"]) == (code, "run")


def test_in_a_pack_the_step_gets_its_hosts_its_gpus_and_the_runs_name(tmp_path):
    text = one_script(tmp_path)
    packed = "export BENCH_STEP_HOSTS=$'n3\\nn7' BENCH_STEP_NAME=a-run BENCH_STEP_PLACE=12\n"
    arrived = json.loads(run_script(f"{packed}{text}", tmp_path).stdout)
    words, env = arrived["words"], arrived["env"]
    sizes = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=1"]
    assert words[: words.index("--export=ALL")] == [*sizes, "--kill-on-bad-exit=1"]
    placed = ["--nodelist=n3,n7", "--job-name=a-run", "--gres=gpu:2"]
    assert words[words.index("--export=ALL") + 1 :][:3] == placed
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["BENCH_HOSTS"]) == ("n3", "26567", "n3,n7")


if __name__ == "__main__":
    import tempfile

    for old in GOLDEN.iterdir():
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in golden_scripts(Path(folder)).items():
            (GOLDEN / name).write_text(text)
