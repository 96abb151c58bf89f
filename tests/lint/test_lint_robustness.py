"""Any text is linted without a traceback and in a time proportional to its length."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lint import lint_script

FIXTURES = Path(__file__).parent / "fixtures"
TEXTS = [path.read_bytes().decode("utf-8") for path in sorted(FIXTURES.glob("*/*.sbatch"))]
PIECES = """
" ' ( ) { } $ ` \\ fi done ; & | < > ${ $(( $( <<EOF [[ ]] * = case esac - -- if then srun for do && || ;; 10# \x00 \r
\x01 \ue001 é \ufffd #SBATCH #SBATCH\x20--nodes= \\\n \n <a> {{ }} @( $' $" $[ (( )) !
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
        assert "\x01" not in finding.message + finding.remedy


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
    "launchers": "srun torchrun --nnodes=2 train.py\n" * (SIZE // 34),
    "nested loops": "X=1\nfor i in 1; do\n" * (SIZE // 25) + "done\n" * (SIZE // 25),
    "sourced files": "".join(f"V{i}=1\n. x\n" for i in range(SIZE // 10)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_time_is_proportional_to_the_length_of_the_text(name: str) -> None:
    started = time.process_time()
    lint_script(HEAD + PATTERNS[name], path="x")
    assert time.process_time() - started < 30  # quadratic patterns would take longer


def test_a_script_that_slurm_refuses_for_its_size_is_not_analysed() -> None:
    started = time.process_time()
    for text in ("#!/bin/bash\n" + "x" * 10_000_000 + "\n", HEAD + "python train.py\n" * 3_000_000):
        (finding,) = lint_script(text, path="x")
        assert (finding.line, finding.rule) == (1, "malformed-directive")
        assert finding.message == "Slurm refuses scripts of more than 4 MiB (max_script_size)"
    assert time.process_time() - started < 30


def test_nothing_of_a_script_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = tmp_path / "proof"
    start_up = tmp_path / "start-up"
    start_up.write_text(f"touch {proof}\n")
    monkeypatch.setenv("BASH_ENV", str(start_up))
    monkeypatch.setenv("BASH_FUNC_touch%%", f"() {{ /bin/touch {proof}; }}")
    lint_script(f"#!/bin/bash\n$(touch {proof})\n`touch {proof}`\nbash -c 'touch {proof}; fi'\n", path="x")
    assert not proof.exists()
