"""Plant causes of lost time in a user's script, and check which cause report/causes.csv names first.

    python benchmarks/campaign_causes.py [--seeds N] [--seed N] [--cluster] [KIND ...]

Each draw is a study of planted_training.py with the recorder: one rank and two ranks with the planted cause,
three repeats each. The size of the cause is drawn at random. Most causes sleep, so their share of the step
is known. For the others, the study also has two ranks without the cause: the share is the time that the step
takes longer with it, and without it no cause may be named. The largest named cause of two ranks is compared
with the planted one. With ``--cluster``, the runs use the nodes of a Slurm test cluster (needs root).

A busy machine is itself a cause, ``cpu-starved``: without a share, it is printed, and not counted.
Exits with 1 if fewer than 90 % of the draws are right, if more than 3 % name a wrong cause, or if more than
2 % of the studies name a cause where none was planted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.causes.catalogue import parts_of
from analysis.causes.table import named, study_causes
from analysis.data.load import load_study
from analysis.stats.measured import measure
from bench.plan import make_plan, write_plan

if TYPE_CHECKING:
    from tests.cluster.bed import Cluster

TRAINING = Path(__file__).with_name("planted_training.py")
#: The planted kinds with the names that are right for them.
KINDS = {
    "checkpoint": "outside-timers",
    "metrics": "extra-communication",
    "no-sync": "extra-communication",
    "loader": "data-loading",
    "late-forward": "late-rank",
    "unused": "unused-parameters",
    "grad-strides": "grad-strides",
    "logging": "outside-timers",
    "recompile": "recompilation",
    "strong": "smaller-share",
    "one-core": "cpu-starved",
    "late-backward": "late-rank",
    "late-optimizer": "late-rank",
    "late-loader": "late-rank",
    "uneven-split": "late-rank",
    "augmentation": "outside-timers",
    "validation": "outside-timers",
    "gather": "extra-communication",
    "late-node": "late-node",
}
#: Kinds that need the test cluster.
ON_CLUSTER = ("late-node",)
#: The range of each amount; for the other kinds it is in seconds, from 12 to 45 % of the step.
AMOUNTS = {"metrics": (40, 120), "gather": (15, 40), "no-sync": (4, 16), "unused": (30, 90)}
#: Kinds that do not sleep: what they cost is measured.
MEASURED = (*AMOUNTS, "grad-strides", "one-core")
STEP_S = 0.06
RIGHT, WRONG, FALSE = 0.9, 0.03, 0.02

MATRIX = """\
study: causes
cluster: {cluster}
axes: {{{sizes}, backend: [gloo], env.PLANTED: ["1"]}}
{include}
scaling: [{{{batches}}}]
workload:
  device: cpu
  command: [{python}, {training}, {kind}, "{amount}", "{{env.PLANTED}}", "{{per_gpu_batch}}"]
  warmup_steps: 3
  steps_per_epoch: 10
  attribution_steps: 5
  epochs: 2
