"""The command line: one Typer app and one error handler for the commands of ``bench.commands``."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from ddp_scaling_bench.errors import BenchError, inaccessible
from ddp_scaling_bench.text import printable
from ddp_scaling_bench.version import __version__

from .commands.advise import advise_command
from .commands.archive import archive_command
from .commands.cancel import cancel_command
from .commands.compare import compare_command
from .commands.doctor import doctor_command
from .commands.history import history_command
from .commands.init import init_command
from .commands.lint import lint_command
from .commands.list_studies import list_command
from .commands.next_step import step_in_folder
from .commands.plan import plan_command
from .commands.preflight import preflight_command
from .commands.report import report_command
from .commands.run import run_command
from .commands.schema import schema_command
from .commands.status import status_command
from .commands.submit import submit_command
from .commands.verify import verify_command
from .terminal import OutputError, discard_output, open_streams, say, show

#: The commands in the order of `bench --help`.
COMMANDS: tuple[Callable[..., int], ...] = (
    *(init_command, plan_command, submit_command, status_command, cancel_command, run_command),
    *(verify_command, list_command, report_command, compare_command, history_command, advise_command),
    *(archive_command, lint_command, doctor_command, preflight_command, schema_command),
)

#: Typer's own copy of click has no public name for this class.
_UsageError: Any = typer.BadParameter.__base__


@contextmanager
def _one_line_usage_errors() -> Iterator[None]:
    """Print an error about options and arguments as one line, without control characters; exit with 2."""
    try:
        yield
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "bench"
        text = " ".join(printable(_usage(error)).rstrip(".").split())
        end = "" if text.endswith("?") else ";"
        say(f"error: {command}: {text[:1].lower()}{text[1:]}{end} see {command} --help")
        raise typer.Exit(2) from None


def _usage(error: Any) -> str:
    """Return an error about options and arguments as text; for a wrong value, with the option's meaning."""
    text, name = str(error.format_message()).rstrip("."), error.ctx.info_name if error.ctx else ""
    if found := getattr(error.__cause__, "errors", None):  # of pydantic, which converts values
        first = found()[0]
        message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        reason = message.partition(", unable")[0]
        if reason.startswith(repr(first["input"])):
            return f"{error.param.opts[0]} {reason}"
        wanted = reason if reason.startswith("a ") else f"a value {reason}"
        return f"{error.param.opts[0]} {first['input']}: give {wanted} ({_meaning(error.param)})"
    if text.startswith("No such option"):
        return _unknown_option(error.option_name, error.ctx)
    if unknown := re.match(r"No such command (['\"])(.*)\1(?:\. Did|$)", text):
        return _unknown_command(unknown[2], error.ctx)
    if text.startswith("Got unexpected extra argument"):
        return _extra_words(text.partition("(")[2].partition(")")[2].strip(" ()"), error.ctx)
    if text.startswith("Missing argument 'matrix'"):
        return f"it needs a matrix: a YAML file, or a shipped example (bench {name} smoke_cpu)"
    option, params = getattr(error, "option_name", ""), error.ctx.command.params if error.ctx else ()
    if param := next((one for one in params if option in one.opts), None):
        only = f"does not take a value; write only {option}"
        return f"{option} {only if param.is_flag else f'needs a value ({_meaning(param)})'}"
    return text


def _meaning(param: Any) -> str:
    text = re.split(r"\. |;|\.$", param.help or "")[0]
    return f"{text[:1].lower()}{text[1:]}"


def _unknown_option(written: str, ctx: Any) -> str:
    """Return an error about an option that a command, or `bench` itself, does not have, as text."""
    text, commands = f"no such option: {written}", getattr(ctx.command, "commands", {})
    owners = [name for name, one in commands.items() if written in _options(one)]
    if owners:
        owner = next((word for word in ctx.meta[_WORDS] if word in owners), owners[0])
        return f"{text}; write it after a command, as in `bench {owner} {written}`"
    if ctx.info_name == "init":
        return f"{text}; put a --command into quotes"
    from .lint.options import LETTERS, LONG

    short, own = written.lstrip("-"), _options(ctx.command)
    word = LETTERS.get(short, short)
    alike = _alike(word, own) or _alike(short, own)
    # Only these commands work with a matrix; a preflight sets its own repeats and time.
    if ctx.info_name == "preflight" or not {"--only", "--site", "--step-time"} & own:
        return f"{text}{alike}"
    from .matrix.field_types import option_of_sbatch
    from .matrix.mistakes import place_of

    if place := place_of(word.replace("-", "_")):
        return f"{text}; in the matrix, write {place}"
    if alike or word not in LONG:
        return f"{text}{alike}"
    how = option_of_sbatch(word, value="=VALUE" * (LONG[word] == "="))
    return f"{text}; {'in the matrix, ' * how.startswith(('use ', 'write '))}{how}"


def _unknown_command(written: str, ctx: Any) -> str:
    """Return an error about a command that does not exist, as text."""
    text = f"no such command {written!r}"
    if written.endswith((".yaml", ".yml")):
        return f"{text}; plan a matrix with `bench plan {written}`"
    return f"{text}{_alike(written, [*ctx.command.commands, '--help', '--version'])}"


