"""`bench schema`: the matrix's JSON Schema, for editors."""

from __future__ import annotations

import typer

from bench.commands.common import print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("schema")(schema_command)


def schema_command() -> int:
    """Print the JSON Schema of a matrix, so that editors complete and check the file.

    In VS Code: bench schema > matrix.schema.json, and begin the matrix with
    # yaml-language-server: $schema=matrix.schema.json
    """
    from bench.matrix.schema import json_schema

    print_json(json_schema())
    return 0
