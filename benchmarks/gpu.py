"""Run everything that needs a GPU; write gpu.json and the table in docs/gpu.md.

    python benchmarks/gpu.py [PART ...] [--json gpu.json] [--page docs/gpu.md]

``make gpu`` is for a machine with one GPU and without a network. All parts run with the Python that runs this
script; nothing is installed. A part that fails or runs out of time does not stop the others; all take at most
8 minutes. Parts that are named run alone, each within its time; the page is written only if none is missing.

If packages are missing, the first line names them.

The exit code is 0 if all parts passed, 1 if a part failed or ran out of time, 2 if this machine is unfit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/gpu.md"
BEGIN, END = "<!-- begin: make gpu -->\n", "<!-- end: make gpu -->\n"
SCHEMA = 1
OLDEST_PYTHON = (3, 11)
#: Seconds for a part to end after SIGTERM; they are included in its budget.
GRACE_S = 5.0
#: Lines of a failed part's output that are shown.
SHOWN_LINES = 30


@dataclass(frozen=True)
class Part:
    """One part: a command that writes its values to a JSON file. ``budget_s`` includes the time to end it."""

    name: str
    title: str
    budget_s: float
    words: tuple[str, ...] = ()

    def command(self, file: Path, folder: Path) -> list[str]:
        """Return the command that writes to ``file`` and may use ``folder``."""
        if self.words:
            return [word.replace("{file}", str(file)).replace("{folder}", str(folder)) for word in self.words]
        script = str(Path(__file__).with_name("gpu_parts.py"))
        return [sys.executable, script, self.name, str(file), str(folder)]


#: A GPU that is busy all the time: a step of about 10 ms on an H100.
_OVERHEAD = ("--device", "cuda", "--width", "8192", "--batch", "1024", "--rounds", "12", "--steps", "20")
MACHINE = Part("machine", "machine", 30)
#: Time that a part leaves unused goes to the next ones, so the longest and least certain part is the last.
PARTS = (
    Part("mfu", "MFU of the transformer in bf16", 50),
    Part("formats", "ResNet-50 by precision and memory format", 60),
    Part(
        "overhead",
        "overhead of the recorder",
        50,
        (sys.executable, str(Path(__file__).with_name("recorder.py")), *_OVERHEAD, "--json", "{file}"),
    ),
    Part("study", "study with conditions", 70),
    Part("tests", "tests", 120),
)


@dataclass(frozen=True)
class Result:
    """The result of one part; ``outcome`` is ``passed``, ``failed`` or ``out of time``."""

    name: str
    outcome: str
    seconds: float
    budget_s: float
    reason: str | None
    values: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the part's entry in gpu.json."""
        return {**vars(self), "seconds": round(self.seconds, 1), "budget_s": round(self.budget_s, 1)}


def run_part(part: Part, folder: Path, *, limit_s: float) -> Result:
    """Run a part for at most ``limit_s`` seconds; its output is in the folder's file ``PART.log``."""
    file, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command(file, folder / part.name),
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=max(0.0, limit_s - GRACE_S))
            outcome, reason = ("passed", None) if code == 0 else ("failed", _why(code, log))
        except subprocess.TimeoutExpired:
            outcome, reason = "out of time", f"it did not end in {limit_s - GRACE_S:.0f} s"
        finally:
            end_group(process)
    return Result(part.name, outcome, time.monotonic() - began, limit_s, reason, read_values(file))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and the processes that it left behind: SIGTERM, then SIGKILL."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _why(code: int, log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return lines[-1] if lines else f"it ended with {end} and no output"


def read_values(file: Path) -> dict[str, Any]:
    """Return the values that a part has written; empty if there are none."""
    with suppress(OSError, ValueError):
        return dict(json.loads(file.read_text(encoding="utf-8")))
    return {}


def environment() -> dict[str, str]:
    """Return the parts' environment: with this checkout on PYTHONPATH, without a launcher's variables."""
    ours = {"PYTHONUNBUFFERED": "1", "BENCH_SITE": "", "GLOO_SOCKET_IFNAME": "lo"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "BENCH_RESULTS")
    kept = {
        name: text
        for name, text in os.environ.items()
        if name not in launchers and not name.startswith("SLURM_")
    }
    return {**kept, **ours, "PYTHONPATH": path}


