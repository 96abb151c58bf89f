"""Fork ranks from a process that has imported torch; see ``ranks.py``.

It reads one JSON request per line from standard input::

    {"target": "module:function", "words": [...], "imports": ["module", ...],
     "ranks": [{"env": {...}, "out": PATH, "err": PATH}, ...]}

and answers ``{"pids": [...]}`` at once and ``{"codes": [...]}`` after all have ended. The target ``script`` is a
file with its arguments, which ends as in an interpreter of its own: with its hooks and exit functions. The modules in
``imports`` are imported once, before the fork.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from ddp_scaling_bench.train.__main__ import main

#: What ranks would import one by one: modules of torch, and programs of the tests.
for name in (
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "tests.record.loops",
    "tests.train.scenarios",
):
    importlib.import_module(name)

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def fork_rank(target: str, words: list[str], rank: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    for descriptor, path in ((1, rank["out"]), (2, rank["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in TORCHRUN:
        os.environ.pop(name, None)
    os.environ.update(rank["env"])
    if target == "script":
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
        sys.exit()
    code = 1
    try:
        module, _, function = target.partition(":")
        call = getattr(importlib.import_module(module), function) if target else main
        code = call(*words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer(content: dict) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def serve() -> None:
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        for name in request["imports"]:
            with contextlib.suppress(ImportError):  # the ranks report it
                importlib.import_module(name)
        gc.freeze()  # else the garbage collections of each rank look at all of torch, and copy its pages
        pids = [fork_rank(request["target"], request["words"], rank) for rank in request["ranks"]]
        answer({"pids": pids})
        codes = dict.fromkeys(pids, 0)
        for _ in pids:
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
        answer({"codes": [codes[pid] for pid in pids]})


if __name__ == "__main__":
    serve()
