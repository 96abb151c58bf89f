"""What the programs of a launch line are: wrappers, launchers, helpers.

``WRAPPERS`` run the command that follows their own options; the value is the set of options that
take their value as the next word. Names and options are those of the tools' own help texts.
"""

from __future__ import annotations

import re


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PYTHON = re.compile(r"(?:i?python|pypy)[0-9.]*w?\Z")
SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})

#: Wrappers that run one command on the same node.
WRAPPERS: dict[str, frozenset[str]] = {
    name: _names(options)
    for name, options in {
        "exec": "-a",
        "command": "",
        "builtin": "",
        "nohup": "",
        "time": "-f -o --format --output",
        "setsid": "",
        "stdbuf": "-i -o -e --input --output --error",
        "unbuffer": "",
        "nice": "-n --adjustment",
        "ionice": "-c -n --class --classdata",
        "sudo": "-u -g",
        "catchsegv": "",
        "numactl": "-N -m -C -i -p --cpunodebind --membind --physcpubind --interleave --preferred",
        "strace": "-o -e -s -p",
        "ltrace": "-o -e",
        "valgrind": "",
        "perf": "-o -e -F",
        "nsys": "-o -t -s -c -w -f -d -y --output --trace --sample --capture-range --force-overwrite --stats "
        "--capture-range-end --delay --duration --gpu-metrics-device --cuda-memory-usage --cudabacktrace",
        "ncu": "-o -k -c -s --export --kernel-name --launch-count --launch-skip --set --section --metrics",
        "rocprof": "-o -i",
        "rocprofv3": "-o -d",
        "dlprof": "",
        "scalene": "",
        "py-spy": "-o --output -r --rate -f --format",
        "memray": "-o",
        "conda": "-n --name -p --prefix --cwd",
        "mamba": "-n --name -p --prefix --cwd",
        "micromamba": "-n --name -p --prefix --cwd",
        "uv": "--with --python -p --extra --group --project --directory --env-file --package --index-url",
        "poetry": "-C -P --directory --project",
        "pipenv": "",
        "pixi": "-e --environment --manifest-path",
        "pdm": "-p --project",
        "hatch": "-e -p",
        "rye": "",
        "mlrun": "",
        "proxychains": "",
        "proxychains4": "",
        "systemd-cat": "-t",
        "ts": "",
        "dumb-init": "",
        "tini": "-s",
    }.items()
}
#: Wrappers that start the command in a container: after their options and the image.
CONTAINERS = _names(
    """singularity apptainer podman podman-hpc docker nvidia-docker shifter enroot sarus ch-run udocker
    pyxis charliecloud ngc cea-singularity"""
)
#: What of a container runtime runs no program of ours.
CONTAINER_CHORES = _names(
    """pull build import create load save rm rmi stop kill images image ps push login inspect tag migrate
    list remove start-service version cache volume"""
)

#: Launchers that reach all nodes of the job by themselves.
REACHES_NODES = _names(
    """mpirun mpiexec mpiexec.hydra mpiexec.slurm mpirun_rsh mpirun.openmpi mpiexec.openmpi orterun prterun
    prun oshrun horovodrun ibrun jsrun aprun flux pdsh clush dsh pssh parallel-ssh pbsdsh ssh xargs
    parallel launcher hyperqueue hq ray dask dask-mpi dask-scheduler dask-worker spark-submit charmrun
    gnu-parallel bcprun ompi-run srun_all"""
)

