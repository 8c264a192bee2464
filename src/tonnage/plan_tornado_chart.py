"""What a plan's cost hangs on, as a page of its own: a tornado."""

from __future__ import annotations

from typing import Any

from tonnage.plan_tornado import Cost, Swing
from tonnage.plan_what_if import WhatIf

_LOW, _HIGH = "#1f77b4", "#d62728"


def tornado_figure(name: str, found: WhatIf) -> dict[str, Any]:
    """Return the figure: a bar from the plan's cost to that with each input lower, and higher."""
    import plotly.graph_objects as graph  # heavy, and only drawn when asked for

    swings = [one for one in found.tornado if _usd(one.base) is not None]
    swings.reverse()  # the first at the top
    figure = graph.Figure()
    for title, colour in (("lower", _LOW), ("higher", _HIGH)):
        costs = [one.low if title == "lower" else one.high for one in swings]
        shown = [(swing, cost) for swing, cost in zip(swings, costs, strict=True) if _usd(cost)]
        figure.add_bar(
            y=[swing.name for swing, _ in shown],
            x=[_more(swing, cost) for swing, cost in shown],
            base=[_usd(swing.base) for swing, _ in shown],
            orientation="h",
            name=f"input {title}",
            marker={"color": colour},
            text=[cost.value for _, cost in shown],
            hovertext=[f"{cost.fleet}<br>{cost.usd_per_hour:,.2f} USD/h" for _, cost in shown],
        )
    figure.update_layout(
        title=f"{name}: what the cost of the plan hangs on (closed form)",
        barmode="overlay",
        template="plotly_white",
        xaxis_title="USD per million output tokens",
    )
    drawn: dict[str, Any] = figure.to_dict()
    return drawn


def _usd(cost: Cost) -> float | None:
    return cost.usd_per_million_output_tokens


def _more(swing: Swing, cost: Cost) -> float:
    return (_usd(cost) or 0.0) - (_usd(swing.base) or 0.0)


def tornado_html(name: str, found: WhatIf) -> str:
    """Return the page; it needs no network."""
    from plotly.io import to_html

    page: str = to_html(tornado_figure(name, found), include_plotlyjs=True, div_id="tornado")
    return page
