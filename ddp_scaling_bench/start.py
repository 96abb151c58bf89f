"""Start a program in a job: ``python -m ddp_scaling_bench.start MODULE ARGUMENTS``.

The program is a module of this package, or of ``bench`` if its name begins so. Jobs run in the user's
folder. :func:`leave_out_working_folder` keeps the user's modules out of these programs, as ``python -P`` does
from Python 3.11 on; the environment, and so the import path of the user's own programs, stays unchanged.
Before this function is called, the package's ``__init__`` and this module import only what Python itself
imports at its start.
"""

import os
import sys


def leave_out_working_folder() -> None:
    """Remove the current folder from the import path, where ``PYTHONPATH=.`` or ``python -m`` put it.

    An installation in the current folder stays: only the folder itself is removed.
    """
    try:
        folder = os.path.realpath(os.getcwd())  # noqa: PTH109 - pathlib is not imported yet
    except OSError:
        return  # the folder was deleted
    sys.path[:] = [entry for entry in sys.path if entry and os.path.realpath(entry) != folder]


def main() -> None:
    """Run the module that the first argument names, with the other arguments."""
    leave_out_working_folder()
    import runpy

    module = sys.argv.pop(1)
    name = module if module.startswith("bench.") else f"{__package__}.{module}"
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
