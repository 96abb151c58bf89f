"""`bench archive`: write what a report of a study needs into one file, for another machine or person."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.units import count, human_bytes

from ..archive import SUFFIX, write_archive
from ..study.plan_json import open_study
from ..terminal import say, show
from .next_step import shown_name
from .options import ResultsOption, StudyArgument, find_study, settle_study

OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help=f"The archive (NAME{SUFFIX}), or the folder in which to create it; default: beside the study.",
        show_default=False,
    ),
]


def archive_command(
    study: StudyArgument = None, output: OutputOption = None, results: ResultsOption = None
) -> int:
    """Write STUDY.tar.gz: all that report, compare, verify, status, advise and doctor read of a study.

    These commands accept the file as a study. It lists the SHA-256 of each file, and a changed file is
    refused. Example: bench archive l40s --output l40s-2026-03.tar.gz
    """
    folder = find_study(study, results)
    if folder.archive:
        raise BenchError(f"{folder.archive} is already an archive", remedy="copy it, or give a study")
    settle_study(folder)
    if active := sum(record.state.active for record in open_study(folder).records().values()):
        remedy = f"wait for their ends, or call `bench cancel {shown_name(folder)}`"
        raise BenchError(f"{folder.path}: {count(active, 'run')} may still write files", remedy=remedy)
    if not any(record.state.ended for record in open_study(folder).records().values()):
        say("warning: no run of this study has ended, so the archive has no results")
    path = output or folder.path.parent
    written = write_archive(folder, path / f"{folder.path.resolve().name}{SUFFIX}" if path.is_dir() else path)
    show(written.path)
    files = f"{count(written.files, 'file')} of {human_bytes(written.content_bytes)}"
    say(f"{files}; SHA-256 of the manifest: {written.manifest_sha256}")
    if written.traces_left_out:
        say(f"left out: {count(written.traces_left_out, 'profiler trace')}")
    if written.is_private:
        say("warning: other users cannot read some of these files; look for secrets before you share them")
    return 0
