"""Which column of a table measured elsewhere means what: by known names only, never by its values.

A name is compared in lower case with everything but letters and digits as one underscore, so that
``Throughput (img/s)`` is ``throughput_img_s``. A name that could mean two things is refused with
both readings; one that nobody knows is left out, and told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_COUNT = r"(?:n|num|no_of|number_of|total)_"
_ITEMS = "samples?|images?|imgs?|tokens?|toks?|sequences?|seqs?|sentences?|examples?|items?|words?|frames?"
_RATE = rf"(?:(?:{_ITEMS})_(?:per_)?(?:s|sec|second)|[tgp]?flops?(?:_s)?)"
_RANK = "(?:gpu|device|rank|accelerator)"

#: What each field is called: a pattern for the whole of a normal name.
_PATTERNS = {
    "nodes": rf"(?:{_COUNT})?(?:nodes?|hosts?)|nnodes|node_count",
    "gpus": (
        rf"(?:{_COUNT})?(?:gpus?|ranks?|devices?|accelerators?|mpi_ranks?|processes|procs|cores)"
        "|ngpus?|nprocs?|world_size|gpu_count"
    ),
    "gpus_per_node": rf"(?:{_RANK}s?|tasks?)_per_node|{_RANK}s?_node",
    "global_batch": "global_batch(?:_size)?|total_batch(?:_size)?|gbs",
    "per_gpu_batch": (
        rf"per_{_RANK}_batch(?:_size)?|batch(?:_size)?_per_{_RANK}|batch(?:_size)?_{_RANK}|local_batch(?:_size)?"
    ),
    "throughput": rf"(?:(?:total|aggregate|system)_)?throughput(?:_{_RATE})?|{_RATE}",
    "throughput_per_gpu": (
        rf"throughput_per_{_RANK}(?:_{_RATE})?|(?:throughput_)?{_RATE}_(?:per_)?{_RANK}|(?:{_ITEMS})_(?:s_)?{_RANK}_s"
    ),
    "time": (
        "time(?:_s|_sec|_seconds)?|(?:step|iteration|iter)_time(?:_s|_sec|_seconds)?|"
        "time_per_(?:step|iteration|iter|it)(?:_s|_sec|_seconds)?|"
        "(?:s|secs?|seconds)_(?:per_)?(?:step|iteration|iter|it)"
    ),
    "time_ms": (
        "time_ms|(?:step|iteration|iter)_time_ms|time_per_(?:step|iteration|iter|it)_ms|step_ms|"
        "ms_(?:per_)?(?:step|iteration|iter|it)"
    ),
    "steps_per_sec": "(?:its?|iters?|iterations?|steps?)_(?:per_)?(?:s|sec|second)",
    "time_to_train": (
        "(?:(?:time|minutes|hours)_to_(?:train|accuracy|target|quality|convergence)|ttt|tta)(?:_[a-z]+)?|"
        "minutes?|hours?|"
        "time_(?:min|mins|minutes|h|hours)"
    ),
    "mode": "mode|scaling|regime|scaling_mode",
    "series": "series",
    "repeat": "rep|repeat|repetition|replicate|trial|run|seed",
    "cell_id": "cell_id|cell",
    "backend": "backend",
    "launcher": "launcher",
    "ddp": "ddp",
}
_COMPILED = {field: re.compile(pattern) for field, pattern in _PATTERNS.items()}

#: Names with two meanings: which, and what to call each.
AMBIGUOUS = {
    "batch(?:_size)?|bs|minibatch(?:_size)?|batchsize": (
        "could be the batch of all ranks or of one",
        "call it global_batch or per_gpu_batch",
    ),
    "(?:epoch|training|train|total|wall|run|elapsed|job)_?time(?:_[a-z]+)?|runtime(?:_[a-z]+)?|time_avg|"
    "walltime(?:_[a-z]+)?|elapsed(?:_[a-z]+)?|seconds|duration(?:_[a-z]+)?|time_per_epoch(?:_[a-z]+)?": (
        "could be the time of a fixed amount of work or the time to reach a target",
        "call it time (of the same work in every row of a strong series, and of the same work per rank in a "
        "weak one) or time_to_train",
    ),
}

#: What a throughput may count by its column's name, beside samples, as it is written on the page.
_UNITS = {
    "images": "images?|imgs?",
    "tokens": "tokens?|toks?",
    "sequences": "sequences?|seqs?",
    "sentences": "sentences?",
    "words": "words?",
    "frames": "frames?",
}
#: Of these a sample holds many: with a batch of samples they give no time per step.
_PARTS_OF_SAMPLES = ("tokens/s", "words/s")

#: The columns that say how fast.
MEASURES = ("throughput", "throughput_per_gpu", "time", "time_ms", "steps_per_sec", "time_to_train")


@dataclass(frozen=True)
class Header:
    """What the columns mean.

    ``places`` gives the column of each field, ``names`` what the table calls it; ``other`` are the
    columns of no known name; ``ambiguous`` maps a column to its two meanings and the way out.
    """

    places: dict[str, int]
    names: dict[str, str]
    other: dict[str, int]
    ambiguous: dict[str, tuple[str, str]]
    twice: list[tuple[str, str, str]]

    @property
    def rate_unit(self) -> str:
        """What the throughput counts: ``tokens/s``, ``TFLOP/s``; ``samples/s`` if its name does not say."""
        return rate_unit(self.names.get("throughput", self.names.get("throughput_per_gpu", "")))

    @property
    def counts_samples(self) -> bool:
        """Whether the throughput counts what a batch counts, too."""
        return self.rate_unit not in _PARTS_OF_SAMPLES and not self.rate_unit.endswith("FLOP/s")


def rate_unit(name: str) -> str:
    """Return the unit that a throughput column's name tells, ``samples/s`` where it tells none."""
    for word in normal(name).split("_"):
        if flops := re.fullmatch("([tgp]?)flops?", word):
            return f"{flops[1].upper()}FLOP/s"
        for unit, pattern in _UNITS.items():
            if re.fullmatch(pattern, word):
                return f"{unit}/s"
    return "samples/s"


def normal(name: str) -> str:
    """Return a column's name as it is compared."""
    return re.sub(r"[^a-z0-9]+", "_", name.casefold().replace("#", "n ")).strip("_")


def read_header(columns: list[str]) -> Header:
    """Return what the columns mean, by their names."""
    header = Header({}, {}, {}, {}, [])
    for place, name in enumerate(columns):
        plain = normal(name)
        field = next((field for field, pattern in _COMPILED.items() if pattern.fullmatch(plain)), None)
        if field in header.places:
            assert field is not None
            header.twice.append((field, header.names[field], name))
        elif field:
            header.places[field], header.names[field] = place, name
        else:
            meaning = next((m for pattern, m in AMBIGUOUS.items() if re.fullmatch(pattern, plain)), None)
            if meaning:
                header.ambiguous[name] = meaning
            header.other[name] = place
    return header
