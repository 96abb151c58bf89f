"""Commands that start their own processes: torchrun, accelerate, deepspeed, mpirun and srun.

The harness starts one process per rank. If the command of a rank is a launcher, too, each rank starts a
training of its own. A launcher is recognised by the words of the command only. Words within a shell
script, or after ``bash -c``, are not visible. If an option is not in the tables of this module, the
number of its words is unknown, and so is the program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .workload import runs_python


class LaunchLine(NamedTuple):
    """A launcher within a command, with its options."""

    launcher: str
    """torchrun, accelerate, deepspeed, mpirun or srun."""
    options: dict[str, str] | None
    """The options of the launcher by name, with underscores; None if one is unknown."""
    wrapper: list[str]
    """The words before the launcher, such as ``env X=1`` or ``uv run``. The program needs them, too."""
    program: list[str] | None
    """The words of the program, beginning with ``python`` for a script or module; None if uncertain."""


def read_launch(words: Sequence[str]) -> LaunchLine | None:
    """Return the innermost launcher that a command starts, with its options, or None.

    The innermost launcher sets the ranks, as in ``srun torchrun train.py``.
    """
    wrapper, rest = _without_wrappers(words)
    line = _launcher(rest)
    if line is None:
        return None
    inner = read_launch(line.program) if line.program else None
    if inner is not None:
        return inner._replace(wrapper=[*wrapper, *inner.wrapper])
    return line._replace(wrapper=wrapper)


def _table(text: str) -> dict[str, str]:
    """Read a table of options: ``name=`` has a value, ``name?`` may have one after "=", ``name`` has none."""
    table = {}
    for written in text.split():
        name = written.rstrip("=?")
        table[name] = written[len(name) :]
    return table


#: torch/distributed/run.py of torch 2.13. Names of one letter follow a single dash.
_TORCHRUN = _table(
    """nnodes= nproc_per_node= rdzv_backend= rdzv_endpoint= rdzv_id= rdzv_conf= standalone max_restarts=
    monitor_interval= start_method= event_log_handler= role= m module no_python run_path log_dir= r=
    redirects= t= tee= local_ranks_filter= duplicate_stdout_filters= duplicate_stderr_filters= node_rank=
    master_addr= master_port= local_addr= logs_specs= numa_binding= signals_to_handle= shutdown_timeout=
    virtual_local_rank h help"""
)
#: accelerate/commands/launch.py of Accelerate 1.15.
_ACCELERATE = _table(
    """h help config_file= quiet q cpu multi_gpu tpu mixed_precision= num_processes= num_machines=
    num_cpu_threads_per_process= enable_cpu_affinity dynamo_backend= dynamo_mode= dynamo_use_fullgraph
    dynamo_use_dynamic dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config
    use_megatron_lm gpu_ids= same_network machine_rank= main_process_ip= main_process_port= t= tee=
    log_dir= role= rdzv_backend= rdzv_conf= max_restarts= monitor_interval= m module no_python debug
    deepspeed_config_file= zero_stage= offload_optimizer_device= offload_param_device=
    gradient_accumulation_steps= gradient_clipping= zero3_init_flag= zero3_save_16bit_model=
    deepspeed_hostfile= fsdp_version= fsdp_offload_params= fsdp_min_num_params= fsdp_sharding_strategy=
    fsdp_reshard_after_forward= fsdp_auto_wrap_policy= fsdp_transformer_layer_cls_to_wrap=
    fsdp_backward_prefetch= fsdp_state_dict_type= fsdp_forward_prefetch= fsdp_use_orig_params=
    fsdp_cpu_ram_efficient_loading= fsdp_sync_module_states= fsdp_activation_checkpointing="""
)
#: deepspeed/launcher/runner.py of DeepSpeed 0.19.
_DEEPSPEED = _table(
    """H= hostfile= i= include= e= exclude= num_nodes= min_elastic_nodes= max_elastic_nodes= num_gpus=
    num_accelerators= master_port= master_addr= node_rank= launcher= launcher_args= module no_python
    no_local_rank no_ssh no_ssh_check force_multi save_pid enable_each_rank_log= autotuning=
    elastic_training bind_cores_to_rank bind_core_list= ssh_port= venv_script= log_level= q quiet h help"""
)
#: srun(1); options that rarely start a training are not listed.
_SRUN = _table(
    """N= nodes= n= ntasks= ntasks_per_node= ntasks_per_gpu= c= cpus_per_task= G= gpus= gpus_per_node=
    gpus_per_task= gres= p= partition= A= account= q= qos= t= time= w= nodelist= x= exclude= C=
    constraint= reservation= mem= mem_per_cpu= mem_per_gpu= J= job_name= o= output= e= error= i= input=
    D= chdir= export= mpi= m= distribution= cpu_bind= gpu_bind= mem_bind= hint= K? kill_on_bad_exit? l
    label u unbuffered exclusive? overlap exact pty? jobid= container_image= container_mounts=
    container_workdir= container_name= no_container_mount_home container_mount_home v verbose"""
)
#: Options of Open MPI's and MPICH's mpirun, with one or two dashes. Each "=" is one word that follows.
_MPIRUN = _table(
    """n= np= c= host= H= hosts= hostfile= machinefile= f= ppn= npernode= map_by= bind_to= rank_by= x=
    wdir= path= arch= iface= genvlist= genv== env== mca== gmca== genvall oversubscribe allow_run_as_root
    tag_output report_bindings v l"""
)
_PYTHON = _table("b B d E i I O P q s S u v x W= X= m=")
_ENV = _table("i ignore_environment u= unset= C= chdir= v debug")
_UV = _table(
    """with= with_requirements= with_editable= p= python= extra= group= no_group= only_group= project=
    directory= env_file= package= all_extras all_groups no_dev only_dev no_sync frozen locked isolated
    active exact offline no_project no_config no_cache n q quiet v verbose"""
)
_CONDA = _table("n= name= p= prefix= cwd= v verbose dev no_capture_output live_stream")
#: Programs whose subcommand ``run`` starts another program, with the options of ``run``.
_RUNNERS: dict[str, dict[str, str]] = {
    "uv": _UV,
    **dict.fromkeys(("conda", "mamba", "micromamba"), _CONDA),
    **{name: {} for name in ("poetry", "pipenv", "pdm", "rye")},
}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "launch",
    "accelerate.commands.launch": "accelerate-launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "mpiexec.openmpi", "orterun", "prterun")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def _options(
    words: Sequence[str], table: Mapping[str, str], *, abbreviated: bool = False, last: str = ""
) -> tuple[dict[str, str], list[str]] | None:
    """Return the options at the beginning of ``words`` and the words after them; None if one is unknown.

    ``abbreviated`` accepts unique prefixes of names, as argparse does. Options end after ``last``.
    """
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-" and last not in options:
        word = rest.pop(0)
        if word == "--":
            break
        found = _long(word, table, abbreviated) if word.startswith("--") else _short(word, table)
        if found is None:
            return None
        for name, value in found:
            if value is None:
                if not rest or (rest[0].startswith("-") and name != last):
                    return None
                options[name] = rest.pop(0)
            else:
                options[name] = value
    return options, rest


def _long(word: str, table: Mapping[str, str], abbreviated: bool) -> list[tuple[str, str | None]] | None:
    """Return the name and value of a long option; the value is None if it is in the next word."""
    written, equals, value = word[2:].partition("=")
    name = written.replace("-", "_")
    names = [known for known in table if len(known) > 1 and (known == name or known.startswith(name))]
    if name in names:
        names = [name]
    if len(names) != 1 or (names != [name] and not abbreviated) or (equals and not table[names[0]]):
        return None
    return [(names[0], value if equals or table[names[0]] != "=" else None)]


def _short(word: str, table: Mapping[str, str]) -> list[tuple[str, str | None]] | None:
    """Return the names and values of the options of one letter in a word, such as ``-um`` or ``-n4``."""
    found: list[tuple[str, str | None]] = []
    for at, letter in enumerate(word[1:], start=2):
        kind = table.get(letter)
        if kind is None:
            return None
        if kind:
            return [*found, (letter, word[at:] or (None if kind == "=" else ""))]
        found.append((letter, ""))
    return found


def _basename(word: str) -> str:
    return word.rpartition("/")[2]


def _without_wrappers(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command into wrappers such as ``env X=1`` or ``uv run``, and the words after them."""
    wrapper: list[str] = []
    rest = list(words)
    while rest:
        inner = _after_wrapper(rest)
        if inner is None or len(inner) == len(rest):
            break
        # Without a shell, X=1 is not an assignment: env(1) does the same.
        wrapper += (["env"] if _ASSIGNMENT.match(rest[0]) else []) + rest[: len(rest) - len(inner)]
        rest = inner
    return wrapper, rest


