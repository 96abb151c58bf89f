"""What a command starts: srun's options, the launcher's options and the program behind all wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.lint import programs
from bench.lint.directives import Option
from bench.lint.environment import MARK, Unknowns, Value
from bench.lint.options import canonical, srun_options

_PYTHON_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_LAUNCHER_WORDS = frozenset({"launch", "run", "model"})
_RUNNERS = frozenset(
    {"conda", "mamba", "micromamba", "uv", "poetry", "pipenv", "pixi", "pdm", "hatch", "rye"}
)
_SCRIPT_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch", ".csh", ".zsh")


@dataclass(slots=True)
class Launch:
    """One program that a command starts, and what stands before it.

    ``via`` is ``srun``, ``remote`` (a launcher that reaches the nodes by itself), ``unknown`` (a
    variable that may be either) or empty. ``kind`` is ``python``, ``launcher`` (torchrun and its
    kin, ``launcher`` says which), ``script`` (a file whose content is not known), ``unknown``,
    ``helper`` or ``inner`` (``bash -c``: ``inner`` is the text that it runs). ``opaque`` says that
    srun got options out of a variable that is not known here.
    """

    line: int
    via: str = ""
    srun_line: int | None = None
    srun: tuple[Option, ...] = ()
    opaque: bool = False
    wrappers: list[str] = field(default_factory=list)
    kind: str = "helper"
    launcher: str = ""
    options: dict[str, Value] = field(default_factory=dict)
    program: Value | None = None
    arguments: tuple[Value, ...] = ()
    inner: Value | None = None
    words: tuple[Value, ...] = ()

    @property
    def is_training(self) -> bool:
        """Whether this may be the program that the job is for."""
        return self.kind in ("python", "launcher", "script", "unknown")


def basename(text: str) -> str:
    """Return the last component of a program's path."""
    return text.rpartition("/")[2]


