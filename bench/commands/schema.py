"""`bench schema`: the matrix's JSON Schema, for editors."""

from __future__ import annotations

from typing import Annotated

import typer

from bench.commands.common import print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("schema")(schema_command)


def schema_command(
    site: Annotated[bool, typer.Option("--site", help="That of a site file, instead of a matrix's.")] = False,
) -> int:
    """Print the JSON Schema of a matrix, so that editors complete and check the file.

    In VS Code: bench schema > matrix.schema.json, and begin the matrix with
    # yaml-language-server: $schema=matrix.schema.json
    """
    from bench.matrix.load import site_schema
    from bench.matrix.schema import json_schema

    print_json(site_schema() if site else json_schema())
    return 0
