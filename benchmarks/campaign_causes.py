"""Plant causes of lost time in a user's script, and check which causes report/causes.csv names.

    python benchmarks/campaign_causes.py [--seeds N] [--seed N] [--local] [KIND ...]
    python benchmarks/campaign_causes.py --delays N [--seed N]

With ``--delays``, each draw delays a part of the step (data loading, forward, backward, optimizer,
all-reduce, or outside all timers) of four ranks by 10 or 20 ms: on all ranks, on one rank, or on one node of
two ranks. The first 18 draws are all combinations in random order; rank, node and delay are random. A draw is
right if the first cause names the part, and the rank or node. An all-reduce takes equally long on all ranks,
so it has no rank and no node. The exit code is 1 if fewer than 95 % of the draws are right, or if 10 % or
more of the loss of a draw is loss of the delayed part that is not explained. (Waiting counts, too, if not all
ranks are delayed.) On a busy machine, other parts take longer as well; the table also shows what is not
explained of all parts.

Without it, each draw (random trial) is a study of planted_training.py with the recorder: three runs of two
ranks with the planted cause, whose size is random. The largest named cause is compared with the planted one.
Each rank measures the time of its planted cause on its own clock, and the true share is this time divided by
the time of a step. A cause that is known only by a count, a setting or a warning has no share. The studies of
causes within DDP's own work also have runs without the cause: any cause named for these runs is a false
alarm. Some kinds use the nodes of a Slurm test cluster, which needs root (``--local`` leaves them out). Some
planted causes are errors of validity, such as ranks that share cores. Therefore cells with errors are
divided, too.

On a busy machine, ``cpu-starved`` is named as well; if it has no share, it is printed but not counted. The
exit code is 1 if fewer than 90 % of the draws are right, if more than 3 % name a wrong cause, if more than
2 % of the studies name a cause where none was planted, or if a planted cause takes less than 10 % of the
step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_training import DELAYS, PER_NODE

from analysis.causes.cells import CauseRow
from analysis.causes.claims import Longer
from analysis.causes.table import Rest, SeenIn, named, study_causes
from analysis.data.load import load_study
from bench.plan import make_plan, write_plan
from bench.study.findings import ForeignCpu
from ddp_scaling_bench.finding import messages
from ddp_scaling_bench.units import known

if TYPE_CHECKING:
    from tests.cluster.bed import Cluster

TRAINING = Path(__file__).with_name("planted_training.py")
#: Starts the trainings of delays.
WARM = Path(__file__).with_name("warm_python.py")
#: The planted kinds, each with the cause that is right for it.
KINDS = {
    "checkpoint": "outside-timers",
    "metrics": "communication",
    "no-sync": "communication",
    "logging": "outside-timers",
    "recompile": "computation",
    "strong": "computation",
    "one-core": "cpu-starved",
    "uneven-split": "late-rank",
    "augmentation": "outside-timers",
    "validation": "outside-timers",
    "gather": "communication",
    "late-node": "late-rank",
    "overlap": "cpu-starved",
}
#: Kinds that need the test cluster.
ON_CLUSTER = ("late-node", "overlap")
#: The range of each amount; for the other kinds it is in seconds, from 15 to 45 % of the step.
AMOUNTS = {
    "metrics": (40, 120),
    "gather": (15, 40),
    "no-sync": (4, 16),
}
#: Kinds whose studies also have runs without the cause, and all kinds whose cause has no share.
COMPARED = ("no-sync",)
UNTIMED = (*COMPARED, "strong")
#: Kinds that use the cores all the time: no other draw runs beside them.
ALONE = (*COMPARED, "metrics", "gather", "one-core", "recompile", "overlap")
STEP_S = 0.06
RIGHT, WRONG, FALSE = 0.9, 0.03, 0.02
#: Limits of the delays: the least fraction that is right, and the fraction of a loss that is not explained.
NAMED, NOT_EXPLAINED = 0.95, 0.1
#: Ranks with a delay, on two nodes.
RANKS = 2 * PER_NODE
#: Shares must be within this distance.
CLOSE = 0.1

MATRIX = """\
study: causes
cluster: {cluster}
axes: {{{sizes}, backend: [gloo], env.PLANTED: ["1"]}}
{include}
scaling: [{{{batches}}}]
workload:
  device: cpu
  command: [{python}, {server}{training}, {kind}, "{amount}", "{{env.PLANTED}}", "{{per_gpu_batch}}", {ranks}]
  warmup_steps: 3
  steps_per_epoch: 10
  attribution_steps: 5
  epochs: 2
