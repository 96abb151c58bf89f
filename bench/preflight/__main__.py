"""Entry point of the processes of a preflight job."""

import os
import sys

from .program import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a lost node must not delay the end of the others
