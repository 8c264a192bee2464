"""The table of `memory --fit`: the smallest layout of every GPU, and what more of them hold."""

from __future__ import annotations

from rich.console import Console

from tonnage.memory_fit import FitReport, layout_text
from tonnage.sim.domain import GpuSpec
from tonnage.sim.model.hosting import GPU_COUNTS, best, nearest
from tonnage.sim.units import format_bytes
from tonnage.terminal import new_table


def print_fit(console: Console, report: FitReport) -> None:
    """Print a row per GPU type: its smallest layout first, then requests by number of GPUs."""
    guest = report.guest
    head = (
        f"{guest.model.name}, weights {guest.weights}, KV {guest.kv_format}, {guest.engine.name} "
        f"{guest.engine.version}: requests of {guest.context_tokens:,} tokens"
    )
    console.print(head, style="bold", soft_wrap=True)
    titles = ["GPU", "smallest layout", "weights per GPU", "KV tokens", "longest request"]
    counts = [f"on {count}" for count in GPU_COUNTS]
    table = new_table(console, "", [*titles, *counts], numbers_from=2)
    for gpu in report.gpus:
        table.add_row(*_smallest(report, gpu), *_requests(report, gpu))
    console.print(table)
    console.print("on N: concurrent requests of that length on N GPUs, one instance; - holds none")
    smallest = report.smallest()
    if smallest is not None:
        place = f"{smallest.gpus} x {smallest.gpu} ({layout_text(smallest.layout)})"
        console.print(f"Least GPU memory in all: {place}", soft_wrap=True)
    console.print("Assumptions:")
    for line in report.assumptions():
        console.print(f"  - {line}", soft_wrap=True)


def _smallest(report: FitReport, gpu: GpuSpec) -> list[str]:
    rows = report.of(gpu.name)
    first = best(rows)
    if first is not None:
        return [
            gpu.name,
            f"{first.gpus} ({layout_text(first.layout)})",
            format_bytes(first.weights_bytes_per_gpu),
            f"{first.kv_tokens:,}",
            f"{first.longest_request_tokens:,}",
        ]
    near = nearest(rows)
    if near is None:
        return [gpu.name, "none", "-", "-", "-"]
    place = f"none; {near.gpus} ({layout_text(near.layout)})"
    if near.loads:
        return [gpu.name, f"{place}:", "-", "-", f"{near.longest_request_tokens:,}"]
    short = f"short of {format_bytes(near.deficit_bytes_per_gpu)} each"
    return [gpu.name, f"{place} is {short}", "-", "-", "-"]


def _requests(report: FitReport, gpu: GpuSpec) -> list[str]:
    found = (best(report.of(gpu.name, count)) for count in GPU_COUNTS)
    return ["-" if row is None else f"{row.max_concurrency:,}" for row in found]
