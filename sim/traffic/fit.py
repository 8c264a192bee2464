"""A `traffic` section fitted to a trace: the loads that can be drawn, with its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from tonnage.sim.domain import FloatArray
from tonnage.sim.traffic.describe import TraceDescription
from tonnage.sim.traffic.session_traces import distinct_prefixes
from tonnage.sim.traffic.trace_table import TraceTable

Section = dict[str, Any]
_FEWEST_SESSIONS = 20  # of which a rate and a number can be taken
_SESSIONS = 200
_FEWEST_COMPACTIONS = 5
_LOST = 0.5  # of the blocks of the turn before: keeping less is a new context, not a longer one
_USERS = (8, 16, 32)  # where the trace does not tell


def traffic_section(description: TraceDescription) -> Section:
    """Return a scenario's `traffic` that offers what the trace does, as far as it can be drawn.

    Sessions where some go on beyond their first turn, else a Poisson or gamma process.
    """
    table = description.table
    if table.sessions_are != "unknown" and bool((table.rows["turn"] > 0).any()):
        return _sessions(description)
    return _open(description)


def _open(description: TraceDescription) -> Section:
    rows, figures = description.table.rows, description.figures
    variation = _rounded(figures["gap_coefficient_of_variation"] or 1.0)
    bursty = abs(variation - 1.0) > 0.05
    section: Section = {"kind": "gamma" if bursty else "poisson"}
    section["rate_per_s"] = _rounded(figures["rate_per_s"] or 1.0)
    if bursty:
        section["coefficient_of_variation"] = variation
    section["input_tokens"] = length_section(rows["input_tokens"])
    section["output_tokens"] = length_section(rows["output_tokens"])
    section["requests"] = len(rows)
    return section


def _sessions(description: TraceDescription) -> Section:
    table = description.table
    rows = table.rows
    sessions = int(rows["session"].nunique())
    section: Section = {"kind": "sessions"}
    span_s = description.figures["span_s"]
    if table.common_clock and sessions >= _FEWEST_SESSIONS and span_s:
        section["rate_per_s"] = _rounded(sessions / span_s)
    else:
        section["concurrency"] = list(_USERS)
    prefix, kinds, exponent = _shared_prefix(table)
    first = rows.loc[rows["turn"] == 0, "input_tokens"]
    later = rows[rows["turn"] > 0]
    lost = later["kept_share"] < _LOST
    shorter = lost & (later["new_input_tokens"] < 0)
    section["session"] = {
        "count": sessions if sessions >= _FEWEST_SESSIONS else _SESSIONS,
        "turns": length_section(rows.groupby("session").size()),
        "shared_prefix_tokens": prefix,
        "shared_prefixes": kinds,
        "zipf_exponent": exponent,
        "first_input_tokens": length_section(first - prefix),
        "new_input_tokens": length_section(later.loc[~lost, "new_input_tokens"]),
        "output_tokens": length_section(rows["output_tokens"]),
        "think_time": duration_section(rows["think_s"]),
        **_compaction(rows, later[shorter], prefix),
        "rewrite_share": _rounded(float((lost & ~shorter).mean())),
        "block_tokens": table.block_tokens or 64,
    }
    return section


def _compaction(rows: pd.DataFrame, shorter: pd.DataFrame, prefix: int) -> Section:
    """Return where contexts are compacted, and to what; too few cases are none.

    The limit is the p95 of the contexts that were compacted. With their median every session would
    be cut there, and longer ones are common.
    """
    if len(shorter) < _FEWEST_COMPACTIONS:
        return {"compact_at_tokens": None}
    context = shorter["input_tokens"] - shorter["new_input_tokens"]  # before it was compacted
    return {
        "compact_at_tokens": round(float(context.quantile(0.95))),
        "compacted_tokens": length_section(shorter["input_tokens"] - prefix),
    }


# --- what sessions share ------------------------------------------------------------------------


def _shared_prefix(table: TraceTable) -> tuple[int, int, float]:
    """Return the tokens of the shared prefix, how many there are, and their Zipf exponent."""
    if table.recorded:
        sizes = [one.tool_tokens + one.system_tokens for one in table.recorded]
        counts = list(distinct_prefixes(table.recorded).values())
        return round(float(np.median(sizes))), len(counts), zipf_exponent(counts)
    # What first turns hit was said by other sessions. Their median leaves out the odd repeated one.
    first = table.rows[table.rows["turn"] == 0]
    blocks = int(first["hit_blocks"].iloc[1:].median()) if len(first) > 1 else 0
    return blocks * (table.block_tokens or 0), 1, 1.0


def zipf_exponent(counts: Sequence[int]) -> float:
    """Return the exponent s that makes `counts` most likely, the n-th kind drawn as 1 / n^s.

    `counts` `[kinds]` fall. With one kind any exponent does, and 1 is returned.
    """
    if len(counts) < 2:
        return 1.0
    logs: FloatArray = np.log(np.arange(1, len(counts) + 1))
    weighted = float(np.dot(counts, logs))
    total = float(sum(counts))

    def unlikelihood(exponent: float) -> float:
        return exponent * weighted + total * float(np.log(np.exp(-exponent * logs).sum()))

    return _rounded(float(minimize_scalar(unlikelihood, bounds=(0.0, 5.0), method="bounded").x))


# --- distributions ------------------------------------------------------------------------------


def length_section(values: pd.Series[Any]) -> Section | int:
    """Return a constant, or the lognormal with the median and p95 of the values, cut at the most.

    Values below 1 token count as 1. A sample whose p95 is its median is uniform.
    """
    tokens = values.dropna().clip(lower=1)
    if tokens.empty:
        return 1
    median, p95, most = (round(float(tokens.quantile(share))) for share in (0.5, 0.95, 1.0))
    if p95 > median:
        return {"kind": "lognormal", "median": median, "p95": p95, "max": most}
    least = round(float(tokens.quantile(0.05)))
    return median if least == most else {"kind": "uniform", "low": least, "high": most}


def duration_section(values_s: pd.Series[Any]) -> Section | str:
    """Return a constant, or the lognormal with the values' median and p95, cut at the most."""
    known = values_s.dropna()
    if known.empty:
        return "0s"
    median, p95, most = (float(known.quantile(share)) for share in (0.5, 0.95, 1.0))
    if not 0.0 < median < p95:
        return _seconds(float(known.mean()))
    return {
        "kind": "lognormal",
        "median": _seconds(median),
        "p95": _seconds(p95),
        "max": _seconds(most),
    }


def _seconds(value_s: float) -> str:
    return f"{_rounded(value_s):g}s"


def _rounded(value: float) -> float:
    """Keep three digits: a fit is no better than that."""
    return float(f"{value:.3g}")
