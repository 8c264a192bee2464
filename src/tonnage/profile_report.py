"""A profile as one HTML page: measured points, what is predicted between them, what that leaves.

The page holds plotly itself and needs no network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tonnage.profile_curves import Series, models_of, series_of
from tonnage.profile_tables import header_lines, held_out_text
from tonnage.sim.cost.operator_models import OperatorModels
from tonnage.sim.cost.profile import RESIDUAL_OCTAVES, Profile

_SERIES_PER_FORMAT = 4
_STEPS_PER_OCTAVE = 4
# Okabe and Ito's colours: told apart by those who are colour-blind.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } td, th { padding: .15em .8em .15em 0; text-align: right; }
td:first-child, th:first-child, td:nth-child(2), th:nth-child(2), td:nth-child(3), th:nth-child(3)
{ text-align: left; } th { border-bottom: 1px solid #999; } .dim { color: #555; }
"""


def profile_page(profile: Profile) -> str:
    """Return the page: header, held-out errors, and a chart per operator that a model answers for.

    The same profile gives the same bytes.
    """
    header = profile.header.model_dump(mode="json")
    title = escape(f"{header['name']}: {header['gpu']}, {header['engine']}")
    parts = [f"<h1>{title}</h1>", *(f"<p>{escape(line)}</p>" for line in header_lines(header))]
    parts += [f"<p class=dim>{escape(note)}</p>" for note in header["notes"]]
    if header["missing"]:
        parts.append(f"<p>Lacks: {escape(', '.join(header['missing']))}</p>")
    parts += ["<h2>Error on shapes held out whole</h2>", _error_table(header["errors"])]
    parts += _charts(profile)
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang=en>\n<head><meta charset=utf-8><title>{title}</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _error_table(errors: Mapping[str, Any]) -> str:
    heads = ("operator", "format", "held out", "rows", "median", "p90", "true / predicted")
    lines = ["<table>", f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for operator, formats in errors.items():
        for name, error in formats.items():
            for one in (error, *([error["extrapolation"]] if "extrapolation" in error else [])):
                low, high = one["interval"]
                cells = (
                    *(operator, name, held_out_text(one), f"{one['n']:,}"),
                    *(f"{one['median']:.1%}", f"{one['p90']:.1%}", f"{low:.2f} to {high:.2f}"),
                )
                lines.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return "\n".join([*lines, "</table>"])


def _charts(profile: Profile) -> Iterator[str]:
    models = models_of(profile)
    by_table: dict[str, list[Series]] = {}
    for one in series_of(profile):
        by_table.setdefault(one.operator.table, []).append(one)
    for index, (table, series) in enumerate(by_table.items()):
        residuals = profile.header.residuals.get(table, {})
        figure = operator_figure(chosen(series), residuals, models)
        yield f"<h2>{escape(table)}</h2>"
        yield figure.to_html(
            full_html=False, include_plotlyjs=index == 0, div_id=f"chart-{table}", validate=False
        )


def chosen(series: Iterable[Series]) -> list[Series]:
    """Return a few series of each format, spread over all of them, the longest of neighbours."""
    by_format: dict[str, list[Series]] = {}
    for one in series:
        by_format.setdefault(one.format, []).append(one)
    found = []
    for ones in by_format.values():
        for part in np.array_split(np.arange(len(ones)), min(_SERIES_PER_FORMAT, len(ones))):
            found.append(max((ones[index] for index in part), key=lambda one: len(one.x)))
    return found


def operator_figure(
    series: Sequence[Series], residuals: Mapping[str, Sequence[int]], models: OperatorModels
) -> go.Figure:
    """Draw points and predicted lines on the left, the residuals of all measured rows right."""
    figure = make_subplots(
        cols=2,
        column_widths=[0.66, 0.34],
        subplot_titles=("measured (points) and predicted (lines)", "measured / predicted"),
    )
    formats = list(dict.fromkeys([*(one.format for one in series), *residuals]))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(formats)}
    for one in series:
        for trace in _traces(one, models, colours[one.format]):
            figure.add_trace(trace, row=1, col=1)
    for name, counts in residuals.items():
        figure.add_trace(_histogram(name, counts, colours[name]), row=1, col=2)
    axis = series[0].operator.axis.replace("_", " ")
    figure.update_xaxes(title=axis, type="log", row=1, col=1)
    figure.update_yaxes(title="seconds", type="log", exponentformat="SI", row=1, col=1)
    ticks = np.linspace(-RESIDUAL_OCTAVES, RESIDUAL_OCTAVES, 5)
    texts = [f"{2.0**tick:.2g}" for tick in ticks]
    figure.update_xaxes(title="factor", tickvals=ticks, ticktext=texts, row=1, col=2)
    figure.update_yaxes(title="rows, %", row=1, col=2)
    figure.update_layout(template="plotly_white", height=520, legend={"groupclick": "togglegroup"})
    return figure


def _traces(one: Series, models: OperatorModels, colour: str) -> Iterator[go.Scatter]:
    name = f"{one.format}: {one.label}"
    points = np.maximum(one.x, 1.0)  # a logarithmic axis has no zero
    octaves = max(np.log2(points[-1] / points[0]), 1.0)
    steps = int(octaves * _STEPS_PER_OCTAVE) + 1
    line = np.geomspace(points[0], points[-1], steps)
    common = {"name": name, "legendgroup": name}
    yield go.Scatter(
        x=line, y=one.predicted(models, line), mode="lines", line={"color": colour}, **common
    )
    marker = {"color": colour, "size": 7}
    yield go.Scatter(
        x=points, y=one.seconds, mode="markers", marker=marker, showlegend=False, **common
    )


def _histogram(name: str, counts: Sequence[int], colour: str) -> go.Bar:
    edges = np.linspace(-RESIDUAL_OCTAVES, RESIDUAL_OCTAVES, len(counts) + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    shares = 100.0 * np.asarray(counts) / max(sum(counts), 1)
    return go.Bar(
        x=middles,
        y=shares,
        width=np.diff(edges),
        customdata=2.0**middles,
        marker={"color": colour},
        opacity=0.6,
        name=name,
        legendgroup=f"residual {name}",
        showlegend=False,
        hovertemplate=f"{escape(name)}: %{{y:.1f}} % at %{{customdata:.2f}}<extra></extra>",
    )
