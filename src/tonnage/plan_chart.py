"""The Pareto front of a plan as a page of its own."""

from __future__ import annotations

from typing import Any

from tonnage.plan_reasons import FrontPoint
from tonnage.planner import PlanReport

_MEETS, _MISSES, _ANSWER = "#1f77b4", "#b0b0b0", "#d62728"


def front_figure(report: PlanReport) -> dict[str, Any]:
    """Return the figure: speed for a user against tokens per GPU, and against what they cost."""
    from plotly.subplots import make_subplots  # heavy, and only drawn when asked for

    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("per GPU of the fleet", "cost of a million output tokens")
    )
    for meets, colour, name in ((True, _MEETS, "meets"), (False, _MISSES, "misses")):
        points = [one for one in report.front if one.meets_objectives is meets]
        _add(figure, points, colour, f"{name} the objectives (closed form)")
    best = report.best.figures
    per_user = best.output_tokens_per_s_per_user.value
    answers = [
        (1, best.output_tokens_per_s_per_gpu.value),
        (2, best.usd_per_million_output_tokens.value),
    ]
    for column, value in answers:
        figure.add_scatter(
            x=[per_user],
            y=[value],
            row=1,
            col=column,
            mode="markers",
            name="best (simulated)",
            marker={"color": _ANSWER, "symbol": "star", "size": 14},
            showlegend=column == 1,
        )
    figure.update_xaxes(title_text="output tokens/s of a user")
    figure.update_yaxes(title_text="output tokens/s per GPU", row=1, col=1)
    figure.update_yaxes(title_text="USD per million output tokens", row=1, col=2)
    figure.update_layout(title=f"{report.scenario.name}: {report.load}", template="plotly_white")
    found: dict[str, Any] = figure.to_dict()
    return found


def _add(figure: Any, points: list[FrontPoint], colour: str, name: str) -> None:
    speeds = [one.output_tokens_per_s_per_user for one in points]
    texts = [f"{one.fleet}<br>{one.gpus} GPUs, {one.usd_per_hour:.2f} USD/h" for one in points]
    columns = {
        1: [one.output_tokens_per_s_per_gpu for one in points],
        2: [one.usd_per_million_output_tokens for one in points],
    }
    for column, values in columns.items():
        figure.add_scatter(
            x=speeds,
            y=values,
            row=1,
            col=column,
            mode="markers",
            name=name,
            text=texts,
            hoverinfo="text+x+y",
            marker={"color": colour, "size": 9},
            showlegend=column == 1,
        )


def front_html(report: PlanReport) -> str:
    """Return the page; it needs no network."""
    from plotly.io import to_html

    page: str = to_html(front_figure(report), include_plotlyjs=True, div_id="front")
    return page
