"""Words that any program can print are no cause; the same words in the form of a known program are."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.commands.doctor import run_doctor
from bench.doctor import diagnose_text

PROSE = [
    "NCCL_DEBUG docs mention SIGSEGV",
    "retry 1: No route to host, next mirror",
    "checking exit status: 127 (ignored)",
    "DNS probe: Name or service not known handled",
    "socket.gaierror: [Errno -2] Name or service not known handled",
    "warning: mirror.example.org: Name or service not known handled",
    "HFLogger MemoryError count: 0",
    "sacct: OUT_OF_MEMORY 0",
    "Killed",
    "ulimit: Too many open files guard on",
    "OSError: Too many open files guard on",
    "cuda sanity: misaligned address check passed",
    "misaligned address check passed",
    "squeue: n1 NODE_FAIL 0",
    "the tutorial says: OSError: [Errno 98] Address already in use",
    "the tutorial says: Address already in use",
    "the tutorial says: RuntimeError: Address already in use",
    "Note: No space left on device is checked at start",
    "shared memory: Cannot allocate memory counter = 0",
    "wget: unrecognized option --mem ignored; continuing",
    "sbatch: your project has no exhausted budget or credits left over",
    "sbatch: error: the example shows how exhausted budget is reported",
    "sbatch: error: please note that gpus are billed",
    "srun: info: user name lookup: no such user cache entries",
    "no such user in the cache, continuing",
    "I have no name! is the prompt of the container",
    "master addr: localhost (default in the docs)",
    "head node ip: 127.0.0.1",
    "cannot find the requested files in the local cache, downloading",
    "NCCL WARN Plugin statistics: 0 failed",
    "n1:1:2 [0] NCCL WARN NET/Plugin: 0 plugins failed",
    "checking for segmentation fault handlers",
    "exit code: 139 is explained in the manual",
    "exit status: 137 would mean out of memory",
    "return code = -9 is mapped to 1",
    "time limit DUE TO TIME LIMIT is not reached",
    "epoch 1: EADDRINUSE retries 0",
    "ENOSPC handler installed",
    "EMFILE 0",
    "ESTALE 0",
    "job hit NODE_FAIL 0 times",
    "Job prolog failed 0 times on slurm",
    "QOSGrpGRES is explained below",
    "QOSMinGRES 0",
    "InvalidAccount 0",
    "slurm: requested node configuration is not available in the mock",
    "CUDA_ERROR_OUT_OF_MEMORY is mapped to RuntimeError",
    "cudaErrorMemoryAllocation 0",
    "uncorrectable ECC errors: 0",
    "retries because of RendezvousTimeoutError: 0",
    "ncclRemoteError count 0",
    "GatedRepoError is handled",
    "LocalEntryNotFoundError is handled",
    "test: socket timed out on send/recv operation: skipped",
    "port 29500 is already in use by the proxy, as planned",
    "orted: command not found is ignored",
    "stale file handle tests passed",
    "double free or corruption check enabled",
    "can't start new thread: 0",
    "using pthread_create failed fallback",
    "invalid device ordinal: tested",
    "invalid device function: tested",
    "CUDA out of memory: handled by the search for the batch size",
    "searching batch size: CUDA out of memory is caught",
    "Host key verification failed is retried",
    "module: command not found is ignored",
    "checking: syntax error: unexpected end of file",
    "Loss is nan, stopping training if it persists",
    "memory limit is being killed",
    "RETRY_EXC count 0",
    "mismatched collectives: 0",
]
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
