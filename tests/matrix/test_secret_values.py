"""Values that may be secrets are masked in words, variables and texts; other values are not."""

from __future__ import annotations

import pytest

from bench.matrix.cell import name_of, value_text
from bench.matrix.secret_values import (
    cell_without_secrets,
    mask_text,
    secrets_in,
    without_secret_variables,
    without_secrets,
)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--wandb-key abc train.py", "--wandb-key *** train.py"),
        ("--token=sk-1 --lr=0.1", "--token=*** --lr=0.1"),
        ("HF_TOKEN=abc wandb.api_key=x accessKeyId=1", "HF_TOKEN=*** wandb.api_key=*** accessKeyId=***"),
        ("--password hunter2 --dbpassword=x", "--password *** --dbpassword=***"),
        ("--auth-tokens a,b --keys k", "--auth-tokens *** --keys ***"),
        ("--key --verbose", "--key --verbose"),
        (
            "--auth a --author me DB_PASS=x --bypass y CREDENTIALS=z",
            "--auth *** --author me DB_PASS=*** --bypass y CREDENTIALS=***",
        ),
        ("--max_tokens 4096 n_tokens=64k", "--max_tokens 4096 n_tokens=64k"),
        ("--tokenizer gpt2 TOKENIZERS_PARALLELISM=false --keyframes=3", None),
        ("https://user:pw@host/x https://host/x@1", "https://***@host/x https://host/x@1"),
    ],
)
def test_values_of_private_names_are_masked_in_a_command(words, shown):
    assert without_secrets(words.split()) == (shown or words).split()


def test_values_within_a_word_of_shell_code_are_masked():
    words = ["bash", "-c", "export WANDB_API_KEY='a b'; python train.py --token abc --lr 1"]
    assert without_secrets(words)[2] == "export WANDB_API_KEY=***; python train.py --token *** --lr 1"


def test_variables_with_private_names_are_masked():
    env = {"WANDB_API_KEY": "abc", "NCCL_DEBUG": "INFO", "TRACKING": "http://u:p@host"}
    assert without_secret_variables(env) == {
        "WANDB_API_KEY": "***",
        "NCCL_DEBUG": "INFO",
        "TRACKING": "http://***@host",
    }


def test_no_secret_of_a_matrix_remains_in_its_text():
    text = """\
cluster:
  env: {WANDB_API_KEY: "abc def", NCCL_DEBUG: INFO}
  setup: [export HF_TOKEN=hf-1]
workload:
  steps_per_epoch: 50
  command:
    - train.py
    - --token
    - s3cret
    - "--api_key"
    - |-
      in-a-block
"""
    secrets = secrets_in(["train.py", "--token", "s3cret", "--api_key", "in-a-block"], {})
    shown = mask_text(text, secrets)
    for secret in ("abc def", "hf-1", "s3cret", "in-a-block"):
        assert secret not in shown
    assert "steps_per_epoch: 50" in shown
    assert "NCCL_DEBUG: INFO" in shown


def test_a_command_is_shown_as_typed_and_a_cells_name_contains_no_secret():
    words = ["python", "train.py", "--name", "a b", "--batch", "{per_gpu_batch}", "--token", "s3cret"]
    assert value_text(words) == "python train.py --name 'a b' --batch {per_gpu_batch} --token ***"
    assert value_text([4, 2]) == "4+2"
    names = {name_of(["n1"], {"command": ["x", "--token", secret]}) for secret in ("s3cret", "other")}
    assert len(names) == 2, "commands that differ in a secret are different cells"
    assert not any("s3cret" in name or "other" in name for name in names)
    assert name_of([], {"command": ["python", "train.py"]}) == "command.python+train.py"


def test_a_cell_without_secrets_keeps_its_other_settings():
    cell = {
        "nodes": 2,
        "env": {"HF_TOKEN": "abc", "NCCL_DEBUG": "INFO"},
        "workload": {"device": "cpu", "command": ["x", "--api-key", "abc"]},
        "swept": {"command": ["x", "--api-key", "abc"], "lr": 1},
    }
    assert cell_without_secrets(cell) == {
        "nodes": 2,
        "env": {"HF_TOKEN": "***", "NCCL_DEBUG": "INFO"},
        "workload": {"device": "cpu", "command": ["x", "--api-key", "***"]},
        "swept": {"command": ["x", "--api-key", "***"], "lr": 1},
    }
    assert cell["env"]["HF_TOKEN"] == "abc"
