"""Start Python scripts that use torch in a few milliseconds: fork them from a process that has imported it.

    python warm_start.py --serve SOCKET
    python warm_start.py SOCKET SCRIPT [ARGUMENT ...]

The first form is the server, the second form its client. The server forks a process that runs SCRIPT with
the client's environment, folder and output. The client exits with the exit code of SCRIPT. If the client is
killed, the fork is killed as well.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_CHECK_S = 0.05


def serve(path: str) -> None:
    """Fork a process for each connection, until this process is terminated."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch.nn.parallel  # noqa: F401

    import bench.record  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _watch(connection)
            connection.close()


def _watch(connection: socket.socket) -> None:
    """Run the script of a connection in a fork, and send its exit code."""
    received, outputs, _, _ = socket.recv_fds(connection, 2**20, 2)
    request = json.loads(received)
    script = os.fork()
    if script == 0:
        connection.close()
        _run(request, outputs)
    while True:
        ended, status = os.waitpid(script, os.WNOHANG)
        if ended:
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        if select.select([connection], [], [], _CHECK_S)[0] and not connection.recv(1):
            os.kill(script, signal.SIGKILL)
            os._exit(1)


def _run(request: dict[str, Any], outputs: list[int]) -> None:
    code: Any = 1
    try:
        for own, given in zip((1, 2), outputs, strict=True):
            os.dup2(given, own)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv = request["words"]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def run(path: str, words: list[str]) -> int:
    """Run a script in a fork of the server; return its exit code."""
    request = {"environment": dict(os.environ), "folder": str(Path.cwd()), "words": words}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], [1, 2])
        return int(connection.recv(64) or b"1")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    sys.exit(run(sys.argv[1], sys.argv[2:]))