#: Launchers that start their own workers on the node they run on, and their options without value.
WORKER_LAUNCHERS: dict[str, frozenset[str]] = {
    name: _names(flags)
    for name, flags in {
        "torchrun": "standalone no_python m module run_path use_env help h",
        "accelerate": "multi_gpu cpu tpu use_fsdp use_deepspeed use_megatron_lm same_network quiet q debug m "
        "module no_python use_xpu use_mps_device mps fp16 tpu_use_cluster use_parallelism_config "
        "enable_cpu_affinity "
        "dynamo_use_fullgraph dynamo_use_dynamic h help gpu tpu_use_sudo no_tpu_cluster use_cpu",
        "deepspeed": "no_ssh no_ssh_check force_multi save_pid no_local_rank no_python m module h help "
        "bind_cores_to_rank elastic_training ssh_check",
        "lightning": "help",
        "fabric": "help",
        "composer": "v verbose m module_mode c command_mode h help",
        "colossalai": "",
    }.items()
}
#: The console scripts of torch.distributed.run, by other names.
SYNONYMS = {
    "torchrun-hpc": "torchrun",
    "torchrun_slurm": "",
    "torchelastic": "torchrun",
    "accelerate-launch": "accelerate",
    "deepspeed.pt": "deepspeed",
    "ds": "deepspeed",
}
#: ``python -m NAME`` that is a launcher.
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "launch",
    "torch.distributed.elastic.run": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
    "composer.cli.launcher": "composer",
    "lightning.fabric.cli": "lightning",
}
#: ``python -m NAME`` that trains nothing.
HELPER_MODULES = _names(
    """pip venv virtualenv ensurepip json.tool http.server site sysconfig timeit compileall zipfile tarfile
    pytest unittest torch.utils.collect_env bitsandbytes wandb nltk.downloader spacy ipykernel jupyter
    notebook tensorboard.main playwright build"""
)

#: Programs that look at the nodes, stage data or wait: their step is not the launch.
HELPERS = _names(
    """hostname echo printf mkdir rm rmdir cp mv ls cat tar rsync scp sleep true false date env printenv
    ulimit nvcc module ml pip pip3 ip ifconfig ibstat ibstatus ibv_devinfo lscpu lstopo lspci free df du
    touch chmod chown ln find sed awk gawk grep egrep head tail sort uniq wc tr cut tee xz gzip gunzip
    zip unzip 7z zstd pigz wget curl aria2c git scontrol squeue sinfo sacct sacctmgr scancel sbatch
    salloc sbcast sattach sstat sprio sview strigger nvidia-smi nvidia-cuda-mps-control rocm-smi amd-smi
    rocminfo nvtop dcgmi gpustat hwloc-ls which whereis whoami id uptime ps pkill kill killall nproc
    lsof sync test [ [[ : cd pushd popd pwd export set unset source . eval trap wait exit return shift
    read local declare typeset readonly let alias unalias type hash ulimit umask shopt getent host dig
    nslookup ping nc ncat ss netstat python-config conda-activate deactivate stat dd df lfs beegfs-ctl
    md5sum sha256sum sha1sum diff cmp basename dirname realpath readlink mktemp seq shuf expr bc jq yq
    tmux screen watch make cmake ninja gcc g++ mount umount fusermount squashfuse dask-ssh wandb
    huggingface-cli hf aws gsutil gcloud azcopy rclone globus uname lsmem dmesg ulimit numastat numad
    limit mail mailx sendmail tensorboard nvidia-modprobe modprobe sysctl taskset-show sshfs logger yes
    timeout-wait xdd strings file python-version jupyter jupyter-lab jupyter-notebook ssh-keygen
    ssh-agent ssh-add keychain awk mawk nl vmstat iostat iotop top htop mpstat sar busybox perl-version
    chronyc ntpdate tree column paste fold split rev nvidia-persistenced dcgmproftester12
    all_reduce_perf all_gather_perf reduce_scatter_perf ib_write_bw iperf3 rapidsmi continue break fg bg
    jobs disown printf getopts mapfile readarray"""
)

#: Python programs that prepare, look or measure rather than train.
CHORES = re.compile(
    r"(?:^|[_/.-])(?:download|prepare|pre_?process|preproc|convert|tokeni[sz]e|build|compile|install|setup|check"
    r"|test_(?:gpu|nccl|cuda|env)|print|show|list|get|make|gen(?:erate)?|create|split|merge|plot|visuali[sz]e"
    r"|summari[sz]e|parse|collect|extract|copy|clean|cleanup|edit|write|config(?:ure)?|hostfile|nodelist|upload"
    r"|sync|submit|monitor|stats|count|cache|index|find|notify|send|slack|log|free_port|port|verify|validate_config)",
    re.IGNORECASE,
)
#: Python programs that train, by their names.
TRAINS = re.compile(
    r"train|finetun|fine_tun|fit\b|ddp|distribut|main|run|learn|experiment|sft|dpo|launch", re.IGNORECASE
)
