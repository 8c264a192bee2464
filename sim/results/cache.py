"""What a prefix cache did for the requests of one run: hit rates, bytes, TTFT by length of hit."""

from __future__ import annotations

from typing import Any

import numpy as np

from tonnage.sim.results.records import Records
from tonnage.sim.results.run import RunResult
from tonnage.sim.serving.tiers import HierarchySpec, TierBooks, crossover_tokens

# The shortest hit of each class, in tokens; the first is a miss.
_CLASSES = (0, 1, 1024, 8192, 32768, 131072)
_QUANTILES = {"p50": 0.50, "p95": 0.95}


def cache_figures(run: RunResult) -> dict[str, Any]:
    """Return the `cache` of one point over the requests that were served; empty without a cache.

    Shares are of all input tokens. `gpu` are hits on the GPU itself, a tier's those that came from
    there, through host memory.
    """
    books = run.cache
    if books is None:
        return {}
    records, served = run.records, run.records.served()
    inputs = int(records.integers("input_tokens")[served].sum())
    cached = int(records.integers("cached_tokens")[served].sum())
    names = () if books.spec is None else books.spec.names
    loaded = {name: int(records.integers(f"{name}_tokens")[served].sum()) for name in names}
    hits = {"gpu": cached - sum(loaded.values()), **loaded}
    by_tier: dict[str, dict[str, Any]] = {
        name: {"hit_tokens": tokens, "input_token_hit_rate": _share(tokens, inputs)}
        for name, tokens in hits.items()
    }
    if books.spec is not None:
        for name in names:
            by_tier[name] |= _tier(name, books.spec, books, loaded[name])
    return {
        "input_token_hit_rate": _share(cached, inputs),
        "by_tier": by_tier,
        "ttft_s_by_cached_tokens": _ttft_by_hit(records),
    }


def _share(tokens: int, of_tokens: int) -> float:
    return tokens / of_tokens if of_tokens else 0.0


def _tier(name: str, spec: HierarchySpec, books: TierBooks, read_tokens: int) -> dict[str, Any]:
    """Return bytes and loads of one tier, and from which length on a load is worth it."""
    tier = spec.tier(name)
    return {
        "read_bytes": read_tokens * tier.kv_bytes_per_token,
        "written_bytes": books.written_tokens[name] * tier.kv_bytes_per_token,
        "loads": books.loads[name],
        "loads_slower_than_recompute": books.slower_loads[name],
        "crossover_tokens": crossover_tokens(
            tier.s_per_token,
            1.0,
            tier.latency_s,
            spec.recompute_s_per_token,
            spec.recompute_s_per_token_squared,
        ),
    }


def _ttft_by_hit(records: Records) -> dict[str, dict[str, float]]:
    """Return mean and quantiles of TTFT by class of cached tokens, of classes that were met."""
    served = records.served()
    cached, ttft_s = records.integers("cached_tokens")[served], records.ttft_s()[served]
    classes = np.searchsorted(_CLASSES, cached, side="right") - 1
    found = {}
    for number, least in enumerate(_CLASSES):
        values = ttft_s[classes == number]
        if not len(values):
            continue
        quantiles = np.quantile(values, list(_QUANTILES.values())).tolist()
        figures = {"mean": float(values.mean()), **dict(zip(_QUANTILES, quantiles, strict=True))}
        found[_class_name(number, least)] = {"requests": len(values), **figures}
    return found


def _class_name(number: int, least: int) -> str:
    if not least:
        return "0"
    if number + 1 == len(_CLASSES):
        return f"{least}+"
    return f"{least}-{_CLASSES[number + 1] - 1}"
