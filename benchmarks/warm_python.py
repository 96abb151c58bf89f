"""Run Python programs in forks of a process that has already imported torch.

    python warm_python.py SOCKET                          serve
    python warm_python.py SOCKET PROGRAM [ARGUMENT ...]   run a program, and exit with its exit code

To import torch takes seconds of CPU time, more than the short trainings of a campaign. A program gets the
environment, folder and output of its caller. The server runs one program at a time.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path


def serve(path: str) -> None:
    """Import torch, and run programs until this process is ended."""
    import torch
    import torch._dynamo  # the optimizers need it

    assert torch.distributed.is_available()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            client, _ = server.accept()
            with client:
                message, outputs, _, _ = socket.recv_fds(client, 2**20, 2)
                if not (child := os.fork()):
                    server.close()
                    run(json.loads(message), outputs)
                for output in outputs:
                    os.close(output)
                client.sendall(b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def run(call: dict[str, object], outputs: list[int]) -> None:
    """Become the program of a caller."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
    os.chdir(str(call["folder"]))
    os.environ.clear()
    os.environ.update(dict(call["environment"]))  # type: ignore[call-overload]
    sys.argv = list(call["words"])  # type: ignore[call-overload]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    """Serve, or run a program on the server."""
    path, *words = sys.argv[1:]
    if not words:
        serve(path)
    call = {"folder": str(Path.cwd()), "environment": {**os.environ}, "words": words}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(call).encode()], [1, 2])
        return abs(int(server.recv(16)))


if __name__ == "__main__":
    sys.exit(main())
