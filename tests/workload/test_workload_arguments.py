"""The command line says what the options say, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.matrix.workload import WorkloadOptions, to_arguments
from bench.workload.session import parse_arguments

HEAD = ["--run-dir", "a run", "--backend", "gloo", "--per-gpu-batch", "22"]

VALUES = {
    "device": st.sampled_from(["cuda", "cpu"]),
    "model": st.sampled_from(["mlp", "convnet", "resnet50", "transformer", "traffic"]),
    "strategy": st.sampled_from(["ddp", "ddp-static", "zero1", "fsdp", "fsdp-keep", "hsdp", "none"]),
    "parameters": st.none() | st.integers(1_000, 10**12),
    "seq_len": st.integers(2, 1_000_000),
    "image_size": st.integers(32, 4096),
    "data": st.text(min_size=1),
    "steps_per_epoch": st.integers(1, 10**7),
    "epochs": st.integers(1, 10**5),
    "warmup_steps": st.integers(3, 10**6),
    "attribution_steps": st.integers(0, 10**5),
    "probe_steps": st.integers(0, 10**5),
    "trace_steps": st.integers(0, 1000),
    "sweep_time": st.floats(0, 3600),
    "sweep_max_mb": st.none() | st.floats(0.004, 16_384),
    "val_steps": st.integers(0, 10**6),
    "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
    "memory_format": st.sampled_from(["contiguous", "channels_last"]),
    "optimizer": st.sampled_from(["sgd", "adam", "adamw"]),
    "learning_rate": st.floats(0, 1e3, exclude_min=True, exclude_max=True),
    "grad_accum": st.integers(1, 10**9),
    "bucket_cap_mb": st.floats(0, 10_000, exclude_min=True),
    "comm_dtype": st.none() | st.sampled_from(["fp32", "bf16", "fp16"]),
    "comm_hook": st.sampled_from(["none", "fp16", "bf16"]),
    "fsdp_wrap": st.sampled_from(["block", "root"]),
    "compile": st.booleans(),
    "activation_checkpointing": st.booleans(),
    "checkpoint": st.booleans(),
    "num_workers": st.integers(0, 1024),
    "pin_memory": st.booleans(),
    "seed": st.integers(0, 2**31 - 1),
    "join_timeout": st.integers(1, 86_400),
}


def test_the_strategies_cover_every_option():
    assert set(VALUES) == set(WorkloadOptions.model_fields)


@given(st.fixed_dictionaries({}, optional=VALUES))
@settings(max_examples=300, deadline=None)
def test_every_option_survives_the_way_to_the_job(values):
    options = WorkloadOptions(**values)
    words = to_arguments(options.model_dump())
    assert parse_arguments([*HEAD, *words]).options == options


def test_what_people_write_is_read():
    words = ["--parameters", "1.5B", "--join-timeout", "5m", "--compile", "True", "--data=--odd"]
    options = parse_arguments([*HEAD, *words]).options
    assert (options.parameters, options.join_timeout, options.compile) == (1_500_000_000, 300, True)
    assert options.data == "--odd"


def test_help_names_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    assert not caught.value.code
    text = capsys.readouterr().out
    for name in WorkloadOptions.model_fields:
        assert f"--{name.replace('_', '-')} VALUE" in text
