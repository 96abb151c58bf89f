"""The schedulers that run jobs, as a matrix and its plan need them.

To add a scheduler, add an entry here, a template, and a module of its name in ``bench/jobs``, in which
``SCHEDULER`` is a subclass of :class:`bench.jobs.contract.Scheduler`. Planning does not import it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerSpec:
    """One scheduler.

    Attributes:
        template: the template of the scripts, in slurm_templates.
        module: the module in ``bench/jobs``, by default that of the scheduler's name.
        suffix: the suffix of the scripts.
        launchers: the launchers that its scripts can use, of which the first is the default.
        keys: the keys of `cluster` that it uses and not every scheduler does. With `exclusive`, runs can have
            whole nodes; with `gpu_request`, jobs request GPUs; with `exclude`, the scheduler chooses nodes.
        one_node: whether all runs are on this machine.
        queues: whether jobs wait in a queue; otherwise `bench submit` executes one run after another.
        packs: whether one job can execute many runs; `bench submit --pack` knows packs of Slurm only.
        sets_master: whether its scripts know the address and the port of the rendezvous.
    """

    template: str
    module: str = ""
    suffix: str = ".sh"
    launchers: tuple[str, ...] = ("torchrun", "own")
    keys: frozenset[str] = frozenset()
    one_node: bool = False
    queues: bool = False
    packs: bool = False
    sets_master: bool = False


#: All schedulers by their name in a matrix; the first is the default.
SCHEDULERS = {
    "slurm": SchedulerSpec(
        template="slurm.sbatch.j2",
        module="slurm.scheduler",
        suffix=".sbatch",
        launchers=("srun", "torchrun", "own"),
        keys=frozenset(
            {
                *(
                    "partition",
                    "account",
                    "qos",
                    "reservation",
                    "constraint",
                    "nodelist",
                    "exclude",
                    "switches",
                ),
                *("mem", "directives", "container", "gpu_type", "gpu_request", "exclusive", "node_gpus"),
                "srun_options",
            }
        ),
        queues=True,
        packs=True,
        sets_master=True,
    ),
    "local": SchedulerSpec(template="local.sh.j2", one_node=True),
    "ssh": SchedulerSpec(template="ssh.sh.j2", keys=frozenset({"hosts"})),
}
DEFAULT = next(iter(SCHEDULERS))
