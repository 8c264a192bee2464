"""The figures of a trace: load, burstiness, lengths, sessions, and what a prefix cache could do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tonnage.sim.domain import FloatArray, IntArray
from tonnage.sim.traffic.spec import TraceSource
from tonnage.sim.traffic.trace_table import TraceTable, read_table

KEPT_S = (60.0, 300.0, 900.0, 3600.0, 14_400.0)  # for which hit rates are given
_POINTS = 200  # of a working set over time
_QUANTILES = {"p5": 0.05, "p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Tokens of distinct blocks over time `[times]`: had been used by then, will be used again.

    Where every session has its own clock the times are since its start, and the tokens are those of
    one session under way then, on average.
    """

    times_s: FloatArray
    seen_tokens: FloatArray
    used_again_tokens: FloatArray


@dataclass(frozen=True, slots=True)
class TraceDescription:
    """A trace, its figures as a JSON object, and its working set, None without block ids."""

    table: TraceTable
    figures: dict[str, Any]
    working_set: WorkingSet | None


def describe(source: TraceSource) -> TraceDescription:
    """Read a trace and work out its figures; raises BadInputError for a bad file."""
    table = read_table(source, KEPT_S)
    rows = table.rows
    figures: dict[str, Any] = {
        "file": source.path.name,
        "format": table.format,
        "requests": len(rows),
        **_load(table),
        "input_tokens": quantiles(rows["input_tokens"])
        | {"total": int(rows["input_tokens"].sum())},
        "output_tokens": quantiles(rows["output_tokens"])
        | {"total": int(rows["output_tokens"].sum())},
        "sessions": _sessions(table),
        "reuse": _reuse(table),
    }
    working_set = _working_set(table) if table.block_tokens else None
    if working_set is not None:
        figures["working_set"] = _working_set_figures(table, working_set)
    figures["notes"] = _notes(table)
    return TraceDescription(table, figures, working_set)


def quantiles(values: pd.Series[Any]) -> dict[str, float]:
    """Return mean, quantiles and maximum of what is known; nothing known: nothing."""
    known = values.dropna()
    if known.empty:
        return {}
    found = {name: float(known.quantile(share)) for name, share in _QUANTILES.items()}
    return {"mean": float(known.mean()), **found, "max": float(known.max())}


def _with_total(tokens: pd.Series[Any]) -> dict[str, float]:
    return quantiles(tokens) | {"total": int(tokens.sum())}


# --- load ---------------------------------------------------------------------------------------


def _load(table: TraceTable) -> dict[str, Any]:
    """Return span, rate and burstiness, which need one clock."""
    if not table.common_clock:
        spans_s = table.rows.groupby("session")["arrival_s"].max()
        return {"span_s": None, "rate_per_s": None, "session_span_s": quantiles(spans_s)}
    arrivals_s = table.rows["arrival_s"].to_numpy()
    span_s = float(arrivals_s[-1])
    rate_per_s = (len(arrivals_s) - 1) / span_s if span_s else None
    return {
        "span_s": span_s,
        "rate_per_s": rate_per_s,
        "gap_coefficient_of_variation": _variation(np.diff(arrivals_s)),
        "dispersion_per_minute": dispersion(arrivals_s, 60.0),
    }


def _variation(gaps_s: FloatArray) -> float | None:
    if len(gaps_s) < 2 or gaps_s.mean() == 0.0:
        return None
    return float(gaps_s.std() / gaps_s.mean())