def run_parts(parts: Sequence[Part], folder: Path, *, began: float) -> list[Result]:
    """Run the parts one after another; a part may also use the time that earlier parts left unused."""
    results = []
    deadline = began
    for part in parts:
        deadline += part.budget_s
        print(f"{part.title} ...", flush=True)
        result = run_part(part, folder, limit_s=deadline - time.monotonic())
        results.append(result)
        reason = f": {result.reason}" if result.reason else ""
        print(f"  {result.outcome} in {result.seconds:.0f} s{reason}", flush=True)
        if result.outcome != "passed":
            lines = (folder / f"{part.name}.log").read_text(errors="replace").splitlines()
            print("".join(f"  | {line}\n" for line in lines[-SHOWN_LINES:]), end="", flush=True)
    return results


# -- the table -------------------------------------------------------------------------------------


def table(content: Mapping[str, Any]) -> str:
    """Return the table of docs/gpu.md for the content of a gpu.json."""
    rows = [
        ("machine", machine_words(content["machine"])),
        ("date", f"{content['date']}, {content['commit']}"),
    ]
    for part in content["parts"]:
        words = WORDS[part["name"]](part["values"]) if part["values"] else []
        if part["outcome"] != "passed":
            words = [*words, f"**{part['outcome']}**: {part['reason']}"]
        rows.append((f"{TITLES[part['name']]} ({part['seconds']:.0f} s)", "; ".join(words)))
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows]
    return "".join(["| part | result |\n|---|---|\n", *lines])


def machine_words(values: Mapping[str, Any]) -> str:
    """Return the machine's GPUs and releases (driver, torch, NCCL, Python) in one line."""
    gpus = ", ".join(values["gpus"])
    driver = f"driver {values['driver']}" if values["driver"] else "driver unknown"
    return f"{gpus}; {driver}; torch {values['torch']}, NCCL {values['nccl']}, Python {values['python']}"


def mfu_words(values: Mapping[str, Any]) -> list[str]:
    """Return the results of the part ``mfu`` as texts: the rates of a matrix product and of training."""
    size = f"{values['product_size']:,}"
    words = [f"matrix product {size} x {size} in bf16: {values['product_flops_per_s'] / 1e12:.0f} TFLOP/s"]
    if "flops_per_s" in values:
        stated = f"MFU {values['mfu']:.1%}" if values["mfu"] is not None else values["mfu_empty_because"]
        rate, share = values["flops_per_s"] / 1e12, values["share_of_product"]
        words.append(f"transformer of {values['parameters'] / 1e6:.0f}M parameters: {rate:.0f} TFLOP/s")
        words.append(f"{share:.1%} of the matrix product, {stated}")
    return [*words, *usage_words(values)]


def usage_words(values: Mapping[str, Any]) -> list[str]:
    """Return how busy the GPU and its host were, and the power, as far as they were measured."""
    words = []
    if values.get("gpu_util_avg") is not None:
        words.append(f"GPU busy {values['gpu_util_avg']:.0f} %")
    if values.get("power_w") is not None:
        words.append(f"{values['power_w']:.0f} W")
    if values.get("launch_share") is not None:
        words.append(f"host launches for {values['launch_share']:.0%} of a step")
    return words


def formats_words(values: Mapping[str, Any]) -> list[str]:
    """Return the results of the part ``formats`` as texts: the rate and the MFU of each configuration."""
    words = []
    for one in values["configurations"]:
        mfu = [] if one["mfu"] is None else [f"MFU {one['mfu']:.1%}"]
        more = ", ".join([*mfu, *usage_words(one)])
        rate = f"{one['images_per_s']:.0f} images/s{f' ({more})' if more else ''}"
        words.append(f"{one['precision']}, {one['memory_format']}: {rate}")
    return words


