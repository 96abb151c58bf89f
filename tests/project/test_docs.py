"""The documentation covers all commands, keys and columns, and its links resolve."""

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from analysis.causes.claims import CAUSES
from analysis.causes.divide import RESTS
from analysis.report.tables import CAUSE_COLUMNS
from bench.cli import app
from bench.matrix import schema
from bench.matrix.workload import Metrics
from ddp_scaling_bench.records import EpochRow, RankRow, StepRow

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])


def commands() -> dict[str, list[str]]:
    """Return every command with its options."""
    names = typer.main.get_command(app).commands.items()
    options = {
        name: [one for param in command.params for one in getattr(param, "opts", [])]
        for name, command in names
    }
    return {name: [one for one in found if one.startswith("--")] for name, found in options.items()}


def test_every_command_and_option_is_documented():
    text = (DOCS / "commands.md").read_text()
    for name, options in commands().items():
        section = re.search(rf"^## bench {name}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert section, f"docs/commands.md has no section '## bench {name}'"
        for option in options:
            assert f"`{option}" in section[1], f"docs/commands.md: bench {name} does not explain {option}"


def test_no_command_is_documented_or_taught_that_is_not_there():
    documented = re.findall(r"^## bench (\S+)$", (DOCS / "commands.md").read_text(), re.M)
    assert sorted(documented) == sorted(commands())
    text = (ROOT / "README.md").read_text() + (DOCS / "tutorial.md").read_text()
    used = set(re.findall(r"^(?:\$ )?bench ([a-z]+)", text, re.M))
    assert used
    assert used <= set(commands())


def test_every_key_of_the_matrix_is_documented():
    text = (DOCS / "matrix.md").read_text()
    models = (schema.Matrix, schema.Cluster, schema.Container, schema.Host, schema.Scaling, schema.Workload)
    for model in (*models, Metrics):
        for name in model.model_fields:
            assert f"`{name}`" in text, f"docs/matrix.md does not explain {name} of {model.__name__}"


def test_every_column_is_documented():
    lines = (DOCS / "measuring.md").read_text().splitlines()
    rows = {tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines}
    marks = ("unit", "window", "meaning")
    for record in (EpochRow, RankRow, StepRow):
        assert {(f"`{one.name}`", *(one.metadata[mark] for mark in marks)) for one in fields(record)} <= rows


def headings(text: str) -> set[str]:
    found = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve_and_the_index_reaches_every_page(page):
    if page.parent == DOCS and page.name != "index.md":
        assert f"({page.name}" in (DOCS / "index.md").read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}, which is not there"
        if anchor and path.suffix == ".md":
            assert anchor in headings(path.read_text()), f"{page.name} links to {target}: no such heading"


def test_the_files_and_folders_that_pages_name_are_there():
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[!.]*/**/*.*")]
    for page in PAGES:
        for name in re.findall(r"`([\w./-]+(?:\.py|/))`", page.read_text()):
            if page.name == "CONTRIBUTING.md" or name.startswith(("bench/", "analysis/", "tests/")):
                assert any(f"/{name}" in file for file in files), f"{page.name} names {name}"


def test_the_changelog_begins_with_this_version():
    from ddp_scaling_bench.version import __version__

    first = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first
    assert first[1].startswith((__version__, "Unreleased"))


def test_every_kind_of_fact_is_documented():
    text = "".join(
        (DOCS / f"{name}.md").read_text() for name in ("measuring", "analysis", "decision", "why", "commands")
    )
    sources = [*ROOT.glob("analysis/**/*.py"), *ROOT.glob("bench/m*/*.py"), *ROOT.glob("bench/study/*.py")]
    kinds = [
        kind
        for file in sources
        for kind in re.findall(r'^class \w+\(.*, kind="([a-z0-9-]+)"\):$', file.read_text(), re.M)
    ]
    assert len(kinds) > 120
    assert {kind for kind in kinds if f"`{kind}`" not in text} <= {"recorded", "unknown"}  # in no file


def test_every_cause_of_a_slow_step_is_documented():
    text = (DOCS / "why.md").read_text()
    section = text.partition("\n## The causes\n")[2]
    assert re.findall(r"^### (\S+)$", section, re.M) == [*CAUSES, *RESTS]
    for name in CAUSES:
        entry = section.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        assert all(word in entry for word in ("**Looks like**", "**Evidence:**", "**Change:**")), name
    assert [name for name in CAUSE_COLUMNS if f"`{name}`" not in text] == []


BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(path.parent)
    assert runpy.run_path(str(path), run_name="imported")["__doc__"]
