"""The options of sbatch and srun (Slurm 22.05 to 26.05), and of pyxis, Shifter, uenv and HyperPod."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .words import Word


class Option(NamedTuple):
    """An option of sbatch or srun under its full name, its value if it has one, and its text."""

    name: str
    value: str | None
    written: str
    line: int = 0
    word: Word | None = None


def whole_number(value: str | None) -> int | None:
    """Return ``value`` as a whole number, or None if it is not a whole number."""
    known = value is not None and value.isascii() and value.isdecimal() and len(value) < 10
    return int(value) if value and known else None


def names(text: str) -> frozenset[str]:
    """Return the set of words in ``text``."""
    return frozenset(text.split())


# Suffix of a name: "=" for an option with a value, "?" with an optional value after "=", nothing for a flag.
_LONG = """
account= acctg-freq= array= batch= bb= bbf= bcast? begin= chdir= cluster-constraint= clusters= comment=
compress? constraint= container= container-id= context= contiguous core-spec= cores-per-socket= cpu-bind=
cpu_bind= cpu-freq= cpus-per-gpu= cpus-per-task= deadline= delay-boot= dependency= disable-status
distribution= epilog= error= exact exclude= exclusive? export= export-file= extra= extra-node-info=
get-user-env? gid= gpu-bind= gpu-freq= gpus= gpus-per-node= gpus-per-socket= gpus-per-task= gres= gres-flags=
help het-group= hint= hold ignore-pbs immediate? input= interactive jobid= job-name= kill-on-bad-exit?
kill-on-invalid-dep= label licenses= mail-type= mail-user= mcs-label= mem= mem-bind= mem_bind= mem-per-cpu=
mem-per-gpu= mincpus= mpi= multi-prog network= nice? no-allocate no-kill? no-requeue nodefile= nodelist=
nodes= ntasks= ntasks-per-core= ntasks-per-gpu= ntasks-per-node= ntasks-per-socket= ntasks-per-tres=
open-mode= output= overcommit overlap oversubscribe parsable partition= power= prefer= preserve-env priority=
profile= prolog= propagate? pty? qos= quiet quit-on-interrupt reboot relative= requeue reservation=
resv-ports? segment= signal= sockets-per-node= spread-job stepmgr switches= task-epilog= task-prolog=
tasks-per-node= test-only thread-spec= threads= threads-per-core= time= time-min= tmp= tres-bind=
tres-per-task= uid= unbuffered usage use-min-nodes verbose version wait? wait-all-nodes= wait-for-children
wckey= whole wrap= x11? container-image= container-mounts= container-workdir= container-name= container-save=
container-mount-home no-container-mount-home container-remap-root no-container-remap-root container-entrypoint
no-container-entrypoint container-writable container-readonly container-env= auto-resume= image= volume=
module= environment= uenv= view=
"""
_SHORT = """
A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency E=preserve-env
e=error F=nodefile G=gpus H=hold h=help I=immediate i=input J=job-name K=kill-on-bad-exit k=no-kill L=licenses
l=label M=clusters m=distribution N=nodes n=ntasks O=overcommit o=output p=partition Q=quiet q=qos r=relative
S=core-spec s=oversubscribe T=threads t=time u=unbuffered V=version v=verbose W=wait w=nodelist
X=disable-status x=exclude Z=no-allocate
"""
#: The options of sbatch and srun: ``"="`` takes a value, ``"?"`` possibly has one, ``""`` has none.
LONG = {word.rstrip("=?"): word[len(word.rstrip("=?")) :] for word in _LONG.split()}
LETTERS = dict(pair.split("=") for pair in _SHORT.split())


def matches(written: str) -> list[str]:
    """Return the options that ``written`` may mean: getopt also accepts unique prefixes of names."""
    found = [written] if written in LONG else [one for one in LONG if one.startswith(written)]
    return ["ntasks-per-node" if name == "tasks-per-node" else name for name in found]


def read_options(words: Sequence[Word]) -> tuple[list[Option], list[Word]]:
    """Parse options like getopt_long; return them and the words from the first other word on."""
    options: list[Option] = []
    rest = list(words)
    while rest and rest[0].start.startswith("-") and rest[0].literal != "-":
        word = rest.pop(0)
        if word.literal == "--":
            break
        for name, value in _parts(word):
            written = word.shown
            if value is None and LONG.get(name) == "=" and rest:
                value = rest.pop(0)
                written = f"{written} {value.shown}"
            options.append(Option(name, value.shown if value else None, written, word.line, value))
    return options, rest


def _parts(word: Word) -> Iterator[tuple[str, Word | None]]:
    """Yield the options in one word with the values that it contains."""
    if word.start.startswith("--"):
        written, equals, _ = word.start[2:].partition("=")
        found = matches(written)
        yield found[0] if len(found) == 1 else written, word.after(f"--{written}=") if equals else None
        return
    for position, letter in enumerate(word.start[1:], start=1):
        name, value = LETTERS.get(letter, letter), word.after(word.start[: position + 1])
        if LONG.get(name) and value.shown:
            yield name, value
            return
        yield name, None
