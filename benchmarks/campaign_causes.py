"""Plant causes of lost time in a user's script, and check which causes report/causes.csv names.

    python benchmarks/campaign_causes.py [--draws N] [--seed N] [PART|CAUSE ...]

Each draw (random trial) is a study of planted_training.py with the recorder: three runs of one rank, the
baseline, and three of four ranks with the planted cause, whose size is random. A delay makes a part of the
step (data loading, forward, backward, optimizer, all-reduce, or outside all timers) 10 or 20 ms longer: on
all ranks, on one rank, or on one node of two ranks. It is right if the first cause names the part, and the
rank or node. An all-reduce takes equally long on all ranks, so it has no rank and no node. The other causes
in CAUSES are on all ranks, and right if the first cause has their name. The first 23 draws are all of these
in random order. The exit code is 1 if fewer than 95 % of the draws are right, or if 10 % or more of the loss
of a draw is loss of the delayed part that is not explained. (Waiting counts, too, if not all ranks are
delayed.) On a busy machine, other parts take longer as well; the table also shows what is not explained of
all parts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_training import DELAYS, PER_NODE

from analysis.causes.cells import CauseRow
from analysis.causes.table import Rest, named, study_causes
from analysis.data.load import load_study
from bench.plan import make_plan, write_plan
from bench.study.findings import ForeignCpu
from ddp_scaling_bench.finding import messages
from ddp_scaling_bench.units import known

TRAINING = Path(__file__).with_name("planted_training.py")
#: Causes that are no delays: the name in causes.csv, and the range of their amount.
CAUSES = {
    "metrics": ("communication", (40, 120)),
    "gather": ("communication", (15, 40)),
    "no-sync": ("communication", (4, 16)),
    "recompile": ("computation", (0.01, 0.02)),
    "one-core": ("cpu-starved", (0.01, 0.02)),
}
#: Limits: the least fraction that is right, and the fraction of a loss that is not explained.
NAMED, NOT_EXPLAINED = 0.95, 0.1
#: Ranks with a delay, on two nodes.
RANKS = 2 * PER_NODE

MATRIX = """\
study: causes
cluster: {{executor: local, time_limit: 5m}}
axes: {{tasks_per_node: [1, {most}], launcher: [own], backend: [gloo]}}
scaling: [{{mode: weak, per_gpu_batch: [16]}}]
workload:
  device: cpu
  command: [{python}, {training}, {kind}, "{amount}", "{ranks}", "{{world_size}}"]
  warmup_steps: 3
  steps_per_epoch: 10
  attribution_steps: 5
  epochs: 2
