"""Output and exit code of ``bench lint``, and the page of its rules."""

import io
import json

import pytest

from bench.commands.lint import lint_command
from ddp_scaling_bench.errors import BenchError
from tests.common import raised

BAD = (
    "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks_per_node=4\n#SBATCH --gpus-per-node=4\n"
    "export NODES=$SLURM_NNODE\npython train.py\n"
)
GOOD = "#!/bin/bash\n#SBATCH --nodes=1\npython train.py\n"


@pytest.fixture
def bad(tmp_path):
    path = tmp_path / "a'; echo b é.sbatch"
    path.write_text(BAD, encoding="utf-8")
    return path


def test_findings_are_printed_as_text_and_json_and_an_error_exits_with_1(bad, capsys):
    assert lint_command([str(bad)], as_json=False) == 1
    printed = capsys.readouterr()
    assert printed.out == (
        f"{bad}:3: error: sbatch refuses `--ntasks_per_node=4`: sbatch has no option --ntasks_per_node"
        " [malformed-directive]\n    write --ntasks-per-node\n"
        f"{bad}:5: warning: Slurm does not set $SLURM_NNODE, so it is empty; did you mean $SLURM_NNODES?"
        " [undefined-variable]\n    use $SLURM_NNODES\n"
        f"{bad}:6: error: only the first node runs this command: 1 of all processes will start [missing-srun]\n"
        "    put srun before the command: it starts one process per task\n"
    )
    assert printed.err == "1 script: 2 errors, 1 warning\n"
    assert lint_command([str(bad)], as_json=True) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert list(findings[0]) == ["path", "line", "rule", "severity", "message", "remedy"]
    found = [(finding["line"], finding["rule"], finding["severity"]) for finding in findings]
    assert found[1:] == [(5, "undefined-variable", "warning"), (6, "missing-srun", "error")]


def test_a_correct_script_exits_with_0(tmp_path, capsys):
    path = tmp_path / "good.sbatch"
    path.write_text(GOOD, encoding="utf-8")
    assert lint_command([str(path), str(path)], as_json=False) == 0
    assert capsys.readouterr() == ("", "1 script: no findings\n")
    assert lint_command([str(path)], as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"findings": []}


def test_standard_input_may_contain_any_bytes(monkeypatch, capsys):
    stdin = io.TextIOWrapper(io.BytesIO(b"#!/bin/bash\r\n#SBATCH --nodes=1\r\n\xff\xfe\0\r\n"))
    monkeypatch.setattr("sys.stdin", stdin)
    assert lint_command(["-"], as_json=False) == 1
    assert capsys.readouterr().out.startswith(
        "-:1: error: sbatch refuses the script: its lines end with CR LF"
    )


def test_a_path_that_is_not_a_script_is_bad_input(tmp_path):
    remedy = "give the path of a sbatch script, or - for stdin"
    for name, message in (
        ("none.sbatch", f": the script does not exist; {remedy}"),
        ("", f": the script is a directory; {remedy}"),
        ("my.yaml", " is a YAML file, not a script; give a script, such as one that `bench plan` wrote"),
        ("train.py", " is a Python program, not a sbatch script; give the script that starts it"),
    ):
        path = tmp_path / name
        if path.suffix == ".py":
            path.write_text("import torch\n")
        assert raised(BenchError, lint_command, [str(path)], as_json=False) == f"{path}{message}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bytes(range(256)), " is not a text in UTF-8; give a sbatch script, or save it as UTF-8"),
        (
            "#!/bin/bash\n".encode("utf-16"),
            " is not a text in UTF-8; give a sbatch script, or save it as UTF-8",
        ),
    ],
)
def test_a_file_of_another_kind_has_one_message(tmp_path, content, reason):
    path = tmp_path / "slurm-1.out"
    path.write_bytes(content)
    assert raised(BenchError, lint_command, [str(path)], as_json=False) == f"{path}{reason}"


def test_the_findings_of_other_files_are_printed_before_the_error(bad, tmp_path, capsys):
    (tmp_path / "sub.sh").write_text("srun python train.py\n")
    paths = [str(tmp_path / "none"), str(bad), str(tmp_path / "sub.sh"), str(tmp_path / "my.yaml")]
    assert raised(BenchError, lint_command, paths, as_json=False) == (
        f"{tmp_path / 'none'}: the script does not exist; give the path of a sbatch script, or - for stdin\n"
        f"{tmp_path / 'my.yaml'} is a YAML file, not a script; give a script, such as one that `bench plan` wrote"
    )
    printed = capsys.readouterr()
    assert printed.err == "2 scripts: 3 errors, 1 warning\n"
    assert "sub.sh:1: error: sbatch refuses the script: its first line does not start with #!" in printed.out


def test_a_script_of_another_shell_is_named(tmp_path, capsys):
    path = tmp_path / "a.sbatch"
    path.write_text("#!/bin/tcsh\n#SBATCH --nodes=1\nsetenv A b\n")
    assert lint_command([str(path)], as_json=False) == 0
    assert "names no bash, so only its #SBATCH lines are checked" in capsys.readouterr().err


def test_control_characters_of_a_script_are_not_printed(tmp_path, capsys):
    path = tmp_path / "a\x1b[31m.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH --nodes=\x1b7x\x07\u202e\x9b\n", encoding="utf-8")
    assert lint_command([str(path)], as_json=False) == 1
    assert lint_command([str(path)], as_json=True) == 1
    printed = capsys.readouterr().out
    assert "a.sbatch:2: error: sbatch refuses `--nodes=x: allowed" in printed
    assert not set("\x1b\x07\x9b\u202e") & set(printed)
