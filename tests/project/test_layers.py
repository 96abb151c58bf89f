"""The house rules: layers, no import cycles, one home per heavy package, and fast start-up."""

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.study.found import DEFINED_IN
from tests.common import run_program

ROOT = Path(__file__).resolve().parents[2]

_BASE = "cell_json checksums cores errors files finding known_models known_strategies records run_folder start text units variables version"
_OF_STRATEGIES = "failures models options strategies"
BASE = [f"ddp_scaling_bench.{name}" for name in _BASE.split()]
OF_STRATEGIES = [f"ddp_scaling_bench.train.{name}" for name in _OF_STRATEGIES.split()]

#: From bottom to top: a module imports from its own layer or from lower ones only.
LAYERS = {
    "ddp_scaling_bench": [
        BASE,
        ["ddp_scaling_bench.measure"],
        OF_STRATEGIES,
        ["ddp_scaling_bench.record"],
        ["ddp_scaling_bench.train"],
        ["ddp_scaling_bench", "ddp_scaling_bench.__main__"],
    ],
    "bench": [
        ["bench", "bench.extras", "bench.shipped"],
        ["bench.matrix"],
        ["bench.study"],
        [
            "bench.archive",
            "bench.package",
            "bench.render",
            # The output of Slurm's commands; what runs jobs is two layers above.
            "bench.jobs.slurm.messages",
            "bench.jobs.slurm.parsing",
            "bench.lint",
            "bench.doctor",
        ],
        ["bench.cost", "bench.plan"],
        ["bench.jobs", "bench.preflight", "bench.terminal"],
        ["bench.commands"],
        ["bench.cli", "bench.__main__"],
    ],
    "analysis": [
        ["analysis", "analysis.processes", "analysis.text"],
        ["analysis.data"],
        ["analysis.stats"],
        ["analysis.checks"],
        ["analysis.decide"],
        ["analysis.causes"],
        ["analysis.compare", "analysis.advise", "analysis.tables_in"],
        ["analysis.targets"],
        ["analysis.report"],
        ["analysis.history"],
    ],
}

_IN_JOBS = tuple(f"ddp_scaling_bench.{name}" for name in ("measure", "record", "train"))
HOMES = {
    "torch": _IN_JOBS,
    "pandas": ("analysis",),
    "scipy": ("analysis",),
    "matplotlib": ("analysis",),
    "pyarrow": ("analysis",),
    "yaml": ("bench.matrix",),
    "jinja2": ("bench.render", "analysis.report.write", "analysis.history.history_page"),
    "subprocess": (
        "bench.jobs.slurm.client",
        "bench.jobs.local",
        "bench.jobs.ssh",
        "bench.jobs.commands",
        "bench.jobs.submission",
        "ddp_scaling_bench.measure.node_counters",
        "bench.lint.script",
    ),
    "tree_sitter": ("bench.lint",),
    "tree_sitter_bash": ("bench.lint",),
    "typer": ("bench.cli", "bench.commands"),
    "pynvml": ("ddp_scaling_bench.measure",),
    "psutil": (*_IN_JOBS, "bench.jobs"),
}

#: The modules that analysis may import: data modules, never what runs or submits jobs.
_SHARED = "checksums errors finding files measure.failures measure.findings records run_folder known_models"
_SHARED += " known_strategies train.options units variables version"
READABLE = (
    *("bench.archive", "bench.matrix", "bench.shipped", "bench.study"),
    *(f"ddp_scaling_bench.{name}" for name in _SHARED.split()),
)


