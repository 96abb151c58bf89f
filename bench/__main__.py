"""Run the command line as `python -m bench`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; show no traceback if Ctrl-C is pressed during the imports."""
    try:
        from bench.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
