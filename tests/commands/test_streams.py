"""Nothing that comes from a job, a file or an argument controls the terminal, and broken streams end cleanly."""

import json
import re
import sys
from pathlib import Path

import pytest

from bench.cli import main
from ddp_scaling_bench.text import one_line, printable
from tests.analysis.figures import no_figure
from tests.commands.command_line import bench, on_terminal
from tests.common import run_program
from tests.matrices import command, matrix

ROOT = Path(__file__).resolve().parents[2]
#: A window title, a cleared screen, colours, 8-bit controls, text direction, a carriage return, rich markup.
HOSTILE = "A\x1b]0;title\x07B\x1b[2J\x1b[31mC\x9b5m\x9d0;t\x9cD\u202e\u2066\u200b\x85\x00\r[bold]E[/nope]\x7f"
#: The same text without the characters at which logs are split.
OF_ONE_LINE = HOSTILE.replace("\x85", "").replace("\r", "")
SHOWN = "ABCD[bold]E[/nope]"
FULL = "error: standard output: cannot be written: No space left on device; redirect it\n"
NO_INPUT = "error: standard input is closed; give a file instead of -, or redirect it\n"
CLOSED = "error: standard output: cannot be written: it is closed; redirect it\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOSTILE, SHOWN),
        ("plain\ttext\nof two lines", "plain\ttext\nof two lines"),
        ("é 漢字 😀 1\u202f000\xa0kB", "é 漢字 😀 1\u202f000\xa0kB"),
        ("\x1bPdata\x1b\\after \x1b(B\x1bc!", "after !"),
        ("\udcff\u2028\ufeff", ""),
        ("\x1b[" * 50_000, ""),
        ("\x9d" * 50_000 + "x", "x"),
    ],
)
def test_a_terminal_gets_no_control_characters(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert one_line("a\r\nb\nc\x1b[2Jd\re") == "a  b cd e"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a study whose run has failed with a hostile reason, and hostile logs."""
    folder = tmp_path_factory.mktemp("streams")
    axes, workload = {"tasks_per_node": [1], "launcher": ["own"]}, command(["python", "train.py"])
    (folder / "m.yaml").write_text(matrix("m", axes=axes, workload=workload))
    (folder / "train.py").write_text(f"raise SystemExit('RuntimeError: ' + {OF_ONE_LINE!r})")
    with no_figure():
        assert bench("run", "m.yaml", cwd=folder).returncode == 1
    return folder


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.parametrize(
    "words",
    [
        *("status m", "status m --watch", "verify m", "doctor m", "report m", "advise m --samples 1k"),
        *("compare m m", "cancel m", "status m --json"),
    ],
)
def test_a_hostile_reason_does_not_reach_the_terminal(study: Path, words: str) -> None:
    ended = bench(*words.split(), cwd=study)
    for stream in (ended.stdout, ended.stderr):
        assert all(letter.isprintable() or letter == "\n" for letter in stream)
    if words in ("status m", "verify m", "doctor m"):
        assert SHOWN in ended.stdout
    if words == "status m --json":
        assert "\x1b]0;title\x07" in json.loads(ended.stdout)["runs"][0]["reason"]


@pytest.mark.parametrize(
    "words",
    [
        *([verb, HOSTILE.replace("\0", "")] for verb in ("status", "plan", "lint", "doctor", "preflight")),
        ["report", "m", "--baseline", HOSTILE],
        [HOSTILE],
        [f"--{HOSTILE}"],
    ],
)
def test_an_argument_that_an_error_repeats_does_not_reach_the_terminal(study: Path, words: list[str]) -> None:
    ended = bench(*words, cwd=study)
    assert ended.returncode == 2
    assert all(letter.isprintable() or letter == "\n" for letter in ended.stderr + ended.stdout)


def test_the_table_on_a_terminal_shows_markup_as_text(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("status", "m", "--results", str(study / "results"))
    shown = on_terminal(*words, columns=200, monkeypatch=monkeypatch)
    assert "ABCD[bold]E" in shown
    # Only the colours and weights of rich itself remain.
    assert not re.search(r"\x1b(?!\[[0-9;]*m)|[\x07\x80-\x9f\u202e\u2066\u200b]", shown)


@pytest.mark.parametrize(
    ("shell", "code", "printed", "said"),
    [
        ("bench status m >&-", 2, "", CLOSED),
        ("bench status m > /dev/full", 2, "", FULL),
        ("bench status m <&- >&- 2>&-", 2, "", ""),
        ("bench doctor - <&-", 2, "", NO_INPUT),
        ("bench status m --json | sleep 0; exit ${PIPESTATUS[0]}", 141, "", ""),
    ],
)
def test_a_broken_stream_ends_cleanly(study: Path, shell: str, code: int, printed: str, said: str) -> None:
    function = f'bench() {{ "{sys.executable}" -P -m ddp_scaling_bench "$@"; }}\n'
    ended = run_program(["bash", "-c", function + shell], cwd=study, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, printed, said)


def test_the_traceback_of_an_unexpected_exception_has_no_control_characters(monkeypatch, capfd):
    def broken(**_: object) -> None:
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr("bench.cli.open_streams", lambda: None)
    monkeypatch.setattr("bench.cli.app", broken)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    shown = capfd.readouterr().err
    assert shown.startswith("Traceback (most recent call last):\n")
    assert f"RuntimeError: {SHOWN}\n" in shown
