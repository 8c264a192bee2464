"""Where a step's time goes, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from tonnage.sim.units import format_seconds
from tonnage.tables import print_provenance, print_scenario
from tonnage.terminal import new_table

Json = Mapping[str, Any]
_COLUMNS = ("operator", "time", "share", "5 % to 95 %", "roofline", "of roofline", "source")
_BAR_CELLS = 24


def print_explanation(console: Console, runs: Mapping[str, Json]) -> None:
    """Print the steps of every pool; `runs` are by variant, "" for one alone."""
    print_scenario(console, next(iter(runs.values()))["scenario"])
    for variant, report in runs.items():
        for name, step in report["steps"].items():
            console.print()
            place = f"{variant}: " if variant else ""
            console.print(f"{place}{name} step {_what(step)}", style="bold", soft_wrap=True)
            _print_operators(console, step)
        if "handoff" in report:
            console.print(_handoff(report["handoff"]), soft_wrap=True)
            for check in report["handoff"].get("checks", ()):
                console.print(_handoff_check(check), soft_wrap=True)
    console.print()
    print_provenance(console, runs)


def _what(step: Json) -> str:
    """Describe a step, such as `of 64 requests at 4,096 tokens: 29.3 ms`."""
    low_s, high_s = step["interval_s"]
    if step["requests"]:
        asked = f"of {step['requests']:,} requests at {step['context_tokens']:,} tokens"
    else:
        asked = f"of {step['prompt_tokens']:,} prompt tokens"
    spread = f"{format_seconds(low_s)} to {format_seconds(high_s)}"
    return f"{asked} on {step['gpu']}: {format_seconds(step['seconds'])} ({spread})"


def _print_operators(console: Console, step: Json) -> None:
    table = new_table(console, "", _COLUMNS)
    for row in step["operators"]:
        low_s, high_s = row["interval_s"]
        source = row["source"] if row["inside_measured_range"] else f"{row['source']}, beyond"
        hidden = f" (+{format_seconds(row['hidden_s'])} beside)" if row["hidden_s"] else ""
        bar = "█" * round(row["share"] * _BAR_CELLS)
        table.add_row(
            row["operator"],
            format_seconds(row["seconds"]) + hidden,
            f"{row['share']:.1%} {bar:<{_BAR_CELLS}}",
            f"{format_seconds(low_s)} to {format_seconds(high_s)}",
            format_seconds(row["roofline_s"]),
            _efficiency(row),
            source,
        )
    console.print(table)


def _handoff(figures: Json) -> str:
    """Describe what the KV of one prompt alone takes from prefill to decode."""
    size_mb = figures["wire_bytes_per_gpu"] / 1e6
    rate_gb_per_s = figures["bandwidth_bytes_per_s_per_gpu"] / 1e9
    wire = f"{size_mb:,.0f} MB per GPU at {rate_gb_per_s:g} GB/s, {figures['kind']}"
    parts = [f"{format_seconds(figures['wire_s'])} on the wire ({wire})"]
    if figures["setup_s"]:
        parts.append(f"{format_seconds(figures['setup_s'])} of set-up per part")
    for side in ("sender", "receiver"):
        if figures[f"{side}_convert_s"]:
            seconds = format_seconds(figures[f"{side}_convert_s"])
            parts.append(f"{seconds} to convert at the {side} (datasheet)")
    early = "; chunks leave while the next ones are computed" if figures["overlap"] else ""
    return f"handoff of {figures['tokens']:,} tokens: {', '.join(parts)}{early}"


def _handoff_check(check: Json) -> str:
    """Describe one item of what watches the KV on its way."""
    low_s, high_s = check["interval_s"]
    spread = f"{format_seconds(low_s)} to {format_seconds(high_s)}, {check['source']}"
    return (
        f"  + {check['side']}, {check['operator']}: {format_seconds(check['seconds'])} ({spread})"
    )


def _efficiency(row: Json) -> str:
    whole_s = row["seconds"] + row["hidden_s"]
    return f"{row['roofline_s'] / whole_s:.0%}" if whole_s else "-"
