"""The command line: one Typer app, one error handler; each verb lives in ``bench.commands``."""

from __future__ import annotations

import sys
from typing import Any

import typer

from bench import __version__
from bench.commands import (
    advise,
    cancel,
    compare,
    diagnose,
    init,
    plan,
    report,
    run,
    schema,
    status,
    submit,
    verify,
)
from bench.errors import BenchError


class _Group(typer.core.TyperGroup):
    """Turns a command's returned number into the exit code, and a user's mistake into words."""

    def invoke(self, ctx: Any) -> Any:
        try:
            code = super().invoke(ctx)
        except BenchError as error:
            sys.stdout.flush()
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None
        if isinstance(code, int) and code:
            raise typer.Exit(code)
        return None


app = typer.Typer(
    name="bench",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Scaling studies of PyTorch DDP: plan, run, analyse.

    A matrix (a YAML file) says what to measure. Start with [bold]bench run smoke_cpu[/bold],
    a small study on this machine. On a cluster: [bold]bench plan MATRIX[/bold], look at the
    scripts, [bold]bench submit[/bold], [bold]bench status[/bold], [bold]bench report[/bold].

    STUDY is the name or folder of a planned study; left out, it is the one planned last.
    Exit codes: 0 fine, 1 findings or failed runs, 2 bad input.""",
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    pass


for _module in (init, plan, submit, status, cancel, run, verify, report, compare, advise, diagnose, schema):
    _module.register(app)


def main() -> None:
    """Run the command line."""
    app()
