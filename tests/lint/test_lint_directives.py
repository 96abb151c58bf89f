"""Directives are read the way sbatch reads them; the expected results are those of sbatch 22.05."""

import os
import re
from pathlib import Path

import pytest

from bench.lint.directives import read_header, read_line
from bench.lint.mistakes import Remark
from bench.lint.options import LETTERS, LONG, Option, matches
from tests.cluster.plugin import release_or_skip
from tests.common import run_program

ACCEPTED = """
--nodes=2-4 | -N2 | -N 2 -n 8 | --ntasks-per-node 4 | --tasks-per-node=4 | --time=00:010:00 | --time=INFINITE
--time=-1 | --time=2-4:00 | --time=10 | --time=1-00 | --time 1- | --mem=4g | --mem=64GB | --mem=0 | --nodes=4k
--mail-type=NONE | --mail-type=END,FAIL | --mail-type=end | --mail-type=ALL,TIME_LIMIT_80 | --signal=B:TERM@60
--signal=SIGUSR1@90 | -H | -s | -c4 | --hint=nomultithread | --exclusive | --exclusive=user | --export ALL
--cpus-per-task=4 # x | --cpus-per-task=4#x | --comment "#a b" | --job-name="my job" | -p 'a'b | --time="10:00"
--gpu-bind=closest | --gpu-bind=none | --array=1-10%2 | --begin=now+1hour | --get-user-env | --nice=abc
--nodes=2 \\ | hetjob | --wait-all-nodes=1 | --gres=gpu:a100:4,lscratch:10 | --exclud=n1 | --ntasks-per-n=4
--partition=a # CHANGE THIS AS YOU LIKE | --output=/a/b\\ c/d | --quotatype=spot | --container-image=a --container-mounts /x:/y | --site-specific=1
"""
REFUSED = """
--nodes=$N | --nodes=1- | -nodes=4 | --node=4 | --ntask=4 | nodes=2 | --nodes=2 foo | --constraints=gpu
--time=24h | --time=1:2:3:4 | --mem=64 GB | --gres=gpu 4 | -gres=gpu:4 | -time=10:00 | –nodes=2
--job-name="a b | --ntasks-per-node = 4 | --ntasks-per-node= 4 | --exclusive user | --ntasks=-3
--ntasks=2.5 | --ntasks=0 | --gpus_per_node=4 | -N=2 | -t=10:00 | --nodes=2; | --partition=a, b
--nodes=1 : | - | ---nodes=2 | --ntasks 4 4
"""


def read(text: str) -> tuple[list[Option], Remark | None]:
    return read_line(text, 7)


def listed(text: str) -> list[str]:
    return [item.strip() for line in text.strip().split("\n") for item in line.split("|")]


def test_directives_that_sbatch_accepts_and_values_to_be_filled_in_get_no_remark() -> None:
    to_fill_in = ["--account=<account>", "--nodes={{ n }}", "-p { partition }", "<OPTIONS>", "--partition="]
    for options in (*listed(ACCEPTED), *to_fill_in):
        assert read(f"#SBATCH {options}")[1] is None, options


def header(*lines: str) -> list[int]:
    return [remark.line for remark in read_header(["#!/bin/bash", *lines]).remarks]


def test_directives_that_sbatch_refuses_get_an_error_and_a_list_of_hosts_is_no_placeholder() -> None:
    for options in listed(REFUSED):
        remark = read(f"#SBATCH {options}")[1]
        assert remark, options
        assert remark.message.startswith("sbatch refuses ")
    assert header("#SBATCH --nodelist=node[01-04] --time=24h") == [2]
    assert header("#SBATCH --ntasks_per_node=4 --output=log_{a}.txt") == [2]
    number = read("#SBATCH --ntasks=$N")[1]
    assert number
    assert number.message == "sbatch refuses `--ntasks=$N`: it does not expand variables in directives"
    assert read("#SBATCH --output=$HOME/log")[1] is None


COMMENTS = """##SBATCH --nodes=2 | # #SBATCH --nodes=2 | ### SBATCH options | # SBATCH --mem=24G | #xSBATCH --nodes=2
#sbatch -N 2 run.sh | # sbatch this script with --nodes=4 | # Search --for | #SBATCH | #SBATCH # nothing"""


def test_comments_are_comments() -> None:
    for line in (*listed(COMMENTS), "", "\t "):
        assert (read_header([line]).remarks, read_header([line]).options) == ([], []), line


def test_several_options_of_one_line_are_all_read() -> None:
    options, _ = read("#SBATCH -N 2 -n8 --gres gpu:v100:4 -HvJ name --exclusive # -t 1")
    found = "nodes=2 ntasks=8 gres=gpu:v100:4 hold=None verbose=None job-name=name exclusive=None"
    assert [f"{option.name}={option.value}" for option in options] == found.split()


@pytest.mark.parametrize("command", ["sbatch", "srun"])
def test_every_option_that_the_command_itself_lists_is_known(command: str, tmp_path: Path) -> None:
    release_or_skip("")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\n")
    done = run_program([command, "--help"], env={**os.environ, "SLURM_CONF": str(conf)}, check=True)
    names = set(re.findall(r"--([a-z][a-z_-]*[a-z])", done.stdout))
    assert len(names) > 80
    rare = {"bcast-exclude", "send-libs", "slurmd-debug"}
    assert {name for name in names - rare if name not in LONG and not matches(name)} == set()
    letters = dict(re.findall(r"^ +-([A-Za-z]), --([a-z-]+)", done.stdout, re.MULTILINE))
    assert {letter: LETTERS.get(letter) for letter in letters} == letters