def overhead_words(values: Mapping[str, Any]) -> list[str]:
    """Return the results of the part ``overhead`` as texts: the time that the recorder adds to a step."""
    words = []
    for cost in values["costs"]:
        interval = f"95 % interval {cost['low_us']:.0f} to {cost['high_us']:.0f}"
        step = f"step of {cost['step_s'] * 1e3:.2f} ms, {values['rounds']} rounds"
        words.append(f"{cost['name']}: {cost['cost_us']:.0f} us ({interval}; {step})")
    return words


def study_words(values: Mapping[str, Any]) -> list[str]:
    """Return the results of the part ``study`` as texts: its runs, and the clocks of the busy GPU."""
    runs = values["runs"]
    windows = sum(run["conditions"] for run in runs)
    words = [f"{len(runs)} runs, {windows} windows with conditions"]
    loaded = [clocks["loaded"] for run in runs for clocks in run["clocks"]]
    for name, unit in (("sm_mhz", "MHz"), ("power_w", "W"), ("temperature_c", "°C")):
        known = [clocks[name] for clocks in loaded if clocks[name] is not None]
        if known:
            words.append(f"{name.rpartition('_')[0]} {min(known):.0f} to {max(known):.0f} {unit}")
    return words


def tests_words(values: Mapping[str, Any]) -> list[str]:
    """Return the result of the part ``tests`` as a text: the numbers of passed, failed and planned tests."""
    counts = [f"{values[kind]} {kind}" for kind in ("passed", "failed", "skipped") if values[kind]]
    return [f"{', '.join(counts) or 'none ended'} of {values['planned']}"]


TITLES = {part.name: part.title for part in PARTS}
WORDS = {
    "mfu": mfu_words,
    "formats": formats_words,
    "overhead": overhead_words,
    "study": study_words,
    "tests": tests_words,
}


def update_page(page: Path, content: Mapping[str, Any]) -> None:
    """Replace the table in ``page``; if there is no such file, create it from docs/gpu.md."""
    before, rest = (page if page.exists() else PAGE).read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}{table(content)}{END}{rest.split(END)[1]}", encoding="utf-8")


def commit() -> str:
    """Return the commit of this checkout; ``unknown commit`` without git."""
    with suppress(OSError, subprocess.SubprocessError):
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown commit"


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Run the parts and write the files; return the exit code."""
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        print(
            f"make gpu: error: {sys.executable} is Python {found}: 3.11 or newer is needed", file=sys.stderr
        )
        return 2
    for file in (options.json, options.page):
        if not file.resolve().parent.is_dir():
            print(f"make gpu: error: {file}: there is no folder {file.parent}", file=sys.stderr)
            return 2
    began = time.monotonic()
    machine = run_part(MACHINE, folder, limit_s=MACHINE.budget_s)
    unfit = machine.values.get("unfit") or (machine.reason if machine.outcome != "passed" else None)
    if unfit:
        print(f"make gpu: error: {unfit}", file=sys.stderr)
        return 2
    print(machine_words(machine.values), flush=True)
    chosen = [one for one in PARTS if one.name in options.parts or not options.parts]
    results = run_parts(chosen, folder, began=time.monotonic())
    content = {
        "schema": SCHEMA,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",  # noqa: UP017 (an older Python must reach its message)
        "commit": commit(),
        "seconds": round(time.monotonic() - began, 1),
        "machine": dict(machine.values),
        "parts": [result.as_json() for result in results],
    }
    written = [options.json]
    options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if len(content["parts"]) == len(PARTS):
        update_page(options.page, content)
        written.append(options.page)
    print(f"\n{table(content)}\nwritten: {', '.join(map(str, written))}", flush=True)
    return int(any(result.outcome != "passed" for result in results))


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [one.name for one in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"the parts to run: {', '.join(names)}")
    parser.add_argument("--json", type=Path, default=ROOT / "gpu.json", help="the file for all values")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with the table")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in names]:
        parser.error(f"there is no part {unknown[0]}; the parts are {', '.join(names)}")
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        return measure(options, Path(name))


if __name__ == "__main__":
    sys.exit(main())
