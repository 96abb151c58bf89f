"""The names of the causes of a slow step. bench/words.toml and docs/why.md describe them."""

from __future__ import annotations

#: Rows that are not causes: time that no timer covers, and loss not assigned to a cause. ``not-valid``
#: replaces all rows with a share, for a cell that has an error (see :mod:`analysis.checks.validity`).
OTHER, NOT_EXPLAINED, NOT_VALID = "other", "not-explained", "not-valid"
RESTS = (OTHER, NOT_EXPLAINED, NOT_VALID)
#: The names in causes.csv, in `bench doctor --json` and in docs/why.md.
CAUSES = (
    *("late-rank", "late-node", "cpu-starved", "clocks", "data-loading", "outside-timers", "slow-fabric"),
    *("extra-communication", "unused-parameters", "grad-strides", "recompilation", "smaller-share"),
    *("memory-pressure", "overlap"),
)
#: Names of warnings in logs (bench/doctor/catalogue/slow.toml) that are causes here.
OF_WARNINGS = {
    "slow-gradient-strides": "grad-strides",
    "slow-find-unused-parameters": "unused-parameters",
    "slow-recompilations": "recompilation",
    "slow-allocator-retries": "memory-pressure",
    "slow-too-many-workers": "cpu-starved",
    "slow-one-thread": "cpu-starved",
    "slow-nccl-socket": "slow-fabric",
    "slow-no-peer-access": "slow-fabric",
}