repeats: 3
"""
LOCAL = "{executor: local, time_limit: 5m}"
SLURM = (
    "{executor: slurm, partition: l40s, account: users, cpus_per_task: 1, mem: 600M, time_limit: 10m, "
    "concurrent_runs: 1, env: {GLOO_SOCKET_IFNAME: eth0}}"
)


@dataclass(frozen=True)
class Draw:
    """One draw: the planted share of the step, and the causes of two ranks with and without the plant."""

    kind: str
    planted: float
    causes: pd.DataFrame
    clean: pd.DataFrame

    @property
    def first(self) -> str:
        """The largest named cause; empty if none is named."""
        return str(self.causes["cause"].iloc[0]) if len(self.causes) else ""

    @property
    def verdict(self) -> str:
        """Return whether the first cause is right, wrong or not explained."""
        right = parts_of(KINDS[self.kind])
        rows = self.causes[~is_busy_machine(self.causes)] if "cpu-starved" not in right else self.causes
        if not len(rows):
            return "not explained"
        return "right" if set(parts_of(str(rows["cause"].iloc[0]))) & set(right) else "wrong"


def is_busy_machine(causes: pd.DataFrame) -> pd.Series:
    """Return which rows only say that other programs of this machine used its cores."""
    words = causes["evidence"].astype(str)
    starved = (causes["cause"] == "cpu-starved") & causes["share"].isna()
    return starved & words.str.contains("foreign processes")


def run_draw(folder: Path, kind: str, dice: random.Random, cluster: Cluster | None) -> Draw | str:
    """Run one study; return its draw, or the reason if it failed."""
    share = dice.uniform(0.15, 0.45)
    amount = dice.randint(*AMOUNTS[kind]) if kind in AMOUNTS else STEP_S * share / (1 - share)
    study = write_study(folder, kind, amount, slurm=cluster is not None)
    environment = {**os.environ, **(cluster.environment if cluster else {})}
    command = [sys.executable, "-m", "bench", "submit", str(study), "--wait"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return f"bench submit: {done.stderr.strip() or done.stdout.strip()}"
    return read_draw(study, kind, amount)


def write_study(folder: Path, kind: str, amount: float, *, slurm: bool) -> Path:
    """Plan the study of one draw."""
    folder.mkdir(parents=True)
    two, sizes = "tasks_per_node: 2", "tasks_per_node: [1, 2]"
    if slurm:
        two, sizes = "nodes: 2, tasks_per_node: 1", "nodes: [1, 2], tasks_per_node: [1]"
    without = f'include: [{{{two}, env.PLANTED: "0", mode: weak, per_gpu_batch: 16}}]' * (kind in MEASURED)
    matrix = MATRIX.format(
        cluster=SLURM if slurm else LOCAL,
        sizes=sizes,
        include=without,
        batches="mode: strong, global_batch: [32]" if kind == "strong" else "mode: weak, per_gpu_batch: [16]",
        python=json.dumps(sys.executable),
        training=json.dumps(str(TRAINING)),
        kind=kind,
        amount=f"{amount:.4f}",
    )
    path = folder / "causes.yaml"
    path.write_text(matrix)
    return write_plan(make_plan(path), folder / "results").path


def read_draw(path: Path, kind: str, amount: float) -> Draw:
    """Return the planted share and the named causes of a finished study."""
    study = load_study(path)
    cells = study.cells[study.cells["gpus"] == 2].to_dict("records")
    places = {row["swept"].get("env.PLANTED", "1"): row["cell_id"] for row in cells}
    runs = measure(study).runs
    counted = study.epochs[study.epochs["run_id"].isin(runs.loc[runs["measured"], "run_id"])]
    steps = counted.groupby("cell_id", observed=True)["step_time_sec_median"].median()
    step_s = float(steps[places["1"]])
    longer_s = step_s - float(steps[places["0"]]) if "0" in places else amount
    if kind == "strong":  # one rank has the fixed costs as well
        longer_s = amount / 2
    causes = named(study_causes(study)).drop_duplicates(["cell_id", "cause", "rank", "node"])
    with_plant, without = (causes[causes["cell_id"] == places.get(value)] for value in ("1", "0"))
    return Draw(kind, longer_s / step_s, with_plant, without)


def print_draw(draw: Draw) -> None:
    """Print the row of a draw, and the named causes without a planted one."""
    rows = draw.causes.to_dict("records")
    names = "; ".join(f"{row['cause']} {_percent(row['share'])}" for row in rows)
    print(f"| {draw.kind} | {draw.planted:.0%} | {names or 'none'} | {draw.verdict} |", flush=True)
    for row in rows:
        print(f"    {row['cause']}: {row['evidence']}", file=sys.stderr, flush=True)
    for row in draw.clean.to_dict("records"):
        print(
            f"    without the plant: {row['cause']} {_percent(row['share'])}: {row['evidence']}",
            file=sys.stderr,
            flush=True,
        )


def _percent(share: float) -> str:
    return "without a share" if pd.isna(share) else f"{share:.0%}"


def summarize(draws: Sequence[Draw], failures: Sequence[str]) -> list[str]:
    """Print the table of kinds; return a text for each limit that is exceeded."""
    print("\n| kind | draws | right | wrong | not explained |\n|---|---|---|---|---|")
    verdicts = pd.Series([draw.verdict for draw in draws], dtype=str)
    kinds = pd.Series([draw.kind for draw in draws], dtype=str)
    for kind in dict.fromkeys(kinds):
        own = verdicts[kinds == kind].value_counts()
        counts = [own.get(name, 0) for name in ("right", "wrong", "not explained")]
        print(f"| {kind} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    number = max(len(draws), 1)
    right, wrong = (sum(verdicts == name) / number for name in ("right", "wrong"))
    false = sum(bool((~is_busy_machine(draw.clean)).any()) for draw in draws) / number
    print(f"\n{len(draws)} draws: {right:.0%} right, {wrong:.0%} wrong; {false:.0%} false alarms")
    exceeded = list(failures)
    exceeded += [f"only {right:.0%} are right"] if right < RIGHT else []
    exceeded += [f"{wrong:.0%} are wrong"] if wrong > WRONG else []
    exceeded += [f"{false:.0%} name a cause where none is planted"] if false > FALSE else []
    small = [draw for draw in draws if draw.planted < 0.1]
    return exceeded + [f"{draw.kind}: only {draw.planted:.0%} planted, not 10 %" for draw in small]


def main() -> int:
    """Run the draws of the chosen kinds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"only these kinds: {', '.join(KINDS)}")
    parser.add_argument("--seeds", type=int, default=3, help="draws of each kind (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first draws (default 0)")
    parser.add_argument("--cluster", action="store_true", help="on a test cluster instead of this machine")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the studies in this folder")
    given = parser.parse_args()
    if unknown := sorted(set(given.kinds) - set(KINDS)):
        parser.error(f"unknown kinds: {', '.join(unknown)}; known are {', '.join(KINDS)}")
    kinds = given.kinds or [kind for kind in KINDS if given.cluster or kind not in ON_CLUSTER]
    if given.keep and given.keep.exists():
        parser.error(f"{given.keep} exists; name a new folder")
    if not given.cluster and (lacking := sorted(set(kinds) & set(ON_CLUSTER))):
        parser.error(f"{', '.join(lacking)} needs --cluster")
    draws, failures = [], []
    with ExitStack() as stack:
        cluster, folder = None, given.keep
        if given.cluster:
            from clusters import own_cluster

            from tests.cluster.bed import missing

            if lacks := missing():
                parser.error(lacks)
            cluster, folder = stack.enter_context(own_cluster())
        folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print("| kind | planted | named | verdict |\n|---|---|---|---|", flush=True)
        for seed in range(given.seed, given.seed + given.seeds):
            for kind in kinds:
                dice = random.Random(f"{kind} {seed}")
                draw = run_draw(folder / f"{kind}{seed}", kind, dice, cluster)
                if isinstance(draw, str):
                    failures.append(f"{kind}: {draw}")
                    print(failures[-1], flush=True)
                    continue
                draws.append(draw)
                print_draw(draw)
    exceeded = summarize(draws, failures)
    for line in exceeded:
        print(f"WRONG: {line}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
