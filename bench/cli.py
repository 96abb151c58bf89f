"""The command line: one Typer app and one error handler for the commands of ``bench.commands``."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        text = " ".join(printable(_usage(error)).rstrip(".").split()).replace(". Did you", "; did you")
        end = "" if text.endswith("?") else ";"
        say(f"error: {command}: {text[:1].lower()}{text[1:]}{end} see {command} --help")
        raise typer.Exit(2) from None


def _usage(error: Any) -> str:
    """Return an error about options and arguments as text; for a wrong value, with the option's meaning."""
    if not (found := getattr(error.__cause__, "errors", None)):  # of pydantic, which converts values
        text, name = str(error.format_message()).rstrip("."), error.ctx.info_name if error.ctx else ""
        if text.startswith("No such option"):
            return _unknown_option(text, error.option_name, error.ctx)
        if text.startswith("Got unexpected extra argument"):
            text = f"it does not take {text.partition('(')[2].partition(')')[2].strip(' ()')}"
            return "; ".join(filter(None, (text, _TAKES.get(name, ""))))
        if text.startswith("Missing argument 'matrix'"):
            return f"it needs a matrix: a YAML file, or a shipped example (bench {name} smoke_cpu)"
        return text
    first = found()[0]
    message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    reason = message.partition(", unable")[0]
    if reason.startswith(repr(first["input"])):
        return f"{error.param.opts[0]} {reason}"
    wanted = reason if reason.startswith("a ") else f"a value {reason}"
    meaning = (error.param.help or "").partition(". ")[0].rstrip(".")
    return f"{error.param.opts[0]} {first['input']}: give {wanted} ({meaning[:1].lower()}{meaning[1:]})"


def _unknown_option(text: str, written: str, ctx: Any) -> str:
    """Return an error about an option that a command, or `bench` itself, does not have, as text."""
    commands = getattr(ctx.command, "commands", {})
    if owner := next((name for name, own in commands.items() if written in _options(own)), ""):
        return f"{text}; write it after a command, as in `bench {owner} {written}`"
    if ctx.info_name == "init":
        return f"{text.replace(' (Possible options: --help)', '')}; put a --command into quotes"
    # Only these commands work with a matrix; a preflight sets its own repeats and time.
    if ctx.info_name == "preflight" or not {"--only", "--site", "--step-time"} & _options(ctx.command):
        return text
    from .lint.options import LETTERS
    from .matrix.load import place_of

    short = written.lstrip("-")
    setting = place_of(LETTERS.get(short, short).replace("-", "_"))
    return f"{text.partition(' (')[0]}; in the matrix, write {setting}" if setting else text


def _options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


#: What to type instead, where a command is given more arguments than it takes.
_TAKES = {
    "init": "for your own training, put its command into quotes: bench init --command 'python train.py'",
    "schema": "to check a matrix: bench plan FILE",
    "plan": "plan one matrix after the other",
}


class _Group(typer.core.TyperGroup):
    """A command group that turns return values into exit codes and user errors into messages."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
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
    app.command(_name, help=_paragraphs(_command.__doc__ or ""))(_command)


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