@functools.cache
def modules() -> dict[str, Path]:
    """Return the file of each module of the project."""
    found = {}
    for package in ("ddp_scaling_bench", "bench", "analysis"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def import_statements() -> dict[str, list[ast.Import | ast.ImportFrom]]:
    """Return the import statements of each module, lazy and type-only ones included."""
    statements = {}
    for module, path in modules().items():
        nodes = statements_in(ast.parse(path.read_text()))
        statements[module] = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return statements


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, which are not in its expressions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements_in(child)


def source(module: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module from which ``node`` imports."""
    if not node.level:
        return str(node.module)
    parts = module.split(".") if modules()[module].name == "__init__.py" else module.split(".")[:-1]
    parents = parts[: len(parts) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def imports() -> Iterator[tuple[str, str]]:
    """Yield (module, imported name); ``from a import b`` gives both ``a`` and ``a.b``."""
    for module, statements in import_statements().items():
        for node in statements:
            if isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names)
            else:
                yield module, source(module, node)
                yield from ((module, f"{source(module, node)}.{alias.name}") for alias in node.names)


def within(name: str, places: tuple[str, ...] | list[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def layer_of(module: str) -> int:
    package = module.split(".")[0]
    found = [
        (len(place), level)
        for level, places in enumerate(LAYERS[package])
        for place in places
        if module == place or (place != package and module.startswith(f"{place}."))
    ]
    assert found, f"{module} is in no layer: add it to LAYERS where it belongs"
    return max(found)[1]


def import_graph() -> dict[str, set[str]]:
    """Return the modules of this project that each module imports.

    ``from package import module`` is an import of the module, not of the package.
    """
    known = import_statements()
    graph: dict[str, set[str]] = {module: set() for module in known}
    for module, statements in known.items():
        for node in statements:
            if isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names}
            else:
                full = {f"{source(module, node)}.{alias.name}" for alias in node.names}
                graph[module] |= {name if name in known else source(module, node) for name in full}
        graph[module] &= known.keys() - {module}
    return graph


@pytest.mark.parametrize("package", LAYERS)
def test_imports_only_point_downward(package):
    wrong = [
        f"{module} (layer {layer_of(module)}) imports {name} (layer {layer_of(name)})"
        for module, names in import_graph().items()
        for name in names
        if module.split(".")[0] == name.split(".")[0] == package and layer_of(name) > layer_of(module)
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_cycle():
    order = graphlib.TopologicalSorter(import_graph())
    order.prepare()  # raises CycleError, which names the modules of a cycle


@pytest.mark.parametrize("package", HOMES)
def test_each_heavy_package_has_one_home(package):
    wrong = [
        f"{module} imports {name}"
        for module, name in imports()
        if name.split(".")[0] == package and not within(module, HOMES[package])
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("importing", "unless", "imported", "allowed"),
    [
        # What analysis may read are data modules.
        ("analysis", (), ("bench", "ddp_scaling_bench"), READABLE),
        # What runs in a job.
        ("ddp_scaling_bench", (), ("analysis", "bench"), ()),
        # Only commands reach analysis.
        ("bench", ("bench.commands",), ("analysis",), ()),
    ],
)
def test_a_package_imports_only_what_it_may_of_another(importing, unless, imported, allowed):
    known = import_statements()
    wrong = [
        f"{module} imports {name}"
        for module, name in imports()
        if within(module, (importing,)) and not within(module, unless)
        if name in known and within(name, imported) and not within(name, allowed)
    ]
    assert wrong == []


def test_modules_for_login_nodes_import_no_heavy_package():
    program = (
        "import sys, bench.cli, bench.plan, bench.lint, bench.doctor\n"
        "print(sorted({'torch', 'pandas', 'numpy', 'scipy', 'matplotlib', 'pyarrow'} & set(sys.modules)))"
    )
    done = run_program([sys.executable, "-c", program], check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_the_project_speaks_of_itself_alone():
    listed = run_program(["git", "ls-files"], cwd=ROOT, check=True).stdout.split()
    binary = {".png", ".gz", ".xz", ".npy"}
    for name in listed:
        path = ROOT / name
        if path.suffix in binary or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        for word in ("/wor" + "k/", "/far" + "m/", "../sha" + "red"):
            assert word not in text, f"{name} names a path of the machine it was written on"


def test_each_module_with_a_recorded_class_is_read():
    header = re.compile(r"^class (\w+)\((\w+)", re.M)
    files = [path for package in LAYERS for path in ROOT.glob(f"{package}/**/*.py")]
    classes = [(path, *one) for path in files for one in header.findall(path.read_text())]
    names = {"Recorded"}
    while more := {name for _, name, base in classes if base in names} - names:
        names |= more
    modules = {path for path, name, _ in classes if name in names} - {ROOT / "ddp_scaling_bench/finding.py"}
    assert modules == {Path(str(module.__file__)) for module in DEFINED_IN}
