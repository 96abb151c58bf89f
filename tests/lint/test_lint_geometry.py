"""Nodes, tasks and GPUs are derived from options like Slurm does it."""

from __future__ import annotations

import shlex

import pytest

from bench.lint.geometry import Geometry
from bench.lint.options import sbatch_options
from bench.lint.values import plain


def geometry(text: str) -> Geometry:
    found, _ = sbatch_options().read([plain(word, 1) for word in shlex.split(text)])
    return Geometry({option.name: option for option in found})


@pytest.mark.parametrize(
    ("options", "nodes", "tasks_per_node", "gpus_per_node"),
    [
        ("", 1, 1, 0),
        ("--nodes=4", 4, 1, 0),
        ("--nodes=4 --ntasks-per-node=4 --gres=gpu:4", 4, 4, 4),
        ("-N 4 -n 16", 4, 4, 0),
        ("-N 3 -n 16", 3, None, 0),
        ("--ntasks=4 --ntasks-per-node=2", 2, 2, 0),
        ("--ntasks=5 --ntasks-per-node=2", 3, None, 0),
        ("--ntasks=2 --ntasks-per-node=4", 1, None, 0),
        ("--ntasks=4", None, None, 0),
        ("--ntasks=1", 1, 1, 0),
        ("--nodes=2-4", None, 1, 0),
        ("--nodes=2 --gpus=8", 2, 1, 4),
        ("--nodes=2 --gpus=7", 2, 1, None),
        ("--gpus=8 --gpus-per-node=4", 1, 1, 4),
        ("--nodes=2 --ntasks-per-node=4 --gpus-per-task=1", 2, 4, 4),
        ("--nodes=32 --gpus-per-node=8 --gpus-per-task=1", 32, 8, 8),
        ("--nodes=2 --gpus-per-node=a100:4 --ntasks-per-gpu=1", 2, None, 4),
        ("--nodelist=n[1-3]", 3, 1, 0),
        ("--nodes=2 --ntasks-per-node=4 --ntasks=4", 2, None, 0),
        ("--nodes=2 --gres=lscratch:10", 2, 1, 0),
        ("--nodes=2 --gres=gpu", 2, 1, 1),
        ("--nodes=2 --ntasks-per-socket=2", 2, None, 0),
        ("--nodes=<n> --ntasks-per-node=4", None, 4, 0),
    ],
)
def test_the_options_of_a_job_determine_nodes_tasks_and_gpus(
    options: str, nodes: int | None, tasks_per_node: int | None, gpus_per_node: int | None
) -> None:
    job = geometry(options)
    assert (job.nodes, job.tasks_per_node, job.gpus_per_node) == (nodes, tasks_per_node, gpus_per_node)


@pytest.mark.parametrize(
    ("job", "srun", "nodes", "tasks_per_node", "gpus_per_node"),
    [
        ("--nodes=4 --ntasks-per-node=4 --gres=gpu:4", "", 4, 4, 4),
        ("--nodes=4 --ntasks-per-node=4 --gres=gpu:4", "--nodes=1 --ntasks=1", 1, 1, 4),
        ("--nodes=4 --ntasks-per-node=4 --gres=gpu:4", "-n 1", 1, 1, 4),
        ("--nodes=2 --ntasks-per-node=8 --gres=gpu:8", "-N 2 --ntasks-per-node=1", 2, 1, 8),
        ("--nodes=2 --ntasks-per-node=8", "--ntasks=2 --ntasks-per-node=1", 2, 1, 0),
        ("--nodes=2 --ntasks-per-node=4", "--ntasks=8", 2, 4, 0),
        ("--nodes=2 --gres=gpu:8", "--gres=gpu:2", 2, 1, 2),
        ("--nodes=4", "-w n[1-2]", 2, 1, 0),
    ],
)
def test_a_step_inherits_the_options_of_the_job_and_overrides_them(
    job: str, srun: str, nodes: int, tasks_per_node: int, gpus_per_node: int
) -> None:
    step = geometry(job).step(geometry(srun).options.values())
    assert (step.nodes, step.tasks_per_node, step.gpus_per_node) == (nodes, tasks_per_node, gpus_per_node)


@pytest.mark.parametrize(
    ("options", "isolates"),
    [("--gpus-per-node=4", False), ("--gpus-per-task=1", True), ("--gpu-bind=none", True)],
)
def test_some_options_possibly_hide_gpus_from_tasks(options: str, isolates: bool) -> None:
    assert geometry(options).isolates_gpus == isolates