repeats: 3
max_running: 1
"""


def is_busy_machine(row: CauseRow) -> bool:
    """Return whether a row only shows other programs on the cores of this machine."""
    kinds = {fact.kind for fact in row.evidence}
    return row.cause == "cpu-starved" and math.isnan(row.share) and ForeignCpu.kind in kinds


@dataclass(frozen=True)
class Draw:
    """A delay of a part of the step, or another cause, on some ranks, and the rows of causes.csv of its cell.

    Attributes:
        part: the delayed part, or the name in :data:`CAUSES`.
        ranks: the ranks with the cause, out of :data:`RANKS`.
        amount: of a delay in seconds per step.
    """

    part: str
    where: str
    ranks: Sequence[int]
    amount: float
    rows: Sequence[CauseRow] = ()

    @property
    def place(self) -> tuple[str, int | None]:
        """The node and the rank that the first cause should name."""
        if self.where == "all" or self.part == "all-reduce":
            return "", None
        return f"n{self.ranks[0] // PER_NODE + 1}", self.ranks[0] if self.where == "rank" else None

    @property
    def first(self) -> CauseRow | None:
        """The first named cause."""
        return next((row for row in named(self.rows) if not is_busy_machine(row)), None)

    @property
    def is_right(self) -> bool:
        """True if the first cause has the name, or names the part and the place."""
        first = self.first
        if self.part in CAUSES:
            return first is not None and first.cause == CAUSES[self.part][0]
        return first is not None and (first.part, first.node, first.rank) == (self.cause_part, *self.place)

    @property
    def not_explained(self) -> float:
        """The fraction of the loss that no cause explains."""
        return sum(abs(row.share) for row in self.rows if row.is_rest) / self.loss

    @property
    def loss(self) -> float:
        """The loss of the cell, as a fraction of its step."""
        return sum(row.share for row in self.rows if known(row.share))

    @property
    def part_not_explained(self) -> float:
        """The fraction of the loss that is in the delayed part and that no cause explains; 0 without one."""
        if self.part in CAUSES:
            return 0.0
        if self.part in ("forward", "backward", "optimizer"):
            parts = {"longer", "shorter"}
        else:
            parts = {self.cause_part}
        if self.place != ("", None):
            parts.add("wait")
        rests = [fact for row in self.rows for fact in row.evidence if isinstance(fact, Rest)]
        shares = [abs(one.share) for rest in rests for one in rest.parts if one.part in parts]
        return sum(shares) / self.loss

    @property
    def cause_part(self) -> str:
        """The name of the part in causes.csv."""
        return {"all-reduce": "transfer", "outside": "other"}.get(self.part, self.part)

    def __str__(self) -> str:
        """The row of the table of draws."""
        ranks, first = ", ".join(map(str, self.ranks)), self.first
        amount = f"{self.amount:.3g}" if self.part in CAUSES else f"{1000 * self.amount:.0f} ms"
        cells = [self.part, self.where, ranks, amount]
        if first:
            who = first.node if first.rank is None else f"rank {first.rank} on {first.node}"
            cells += [" ".join(filter(None, (first.cause, first.part, who))), _percent(first.share)]
        else:
            cells += ["none", ""]
        cells += [_percent(self.part_not_explained), _percent(self.not_explained)]
        return f"| {' | '.join([*cells, 'right' if self.is_right else 'wrong'])} |"


def draws(number: int, seed: int, parts: Sequence[str]) -> list[Draw]:
    """Return draws: all delays and causes (of ``parts``, if given) in random order, then random ones."""
    dice = random.Random(seed)
    kinds = [*product(DELAYS, ("all", "rank", "node")), *((cause, "all") for cause in CAUSES)]
    kinds = [kind for kind in kinds if not parts or kind[0] in parts]
    dice.shuffle(kinds)
    kinds += [dice.choice(kinds) for _ in range(number)]
    found = []
    for part, where in kinds[:number]:
        rank = dice.randrange(RANKS)
        first = rank - rank % PER_NODE
        ranks = {"all": range(RANKS), "rank": (rank,), "node": range(first, first + PER_NODE)}[where]
        amount = dice.uniform(*CAUSES[part][1]) if part in CAUSES else dice.choice((0.01, 0.02))
        found.append(Draw(part, where, ranks, amount))
    return found


def run_draw(folder: Path, draw: Draw) -> Draw | str:
    """Run one study; return the draw with its rows, or the reason if it failed."""
    folder.mkdir(parents=True)
    text = MATRIX.format(
        most=RANKS,
        python=json.dumps(sys.executable),
        training=json.dumps(str(TRAINING)),
        kind=draw.part,
        amount=draw.amount,
        ranks=",".join(map(str, draw.ranks)),
    )
    (folder / "causes.yaml").write_text(text)
    path = write_plan(make_plan(folder / "causes.yaml"), folder / "results").path
    command = [sys.executable, "-m", "bench", "submit", str(path), "--wait"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"bench submit: {done.stderr.strip() or done.stdout.strip()}"
    study = load_study(path)
    cell = next(cell.cell_id for cell in study.cells.values() if cell.gpus == RANKS)
    # Some causes are errors of validity, such as ranks that share cores.
    rows = [row for row in study_causes(study, also_invalid=True) if row.cell_id == cell]
    return replace(draw, rows=rows)


def _percent(share: float) -> str:
    return "without a share" if math.isnan(share) else f"{share:.0%}"


def main() -> int:
    """Run draws and print their table; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choices = (*DELAYS, *CAUSES)
    parser.add_argument("parts", nargs="*", metavar="PART|CAUSE", help=f"only these: {', '.join(choices)}")
    parser.add_argument("--draws", type=int, default=23, help="number of draws (default 23)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")
    given = parser.parse_args()
    if unknown := sorted(set(given.parts) - set(choices)):
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(choices)}")
    names = ["part", "where", "ranks", "amount", "first cause", "share"]
    names += ["not explained: part", "all", "verdict"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)
    done: list[Draw] = []
    with tempfile.TemporaryDirectory() as folder:
        for place, wanted in enumerate(draws(given.draws, given.seed, given.parts)):
            draw = run_draw(Path(folder) / f"draw{place}", wanted)
            print(draw, flush=True)
            if isinstance(draw, Draw):
                done.append(draw)
                for row in draw.rows:
                    text = f"{row.cause} {_percent(row.share)}: {messages(row.evidence)}"
                    print(f"    {text}", file=sys.stderr, flush=True)
    right = sum(draw.is_right for draw in done)
    rest = [draw for draw in done if not draw.part_not_explained < NOT_EXPLAINED]
    other = sum(not draw.not_explained < NOT_EXPLAINED for draw in done)
    print(f"\n{right} of {given.draws} are right; {NOT_EXPLAINED:.0%} or more of the loss is not explained:")
    print(f"in the delayed part of {len(rest)} draws, in all parts of {other} draws")
    return 1 if len(done) < given.draws or rest or right < NAMED * given.draws else 0


if __name__ == "__main__":
    sys.exit(main())