def dispersion(arrivals_s: FloatArray, window_s: float) -> float | None:
    """Return variance over mean of the arrivals in whole windows: 1 of a Poisson process.

    None with fewer than two windows.
    """
    windows = int(arrivals_s[-1] // window_s)
    if windows < 2:
        return None
    counts: IntArray = np.histogram(arrivals_s, bins=windows, range=(0.0, windows * window_s))[0]
    return float(counts.var() / counts.mean())


# --- sessions -----------------------------------------------------------------------------------


def _sessions(table: TraceTable) -> dict[str, Any] | None:
    if table.sessions_are == "unknown":
        return None
    rows = table.rows
    turns = rows.groupby("session").size()
    figures: dict[str, Any] = {
        "source": table.sessions_are,
        "count": len(turns),
        "turns": quantiles(turns),
        "first_input_tokens": quantiles(rows.loc[rows["turn"] == 0, "input_tokens"]),
        "new_input_tokens": quantiles(rows["new_input_tokens"]),
        "think_s": quantiles(rows["think_s"]),
    }
    if table.recorded:
        shared = [one.tool_tokens + one.system_tokens for one in table.recorded]
        figures["tool_and_system_tokens"] = quantiles(pd.Series(shared))
    return figures


# --- reuse --------------------------------------------------------------------------------------


def _reuse(table: TraceTable) -> dict[str, Any] | None:
    """Return what an endless prefix cache hits, of all requests."""
    if table.block_tokens is None:
        return None
    rows, cache = table.rows, table.cache
    blocks, tokens = int(rows["blocks"].sum()), int(rows["input_tokens"].sum())
    block_hit_rate = int(rows["hit_blocks"].sum()) / blocks
    kept = cache.hit_tokens_if_kept / tokens
    return {
        "block_tokens": table.block_tokens,
        "blocks": blocks,
        "distinct_blocks": len(cache),
        "block_hit_rate": block_hit_rate,
        "first_seen_block_share": 1.0 - block_hit_rate,
        "input_token_hit_rate": int(rows["hit_tokens"].sum()) / tokens,
        "input_token_hit_rate_if_kept": {
            f"{kept_s:g}": float(rate) for kept_s, rate in zip(KEPT_S, kept, strict=True)
        },
    }


def _working_set(table: TraceTable) -> WorkingSet:
    rows = table.rows
    if table.common_clock:
        times_s = np.linspace(0.0, float(rows["arrival_s"].max()), _POINTS)
        seen, used_again = table.cache.working_set_tokens(times_s)
        return WorkingSet(times_s, seen.astype(float), used_again.astype(float))
    spans_s = np.sort(rows.groupby("session")["arrival_s"].max().to_numpy())
    # Beyond that time too few sessions are left for a mean.
    times_s = np.linspace(0.0, float(np.quantile(spans_s, 0.9)), _POINTS)
    seen, used_again = table.cache.working_set_tokens(times_s)
    under_way = len(spans_s) - np.searchsorted(spans_s, times_s, side="left")
    return WorkingSet(times_s, seen / len(spans_s), used_again / under_way)


def _working_set_figures(table: TraceTable, found: WorkingSet) -> dict[str, Any]:
    return {
        "per": "trace" if table.common_clock else "session under way",
        "seen_tokens": float(found.seen_tokens[-1]),
        "used_again_tokens_mean": float(found.used_again_tokens.mean()),
        "used_again_tokens_max": float(found.used_again_tokens.max()),
    }


# --- notes --------------------------------------------------------------------------------------


def _notes(table: TraceTable) -> list[str]:
    """Say what the figures rest on, where that is not plain."""
    notes = []
    arrivals_s = table.rows["arrival_s"]
    distinct = arrivals_s.nunique()
    if table.common_clock and distinct < len(arrivals_s) / 2:
        notes.append(
            f"{len(arrivals_s):,} requests have {distinct:,} arrival times: the variation of gaps "
            "is that of a coarse clock; go by the dispersion per minute"
        )
    if not table.common_clock:
        notes.append(
            "every session has its own clock: no rate, no burstiness; the working set is that of "
            "one session under way, by the time since it began"
        )
    if table.sessions_are == "inferred":
        notes.append(
            "sessions are inferred: a prompt that begins with all whole blocks of an earlier one "
            "goes on with it; think time is from request to request, the answer's time included"
        )
    if table.block_tokens is None:
        notes.append("no block ids: nothing is known of reuse and sessions")
    unanswered = sum(one.unanswered for one in table.recorded)
    if unanswered:
        notes.append(f"{unanswered:,} turns without an answer are counted with one output token")
    if table.cache.odd_blocks:
        notes.append(
            f"{table.cache.odd_blocks:,} blocks have an id that was there behind another "
            "beginning; they are counted as no hits"
        )
    return notes
