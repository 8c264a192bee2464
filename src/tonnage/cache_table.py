"""What a prefix cache did, as tables: hits and bytes by tier, and TTFT by length of the hit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from tonnage.sim.units import format_bytes, format_seconds
from tonnage.terminal import new_table

Json = Mapping[str, Any]
Named = Sequence[tuple[tuple[str, ...], Json]]  # what a point is called, and its figures
_NOTHING = "-"
_TIER_TITLES = ("hit rate", "read", "written", "loads", "slower than computing")
_TTFT_TITLES = ("requests", "mean", "p50", "p95")


def print_caches(console: Console, heads: Sequence[str], points: Named) -> None:
    """Print what the caches of these points did; nothing where none has one."""
    cached = [(name, point["cache"]) for name, point in points if "cache" in point]
    if not cached:
        return
    _print_tiers(console, heads, cached)
    for line in dict.fromkeys(_slow_lines(cached)):
        console.print(line, soft_wrap=True)
    _print_ttft(console, heads, cached)


def _print_tiers(console: Console, heads: Sequence[str], caches: Named) -> None:
    heads = [*heads, "prefix cache"]
    tiered = any(len(cache["by_tier"]) > 1 for _, cache in caches)
    titles = _TIER_TITLES if tiered else _TIER_TITLES[:1]
    table = new_table(console, "", [*heads, *titles], numbers_from=len(heads))
    for name, cache in caches:
        hit_rate = f"{cache['input_token_hit_rate']:.1%}"
        rows = [("all", [hit_rate, *[""] * (len(titles) - 1)])]
        if tiered:
            rows += [(tier, _tier_cells(found)) for tier, found in cache["by_tier"].items()]
        for where, cells in rows:
            table.add_row(*name, where, *cells)
    console.print(table)


def _tier_cells(tier: Json) -> list[str]:
    """Return the cells of one tier; the GPU is not read from and not written to."""
    cells = [f"{tier['input_token_hit_rate']:.1%}"]
    cells += [format_bytes(tier[key]) if key in tier else "" for key in _BYTES]
    if not tier.get("loads"):
        return [*cells, "0" if "loads" in tier else "", ""]
    loads, slower = tier["loads"], tier["loads_slower_than_recompute"]
    return [*cells, f"{loads:,.0f}", f"{slower:,.0f} ({slower / loads:.0%})"]


_BYTES = ("read_bytes", "written_bytes")


def _slow_lines(caches: Named) -> Iterator[str]:
    """Say from which tiers loads took longer than computing the tokens again."""
    for _, cache in caches:
        for name, tier in cache["by_tier"].items():
            if not tier.get("loads_slower_than_recompute"):
                continue
            least = tier.get("crossover_tokens")
            worth = "at no length" if least is None else f"from {least:,.0f} tokens on"
            yield (
                f"Loading from {name} took longer than computing the tokens again; it is faster "
                f"{worth}. cache.load: faster computes the others"
            )


def _print_ttft(console: Console, heads: Sequence[str], caches: Named) -> None:
    heads = [*heads, "cached tokens"]
    titles = [_TTFT_TITLES[0], *[f"TTFT {title}" for title in _TTFT_TITLES[1:]]]
    table = new_table(console, "", [*heads, *titles], numbers_from=len(heads))
    for name, cache in caches:
        for tokens, spread in cache["ttft_s_by_cached_tokens"].items():
            times = [_seconds(spread.get(title)) for title in _TTFT_TITLES[1:]]
            table.add_row(*name, tokens, f"{spread['requests']:,.0f}", *times)
    console.print(table)


def _seconds(value: float | None) -> str:
    return _NOTHING if value is None else format_seconds(value)
