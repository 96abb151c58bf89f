"""Values that may be secrets are masked in words, variables and texts; other values are not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.errors import InputError
from bench.matrix.cell import name_of, value_text
from bench.matrix.document import mask_yaml, masked_lines
from bench.matrix.expansion import expand
from bench.matrix.load import load_matrix, site_schema
from bench.matrix.schema import json_schema
from bench.secret_values import (
    NAMES,
    cell_without_secrets,
    is_private,
    mask_text,
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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("SSHPASS=x GH_PAT=y BEARER=z COOKIE=c", "SSHPASS=*** GH_PAT=*** BEARER=*** COOKIE=***"),
        ("login failed: Pwd=hunter2;Server=x failed", "login failed: Pwd=*** failed"),
        ("cannot clone https://u:pass@h/x", "cannot clone https://***@h/x"),
        (
            "cannot clone https://u:p@ss@h/x and https://h/y@2",
            "cannot clone https://***@h/x and https://h/y@2",
        ),
        ("amqp://u:a/b?c@h/x and http://h:80/x@2", "amqp://***@h/x and http://h:80/x@2"),
        ("Authorization: Bearer abc.def refused", "Authorization: *** refused"),
        ("X-Auth-Token: abc", "X-Auth-Token: ***"),
        ("{'AWS_ACCESS_KEY_ID': 'A B', 'PGPASSWORD': 'x'}", "{'AWS_ACCESS_KEY_ID': ***, 'PGPASSWORD': ***}"),
        ("password: hunter2, passphrase: x", "password: *** passphrase: ***"),
        ("GET https://h/x?token=abc&n=1 failed", "GET https://h/x?token=*** failed"),
        ("MYSQL_PWD=x my_jwt=y SLACK_WEBHOOK_URL=z", "MYSQL_PWD=*** my_jwt=*** SLACK_WEBHOOK_URL=***"),
        # Sentences, and names that only look similar, stay as they are.
        ("KeyError: 'lr'", "KeyError: 'lr'"),
        ("Missing key(s) in state_dict: lr", "Missing key(s) in state_dict: lr"),
        ("token_embedding.weight: copying a param", "token_embedding.weight: copying a param"),
        ("not a mapping (key: value)", "not a mapping (key: value)"),
        ("PATH=/bin pattern=x bypass=1 author: me", "PATH=/bin pattern=x bypass=1 author: me"),
    ],
)
def test_secrets_in_messages_are_masked(text, shown):
    assert mask_text(text) == shown
    assert mask_text(shown) == shown


def test_every_word_of_the_list_of_names_masks_a_variable_and_is_documented():
    page = (Path(__file__).parents[2] / "docs/recorder.md").read_text(encoding="utf-8")
    for word in " ".join(NAMES).split():
        for name in (word, word.upper(), f"my_{word}", f"MY_{word.upper()}"):
            assert without_secret_variables({name: "hunter2"}) == {name: "***"}
        assert f"`{word}`" in page


def test_no_key_of_a_matrix_is_the_name_of_a_secret():
    def names(schema):
        for part in schema.values() if isinstance(schema, dict) else schema:
            if isinstance(part, dict | list):
                yield from names(part)
        if isinstance(schema, dict):
            yield from schema.get("properties", {})

    assert not [name for name in names([json_schema(), site_schema()]) if is_private(name)]


def test_masking_a_long_text_takes_little_time():
    began = time.process_time()
    for text in ("key " * 50_000, "a.b-c_d" * 100_000, "token=basic " * 20_000, "pass path " * 50_000):
        mask_text(text)
    assert time.process_time() - began < 20  # quadratic time would be minutes


MATRIX = """\
# é 漢字 HF_TOKEN=hidden-1
cluster:
  env: {WANDB_API_KEY: "hid\\x64en-2", NCCL_DEBUG: INFO, "MY_PAT": hidden-3, MAX_TOKENS: 4096, COOKIE: 'hidden''4'}
  setup:
    - export HF_TOKEN=hidden-5  # GH_PAT=hidden-6
    - echo https://u:hidden-7@host/x; echo '*** start ***'
axes: {nodes: [1], env.AUTH_TOKEN: [hidden-8, hidden-9]}   # two
workload:
  command:
    - train.py
    - --token
    - &word hidden-a
    - "--api_key"
    - |-
      hidden-b
      of two lines
    - *word
    - &other hidden-c
    - --key
    - *other
"""


def test_a_masked_matrix_is_valid_yaml_without_secrets_and_names_the_lines_to_complete():
    masked = mask_yaml(MATRIX)
    assert (
        masked
        == """\
# é 漢字 HF_TOKEN=***
cluster:
  env: {WANDB_API_KEY: "***", NCCL_DEBUG: INFO, "MY_PAT": "***", MAX_TOKENS: 4096, COOKIE: "***"}
  setup:
    - "export HF_TOKEN=***"  # GH_PAT=***
    - "echo https://***@host/x; echo '*** start ***'"
axes: {nodes: [1], env.AUTH_TOKEN: ["***", "***"]}   # two
workload:
  command:
    - train.py
    - --token
    - &word "***"
    - "--api_key"
    - "***"
    - *word
    - &other "***"
    - --key
    - *other
"""
    )
    assert masked_lines(masked) == [3, 3, 3, 5, 6, 7, 7, 12, 14, 16]
    assert masked_lines(MATRIX) == []
    assert mask_yaml(masked) == masked
    assert mask_yaml("# only a comment\n") == "# only a comment\n"


def test_a_matrix_without_secrets_is_not_changed():
    for path in [*(Path(__file__).parents[2] / "matrices").glob("*.yaml")]:
        text = path.read_text(encoding="utf-8")
        assert mask_yaml(text) == text


def test_messages_about_a_matrix_do_not_repeat_its_secrets(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(
        "axes: {nodes: [1], env.AUTH_TOKEN: [hidden-1, hidden-1]}\n"
        'cluster: {executor: local, env: {GH_PAT: [hidden-2], SSHPASS: "hidden\\x07-3"}}\n'
        "scaling: [{mode: weak, per_gpu_batch: [2]}]\nworkload: {device: cpu}\n",
        encoding="utf-8",
    )
    with pytest.raises(InputError) as caught:
        matrix, document = load_matrix(path)
        expand(matrix, document)
    assert "hidden" not in str(caught.value)
    assert "GH_PAT" in str(caught.value)