def _after_wrapper(words: list[str]) -> list[str] | None:
    """Return the words that the wrapper at the beginning of ``words`` starts, or None without a wrapper."""
    name = _basename(words[0])
    rest: list[str] = words
    if name == "env" or (name in _RUNNERS and words[1:2] == ["run"]):
        skip = 1 if name == "env" else 2
        found = _options(words[skip:], _ENV if name == "env" else _RUNNERS[name])
        if found is None:
            return None
        rest = found[1]
    if name == "env" or rest is words:
        while rest and _ASSIGNMENT.match(rest[0]):
            rest = rest[1:]
    return rest or None


def _launcher(words: Sequence[str]) -> LaunchLine | None:
    """Return the launcher at the beginning of ``words``, or None."""
    if not words:
        return None
    python, name, rest = "python", _basename(words[0]), list(words[1:])
    if runs_python(words[0]):
        found = _options(rest, _PYTHON, last="m")
        if found is None:
            return None
        options, rest = found
        python = words[0]
        if "m" in options:
            name = _MODULES.get(options["m"], "")
        elif rest:
            name, rest = _basename(rest[0]), rest[1:]  # python /path/of/torchrun
    if name == "accelerate":
        if rest[:1] != ["launch"]:
            return None
        name, rest = "accelerate-launch", rest[1:]
    if name in _MPI:
        program = _after_mpi_options(rest)
        return LaunchLine("mpirun", None, [], program)
    if name == "srun":
        found = _options(rest, _SRUN, abbreviated=True)
        return LaunchLine("srun", found and found[0], [], (found[1] or None) if found else None)
    tables = {
        "torchrun": ("torchrun", _TORCHRUN),
        "launch": ("torchrun", {**_TORCHRUN, "use_env": ""}),
        "accelerate-launch": ("accelerate", _ACCELERATE),
        "deepspeed": ("deepspeed", _DEEPSPEED),
    }
    if name not in tables:
        return None
    launcher, table = tables[name]
    found = _options(rest, table, abbreviated=launcher != "accelerate")
    if found is None:
        return LaunchLine(launcher, None, [], None)
    options, rest = found
    # Without --use_env, torch.distributed.launch also passes --local_rank to the script.
    certain = name != "launch" or "use_env" in options
    return LaunchLine(launcher, options, [], _program(options, rest, python) if certain else None)


def _program(options: Mapping[str, str], rest: list[str], python: str) -> list[str] | None:
    """Return the words of the process that a launcher written in Python starts, or None."""
    module = "m" in options or "module" in options
    if not rest or "h" in options or "help" in options:
        return None
    if "no_python" in options and "run_path" not in options:
        return None if module else rest
    return [python, "-m", *rest] if module else [python, *rest]


def _after_mpi_options(words: Sequence[str]) -> list[str] | None:
    """Return the words after the options of mpirun, or None."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        following = _MPIRUN.get(rest[0].lstrip("-").replace("-", "_"))
        if following is None:
            return None
        rest = rest[1 + len(following) :]
    # A colon separates the programs of an MPMD launch.
    return rest if rest and ":" not in rest else None
