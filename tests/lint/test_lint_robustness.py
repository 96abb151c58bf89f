"""Any text is linted without a traceback and in a time proportional to its length."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lint import lint_script
from bench.lint.script import ANALYSED_SIZE

FIXTURES = Path(__file__).parent / "fixtures"
TEXTS = [path.read_bytes().decode("utf-8") for path in sorted(FIXTURES.glob("*/*.sbatch"))]
PIECES = """
" ' ( ) { } $ ` \\ fi done ; & | < > ${ $(( $( <<EOF [[ ]] * = case esac - -- if then srun for do && || ;; 10# \x00 \r
\ue000 \ue001 é \ufffd #SBATCH #SBATCH\x20--nodes= \\\n \n <a> {{ }} @( $' $" $[ (( )) !
""".split(" ")
HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n"


def mutated(draw: random.Random) -> str:
    text = draw.choice(TEXTS)
    for _ in range(draw.randrange(1, 8)):
        place = draw.randrange(len(text) + 1)
        cut = draw.choice([0, 0, 1, draw.randrange(40)])
        text = text[:place] + draw.choice(PIECES) + text[place + cut :]
        if draw.random() < 0.05:
            text += draw.choice(TEXTS)
    return text


def check(text: str) -> None:
    lines = text.count("\n") + 1
    for finding in lint_script(text, path="x"):
        assert 1 <= finding.line <= lines
        assert finding.message
        assert finding.remedy
        assert "\ue000" not in finding.message + finding.remedy


@pytest.mark.slow
def test_a_thousand_mutated_scripts_are_linted_without_a_traceback() -> None:
    draw = random.Random(2024)
    for _ in range(1_000):
        check(mutated(draw))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=400))
def test_any_text_is_linted(text: str) -> None:
    check(text)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_linted(data: bytes) -> None:
    check("#!/bin/bash\n" + data.decode("utf-8", errors="replace"))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from([*PIECES, " ", "\n", "a", "srun ", "torchrun ", "--node_rank=", "$SLURM_NODEID"])
    )
)
def test_any_sequence_of_shell_pieces_is_linted(pieces: list[str]) -> None:
    check(HEAD + "".join(pieces))


SIZE = 60_000
PATTERNS = {
    "one word": "x" * SIZE,
    "blanks": " " * SIZE,
    "quotes": '"' * SIZE,
    "single quotes": "'" * (SIZE + 1),
    "dollars": "$" * SIZE,
    "arithmetic": "$((" * (SIZE // 3),
    "substitutions": "$(" * (SIZE // 2),
    "braces": "${" * (SIZE // 2),
    "backquotes": "`" * SIZE,
    "backslashes": "\\" * SIZE,
    "doubling": "A=$A$A\n" * (SIZE // 8) + "srun python $A\n",
    "appending": "A+=abcdefgh\n" * (SIZE // 12),
    "words of an array": "A=(" + "a " * (SIZE // 2) + ")\nsrun ${A[@]}\n",
    "options of srun": "srun " + "--foo " * (SIZE // 6),
    "options of sbatch": "#SBATCH " + "--nodes=2 " * (SIZE // 10),
    "addresses": "export MASTER_ADDR=localhost\n" * (SIZE // 29),
    "here-documents": "cat <<EOF\n" * (SIZE // 10),
    "exits": "if a; then\n" + "python train.py\nexit 1\n" * (SIZE // 23),
    "ifs": "if a; then\n" * (SIZE // 11),
    "functions that call two": "".join(f"f{i}() {{ f{i + 1}; f{i + 1}; }}\n" for i in range(600)) + "f0\n",
    "hosts": "#SBATCH -w " + "n[1-4000]," * (SIZE // 10),
    "nul": "\0" * SIZE,
    "carriage returns": "\r" * SIZE,
    "placeholders": "<a b c d" * (SIZE // 8),
    "comments": " #" * (SIZE // 2),
    "dates": "P=$(( $(date date date %) + 1 ))\n" * (SIZE // 34),
    "quotes of both kinds": "'\"\n" * (SIZE // 3),
    "subscripts": "${a[" * (SIZE // 4),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_time_is_proportional_to_the_length_of_the_text(name: str) -> None:
    started = time.process_time()
    lint_script(HEAD + PATTERNS[name], path="x")
    assert time.process_time() - started < 5  # quadratic patterns would take longer


def test_a_line_of_ten_megabytes_and_a_file_of_fifty_are_linted() -> None:
    started = time.process_time()
    (line, _) = lint_script("#!/bin/bash\n" + "x" * 10_000_000 + "\n", path="x")
    assert line.message == (
        "Slurm refuses scripts of more than 4 MiB, unless the site raised max_script_size"
    )
    found = lint_script(HEAD + "python train.py\n" * 3_000_000, path="x")
    assert ("missing-srun", 4) in {(finding.rule, finding.line) for finding in found}
    assert time.process_time() - started < 30


def test_a_script_that_is_cut_off_gets_no_syntax_error() -> None:
    text = HEAD + "srun hostname\n: '\n" + "x\n" * ANALYSED_SIZE + "'\n"
    (finding,) = lint_script(text, path="x")
    assert (finding.line, finding.message) == (1, "only the first 512 KiB of this script were checked")
