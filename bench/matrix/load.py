"""Read a whole matrix: its YAML, what it inherits from a site, and its schema."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import ValidationError

from bench.errors import InputError, Problem
from bench.matrix.document import Document, read_document
from bench.matrix.messages import problems_of, without_unknown_keys
from bench.matrix.schema import STUDY_NAME, STUDY_NAME_RULE, Matrix
from bench.matrix.site import inherit, read_site


def load_matrix(path: Path, *, site: Path | None = None) -> tuple[Matrix, Document]:
    """Return the matrix in a YAML file, and where each of its lines stood.

    Args:
        path: the matrix.
        site: a site file that it inherits from.

    Raises:
        BenchError: a file is not there or not text.
        InputError: everything that is wrong with the site file; else everything that is wrong
            with the matrix's YAML and keys, at once. Where only keys are unknown or given twice,
            they are kept in the document's problems and told together with what
            :func:`bench.matrix.expansion.expand` finds.
    """
    document = read_document(path)
    if not isinstance(document.content, dict):
        problem = Problem(
            str(path), 1, "a matrix is a mapping (key: value)", "start from `bench init`, or from an example"
        )
        raise InputError([problem])
    content = dict(document.content)
    if content.get("study") is None:
        if not STUDY_NAME.fullmatch(path.stem) or ".." in path.stem:
            what = f"the file's stem {path.stem!r} cannot name the study; allowed: {STUDY_NAME_RULE}"
            raise InputError([Problem(str(path), 1, what, "add `study: NAME`")])
        content["study"] = path.stem
    if site is not None:
        content, document.site = inherit(content, read_site(site))
    try:
        return Matrix.model_validate(content), document
    except ValidationError as error:
        document.problems += problems_of(error, document)
        rest = without_unknown_keys(content, error)
    if rest is not None:
        # Nothing but unknown keys: leave them out, so that the expansion's problems come too.
        with contextlib.suppress(ValidationError):
            return Matrix.model_validate(rest), document
    raise InputError(document.problems)
