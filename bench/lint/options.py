"""The options of sbatch and srun.

Names and arguments are from the manual pages of Slurm 22.05 to 26.05 and from ``sbatch --help``. The options
of plugins come from pyxis, Shifter, the CSCS container engine, SageMaker HyperPod and common sites.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .words import Word

# A variable or a command substitution, which sbatch does not expand: sbatch(1) on directives.
EXPANSION = re.compile(r"\$\{?[A-Za-z_]|\$\(|`")
#: Characters of placeholders, such as ``<account>`` or ``{{ nodes }}``: the value is not filled in yet.
_BRACKETS = frozenset("<>{}")


class Option(NamedTuple):
    """An option of sbatch or srun under its full name.

    ``value`` is None if the option has no value. ``written`` is the option's text in the script.
    ``word`` is the value with its unknown expansions.
    """

    name: str
    value: str | None
    written: str
    line: int = 0
    word: Word | None = None


def is_placeholder(value: str) -> bool:
    """Return whether a value is still to be filled in, such as ``<account>`` or ``{{ nodes }}``."""
    return not _BRACKETS.isdisjoint(value) and not EXPANSION.search(value)


def whole_number(value: str | None) -> int | None:
    """Return ``value`` as a whole number, or None if it is not a whole number."""
    if value is not None and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    return None


def names(text: str) -> frozenset[str]:
    """Return the set of words in ``text``."""
    return frozenset(text.split())


# Suffix of a name: "=" for an option with a value, "?" with an optional value after "=", nothing for a flag.
_COMMON = """
account= acctg-freq= bb= bbf= begin= chdir= cluster-constraint= clusters= comment= constraint= container=
container-id= context= contiguous core-spec= cores-per-socket= cpu-freq= cpus-per-gpu= cpus-per-task=
deadline= delay-boot= dependency= distribution= error= exclude= exclusive? export= extra= extra-node-info=
get-user-env? gid= gpu-bind= gpu-freq= gpus= gpus-per-node= gpus-per-socket= gpus-per-task= gres=
gres-flags= help hint= hold input= job-name= kill-on-invalid-dep= licenses= mail-type= mail-user= mcs-label=
mem= mem-bind= mem-per-cpu= mem-per-gpu= mincpus= network= nice? no-kill? nodefile= nodelist= nodes= ntasks=
ntasks-per-core= ntasks-per-gpu= ntasks-per-node= ntasks-per-socket= ntasks-per-tres= open-mode= output=
overcommit oversubscribe partition= power= prefer= priority= profile= propagate? qos= quiet reboot requeue
reservation= segment= signal= sockets-per-node= spread-job stepmgr switches= tasks-per-node= thread-spec=
threads-per-core= time= time-min= tmp= tres-bind= tres-per-task= uid= usage use-min-nodes verbose version
wait-all-nodes= wckey= consolidate-segments oom-kill-step? external parsable resv-ports? test-only
"""
_SBATCH_ONLY = "array= batch= cluster= export-file= ignore-pbs no-requeue wait wrap= switch="
_SRUN_ONLY = """
accel-bind= async bcast? bcast-exclude= compress? cpu-bind= cpu_bind= debugger-test disable-status epilog=
exact het-group= immediate? interactive jobid= kill-on-bad-exit? label max-exit-timeout= mem_bind= mpi=
msg-timeout= multi-prog no-allocate overlap pack-group= preserve-env prolog= pty? quit-on-interrupt
relative= send-libs? slurmd-debug= task-epilog= task-prolog= threads= treewidth= tree-width= unbuffered
wait= wait-for-children whole x11?
"""
# pyxis, Shifter, the CSCS container engine, SageMaker HyperPod.
_PLUGINS = """
container-image= container-mounts= container-workdir= container-name= container-save= container-mount-home
no-container-mount-home container-remap-root no-container-remap-root container-entrypoint
no-container-entrypoint container-entrypoint-log container-writable container-readonly container-env=
auto-resume= image= volume= module= environment= uenv= view=
"""
_SHORT = """
A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency e=error
F=nodefile G=gpus H=hold h=help I=immediate i=input J=job-name k=no-kill L=licenses M=clusters
m=distribution N=nodes n=ntasks O=overcommit o=output p=partition Q=quiet q=qos S=core-spec s=oversubscribe
t=time V=version v=verbose W=wait w=nodelist x=exclude
"""
_SRUN_SHORT = """
E=preserve-env K=kill-on-bad-exit l=label r=relative T=threads u=unbuffered X=disable-status Z=no-allocate
"""
#: Other names of options.
_SYNONYMS = dict(
    pair.split("=")
    for pair in [
        "tasks-per-node=ntasks-per-node",
        "cluster=clusters",
        "switch=switches",
        "cpu_bind=cpu-bind",
        "mem_bind=mem-bind",
        "pack-group=het-group",
    ]
)


@dataclass(frozen=True, slots=True)
class OptionTable:
    """The options of a command: ``"="`` takes a value, ``"?"`` possibly has one, ``""`` has none."""

    long: dict[str, str]
    short: dict[str, str]

    def matches(self, written: str) -> list[str]:
        """Return the options that ``written`` may mean: getopt also accepts unique prefixes of names."""
        found = [written] if written in self.long else [one for one in self.long if one.startswith(written)]
        return sorted({_SYNONYMS.get(name, name) for name in found})

    def read(self, words: Sequence[Word]) -> tuple[list[Option], Sequence[Word]]:
        """Parse options like getopt_long; return them and the words from the first other word on.

        An option that the command does not have keeps its written name.
        """
        options: list[Option] = []
        rest = list(words)
        while rest and rest[0].start.startswith("-") and rest[0].literal != "-":
            word = rest.pop(0)
            if word.literal == "--":
                break
            for name, value in self._parts(word):
                written = word.shown
                if value is None and self.long.get(name) == "=" and rest:
                    value = rest.pop(0)
                    written = f"{written} {value.shown}"
                options.append(Option(name, value.shown if value else None, written, word.line, value))
        return options, rest

    def _parts(self, word: Word) -> Iterator[tuple[str, Word | None]]:
        """Yield the options in one word with the values that it contains."""
        if word.start.startswith("--"):
            written, equals, _ = word.start[2:].partition("=")
            found = self.matches(written)
            yield found[0] if len(found) == 1 else written, word.after(f"--{written}=") if equals else None
            return
        for position, letter in enumerate(word.start[1:], start=1):
            name = self.short.get(letter, letter)
            value = word.after(word.start[: position + 1])
            if self.long.get(name) and value.shown:
                yield name, value
                return
            yield name, None


def _table(short: str, *lists: str) -> OptionTable:
    long = {word.rstrip("=?"): word[len(word.rstrip("=?")) :] for word in " ".join(lists).split()}
    letters = dict(pair.split("=") for pair in short.split())
    return OptionTable(long, {letter: name for letter, name in letters.items() if name in long})


#: The options of sbatch and of srun.
SBATCH = _table(_SHORT, _COMMON, _SBATCH_ONLY, _PLUGINS)
SRUN = _table(_SHORT + _SRUN_SHORT, _COMMON, _SRUN_ONLY, _PLUGINS)