repeats: 3
max_running: 1
"""
LOCAL = "{executor: local, time_limit: 5m}"
SLURM = (
    "{executor: slurm, partition: l40s, account: users, cpus_per_task: 1, mem: 600M, time_limit: 10m, "
    "exclusive: false, env: {GLOO_SOCKET_IFNAME: eth0}}"
)
#: A job of someone else on the nodes of the study.
NEIGHBOUR = "while :; do :; done"


@dataclass(frozen=True)
class Place:
    """The place of the draws: a folder, and a test cluster if the draws need one."""

    folder: Path
    cluster: Cluster | None = None


@dataclass(frozen=True)
class Draw:
    """A random trial: the planted causes of a study, and the causes that were named.

    Attributes:
        kind: the planted kind.
        planted: its share of the step; NaN if the cause has no share.
        causes: the causes named for runs of two ranks.
        clean: the causes named for runs of two ranks without the planted cause.
    """

    kind: str
    planted: float
    causes: Sequence[CauseRow]
    clean: Sequence[CauseRow] = ()

    @property
    def counted(self) -> Sequence[CauseRow]:
        """The named causes; ``cpu-starved`` by a busy machine counts only if lack of CPU time is planted."""
        if self.kind in ("one-core", "overlap"):
            return self.causes
        return [row for row in self.causes if not is_busy_machine(row)]

    @property
    def verdict(self) -> str:
        """Return whether the first named cause is right, wrong or not explained."""
        if not self.counted:
            return "not explained"
        return "right" if KINDS[self.kind] == self.counted[0].cause else "wrong"

    @property
    def close(self) -> bool:
        """True if the named share agrees with the planted one."""
        return self.verdict == "right" and abs(self.counted[0].share - self.planted) <= CLOSE


def is_busy_machine(row: CauseRow) -> bool:
    """Return whether a row only shows other programs on the cores of this machine."""
    kinds = {fact.kind for fact in row.evidence}
    return row.cause == "cpu-starved" and math.isnan(row.share) and ForeignCpu.kind in kinds


def is_no_alarm(row: CauseRow) -> bool:
    """Return whether a row shows a busy machine, or only that a part of the step takes time."""
    return is_busy_machine(row) or all(isinstance(fact, Longer | SeenIn) for fact in row.evidence)


# -- one draw -------------------------------------------------------------------------


def run_draw(place: Place, kind: str, seed: int) -> Draw | str:
    """Run one study; return its draw, or the reason if it failed."""
    dice = random.Random(f"{kind} {seed}")
    folder = place.folder / f"{kind}{seed}"
    folder.mkdir(parents=True)
    study = write_study(folder, kind, dice, place)
    with neighbours(place) if kind == "overlap" else nullcontext():
        failed = submit(study, place.cluster)
    return failed or read_draw(study, kind)


@dataclass(frozen=True)
class Delay:
    """A delay of a part of the step on some ranks, and the rows of causes.csv of its cell.

    Attributes:
        ranks: the delayed ranks, out of :data:`RANKS`.
        delay_s: seconds per step.
    """

    part: str
    where: str
    ranks: Sequence[int]
    delay_s: float
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
        """True if the first cause names the part and the place."""
        first = self.first
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
        """The fraction of the loss that is in the delayed part and that no cause explains."""
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
        cells = [self.part, self.where, ranks, f"{1000 * self.delay_s:.0f} ms"]
        if first:
            who = first.node if first.rank is None else f"rank {first.rank} on {first.node}"
            cells += [" ".join(filter(None, (first.cause, first.part, who))), _percent(first.share)]
        else:
            cells += ["none", ""]
        cells += [_percent(self.part_not_explained), _percent(self.not_explained)]
        return f"| {' | '.join([*cells, 'right' if self.is_right else 'wrong'])} |"


def draw_delays(number: int, seed: int) -> list[Delay]:
    """Draw delays: all combinations of part and place in random order, then random ones."""
    dice = random.Random(seed)
    kinds = list(product(DELAYS, ("all", "rank", "node")))
    dice.shuffle(kinds)
    kinds += [dice.choice(kinds) for _ in range(number)]
    found = []
    for part, where in kinds[:number]:
        rank = dice.randrange(RANKS)
        first = rank - rank % PER_NODE
        ranks = {"all": range(RANKS), "rank": (rank,), "node": range(first, first + PER_NODE)}[where]
        found.append(Delay(part, where, ranks, dice.choice((0.01, 0.02))))
    return found


def run_delay(folder: Path, delay: Delay) -> Delay | str:
    """Run one study; return the delay with its rows, or the reason if it failed."""
    folder.mkdir(parents=True)
    text = MATRIX.format(
        cluster=LOCAL,
        sizes=f"tasks_per_node: [1, {RANKS}], launcher: [own]",
        include="",
        batches="mode: weak, per_gpu_batch: [16]",
        python=json.dumps(sys.executable),
        server=f"{json.dumps(str(WARM))}, {json.dumps(str(folder.parent / 'socket'))}, ",
        training=json.dumps(str(TRAINING)),
        kind=delay.part,
        amount=delay.delay_s,
        ranks=f'"{",".join(map(str, delay.ranks))}", "{{world_size}}"',
    )
    (folder / "causes.yaml").write_text(text)
    path = write_plan(make_plan(folder / "causes.yaml"), folder / "results").path
    if failed := submit(path, None):
        return failed
    study = load_study(path)
    cell = next(cell.cell_id for cell in study.cells.values() if cell.gpus == RANKS)
    rows = [row for row in study_causes(study, also_invalid=True) if row.cell_id == cell]
    return replace(delay, rows=rows)


@contextmanager
def warm_python(path: Path) -> Iterator[None]:
    """Run a server that starts the trainings."""
    with subprocess.Popen([sys.executable, str(WARM), str(path)]) as server:
        while server.poll() is None and not path.exists():
            time.sleep(0.1)
        try:
            yield
        finally:
            server.terminate()


def run_delays(number: int, seed: int) -> int:
    """Run delays and print their table; return the exit code."""
    columns = (
        "part",
        "where",
        "ranks",
        "delay",
        "first cause",
        "share",
        "not explained: part",
        "all",
        "verdict",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    draws: list[Delay] = []
    failures = []
    with tempfile.TemporaryDirectory() as folder, warm_python(Path(folder) / "socket"):
        for place, delay in enumerate(draw_delays(number, seed)):
            draw = run_delay(Path(folder) / f"draw{place}", delay)
            print(draw, flush=True)
            if isinstance(draw, str):
                failures.append(draw)
                continue
            draws.append(draw)
            for row in draw.rows:
                text = f"{row.cause} {_percent(row.share)}: {messages(row.evidence)}"
                print(f"    {text}", file=sys.stderr, flush=True)
    right = sum(draw.is_right for draw in draws)
    rest = [draw for draw in draws if not draw.part_not_explained < NOT_EXPLAINED]
    other = sum(not draw.not_explained < NOT_EXPLAINED for draw in draws)
    print(
        f"\n{right} of {number} are right; {NOT_EXPLAINED:.0%} or more of the loss is not explained: in the"
    )
    print(f"delayed part of {len(rest)} draws, in all parts of {other} draws")
    return 1 if failures or rest or right < NAMED * number else 0


def submit(study: Path, cluster: Cluster | None) -> str:
    """Run a study; return the reason if this failed, else an empty text."""
    environment = {**os.environ, **(cluster.environment if cluster else {})}
    command = [sys.executable, "-m", "bench", "submit", str(study), "--wait"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return f"bench submit: {done.stderr.strip() or done.stdout.strip()}" if done.returncode else ""


@contextmanager
def neighbours(place: Place) -> Iterator[None]:
    """Run a foreign job on both nodes of a study."""
    assert place.cluster
    options = ["--partition=l40s", "--account=users", "--nodes=2", "--ntasks-per-node=1", "--time=20"]
    words = ["sbatch", "--parsable", "--nodelist=n1,n2", *options, f"--wrap=srun bash -c {NEIGHBOUR!r}"]
    job = place.cluster.run(words, cwd=place.folder).stdout.strip()
    try:
        yield
    finally:
        place.cluster.run(["scancel", job])


def write_study(folder: Path, kind: str, dice: random.Random, place: Place) -> Path:
    """Plan the study of one draw."""
    share = dice.uniform(0.15, 0.45)
    amount = dice.randint(*AMOUNTS[kind]) if kind in AMOUNTS else share * STEP_S / (1 - share)
    two, sizes = "tasks_per_node: 2", f"tasks_per_node: {[1, 2] if kind == 'strong' else [2]}"
    if place.cluster:
        two, sizes = "nodes: 2, tasks_per_node: 1", "nodes: [2], tasks_per_node: [1]"
    without = f'include: [{{{two}, env.PLANTED: "0", mode: weak, per_gpu_batch: 16}}]' * (kind in COMPARED)
    matrix = MATRIX.format(
        cluster=SLURM if place.cluster else LOCAL,
        sizes=sizes,
        include=without,
        batches="mode: strong, global_batch: [32]" if kind == "strong" else "mode: weak, per_gpu_batch: [16]",
        python=json.dumps(sys.executable),
        server="",
        training=json.dumps(str(TRAINING)),
        kind=kind,
        amount=f"{amount:.4f}",
        ranks='""',
    )
    path = folder / "causes.yaml"
    path.write_text(matrix)
    return write_plan(make_plan(path), folder / "results").path


def read_draw(path: Path, kind: str) -> Draw:
    """Return the planted share and the named causes of a finished study."""
    study = load_study(path)
    cells = [cell for cell in study.cells.values() if cell.gpus == 2]
    places = {(cell.swept or {}).get("env.PLANTED", "1"): cell.cell_id for cell in cells}
    with_plant, without = (named_causes(path, places.get(value, "")) for value in ("1", "0"))
    return Draw(kind, planted_share(path, kind, places["1"]), with_plant, without)


def named_causes(path: Path, cell: str) -> list[CauseRow]:
    """Return the rows of a cell that name a cause, the largest share first."""
    causes = named(study_causes(load_study(path), also_invalid=True))
    return [row for row in causes if row.cell_id == cell]


def planted_share(path: Path, kind: str, cell: str) -> float:
    """Return the planted cause's share of the step, as two ranks measured it on their own clocks."""
    if kind in UNTIMED:
        return math.nan
    files = sorted(path.glob(f"runs/{cell}-r*/attempt-*/planted*.json"))
    ranks = pd.DataFrame([{"run": file.parent, **json.loads(file.read_text())} for file in files])
    spent_s = ranks["spent_s"].fillna(ranks["amount"]).astype(float)
    return float(spent_s.groupby(ranks["run"]).max().mean() / ranks["step_s"].mean())


