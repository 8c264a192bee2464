"""What people look at in a trace, as plots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tonnage.sim.domain import FloatArray
from tonnage.sim.traffic.describe import TraceDescription

_POINTS = 400  # of a curve of shares
_BINS = 60  # of a curve over time
_TURNS = 200
_FEWEST_SESSIONS = 5  # of a turn whose spread is drawn

Plot = tuple[str, str, go.Figure]  # name, caption, figure


def plots(description: TraceDescription) -> Iterator[Plot]:
    """Yield the plots that the trace has the data for."""
    table = description.table
    if table.common_clock and description.figures["span_s"]:
        yield _arrivals(table.rows["arrival_s"].to_numpy())
    yield _lengths(table.rows)
    if table.block_tokens:
        yield _hits(description)
        yield _kept(description)
        yield _working_set(description)
    if table.sessions_are != "unknown" and bool((table.rows["turn"] > 0).any()):
        yield _turns(table.rows)
        yield _think_times(table.rows)
        yield _contexts(table.rows)


def _figure(x: str, y: str, **axes: Any) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        margin={"l": 70, "r": 20, "t": 20, "b": 50},
        height=340,
        legend={"orientation": "h", "y": 1.1},
        xaxis_title=x,
        yaxis_title=y,
        **axes,
    )
    return figure


def _arrivals(arrivals_s: FloatArray) -> Plot:
    minutes = int(arrivals_s[-1] // 60.0) + 1
    counts = np.histogram(arrivals_s, bins=minutes, range=(0.0, 60.0 * minutes))[0]
    figure = _figure("minutes", "requests per minute")
    figure.add_bar(x=np.arange(minutes), y=counts)
    return "Arrivals", "Requests that arrive in each minute; the last one may be cut.", figure


def _lengths(rows: pd.DataFrame) -> Plot:
    figure = _figure("tokens", "share of requests with no more", xaxis_type="log")
    for column, name in (("input_tokens", "input"), ("output_tokens", "output")):
        figure.add_scatter(**_shares(rows[column].to_numpy(dtype=float)), name=name)
    return "Lengths", "Tokens of prompts and answers.", figure


def _hits(description: TraceDescription) -> Plot:
    rows = description.table.rows
    if description.table.common_clock:
        span_s = float(rows["arrival_s"].max()) or 1.0
        places = np.minimum((rows["arrival_s"] / span_s * _BINS).astype(int), _BINS - 1)
        sums = rows.groupby(places)[["hit_tokens", "input_tokens"]].sum()
        x, title = (sums.index + 0.5) * span_s / _BINS / 60.0, "minutes"
    else:
        sums = rows[rows["turn"] < _TURNS].groupby("turn")[["hit_tokens", "input_tokens"]].sum()
        x, title = sums.index + 1, "turn of the session"
    figure = _figure(title, "share of input tokens", yaxis_range=[0, 1])
    figure.add_scatter(x=x, y=sums["hit_tokens"] / sums["input_tokens"], mode="lines")
    return "Hits", "Input tokens that a prefix cache without end would hit.", figure


def _kept(description: TraceDescription) -> Plot:
    reuse = description.figures["reuse"]
    kept = reuse["input_token_hit_rate_if_kept"]
    figure = _figure("minutes", "share of input tokens", xaxis_type="log", yaxis_range=[0, 1])
    minutes = [float(kept_s) / 60.0 for kept_s in kept]
    figure.add_scatter(x=minutes, y=list(kept.values()), mode="lines+markers", name="kept so long")
    figure.add_hline(y=reuse["input_token_hit_rate"], line_dash="dot", annotation_text="for ever")
    return "Time kept", "Hit rate if a block stayed that long after each use.", figure


def _working_set(description: TraceDescription) -> Plot:
    found = description.working_set
    assert found is not None
    per = "" if description.table.common_clock else ", per session under way"
    figure = _figure("minutes", f"tokens of distinct blocks{per}")
    minutes = found.times_s / 60.0
    figure.add_scatter(x=minutes, y=found.seen_tokens, mode="lines", name="used by then")
    figure.add_scatter(
        x=minutes, y=found.used_again_tokens, mode="lines", name="used by then and again later"
    )
    caption = (
        "What a cache holds that forgets nothing, and what one would have to hold that knows the "
        "future, for the same hits."
    )
    return "Working set", caption, figure


def _turns(rows: pd.DataFrame) -> Plot:
    figure = _figure("turns", "share of sessions with no more", xaxis_type="log")
    turns: FloatArray = np.array(rows.groupby("session").size(), dtype=np.float64)
    figure.add_scatter(**_shares(turns))
    return "Turns", "Requests of a session.", figure


def _think_times(rows: pd.DataFrame) -> Plot:
    figure = _figure("seconds", "share of turns with no more", xaxis_type="log")
    think_s = rows["think_s"].dropna().to_numpy()
    figure.add_scatter(**_shares(np.maximum(think_s, 0.1)))  # the axis has no 0
    return "Think time", "From an answer to the next request of the session.", figure


def _contexts(rows: pd.DataFrame) -> Plot:
    by_turn = rows[rows["turn"] < _TURNS].groupby("turn")["input_tokens"]
    enough = by_turn.size() >= min(_FEWEST_SESSIONS, rows["session"].nunique())
    figure = _figure("turn of the session", "input tokens", yaxis_rangemode="tozero")
    for share, name in ((0.9, "p90"), (0.5, "median"), (0.1, "p10")):
        line = by_turn.quantile(share)[enough]
        figure.add_scatter(x=line.index + 1, y=line, mode="lines", name=name)
    return "Context", "Input tokens by turn, of the sessions that came so far.", figure


def _shares(values: FloatArray) -> dict[str, Any]:
    """Return the share of values that are no larger, as a line of few points."""
    ordered = np.sort(values)
    shares = np.linspace(0.0, 1.0, min(_POINTS, len(ordered)))
    return {"x": np.quantile(ordered, shares), "y": shares, "mode": "lines"}