class CommandReader:
    """Read the arguments of one command from the left: wrappers, srun, launcher, program."""

    def __init__(self, arguments: Sequence[Value], unknowns: Unknowns) -> None:
        self.words = [argument for argument in arguments if argument.text]
        self.unknowns = unknowns
        self.at = 0
        self.launch = Launch(line=self.words[0].line if self.words else 0, words=tuple(self.words))

    def read(self) -> Launch:
        """Return what is started."""
        for _ in range(30):  # each round strips one wrapper
            if self.at >= len(self.words) or not self._strip():
                break
        return self.launch

    def _text(self, ahead: int = 0) -> str:
        position = self.at + ahead
        return self.words[position].text.replace("\\\n", "") if position < len(self.words) else ""

    def _strip(self) -> bool:
        """Read one program; return whether another may follow."""
        text = self._text()
        name = basename(text)
        if name == "env" or self._is_assignment(text):
            return self._strip_env()
        if name == "srun":
            return self._strip_srun()
        if name in ("timeout", "taskset", "chrt"):
            return self._strip_positional(name)
        if name in programs.WRAPPERS:
            return self._strip_wrapper(name)
        if name in programs.CONTAINERS:
            return self._strip_container(name)
        if name in programs.REACHES_NODES or name.startswith(("mpirun", "mpiexec")):
            self.launch.via = self.launch.via or "remote"
            self.launch.wrappers.append(name)
            self.launch.kind = "unknown"
            return self._jump_to_program()
        if name in programs.SHELLS:
            self._shell()
        elif programs.PYTHON.match(name) or self._is_unknown_python(text):
            self._python()
        elif programs.SYNONYMS.get(name, name) in programs.WORKER_LAUNCHERS:
            self._launcher(programs.SYNONYMS.get(name, name), skip=1)
        else:
            return self._other(text, name)
        return False

    @staticmethod
    def _is_assignment(text: str) -> bool:
        head, equals, _ = text.partition("=")
        return bool(equals) and head.isidentifier()

    def _is_unknown_python(self, text: str) -> bool:
        """Return whether ``text`` is a variable such as $PYTHON whose value is not known."""
        match = MARK.fullmatch(text)
        names = [unknown.name.lower() for unknown in self.unknowns.of(text)] if match else []
        return any("python" in name or name == "py" for name in names)

    def _strip_env(self) -> bool:
        if basename(self._text()) == "env":
            self.at += 1
        while (text := self._text()).startswith("-") or self._is_assignment(text):
            self.at += 2 if text in ("-u", "--unset", "-C", "--chdir", "-S") and text != "-S" else 1
        return True

    def _strip_positional(self, name: str) -> bool:
        """Skip ``timeout [options] DURATION`` or ``taskset [-c] MASK``."""
        self.at += 1
        while (text := self._text()).startswith("-"):
            self.at += 2 if text in ("-k", "-s", "--kill-after", "--signal") else 1
        self.at += 1
        self.launch.wrappers.append(name)
        return True

    def _strip_wrapper(self, name: str) -> bool:
        with_value = programs.WRAPPERS[name]
        self.at += 1
        if name in _RUNNERS and not self._subcommand("run", "exec"):
            return False
        if name in ("nsys", "ncu", "perf", "memray", "scalene", "py-spy"):
            self._subcommand("profile", "launch", "start", "run", "record", "stat")
        if name == "numactl" and self._text() in ("--show", "-s", "--hardware", "-H"):
            return False
        while (text := self._text()).startswith("-"):
            self.at += 1
            if text == "--":
                break
            if text in with_value and "=" not in text:
                self.at += 1
        self.launch.wrappers.append(name)
        return True

    def _subcommand(self, *names: str) -> bool:
        """Skip options and one of the subcommands ``names``; False where another one is there."""
        position = self.at
        while position < len(self.words) and self.words[position].text.startswith("-"):
            position += 1
        if position < len(self.words) and self.words[position].text in names:
            self.at = position + 1
            return True
        return False

    def _strip_container(self, name: str) -> bool:
        self.at += 1
        if self._text() in programs.CONTAINER_CHORES or not self._text():
            return False
        self.launch.wrappers.append(name)
        self.launch.kind = "unknown"
        return self._jump_to_program()

    def _jump_to_program(self, *, scripts: bool = True) -> bool:
        """Move to the first word that is a program known here; False where there is none.

        With ``scripts``, a file of Python is one, too.
        """
        for position in range(self.at, len(self.words)):
            text = self.words[position].text
            name = basename(text)
            known = programs.PYTHON.match(name) or self._is_unknown_python(text)
            if known or programs.SYNONYMS.get(name, name) in programs.WORKER_LAUNCHERS:
                self.at = position
                return True
            if name in programs.SHELLS and position + 1 < len(self.words):
                self.at = position
                return True
            if scripts and name.endswith(".py") and not text.startswith("-"):
                self.at = position
                return True
        return False

    def _strip_srun(self) -> bool:
        self.launch.via = "srun"
        self.launch.srun_line = self.words[self.at].line
        self.at += 1
        options: list[Option] = []
        table = srun_options()
        while self.at < len(self.words):
            text, line = self._text(), self.words[self.at].line
            if MARK.fullmatch(text) and self.at + 1 < len(self.words):
                self.launch.opaque = True
                self.at += 1
                continue
            if not text.startswith("-") or text == "-":
                break
            self.at += 1
            if text == "--":
                break
            options.extend(self._srun_option(text, line, table.short))
        self.launch.srun += tuple(options)
        self.launch.kind = "helper" if self.at >= len(self.words) else "unknown"
        return True

    def _srun_option(self, text: str, line: int, short: dict[str, str]) -> list[Option]:
        """Read one word of srun's options, and its value where that is the next word."""
        table = srun_options()
        if text.startswith("--"):
            written, equals, value = text[2:].partition("=")
            matches = table.matches(written)
            name = matches[0] if len({canonical(match) for match in matches}) == 1 else written
            if not equals and table.takes(name) == "=":
                value = self._text()
                self.at += 1
            return [Option(canonical(name), value, text, line)]
        options = []
        for position, letter in enumerate(text[1:], start=1):
            name = short.get(letter, letter)
            if table.takes(name) != "=":
                options.append(Option(canonical(name), None, text, line))
                continue
            value = text[position + 1 :]
            if not value:
                value = self._text()
                self.at += 1
            options.append(Option(canonical(name), value, text, line))
            break
        return options

    def _shell(self) -> None:
        """Read ``bash -c TEXT``, or the script that a shell is given."""
        self.at += 1
        while (text := self._text()).startswith(("-", "+")):
            self.at += 1
            if not text.startswith("--") and "c" in text[1:]:
                if self.at < len(self.words):
                    while self._text().startswith("-") and self.at + 1 < len(self.words):
                        self.at += 1
                    self.launch.kind = "inner"
                    self.launch.inner = self.words[self.at]
                return
            if text in ("-o", "+o", "--rcfile", "--init-file"):
                self.at += 1
        self._script()

    def _script(self) -> None:
        self.launch.kind = "script" if self.at < len(self.words) else "helper"
        if self.at < len(self.words):
            self.launch.program = self.words[self.at]
            self.launch.arguments = tuple(self.words[self.at + 1 :])

    def _python(self) -> None:
        self.at += 1
        launch = self.launch
        launch.kind = "python"
        while (text := self._text()).startswith("-"):
            self.at += 1
            if text in ("-c", "-", "-V", "--version", "-h", "--help", "-i") or text.startswith("-c"):
                launch.kind = "helper"
                return
            if text == "-m" or (text.startswith("-m") and not text.startswith("--")):
                self._module(text[2:])
                return
            if text in _PYTHON_WITH_VALUE:
                self.at += 1
        if self.at >= len(self.words):
            launch.kind = "helper"
            return
        launch.program = self.words[self.at]
        launch.arguments = tuple(self.words[self.at + 1 :])

    def _module(self, attached: str) -> None:
        name = attached or self._text()
        if not name:
            self.launch.kind = "helper"
            return
        if not attached:
            self.at += 1
        if name in programs.MODULES:
            self._launcher(programs.MODULES[name], skip=0)
            return
        root = name.partition(".")[0]
        if name in programs.HELPER_MODULES or root in programs.HELPER_MODULES or root in ("ray", "dask"):
            self.launch.kind = "helper"
            if root in ("ray", "dask"):
                self.launch.via = self.launch.via or "remote"
            return
        self.launch.program = self.words[self.at - 1] if self.at else None
        self.launch.arguments = tuple(self.words[self.at :])

    def _launcher(self, name: str, *, skip: int) -> None:
        """Read the options of torchrun and its kin, up to the program."""
        launch = self.launch
        launch.kind, launch.launcher = "launcher", name
        self.at += skip
        if name in ("accelerate", "lightning", "fabric", "colossalai") and skip:
            if name == "accelerate" and self._text() not in ("launch",) and not self._unknown_here():
                launch.kind = "helper"
                return
            while self._text() in _LAUNCHER_WORDS:
                self.at += 1
        flags = programs.WORKER_LAUNCHERS.get(name, programs.WORKER_LAUNCHERS["torchrun"]) | {"use_env"}
        while (text := self._text()).startswith("-") and text != "-":
            self.at += 1
            if text == "--":
                break
            self._launcher_option(text, flags)
        if self.at < len(self.words):
            launch.program = self.words[self.at]
            launch.arguments = tuple(self.words[self.at + 1 :])
        if {"help", "h", "version"} & set(launch.options):
            launch.kind = "helper"

    def _unknown_here(self) -> bool:
        return bool(MARK.search(self._text()))

    def _launcher_option(self, text: str, flags: frozenset[str]) -> None:
        written, equals, value = text.partition("=")
        name = written.lstrip("-").replace("-", "_")
        line = self.words[self.at - 1].line
        if equals:
            self.launch.options[name] = Value(value, (line,))
        elif name in flags or self._text().startswith("-") or self._text().endswith(".py"):
            self.launch.options[name] = Value("", (line,))
        elif self.at < len(self.words):
            self.launch.options[name] = Value(self._text(), (line,))
            self.at += 1

    def _other(self, text: str, name: str) -> bool:
        """Read a program that is none of the above; return whether it wraps one that is."""
        launch = self.launch
        launch.program = self.words[self.at]
        launch.arguments = tuple(self.words[self.at + 1 :])
        if name.endswith(".py"):
            launch.kind = "python"
            return False
        if name in programs.HELPERS and not MARK.search(text):
            launch.kind = "helper"
            return False
        before = self.at
        self.at += 1
        if self._jump_to_program(scripts=False) and basename(self._text()) not in programs.SHELLS:
            launch.wrappers.append(name)
            if MARK.fullmatch(text) and not launch.via:
                launch.via = "unknown"
            launch.program, launch.arguments = None, ()
            return True
        self.at = before
        is_script = name.endswith(_SCRIPT_ENDINGS) or "/" in text
        launch.kind = "script" if is_script else "unknown"
        return False
