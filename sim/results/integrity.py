"""What the checks of a run compared and found, as the JSON object names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from tonnage.sim.domain import Coverage, IntegritySpec
from tonnage.sim.results.run import RunResult
from tonnage.sim.serving.integrity import IntegrityBooks
from tonnage.sim.serving.tag_wrap import wrap_chance


@dataclass(frozen=True, slots=True)
class WatchedPool:
    """One pool as its checks see it; `pages`: of one rank, of which there are `ranks` in all."""

    integrity: IntegritySpec
    page_tokens: int
    pages: int
    ranks: int


def integrity_figures(run: RunResult, pools: Mapping[str, WatchedPool]) -> dict[str, Any]:
    """Return `integrity` of a point: zeros where nothing was checked and nothing went wrong.

    `checks`: entries of page tables that were compared, in `check_runs` checks.
    """
    books = run.integrity or IntegrityBooks()
    entries, runs = _handoff_checks(run, pools)
    figures: dict[str, Any] = {
        "checks": books.checks.entries + entries,
        "detected": books.detected,
        "aborted": books.aborted,
        "wrong_reads": books.wrong_reads,
    }
    watched = any(_is_watched(pool.integrity) for pool in pools.values())
    if watched:
        figures["check_runs"] = books.checks.runs + runs
        figures["unchecked_decode_steps"] = books.checks.unchecked_steps
    if books.injections:
        figures |= {
            "injected": books.injected,
            "victims": len(books.victims),
            "seen_before_abort": books.seen_before_abort,
            "refused_writes": books.refused_writes,
            "recomputed_prompts": books.recomputed,
            "stops": books.stops,
            "lost_requests": books.lost,
            "double_entries_mended": books.doubles_mended,
        }
    return figures | _wrap(run, pools)


def _is_watched(spec: IntegritySpec) -> bool:
    return spec.tracker != "none" or spec.handoff_checksum


def _handoff_checks(run: RunResult, pools: Mapping[str, WatchedPool]) -> tuple[int, int]:
    """Return the entries compared at handoffs, and the checks: two of the sender, one of the other.

    Prompts that were checked and did not arrive are not among them.
    """
    if "prefill" not in pools:
        return 0, 0
    there = ~np.isnan(run.records.times("transfer_end_s"))
    tokens = run.records.integers("input_tokens")[there]
    entries = runs = 0
    for role, times in (("prefill", 2), ("decode", 1)):
        pool = pools[role]
        if pool.integrity.checks(Coverage.HANDOFF):
            entries += times * int((-(-tokens // pool.page_tokens)).sum())
            runs += times * len(tokens)
    return entries, runs


def _wrap(run: RunResult, pools: Mapping[str, WatchedPool]) -> dict[str, Any]:
    """Return what 32-bit tags are worth in the pool that decodes, at the rate of this run.

    Pages that were given twice to one request, after a retraction, are counted once.
    """
    pool = pools["decode" if "decode" in pools else "serve"]
    if pool.integrity.tracker != "batched" or not run.makespan_s:
        return {}
    records = run.records
    tokens = records.integers("input_tokens") + records.integers("generated_tokens")
    given = float((-(-tokens // pool.page_tokens)).sum())
    ages_s = records.e2e_s()
    known = ages_s[~np.isnan(ages_s)]
    life_s = float(known.max()) if len(known) else run.makespan_s
    chance = wrap_chance(given / run.makespan_s / pool.ranks, pool.pages, life_s)
    if not isfinite(chance.log10_chance):
        return {}
    return {
        "tag_wrap_s": chance.seconds_to_wrap,
        "tag_wrap_log10_chance": chance.log10_chance,
    }
