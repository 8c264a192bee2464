"""A plan as one HTML page with its charts; it holds plotly itself and opens without a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from tonnage.sim.export.settings import one_line
from tonnage.sim.export.summary import provenance_text, title
from tonnage.sim.export.tables import (
    around_table,
    figure_table,
    interval_bounds,
    objective_table,
    pool_rows,
)
from tonnage.sim.planning.fleet_plan import FleetPlan

Chart = tuple[str, str, Any]  # title, caption, figure
FrontPoints = Sequence[Mapping[str, Any]]
Rows = Sequence[tuple[str, ...]]

_PLAN, _MEETS, _MISSES = "#c2410c", "#2563eb", "#a3a3a3"
_STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; color: #1c1917; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { border: 1px solid #d6d3d1; padding: 0.25rem 0.6rem; text-align: left; }
th { background: #f5f5f4; }
p.note { color: #57534e; }
"""


def html_report(plan: FleetPlan, remarks: Sequence[str], front: FrontPoints = ()) -> str:
    """Return the page: tables, charts, what is assumed and what to mind."""
    heading = escape(one_line(title(plan)))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<title>{heading}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{heading}</h1>",
            *_tables(plan),
            *_charts(charts(plan, front)),
            *_list("Assumed", plan.provenance.assumptions),
            *_list("To mind", remarks),
            f'<p class="note">{escape(one_line(provenance_text(plan)))}</p>',
            "</body></html>",
            "",
        ]
    )


def charts(plan: FleetPlan, front: FrontPoints = ()) -> Iterator[Chart]:
    """Yield what there is to draw: objectives, cost by pool, and the front where it is known."""
    if plan.figures.objectives:
        caption = "What was reached, as a share of the limit; a bar's whisker is the interval."
        yield "Objectives and their limits", caption, _objectives(plan)
    yield "Cost by pool", "USD per hour.", _costs(plan)
    if front:
        caption = "Fleets that no other beats, by closed form; the plan as it was found."
        yield "The front", caption, _front(plan, front)


# --- figures ------------------------------------------------------------------------------------


def _objectives(plan: FleetPlan) -> Any:
    ones = plan.figures.objectives
    shares = [one.reached.value / one.limit_s for one in ones]
    bounds = [interval_bounds(one.reached) for one in ones]
    above = [
        high / one.limit_s - share
        for one, share, (_, high) in zip(ones, shares, bounds, strict=True)
    ]
    below = [
        share - low / one.limit_s for one, share, (low, _) in zip(ones, shares, bounds, strict=True)
    ]
    figure = _figure("", "share of the limit")
    figure.add_bar(
        x=[one.name for one in ones],
        y=shares,
        marker_color=[_MEETS if one.met else _PLAN for one in ones],
        error_y={"type": "data", "array": above, "arrayminus": below, "symmetric": False},
    )
    figure.add_hline(y=1.0, line_dash="dash")
    return figure


def _costs(plan: FleetPlan) -> Any:
    figure = _figure("", "USD per hour")
    names = [f"{pool.role}: {pool.gpus} {pool.gpu}" for pool in plan.pools]
    figure.add_bar(x=names, y=[pool.gpus * pool.gpu_hour_usd for pool in plan.pools])
    return figure


def _front(plan: FleetPlan, front: FrontPoints) -> Any:
    figure = _figure("output tokens/s of a user", "output tokens/s per GPU (all GPUs)")
    for meets, colour, name in ((True, _MEETS, "meets"), (False, _MISSES, "misses")):
        points = [one for one in front if bool(one["meets_objectives"]) is meets]
        figure.add_scatter(
            x=[one["output_tokens_per_s_per_user"] for one in points],
            y=[one["output_tokens_per_s_per_gpu"] for one in points],
            text=[_point_text(one) for one in points],
            mode="markers",
            name=f"{name} the objectives",
            marker={"color": colour, "size": 9},
        )
    found = plan.figures
    figure.add_scatter(
        x=[found.output_tokens_per_s_per_user.value],
        y=[found.output_tokens_per_s_per_gpu.value],
        mode="markers",
        name="the plan",
        marker={"color": _PLAN, "symbol": "star", "size": 14},
    )
    return figure


def _point_text(point: Mapping[str, Any]) -> str:
    cost = point["usd_per_million_output_tokens"]
    return f"{escape(str(point['fleet']))}<br>{cost:.3g} USD per million output tokens"


def _figure(x: str, y: str) -> Any:
    import plotly.graph_objects as go  # heavy: only where a page is asked for

    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        height=360,
        margin={"l": 70, "r": 20, "t": 20, "b": 50},
        xaxis_title=x,
        yaxis_title=y,
    )
    return figure


# --- HTML ---------------------------------------------------------------------------------------


def _tables(plan: FleetPlan) -> Iterator[str]:
    how = "simulated" if plan.figures.simulated else "in closed form"
    yield from ("<h2>Pools</h2>", _table(pool_rows(plan)))
    yield from (f"<h2>Figures, {how}</h2>", _table(figure_table(plan)))
    if plan.figures.objectives:
        yield from ("<h2>Objectives</h2>", _table(objective_table(plan)))
    yield from ("<h2>Around the pools</h2>", _table(around_table(plan)))


def _table(rows: Rows) -> str:
    head, *rest = rows
    lines = [_row(head, "th"), *(_row(row, "td") for row in rest)]
    return f"<table>{''.join(lines)}</table>"


def _row(cells: tuple[str, ...], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(one_line(cell))}</{tag}>" for cell in cells) + "</tr>"


def _charts(drawn: Iterator[Chart]) -> Iterator[str]:
    for number, (heading, caption, figure) in enumerate(drawn):
        yield f'<h2>{heading}</h2><p class="note">{caption}</p>'
        yield figure.to_html(
            full_html=False,
            include_plotlyjs=number == 0,
            div_id=f"chart-{number}",
            config={"displaylogo": False},
        )


def _list(heading: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        items = "".join(f"<li>{escape(one_line(text))}</li>" for text in texts)
        yield f"<h2>{heading}</h2><ul>{items}</ul>"
