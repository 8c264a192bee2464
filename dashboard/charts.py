"""The figures of the pages, from the figures of reports; drawn and tested without Streamlit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tonnage.dashboard.frames import Curve, pareto_rows

# Okabe and Ito's colours, those with enough contrast on white and on black first.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999")
GREY = "#999999"
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "x")
HEIGHT = 380

Json = Mapping[str, Any]

_MEMORY_PARTS = (
    ("weights", "weights_bytes_per_gpu"),
    ("draft weights", "draft_weights_bytes_per_gpu"),
    ("activations", "activation_bytes_per_gpu"),
    ("CUDA graphs", "graph_bytes_per_gpu"),
    ("KV pool", "kv_bytes_per_gpu"),
    ("left free by the engine", "reserved_bytes_per_gpu"),
)
_PART_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#CC79A7", "#009E73", GREY)


def blank(x: str, y: str, **layout: Any) -> go.Figure:
    """Return an empty figure with titles on its axes, and room for both."""
    figure = go.Figure()
    figure.update_layout(
        colorway=COLOURS,
        height=HEIGHT,
        margin={"l": 70, "r": 20, "t": 40, "b": 60},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        xaxis_title=x,
        yaxis_title=y,
        **layout,
    )
    return figure


def colour(index: int) -> str:
    """Return the colour of the n-th series."""
    return COLOURS[index % len(COLOURS)]


def marker(index: int) -> str:
    """Return the mark of the n-th series; where colours begin again, marks are others."""
    return MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]


def memory_figure(pools: Mapping[str, Json]) -> go.Figure:
    """Stack what the memory of one GPU holds, a bar for each pool, in GiB."""
    figure = blank("memory of one GPU, GiB", "", barmode="stack")
    names = [f"{name} ({one['gpu']})" for name, one in pools.items()]
    for (part, key), shade in zip(_MEMORY_PARTS, _PART_COLOURS, strict=True):
        sizes = [one[key] / 2**30 for one in pools.values()]
        if any(sizes):
            text = [f"{size:.1f}" if size >= 4 else "" for size in sizes]
            figure.add_bar(
                y=names,
                x=sizes,
                name=part,
                orientation="h",
                text=text,
                textposition="inside",
                insidetextanchor="middle",
                marker_color=shade,
                hovertemplate=f"{part}: %{{x:.2f}} GiB<extra>%{{y}}</extra>",
            )
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(height=170 + 60 * len(names))
    return figure


def what_if_figure(rows: pd.DataFrame) -> go.Figure:
    """Compare the KV tokens of an instance under changes; what is now is marked."""
    figure = blank("KV tokens of one instance, millions", "")
    fitting = rows[rows["kv_tokens"].notna()]
    shades = [COLOURS[1] if now else COLOURS[0] for now in fitting["now"]]
    figure.add_bar(
        y=fitting["change"],
        x=fitting["kv_tokens"] / 1e6,
        orientation="h",
        marker_color=shades,
        text=[f"{tokens / 1e6:.2f}" for tokens in fitting["kv_tokens"]],
        hovertemplate="%{y}: %{x:.3f} M tokens<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(height=150 + 26 * len(fitting), showlegend=False)
    return figure


def curve_figure(curves: Sequence[Curve], y: str, x: str, *, log_y: bool = False) -> go.Figure:
    """Draw lines over the load; intervals as bars, published points without a line."""
    figure = blank(x, y)
    for index, curve in enumerate(curves):
        shade = curve.colour or colour(index)
        error = None
        if curve.low is not None and curve.high is not None:
            error = {
                "type": "data",
                "symmetric": False,
                "array": [high - one for high, one in zip(curve.high, curve.y, strict=True)],
                "arrayminus": [one - low for low, one in zip(curve.low, curve.y, strict=True)],
                "thickness": 1.2,
                "color": shade,
            }
        figure.add_scatter(
            x=curve.x,
            y=curve.y,
            name=curve.name,
            mode="markers" if curve.points_only else "lines+markers",
            line={"color": shade, "dash": curve.dash},
            marker={
                "color": shade,
                "size": 11 if curve.points_only else 8,
                "symbol": MARKERS[(6 if curve.points_only else index) % len(MARKERS)],
            },
            error_y=error,
            hovertemplate=f"%{{x:,}}: %{{y:,.4g}}<extra>{curve.name}</extra>",
        )
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(type="log" if log_y else "linear", rangemode="tozero")
    figure.update_layout(showlegend=True)
    return figure


def pareto_figure(runs: Mapping[str, Json]) -> go.Figure:
    """Draw what a user gets against what a GPU gives, for every point of runs, and the frontier."""
    rows = pareto_rows(runs)
    figure = blank(
        "output tokens/s of a user (1 / mean TPOT)", "output tokens/s per GPU (all GPUs)"
    )
    for index, (name, points) in enumerate(rows.groupby("run", sort=False)):
        figure.add_scatter(
            x=points["per_user"],
            y=points["per_gpu"],
            name=str(name),
            mode="markers",
            marker={
                "color": colour(index),
                "symbol": MARKERS[index % len(MARKERS)],
                "size": 10,
            },
            text=points["hover"],
            hovertemplate="%{text}<br>%{x:.1f} tokens/s of a user"
            "<br>%{y:.1f} tokens/s per GPU<extra></extra>",
        )
    front = rows[rows["on_front"]].sort_values("per_user")
    figure.add_scatter(
        x=front["per_user"],
        y=front["per_gpu"],
        name="frontier",
        mode="lines",
        line={"color": GREY, "dash": "dot", "shape": "vh"},
        hoverinfo="skip",
    )
    figure.update_layout(showlegend=True)
    return figure


def history_figure(
    history: pd.DataFrame, outages: Sequence[tuple[float, float, str]] = ()
) -> go.Figure:
    """Draw KV occupancy, batch and queue of every instance over the run; what failed is shaded."""
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.05)
    rows = (
        ("kv_share", "KV pages in use, %", 100.0),
        ("running_requests", "requests in the batch", 1.0),
        ("waiting_requests", "requests that wait", 1.0),
    )
    for index, (label, means) in enumerate(history.groupby("label", sort=False)):
        times_s = (means["start_s"] + means["end_s"]) / 2
        for row, (column, _, factor) in enumerate(rows, start=1):
            figure.add_scatter(
                x=times_s,
                y=means[column] * factor,
                name=str(label),
                legendgroup=str(label),
                showlegend=row == 1,
                mode="lines",
                line={"color": colour(index), "dash": ("solid", "dot", "dash")[index // 7 % 3]},
                hovertemplate=f"%{{x:.1f}} s: %{{y:.1f}}<extra>{label}</extra>",
                row=row,
                col=1,
            )
    for row, (_, title, _) in enumerate(rows, start=1):
        figure.update_yaxes(title_text=title, rangemode="tozero", row=row, col=1)
    figure.update_xaxes(title_text="seconds since the run began", row=3, col=1)
    for begins_s, ends_s, what in outages:
        shade = {"fillcolor": COLOURS[3], "opacity": 0.18, "line_width": 0}
        figure.add_vrect(x0=begins_s, x1=ends_s, annotation_text=what, **shade, row=1, col=1)
        for row in (2, 3):
            figure.add_vrect(x0=begins_s, x1=ends_s, **shade, row=row, col=1)
    figure.update_layout(
        height=660,
        margin={"l": 70, "r": 20, "t": 50, "b": 60},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    )
    return figure


def recoloured(figure: go.Figure, shades: Sequence[str]) -> go.Figure:
    """Return a figure of another page with colours that the colour-blind tell apart."""
    for trace, shade in zip(figure.data, shades, strict=False):
        trace.line.color = shade
    figure.update_layout(height=HEIGHT)
    return figure


def coverage_figure(heat_map: go.Figure) -> go.Figure:
    """Return the matrix of `integrity` in colours that the colour-blind tell apart."""
    heat_map.data[0].colorscale = "Cividis"
    heat_map.data[0].textfont = {"size": 12}
    heat_map.update_layout(xaxis_title="what watches", yaxis_title="class of fault (family)")
    heat_map.update_layout(margin={"l": 10, "r": 10, "t": 70, "b": 10})
    return heat_map


def overhead_figure(rows: pd.DataFrame) -> go.Figure:
    """Show what each way of watching adds to a step, in microseconds, with its interval."""
    figure = blank("what watches", "added, µs", barmode="group")
    costly = rows[rows["added_us"] > 0]  # a logarithmic axis has no zero
    for index, (where, ones) in enumerate(costly.groupby("where", sort=False)):
        figure.add_bar(
            x=ones["check"],
            y=ones["added_us"],
            name=str(where),
            marker_color=colour(index),
            error_y={
                "type": "data",
                "symmetric": False,
                "array": ones["high_us"] - ones["added_us"],
                "arrayminus": ones["added_us"] - ones["low_us"],
                "color": GREY,
            },
            hovertemplate=f"%{{x}}: %{{y:.1f}} µs<extra>{where}</extra>",
        )
    figure.update_yaxes(type="log")
    figure.update_layout(showlegend=True)
    return figure


def bars_figure(frame: pd.DataFrame, column: str, load: str) -> go.Figure:
    """Compare one figure of runs over their loads; `load` is the title of these."""
    figure = blank(load, column, barmode="group")
    for index, (run, ones) in enumerate(frame.groupby("run", sort=False)):
        figure.add_bar(
            x=[one if isinstance(one, str) else f"{one:g}" for one in ones["load"]],
            y=ones[column],
            name=str(run),
            marker_color=colour(index),
        )
    figure.update_xaxes(type="category")
    figure.update_layout(showlegend=True)
    return figure


def agreement_figure(rows: pd.DataFrame, figure_name: str, unit: str) -> go.Figure:
    """Draw predicted against measured; a tenth to either side is shaded."""
    figure = blank(f"measured {figure_name}{unit}", f"predicted {figure_name}{unit}")
    low, high = rows["measured"].min(), rows["measured"].max()
    ends = [low * 0.8, high * 1.25]
    figure.add_scatter(
        x=[*ends, *reversed(ends)],
        y=[ends[0] * 1.1, ends[1] * 1.1, ends[1] * 0.9, ends[0] * 0.9],
        fill="toself",
        mode="lines",
        line={"width": 0},
        fillcolor="rgba(153,153,153,0.25)",
        name="within 10 %",
        hoverinfo="skip",
    )
    for index, (group, ones) in enumerate(rows.groupby("group", sort=True)):
        figure.add_scatter(
            x=ones["measured"],
            y=ones["predicted"],
            name=str(group),
            mode="markers",
            marker={"color": colour(index), "symbol": marker(index), "size": 8},
            text=ones["id"],
            hovertemplate="%{text}: measured %{x:.4g}, predicted %{y:.4g}<extra></extra>",
        )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure
