"""The command line's entry point: `bench` or `python -m ddp_scaling_bench`.

It starts the program `bench` by its name; nothing else in this package knows of it.
"""

import sys

from .start import leave_out_working_folder


def main() -> None:
    """Run the command line; show no traceback if Ctrl-C is pressed during the imports."""
    try:
        leave_out_working_folder()  # before any import that a file of this folder could replace
        for package in ("bench", "analysis"):
            _import_own(package)
        from importlib import import_module

        import_module("bench.cli").main()
    except KeyboardInterrupt:
        sys.exit(130)


def _import_own(name: str) -> None:
    """Import a package of this installation, even if the import path finds another one of this name first."""
    import importlib.util
    from pathlib import Path

    init = Path(__file__).resolve().parent.parent / name / "__init__.py"
    if name in sys.modules and sys.modules[name].__file__ == str(init):
        return
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(init.parent)])
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    main()