# -- results --------------------------------------------------------------------------


def print_draw(draw: Draw) -> None:
    """Print a draw's row and evidence, and the causes named for the runs without a planted cause."""
    names = "; ".join(f"{row.cause} {_percent(row.share)}" for row in draw.causes)
    without = draw.kind in UNTIMED
    verdict = draw.verdict + ("" if draw.close or without else ", not close")
    print(f"| {draw.kind} | {_percent(draw.planted)} | {names or 'none'} | {verdict} |", flush=True)
    for row in draw.causes:
        print(f"    {row.cause}: {messages(row.evidence)}", file=sys.stderr, flush=True)
    for row in draw.clean:
        text = f"{row.cause} {_percent(row.share)}: {messages(row.evidence)}"
        print(f"    without the planted cause: {text}", file=sys.stderr, flush=True)


def _percent(share: float) -> str:
    return "without a share" if pd.isna(share) else f"{share:.0%}"


def summarize(draws: Sequence[Draw], failures: Sequence[str]) -> list[str]:
    """Print the table of kinds; return a text for each limit that is exceeded."""
    columns = ("right", "wrong", "not explained")
    print(f"\n| kind | draws | {' | '.join(columns)} | close |\n|---|---|---|---|---|---|")
    for kind in dict.fromkeys(draw.kind for draw in draws):
        own = [draw for draw in draws if draw.kind == kind]
        counts = [sum(draw.verdict == name for draw in own) for name in columns]
        print(f"| {kind} | {len(own)} | {' | '.join(map(str, counts))} | {sum(draw.close for draw in own)} |")
    number = max(len(draws), 1)
    right, wrong, other = (sum(draw.verdict == name for draw in draws) for name in columns)
    close = sum(draw.close and draw.verdict == "right" for draw in draws)
    false = sum(not all(map(is_no_alarm, draw.clean)) for draw in draws)
    print(f"\n{len(draws)} draws: {right} right, {wrong} wrong, {other} not explained")
    print(f"{close} are right with a share near the true one; {false} false alarms")
    exceeded = list(failures)
    exceeded += [f"only {right} are right"] * (right < RIGHT * number)
    exceeded += [f"{wrong} are wrong"] * (wrong > WRONG * number)
    exceeded += [f"{false} name a cause where none is planted"] * (false > FALSE * number)
    small = [draw for draw in draws if draw.planted < CLOSE]
    return exceeded + [f"{draw.kind}: only {draw.planted:.0%} planted" for draw in small]


