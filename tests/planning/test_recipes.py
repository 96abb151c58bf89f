"""The recipes in docs/clusters.md plan, and name their sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.plan import Plan, make_plan

TEXT = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
SECTION = TEXT[TEXT.index("\n## Recipes\n") :].split("\n## ")[1]
RECIPES = dict(part.split("\n", 1) for part in SECTION.split("\n### ")[1:])


def plan_of(folder: Path, name: str) -> Plan:
    (matrix,) = re.findall(r"^```yaml\n(.*?)^```$", RECIPES[name], re.MULTILINE | re.DOTALL)
    (folder / "recipe.yaml").write_text(matrix, encoding="utf-8")
    return make_plan(folder / "recipe.yaml")


def test_there_is_a_recipe_for_each_cluster():
    expected = ["LUMI-G", "Frontier", "JUWELS Booster", "Perlmutter", "A cluster with two sockets per node"]
    assert list(RECIPES) == expected
    assert "**not run on these systems**" in SECTION


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_plans_without_warnings_about_its_keys(tmp_path, name):
    plan = plan_of(tmp_path, name)
    assert not [warning for warning in plan.warnings if "recipe.yaml:" in warning]


def test_the_masks_of_lumi_are_the_usable_cores_beside_each_gpu(tmp_path):
    # The first core of the L3 region beside GPU 0, 1, ..., which is reserved.
    first = [48, 56, 16, 24, 0, 8, 32, 40]
    (option,) = plan_of(tmp_path, "LUMI-G").matrix.cluster.srun_options
    masks = option.removeprefix("--cpu-bind=mask_cpu:").split(",")
    assert [int(mask, 16) for mask in masks] == [sum(1 << core + i for i in range(1, 8)) for core in first]
