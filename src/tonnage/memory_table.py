"""The memory report on a terminal: a bar per GPU, what it is made of, and what fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from tonnage.sim.units import format_bytes
from tonnage.tables import fraction_text, pool_line, print_provenance, print_scenario
from tonnage.terminal import new_table

Json = Mapping[str, Any]
_BAR_CELLS = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a GPU's memory: its letter and colour in the bar."""

    name: str
    letter: str
    style: str
    size_bytes: float


def print_memory(console: Console, runs: Mapping[str, Json]) -> None:
    """Print the memory of every pool; `runs` are by variant, "" for one alone."""
    print_scenario(console, next(iter(runs.values()))["scenario"])
    for variant, report in runs.items():
        for role, memory in report["memory"].items():
            place = f"{variant}: " if variant else ""
            console.print()
            console.print(place + pool_line(report["scenario"], role), style="bold", soft_wrap=True)
            _print_bar(console, memory)
            _print_parts(console, memory)
            _print_capacity(console, memory)
    console.print()
    print_provenance(console, runs)


def segments(memory: Json) -> tuple[Segment, ...]:
    """Split a GPU's memory; the parts add up to the whole."""
    replicated_bytes = sum(memory.get("replicated_bytes_by_role", {}).values())
    weights_bytes = memory["weights_bytes_per_gpu"]
    parts = (
        Segment("weights, sharded", "W", "blue", weights_bytes - replicated_bytes),
        Segment("weights, replicated", "R", "cyan", replicated_bytes),
        Segment("activations", "A", "yellow", memory.get("activation_bytes_per_gpu", 0.0)),
        Segment("graphs", "G", "magenta", memory.get("graph_bytes_per_gpu", 0.0)),
        Segment("KV cache", "K", "green", memory["kv_bytes_per_gpu"]),
    )
    used_bytes = sum(part.size_bytes for part in parts)
    rest_bytes = max(0.0, memory["gpu_memory_bytes"] - used_bytes)
    return (*parts, Segment("reserve", ".", "bright_black", rest_bytes))


def bar_cells(parts: tuple[Segment, ...], cells: int = _BAR_CELLS) -> tuple[int, ...]:
    """Share the cells of a bar out; they add up, and nothing that is there is without a cell."""
    total_bytes = sum(part.size_bytes for part in parts)
    exact = [part.size_bytes / total_bytes * cells for part in parts]
    shares = [max(int(share), 1 if share > 0 else 0) for share in exact]
    while sum(shares) != cells:
        step = 1 if sum(shares) < cells else -1
        # A cell is never taken from a part that has only one.
        able = [index for index, share in enumerate(shares) if step > 0 or share > 1]
        worst = max(able, key=lambda index: step * (exact[index] - shares[index]))
        shares[worst] += step
    return tuple(shares)


def _print_bar(console: Console, memory: Json) -> None:
    parts = segments(memory)
    bar = Text("  [")
    for part, cells in zip(parts, bar_cells(parts), strict=True):
        style = f"{part.style} reverse" if console.is_terminal else ""
        bar.append(part.letter * cells, style=style)
    bar.append(f"] {format_bytes(memory['gpu_memory_bytes'])} per GPU")
    console.print(bar, soft_wrap=True)


def _print_parts(console: Console, memory: Json) -> None:
    table = new_table(console, "", ["", "per GPU", "size", "share"], numbers_from=2)
    for part in segments(memory):
        share = part.size_bytes / memory["gpu_memory_bytes"]
        table.add_row(part.letter, part.name, format_bytes(part.size_bytes), f"{share:.1%}")
    console.print(table)
    titles = {"weights": "weights_by_role", "of these replicated": "replicated_bytes_by_role"}
    for title, key in titles.items():
        roles = memory.get(key) or {}
        sizes = [f"{name} {format_bytes(size)}" for name, size in roles.items() if size > 0]
        if sizes:
            console.print(f"  {title}: {', '.join(sizes)}", soft_wrap=True)


def _print_capacity(console: Console, memory: Json) -> None:
    quoted = format_bytes(memory["checkpoint_bytes_per_gpu"])
    loaded = format_bytes(memory["weights_bytes_per_gpu"])
    per_rank = memory.get("kv_tokens_per_rank", memory["kv_tokens"])
    each = "" if per_rank == memory["kv_tokens"] else f", {per_rank:,} per attention rank"
    lines = [
        f"checkpoint / GPUs {quoted}; loaded {loaded}; memory fraction {fraction_text(memory)}",
        f"KV: {memory['kv_tokens']:,} tokens per instance{each}, "
        f"{memory['kv_bytes_per_token']:,.0f} bytes per token and GPU",
    ]
    if memory.get("longest_request_tokens") is not None:
        lines.append(f"longest single request: {memory['longest_request_tokens']:,} tokens")
    if memory.get("max_concurrency") is not None:
        length = memory.get("tokens_per_request")
        at = "" if length is None else f" of {length:,.0f} tokens each"
        lines.append(f"concurrent requests per instance: {memory['max_concurrency']:,}{at}")
    for line in lines:
        console.print(f"  {line}", soft_wrap=True)