# -- all draws ------------------------------------------------------------------------


def run_all(place: Place, wanted: Sequence[tuple[str, int]], found: Callable[[Draw | str], None]) -> None:
    """Run draws: two at the same time if both mostly sleep, the others alone."""
    together = [one for one in wanted if one[0] not in ALONE and not place.cluster]
    with ThreadPoolExecutor(2) as pool:
        for draw in pool.map(lambda one: run_draw(place, *one), together):
            found(draw)
    for one in wanted:
        if one not in together:
            found(run_draw(place, *one))


def main() -> int:
    """Run the draws of the chosen kinds."""
    given = arguments()
    if given.delays:
        return run_delays(given.delays, given.seed)
    wanted = [(kind, seed) for seed in range(given.seed, given.seed + given.seeds) for kind in given.kinds]
    draws: list[Draw] = []
    failures: list[str] = []

    def found(draw: Draw | str) -> None:
        if isinstance(draw, str):
            failures.append(draw)
            print(draw, flush=True)
        else:
            draws.append(draw)
            print_draw(draw)

    print("| planted | share | named | verdict |\n|---|---|---|---|", flush=True)
    run_wanted(wanted, found)
    exceeded = summarize(draws, failures)
    for line in exceeded:
        print(f"WRONG: {line}")
    return 1 if exceeded else 0


