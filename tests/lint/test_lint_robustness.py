"""Any text is linted without a traceback, and nothing of it is executed."""

import random
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


def test_mutated_scripts_are_linted_without_a_traceback() -> None:
    draw = random.Random(2024)
    for _ in range(100):
        check(mutated(draw))


WORDS = [*PIECES, " ", "\n", "a", "srun ", "torchrun ", "--node_rank=", "$SLURM_NODEID"]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=400) | st.lists(st.sampled_from(WORDS)).map(lambda words: HEAD + "".join(words)))
def test_any_text_is_linted(text: str) -> None:
    check(text)


SIZE = 10_000
PATTERNS = {
    "dollars": "$" * SIZE,
    "substitutions": "$(" * (SIZE // 2),
    "doubling": "A=$A$A\n" * (SIZE // 8) + "srun python $A\n",
    "options of sbatch": "#SBATCH " + "--nodes=2 " * (SIZE // 10),
    "ifs": "if a; then\n" * (SIZE // 11),
    "functions that call two": "".join(f"f{i}() {{ f{i + 1}; f{i + 1}; }}\n" for i in range(300)) + "f0\n",
    "launchers": "srun torchrun --nnodes=2 train.py\n" * (SIZE // 34),
    "nested loops": "X=1\nfor i in 1; do\n" * (SIZE // 25) + "done\n" * (SIZE // 25),
    "sourced files": "".join(f"V{i}=1\n. x\n" for i in range(SIZE // 10)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_long_patterns_are_linted(name: str) -> None:
    check(HEAD + PATTERNS[name])  # in quadratic time, the test would not end


def test_a_script_that_slurm_refuses_for_its_size_is_not_analysed() -> None:
    for text in ("#!/bin/bash\n" + "x" * 2**22 + "\n", HEAD + "python train.py\n" * 2**18):
        (finding,) = lint_script(text, path="x")
        assert (finding.line, finding.rule) == (1, "malformed-directive")
        assert finding.message == "Slurm refuses scripts of more than 4 MiB (max_script_size)"


def test_nothing_of_a_script_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = tmp_path / "proof"
    start_up = tmp_path / "start-up"
    start_up.write_text(f"touch {proof}\n")
    monkeypatch.setenv("BASH_ENV", str(start_up))
    monkeypatch.setenv("BASH_FUNC_touch%%", f"() {{ /bin/touch {proof}; }}")
    lint_script(f"#!/bin/bash\n$(touch {proof})\n`touch {proof}`\nbash -c 'touch {proof}; fi'\n", path="x")
    assert not proof.exists()
