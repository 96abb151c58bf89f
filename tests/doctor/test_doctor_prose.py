"""Words that any program can print are no cause; the same words in the form of a known program are."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.commands.doctor import run_doctor
from bench.doctor import diagnose_text

PROSE = Path(__file__).with_name("prose.txt").read_text(encoding="utf-8").splitlines()
MESSAGES = {
    "OSError: [Errno 28] No space left on device: '/scratch/x'": "disk-quota",
    "tar: out/model.pt: Cannot write: No space left on device": "disk-quota",
    "RuntimeError: Address already in use": "port-in-use",
    "socket.gaierror: [Errno -2] Name or service not known": "hostname-unreachable",
    "torch.OutOfMemoryError: CUDA out of memory.": "oom-gpu",
    "MemoryError": "oom-host",
    "KeyError: 'LOCAL_RANK'": "no-launcher",
    "ModuleNotFoundError: No module named 'torch'": "wrong-python-env",
}
PREFIXES = [
    "",
    "3: ",
    "n042: ",
    "03: [rank3]: ",
    "[default0]:",
    "[1,0]<stderr>:",
    "(RayTrainWorker pid=1, ip=10.0.0.1) ",
    "2024-05-02T11:31:04.501Z ",
    "2024-05-02 11:31:04,501 - ERROR - ",
    "2024-05-02 11:31:04.501 | ERROR    | __main__:main:41 - ",
    "[2024-05-02 11:31:04,501][train][ERROR] - ",
    "E0502 11:31:04.501000 123 torch/run.py:12] ",
    "INFO 05-02 11:31:04 engine.py:12] ",
    "May  2 11:31:04 n042 train[123]: ",
]


@pytest.mark.parametrize("line", PROSE)
def test_words_that_any_program_can_print_are_no_cause(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "job.out"
    log.write_text(f"{line}\n")
    assert run_doctor([log], json=False) == 3
    assert capsys.readouterr().out.startswith("No known cause.")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_found_below_a_time_a_rank_and_a_level(message: str, prefix: str) -> None:
    first = diagnose_text(f"{prefix}{message}\n").first_failure
    assert first is not None
    assert first.cause == MESSAGES[message]
