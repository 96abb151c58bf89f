"""Tell whether the ranks of a run train together, or each a model of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_scaling_bench.files import read_json
from ddp_scaling_bench.run_folder import RunFolder

from ..matrix.cell import Cell
from .conditions import objects
from .readings import readings_of

#: Ranks that send a smaller share of the bytes of an exchange of gradients do not train together.
LEAST_SHARE = 0.01
#: What to do about a command without the recorder whose nodes sent so few bytes.
REMEDY = (
    "set workload.parameters to the number of trained parameters (with LoRA, only those of the adapter); "
    "with compressed gradients, or if ranks exchange rarely on purpose, set exchange: rare"
)
_BYTES = 4  # of a gradient in fp32


def together_of(
    folder: RunFolder, cell: Cell, env: Mapping[str, Any], readings: int | None = None
) -> bool | None:
    """Return whether the ranks of a run train together; None if this was not measured.

    The recorder compares the ranks' parameters, and writes the result to ``env``, the content of env.json.
    Without it, several nodes do not train together if they sent hardly any bytes during the command. Each
    of the ``readings`` of the command is at least one micro-batch; if the number is None, they are read.
    """
    exchange = env.get("exchange")
    if isinstance(exchange, dict):
        return found if isinstance(found := exchange.get("together"), bool) else None
    parameters = cell.workload.get("parameters")
    if not (cell.is_unrecorded and parameters and cell.nodes > 1) or cell.is_exchange_rare:
        return None
    variables = {**cell.env, **(env.get("env") or {})}
    sockets = variables.get("NCCL_NET") == "Socket" or variables.get("NCCL_IB_DISABLE") == "1"
    sent = _sent_bytes(folder)
    if len(sent) < cell.nodes or None in sent or not (cell.backend == "gloo" or sockets):
        return None
    if readings is None:
        readings = len(readings_of(folder, cell).rows)
    # An all-reduce moves at least so many bytes between nodes, whatever its algorithm.
    least = 2 * (cell.nodes - 1) * _BYTES * parameters * readings / cell.workload["grad_accum"]
    return None if sum(filter(None, sent)) >= LEAST_SHARE * least else False


def _sent_bytes(folder: RunFolder) -> list[int | None]:
    """Return the bytes that each node sent to others during the command; None if they are unknown."""
    windows = objects((read_json(folder.conditions) or {}).get("windows"))
    nodes = objects(windows[0].get("nodes")) if len(windows) == 1 else []
    sent = [(node.get("net") or {}).get("sent") or {} for node in nodes]
    return [size if isinstance(size := one.get("link_bytes"), int) else None for one in sent]
