"""Predicted and executed figures side by side, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from tonnage.sim.units import format_bytes, format_seconds
from tonnage.tables import print_provenance, print_scenario
from tonnage.terminal import new_table

Json = Mapping[str, Any]

_SHOWN = (
    ("output_tokens_per_s", "output tok/s"),
    ("ttft_s.mean", "TTFT mean"),
    ("ttft_s.p95", "TTFT p95"),
    ("tpot_s.mean", "TPOT mean"),
    ("tpot_s.p95", "TPOT p95"),
    ("e2e_s.mean", "e2e mean"),
)


def print_execution(console: Console, runs: Mapping[str, Json]) -> None:
    """Print what was measured, and every figure twice; `runs` are by variant, "" for one alone."""
    print_scenario(console, next(iter(runs.values()))["scenario"])
    for variant, report in runs.items():
        console.print()
        place = f"{variant}: " if variant else ""
        for role, pool in report["pools"].items():
            console.print(f"{place}{role} {_measured(pool)}", soft_wrap=True)
        _print_points(console, report)
    console.print()
    print_provenance(console, runs)


def _measured(pool: Json) -> str:
    """Say what was run and how much of the simulation's time that stands for."""
    device = pool["device"]
    ratios = ", ".join(
        f"{phase} x {ratio:.2f}" for phase, ratio in pool["measured_over_predicted"].items()
    )
    layers = f"{device['layers_run']} of {device['layers']} layers"
    memory = (
        f"{format_bytes(device['weight_bytes'])} weights, {format_bytes(device['kv_bytes'])} KV"
    )
    return (
        f"steps on {device['device']} ({device['backend']} kernels, {layers}, {memory}): "
        f"{pool['steps_measured']:,} of {pool['steps_visited']:,} measured, standing for "
        f"{pool['share_of_time_measured']:.0%} of the time; measured over predicted: {ratios}"
    )


def _print_points(console: Console, report: Json) -> None:
    table = new_table(console, "", ("load", "figure", "predicted", "executed", "error"))
    for point in report["points"]:
        for name, label in _SHOWN:
            pair = point["figures"].get(name)
            if pair is None:
                continue
            error = pair["error"]
            table.add_row(
                _load(point),
                label,
                _shown(name, pair["predicted"]),
                _shown(name, pair["executed"]),
                "" if error is None else f"{error:+.1%}",
            )
    console.print(table)


def _load(point: Json) -> str:
    if point["concurrency"] is not None:
        return f"{point['concurrency']} concurrent"
    return "" if point["rate_per_s"] is None else f"{point['rate_per_s']:g}/s"


def _shown(name: str, value: float) -> str:
    return format_seconds(value) if "_s." in name else f"{value:,.1f}"
