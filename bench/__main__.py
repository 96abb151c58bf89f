"""`python -m bench` is `bench`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C during the imports also ends it without a traceback."""
    try:
        from bench.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