def _alike(written: str, names: Collection[str]) -> str:
    """Return ``; did you mean A or B?``: the names that begin with what was written, or are similar."""
    bare = {name.lstrip("-"): name for name in sorted(names)}
    word = written.lower()
    found = [name for name in bare if name.startswith(word)]
    found = found or get_close_matches(word, bare, n=1, cutoff=0.75)
    return f"; did you mean {' or '.join(bare[name] for name in found)}?" if 0 < len(found) < 3 else ""


def _extra_words(words: str, ctx: Any) -> str:
    """Return an error about more arguments than a command takes, as text."""
    text, params, typed = f"it does not take {words}", ctx.command.params, ctx.meta[_WORDS]
    if what := _TAKES.get(ctx.info_name):
        return f"{text}; {what}"
    before = [*("", ""), *typed[: typed.index(words) if words in typed else 0]]
    flag, valued = (next((one for one in params if name in one.opts), None) for name in before[:-3:-1])
    if flag and flag.is_flag:
        return f"{text}: {before[-1]} has no value"
    if valued and valued.param_type_name == "option" and not valued.is_flag:
        return f"{text}: {before[-2]} has one value ({_meaning(valued)})"
    arguments = [one.name for one in params if one.param_type_name == "argument"]
    only = "settings belong into the matrix" if "=" in words else "repeat the command for others"
    return f"{text}: it takes {' and '.join(f'one {name}' for name in arguments)}; {only}"


def _options(command: Any) -> set[str]:
    return {name for one in command.params for name in one.opts if name.startswith("-")}


#: What to type instead, where a command is given more arguments than it takes.
_TAKES = {
    "init": "for your own training, put its command into quotes: bench init --command 'python train.py'",
    "schema": "to check a matrix: bench plan FILE",
    "plan": "plan one matrix after the other",
    "verify": "name one run as STUDY/RUN",
    "list": "to list the runs of a study: bench status STUDY",
    "compare": "compare two studies at a time",
}
#: The name under which a context holds the words that were typed behind its command.
_WORDS = "bench.words"


class _Command(typer.core.TyperCommand):
    """A command whose errors about options name it."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        ctx.meta[_WORDS] = [*args]
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            error.ctx = error.ctx or ctx
            raise


class _Group(typer.core.TyperGroup):
    """A command group that turns return values into exit codes and user errors into messages."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        ctx.meta[_WORDS] = [*args]
        with _one_line_usage_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _one_line_usage_errors():
                code = super().invoke(ctx)
        except OutputError:
            raise
        except (BenchError, OSError) as raised:
            error = inaccessible(raised) if isinstance(raised, OSError) else raised
            if error is None:
                raise
            say(f"error: {error}")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            say("stopped")
            raise typer.Exit(130) from None
        if isinstance(code, int) and code:
            raise typer.Exit(code)
        return None


_HELP = """Plan, run and analyse scaling studies of PyTorch: DDP, FSDP and HSDP.

A matrix (a YAML file) defines what to measure. Try [bold]bench run smoke_cpu[/bold], a small study on this
machine. STUDY is the name or folder of a planned study; by default, the one that was planned last.

Exit codes: 0 no problems, 1 findings or failed runs, 2 bad input or no standard output, 3 no answer, 130
stopped with Ctrl-C, 141 the reader of a pipe has gone."""


def _paragraphs(text: str) -> str:
    """Return a help text with one line per paragraph, which the terminal wraps; examples keep their lines."""
    return re.sub(r"(?<!\n)\n(?!\n|Example|bench )", " ", inspect.cleandoc(text))


app = typer.Typer(
    name="bench",
    cls=_Group,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=_paragraphs(_HELP),
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        show(f"bench {__version__}")
        raise typer.Exit


#: The first screen, above the next command.
_WELCOME = """\
bench measures how a PyTorch training scales, and which size to use.
  bench init          write a matrix: what to measure
  bench plan MATRIX   check it, write scripts, show the cost
  bench submit        start the runs (see bench status)
  bench report        which size to use, how sure, and why
  bench doctor        why runs failed or are slow
More: bench --help"""


@app.callback()
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    if ctx.invoked_subcommand is None:
        root = Path(os.environ.get("BENCH_RESULTS") or "results")
        show(f"{_WELCOME}\nnext: {step_in_folder(root)}")


for _command in COMMANDS:
    _name = _command.__name__.removesuffix("_command")
    app.command(_name, cls=_Command, help=_paragraphs(_command.__doc__ or ""))(_command)


def main() -> None:
    """Run the command line; exit with one line, or none for a closed pipe, if nothing more can be printed.

    The traceback of an unexpected exception is printed without control characters.
    """
    try:
        open_streams()
        try:
            app(prog_name="bench")
        finally:
            sys.stdout.flush()
    except OutputError as error:
        discard_output()
        if not error.is_broken_pipe:
            say(f"error: {error}")
        sys.exit(error.exit_code)
    except Exception:
        say(traceback.format_exc().rstrip())
        sys.exit(1)
