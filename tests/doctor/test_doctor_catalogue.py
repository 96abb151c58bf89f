"""The catalogue of causes: consistent, fast on any input, and right about recorded logs and prose.

``python tests/doctor/test_doctor_catalogue.py`` writes the table of causes in docs/doctor.md.
"""

import re
from collections import Counter
from itertools import product
from pathlib import Path

from bench.doctor import diagnose, diagnose_text
from bench.doctor.catalogue import FAILURE, HINT, KINDS, SLOW, Signature, load
from bench.doctor.diagnosis import IDLE_CORES, OF_RUN, ONE_NODE
from bench.doctor.scan import Scan
from ddp_scaling_bench.finding import RECORDED

SIGNATURES = load().signatures


def identifier(signature: Signature) -> str:
    return f"{signature.name}-{signature.kind}"


def test_a_signature_matches_its_own_example_which_is_diagnosed_as_its_cause() -> None:
    for signature in SIGNATURES:
        scan = Scan("example", load()).read(signature.example)
        assert signature in [hit.signature for hit in scan.hits], identifier(signature)
        # A hint needs a message about other processes or the end of the job.
        end = "\nsrun: error: n1: task 0: Exited with exit code 1\n" * (signature.kind == HINT)
        facts = frozenset({IDLE_CORES, *signature.needs})
        found = diagnose({"-": signature.example + end}, facts=facts).causes
        assert not signature.is_cause or signature.name in [one.cause for one in found], identifier(signature)


def test_localhost_as_the_master_is_right_on_one_node() -> None:
    line = ["The client socket has timed out after 60000ms while trying to connect to (127.0.0.1, 29500)."]
    causes = [
        diagnose({"job.err": line}, facts=facts).first_failure
        for facts in (frozenset(), frozenset({ONE_NODE}))
    ]
    assert [cause and cause.cause for cause in causes] == ["loopback-master-addr", "rendezvous-timeout"]


def test_the_catalogue_is_consistent() -> None:
    shown = [signature for signature in SIGNATURES if signature.is_cause]
    assert {signature.name for signature in shown} == {*load().causes}
    assert {signature.kind for signature in SIGNATURES} == set(KINDS)
    assert {signature.kind for signature in SIGNATURES if signature.severity == SLOW} == {KINDS[0]}
    for name, info in load().causes.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name)
        assert info.explanation.endswith(".")
        assert info.remedy.endswith((".", ")"))
    # Conditions name existing facts and causes, and no pattern has an unbounded repetition of a broad class.
    names = {signature.name for signature in SIGNATURES} | {IDLE_CORES, OF_RUN, ONE_NODE, *RECORDED}
    classes = re.compile(r"\[(?!\^)(?:\\.|[^\]])*\]")
    unbounded = re.compile(r"(?<!\\)\.[*+]|\\[SDW][*+]|\[\^[^\]]*\][*+]")
    for signature in SIGNATURES:
        assert set(signature.needs) | set(signature.unless) <= names, signature.name
        for pattern in (signature.pattern, signature.near):
            bare = classes.sub("", pattern.text) if pattern else ""
            assert not unbounded.search(bare), (signature.name, bare)


#: Words of a remedy for somebody who wrote a batch script.
OF_A_SCRIPT = re.compile(
    r"batch script|#SBATCH|#!/bin|\bsbatch\b|--(?:ntasks|time|account|constraint|exclude|nproc)=|\bset -e|"
    r"\bexport [A-Z]|SLURM_JOB_ID"
)


