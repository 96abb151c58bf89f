"""The options of sbatch and srun.

Names and arguments are from the manual pages of Slurm 22.05 to 26.05 and from ``sbatch --help``. The options
of plugins come from pyxis, Shifter, the CSCS container engine, SageMaker HyperPod and common sites.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

_PLACEHOLDER = re.compile(
    r"[<>{}\[\]]|\.\.\.|%%|@\w+@|\A[A-Z][A-Z_:-]*\Z|\A(?i:x+|n+)\Z|(?i:your[-_ ]|todo)"
    r"|(?i:(?:change|fix)[-_ ]?me)"
)
_BRACKETS = re.compile(
    r"[<>{}]|\.\.\.|%%\w+%%|@[A-Z_]+@|##\w+##|%\(\w+\)|XX+\w+XX+"
    r"|(?:\A|=)(?:\[[A-Za-z]|%\w+%\Z|_+[A-Za-z]\w*_\Z|![A-Za-z]\w*\Z)"
)
#: A variable or a command substitution, which sbatch does not expand.
EXPANSION = re.compile(r"\$\{?[A-Za-z_]|\$\(|`")


class Option(NamedTuple):
    """An option of sbatch or srun under its full name.

    ``value`` is None if the option has no value. ``written`` is the option's text in the script.
    """

    name: str
    value: str | None
    written: str
    line: int = 0


def is_in_brackets(text: str) -> bool:
    """Return whether ``text`` is a placeholder in brackets, such as ``<account>`` or ``{{ nodes }}``."""
    return bool(_BRACKETS.search(text))


def is_placeholder(value: str) -> bool:
    """Return whether a value is a placeholder, such as ``<account>``, ``{{ nodes }}`` or ``N``."""
    return bool(_PLACEHOLDER.search(value)) or is_in_brackets(value)


def whole_number(value: str | None) -> int | None:
    """Return ``value`` as a whole number, or None if it is not a whole number."""
    if value is not None and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    return None


def names(text: str) -> frozenset[str]:
    """Return the set of words in ``text``."""
    return frozenset(text.split())


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


# Suffix of a name: "=" for an option with a value, "?" with an optional value after "=", nothing for a flag.
_COMMON = """
account= acctg-freq= bb= bbf= begin= chdir= cluster-constraint= clusters= comment= constraint=
container= container-id= context= contiguous core-spec= cores-per-socket= cpu-freq= cpus-per-gpu=
cpus-per-task= deadline= delay-boot= dependency= distribution= error= exclude= exclusive? export= extra=
extra-node-info= get-user-env? gid= gpu-bind= gpu-freq= gpus= gpus-per-node= gpus-per-socket=
gpus-per-task= gres= gres-flags= help hint= hold input= job-name= kill-on-invalid-dep= licenses=
mail-type= mail-user= mcs-label= mem= mem-bind= mem-per-cpu= mem-per-gpu= mincpus= network= nice?
no-kill? nodefile= nodelist= nodes= ntasks= ntasks-per-core= ntasks-per-gpu= ntasks-per-node=
ntasks-per-socket= ntasks-per-tres= open-mode= output= overcommit oversubscribe partition= power=
prefer= priority= profile= propagate? qos= quiet reboot requeue reservation= segment=
signal= sockets-per-node= spread-job stepmgr switches= tasks-per-node= thread-spec= threads-per-core=
time= time-min= tmp= tres-bind= tres-per-task= uid= usage use-min-nodes verbose version wait-all-nodes=
wckey= consolidate-segments oom-kill-step? external parsable resv-ports? test-only
"""
_SBATCH_ONLY = """
array= batch= cluster= export-file= ignore-pbs no-requeue wait wrap= switch=
"""
_SRUN_ONLY = """
accel-bind= async bcast? bcast-exclude= compress? cpu-bind= cpu_bind= debugger-test disable-status
epilog= exact het-group= immediate? interactive jobid= kill-on-bad-exit? label max-exit-timeout=
mem_bind= mpi= msg-timeout= multi-prog no-allocate ntasks-per-node= overlap pack-group= preserve-env
prolog= pty? quit-on-interrupt relative= send-libs? slurmd-debug= spread-job
task-epilog= task-prolog=
threads= treewidth= tree-width= unbuffered wait= wait-for-children whole x11?
"""
_PLUGINS = """
container-image= container-mounts= container-workdir= container-name= container-save=
container-mount-home no-container-mount-home container-remap-root no-container-remap-root
container-entrypoint no-container-entrypoint container-entrypoint-log container-writable
container-readonly container-env=
quotatype= auto-resume= gpu_cmode= gpufreq= image= volume= module= environment= uenv= view= ear= nvmps
"""
_SHORT = _pairs(
    """A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency
    e=error F=nodefile G=gpus H=hold h=help I=immediate i=input J=job-name k=no-kill L=licenses
    M=clusters m=distribution N=nodes n=ntasks O=overcommit o=output p=partition Q=quiet q=qos
    S=core-spec s=oversubscribe t=time V=version v=verbose W=wait w=nodelist x=exclude"""
)
_SRUN_SHORT = _pairs(
    """E=preserve-env K=kill-on-bad-exit l=label r=relative T=threads u=unbuffered X=disable-status
    Z=no-allocate"""
)
#: Other names of options.
_SYNONYMS = _pairs(
    """tasks-per-node=ntasks-per-node cluster=clusters switch=switches cpu_bind=cpu-bind mem_bind=mem-bind
    pack-group=het-group"""
)


@dataclass(frozen=True, slots=True)
class OptionTable:
    """The long and short options of one command, and the options of common plugins.

    The values of ``long`` and ``plugins`` are ``"="`` (takes a value), ``"?"`` (optional value)
    and ``""`` (no value).
    """

    command: str
    long: dict[str, str]
    short: dict[str, str]
    plugins: dict[str, str]

    def matches(self, written: str) -> list[str]:
        """Return the options that ``written`` may mean: getopt also accepts unique prefixes of names."""
        if written in self.long or written in self.plugins:
            return [written]
        return [name for name in self.long if name.startswith(written)]

    def takes(self, name: str) -> str:
        """Return whether an option takes a value: ``"="`` (yes), ``"?"`` (optional) or ``""`` (no)."""
        return self.long.get(name, self.plugins.get(name, ""))

    def closest(self, written: str) -> str | None:
        """Return the option whose name is closest to the misspelt ``written``, or None."""
        close = difflib.get_close_matches(written.replace("_", "-").lower(), self.long, n=1, cutoff=0.84)
        return close[0] if close else None


def canonical(name: str) -> str:
    """Return the main name of an option that has several names."""
    return _SYNONYMS.get(name, name)


def _table(*lists: str) -> dict[str, str]:
    table = {}
    for written in " ".join(lists).split():
        name = written.rstrip("=?")
        table[name] = written[len(name) :]
    return table


@cache
def sbatch_options() -> OptionTable:
    """Return the options of sbatch."""
    long = _table(_COMMON, _SBATCH_ONLY)
    short = {letter: name for letter, name in _SHORT.items() if name in long}
    return OptionTable("sbatch", long, short, _table(_PLUGINS))


@cache
def srun_options() -> OptionTable:
    """Return the options of srun."""
    long = _table(_COMMON, _SRUN_ONLY)
    short = {letter: name for letter, name in {**_SHORT, **_SRUN_SHORT}.items() if name in long}
    return OptionTable("srun", long, short, _table(_PLUGINS))


def srun_only(name: str) -> bool:
    """Return whether ``name`` is an option of srun and not of sbatch."""
    return name in _table(_SRUN_ONLY) and name not in _table(_COMMON, _SBATCH_ONLY)
