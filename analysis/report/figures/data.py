"""Throughput with real data, with synthetic data, and of the loader alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from analysis.data.columns import ScalingRow, grouped
from analysis.report.figures import lines as over_ranks
from analysis.report.figures.drawing import Drawing, by_mode, figure
from analysis.report.figures.scaling import THROUGHPUT, point_of
from analysis.report.results import Results
from analysis.report.words import CAPTIONS
from analysis.stats.rates import rate_unit
from analysis.text import clean
from ddp_scaling_bench.units import number

#: The kind of part that names the data of a series, and the value of batches that are not read.
_DATA, _SYNTHETIC = "swept data", "data synthetic"


@figure("data")
def data_figures(results: Results) -> Iterator[Drawing]:
    """Draw the throughputs of each mode by ``data``, of the settings that have the most sizes.

    Without workers, a rank reads a batch before its step: the samples per time of data loading are then the
    rate of the loader alone. Workers read during the steps, so their rate is not measured.
    """
    unit = rate_unit(results.rows)
    built_in = {clean(cell.cell_id): cell for cell in results.study.planned if cell.follows_plan}
    for suffix, every in by_mode(results.rows):
        rows = [row for row in unit.rows(every) if _DATA in _parts(row, results)]
        settings = [*grouped(rows, lambda row: _others(row, results)).values()]
        sizes = [len({(row.series, row.gpus) for row in own}) for own in settings]
        by_data = grouped(
            settings[sizes.index(max(sizes))] if sizes else [], lambda row: _parts(row, results)[_DATA]
        )
        if len(by_data) < 2:
            continue
        found = {}
        for data, own in by_data.items():
            found[data] = [point_of(THROUGHPUT, row, results) for row in own]
            read = [row for row in own if row.cell_id in built_in and data != _SYNTHETIC and row.data > 0]
            alone = [row for row in read if built_in[row.cell_id].workload.get("num_workers") == 0]
            if alone:
                rates = [unit.of(row.global_batch / row.data, row) for row in alone]
                found[f"loader alone, {data}"] = [*map(over_ranks.Point.of, alone, rates)]
        lines, left_out = over_ranks.without_many_runs(dict([*found.items()][: len(over_ranks.COLOURS)]))
        left_out += [f"one of {len(sizes)} settings drawn"] * (len(sizes) > 1)
        axes = {"title": f"Throughput ({unit.name})", "text": number, "base": 10, "device": results.device}
        scale = over_ranks.Scale.of([lines], **axes)
        texts = over_ranks.explain(lines, scale)
        yield Drawing(
            name=f"data-{suffix}",
            subject="Real and synthetic data",
            topic="data",
            mode=every[0].mode,
            description=texts["description"],
            caption=f"{CAPTIONS['data']} {texts['caption']}",
            left_out=left_out,
        ).draw(partial(over_ranks.draw_lines, lines=lines, scale=scale), left_in=scale.left_in)


def _parts(row: ScalingRow, results: Results) -> dict[str, str]:
    return results.parts.get(row.series, {})


def _others(row: ScalingRow, results: Results) -> tuple[tuple[str, str], ...]:
    """Return the settings of a series but for its data."""
    return tuple((name, text) for name, text in _parts(row, results).items() if name != _DATA)