def test_a_remedy_for_a_run_of_bench_can_be_followed_in_a_matrix() -> None:
    page = Path(__file__).parents[2] / "docs" / "matrix.md"
    fields = set(re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE))
    placeholders = set("run_dir backend master_addr master_port nodes tasks_per_node world_size seed".split())
    for name, info in load().causes.items():
        told = info.of_run or info
        if name != "sbatch-argument-order":  # bench gives sbatch no options after the script's name
            own = [] if info.of_run else [one.remedy for one in SIGNATURES if one.name == name]
            assert not OF_A_SCRIPT.search("\n".join([told.remedy, *own])), name
        if info.of_run:
            assert set(re.findall(r"`([a-z_]+)(?:: [^`]*)?`", told.remedy)) <= fields, name
        assert {*re.findall(r"\{([a-z_]+)\}", told.remedy)} <= placeholders, name


def test_a_failed_set_up_line_of_a_run_is_explained_in_terms_of_the_matrix() -> None:
    line = "/var/spool/slurmd/job8/slurm_script: line 9: module: command not found"
    own, of_run = (
        diagnose({"job.err": line}, facts=facts).causes[0] for facts in (frozenset(), frozenset({OF_RUN}))
    )
    assert (own.cause, of_run.cause) == ("module-missing", "module-missing")
    assert "#!/bin/bash -l" in own.remedy
    assert "The run ended at this line of `setup`." in of_run.explanation
    assert "`setup` below `cluster`" in of_run.remedy


FIXTURES = sorted(Path(__file__).parent.glob("fixtures/*.txt"))


def read(path: Path) -> tuple[dict[str, str], bytes]:
    """Return what is expected (keys expect, evidence, slow), and the log."""
    content = path.read_bytes()
    header = {"evidence": "", "slow": ""}
    while content.startswith((b"# expect: ", b"# evidence: ", b"# slow: ")):
        line, _, content = content.partition(b"\n")
        key, _, value = line.decode().removeprefix("# ").partition(": ")
        header[key] = value
    return header, content


def test_the_first_cause_and_its_evidence_are_found_in_at_least_two_logs_per_cause() -> None:
    logs: Counter[str] = Counter()
    for path in FIXTURES:
        header, log = read(path)
        logs.update((header["expect"], *header["slow"].split()))
        found = diagnose({path.name: log})
        first = found.first_failure
        assert (first.cause if first else "none") == header["expect"], path.stem
        if first:
            assert first.evidence.startswith(header["evidence"]), path.stem
            assert header["evidence"] in log.decode().split("\n")[(first.line or 0) - 1], path.stem
        slow = [cause.cause for cause in found.causes if cause.severity == SLOW]
        assert slow == header["slow"].split(), path.stem

    # A log cannot show these facts: tests/doctor/test_doctor_diagnosis.py.
    signatures = (one for one in load().signatures if not {IDLE_CORES, OF_RUN} & {*one.needs})
    shown = {signature.name for signature in signatures if signature.is_cause}
    assert {name: logs[name] for name in shown if logs[name] < 2} == {}


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


def test_words_that_any_program_can_print_are_no_cause():
    assert {line for line in PROSE if diagnose_text(f"{line}\n").causes} == set()


def test_a_message_is_found_below_a_time_a_rank_and_a_level():
    for prefix, (message, cause) in product(PREFIXES, MESSAGES.items()):
        first = diagnose_text(f"{prefix}{message}\n").first_failure
        assert (first and first.cause) == cause, prefix + message


PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
BEGIN = "<!-- causes: written by python tests/doctor/test_doctor_catalogue.py -->"
END = "<!-- end of causes -->"


def row(name: str) -> str:
    severity = next(one.severity for one in load().signatures if one.name == name)
    note = f" (severity `{severity}`)" if severity != FAILURE else ""
    return f"| `{name}`{note} | {load().causes[name].explanation.replace('|', '&#124;')} |"


def updated_page(page: str) -> str:
    before, rest = page.split(BEGIN)
    rows = "\n".join(["| cause | meaning |", "|---|---|", *map(row, load().causes)])
    return f"{before}{BEGIN}\n\n{rows}\n\n{END}{rest.split(END)[1]}"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert updated_page(page) == page, f"run: python {Path(__file__)}"


if __name__ == "__main__":
    PAGE.write_text(updated_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
