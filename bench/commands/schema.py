"""`bench schema`: print the JSON Schema of a matrix."""

from __future__ import annotations

from typing import Annotated

import typer

from ..terminal import print_json


def schema_command(
    site_file: Annotated[
        bool, typer.Option("--site-file", help="Print the schema of a site file instead.")
    ] = False,
) -> int:
    """Print the JSON Schema of a matrix, which editors use to complete and check the file.

    In VS Code: bench schema > matrix.schema.json, and begin the matrix with
    # yaml-language-server: $schema=matrix.schema.json
    """
    from ..matrix.schema import json_schema, site_schema

    print_json(site_schema() if site_file else json_schema())
    return 0