def arguments() -> argparse.Namespace:
    """Parse the command line and check that the draws can run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"only these kinds: {', '.join(KINDS)}")
    parser.add_argument("--seeds", type=int, default=3, help="random trials of each kind (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first draws (default 0)")
    parser.add_argument("--delays", type=int, default=0, help="draw this number of delays instead")
    parser.add_argument("--local", action="store_true", help="leave out the kinds that need a test cluster")
    given = parser.parse_args()
    if unknown := sorted(set(given.kinds) - set(KINDS)):
        parser.error(f"unknown kinds: {', '.join(unknown)}; known are {', '.join(KINDS)}")
    kinds = given.kinds or list(KINDS)
    given.kinds = [kind for kind in kinds if not (given.local and kind in ON_CLUSTER)]
    if set(given.kinds) & set(ON_CLUSTER):
        from tests.cluster.bed import missing

        if lacks := missing():
            parser.error(f"{lacks}; --local leaves out the kinds that need a test cluster")
    return given


def run_wanted(wanted: Sequence[tuple[str, int]], found: Callable[[Draw | str], None]) -> None:
    """Run the draws on this machine, then those on the test cluster."""
    if local := [one for one in wanted if one[0] not in ON_CLUSTER]:
        with tempfile.TemporaryDirectory() as folder:
            run_all(Place(Path(folder)), local, found)
    if others := [one for one in wanted if one[0] in ON_CLUSTER]:
        from clusters import own_cluster

        with own_cluster() as (cluster, shared):
            run_all(Place(shared, cluster), others, found)


if __name__ == "__main__":
    sys.exit(main())
