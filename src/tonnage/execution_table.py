"""Predicted and executed figures side by side, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from tonnage.injection_table import print_injection
from tonnage.sim.units import format_bytes, format_seconds
from tonnage.tables import print_provenance, print_scenario
from tonnage.terminal import new_table

Json = Mapping[str, Any]

FIGURES = (
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
        if "injection" in report:
            print_injection(console, report["injection"], variant)
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
        f"{_check(device)}"
    )


def _check(device: Json) -> str:
    """Say what the tag check takes of a step."""
    if device["tag_check_s"] is None:
        return ""
    predicted_s = device["tag_check_predicted_s"]
    beside = "not predicted" if predicted_s is None else f"{format_seconds(predicted_s)} predicted"
    return f"; tag check {format_seconds(device['tag_check_s'])} a step, {beside}"


def _print_points(console: Console, report: Json) -> None:
    columns = ("load", "figure", "predicted", "executed", "error", "", "error without drift")
    shown = columns if report["drift"].get("points") else columns[:-1]
    table = new_table(console, "", shown)
    for number, point in enumerate(report["points"]):
        for name, label in FIGURES:
            pair = point["figures"].get(name)
            if pair is None:
                continue
            row = (
                load_of(point),
                label,
                shown_figure(name, pair["predicted"], pair["predicted_interval"]),
                shown_figure(name, pair["executed"], pair["executed_interval"]),
                error_text(pair["error"]),
                "outside" if pair["inside"] is False else "",
                error_text(error_without_drift(report, number, name)),
            )
            table.add_row(*row[: len(shown)])
    console.print(table)
    if table.rows and any(
        pair["inside"] is False for point in report["points"] for pair in point["figures"].values()
    ):
        console.print("outside: the executed figure lies outside the predicted interval")
    _print_drift(console, report["drift"])


def _print_drift(console: Console, drift: Json) -> None:
    """Print how far the machine is from what it was when the profile was measured."""
    if not drift["profile"]:
        console.print(f"Drift of the machine: nothing to compare with: {drift['why_not']}")
        return
    console.print(f"Drift of the machine: time now over time when {drift['profile']} was measured")
    if drift["why_not"]:
        console.print(f"  not divided out of the errors: {drift['why_not']}")
    for role, pool in drift["pools"].items():
        families = ", ".join(
            f"{name} {one['ratio']:.2f} ({one['lowest']:.2f}-{one['highest']:.2f})"
            for name, one in pool["families"].items()
        )
        phases = ", ".join(
            f"{phase} steps {one['ratio']:.2f} ({one['share_of_time_compared']:.0%} of their time)"
            for phase, one in pool["phases"].items()
        )
        console.print(f"  {role}: {phases}: {families}", soft_wrap=True)


def error_without_drift(report: Json, point: int, figure: str) -> float | None:
    """Return the error of a figure of a point with the drift divided out, None without one."""
    if not report["drift"].get("points"):
        return None
    found = report["drift"]["points"][point]["figures"].get(figure)
    return None if found is None else found["error"]


def error_text(error: float | None) -> str:
    """Return a relative error as it is shown."""
    return "" if error is None else f"{error:+.1%}"


def shown_figure(name: str, value: float, interval: Sequence[float] | None) -> str:
    """Return a figure with its interval, where it has one."""
    if interval is None:
        return _shown(name, value)
    low, high = (_shown(name, end) for end in interval)
    return f"{_shown(name, value)} ({low} - {high})"


def load_of(point: Json) -> str:
    """Return the load of a point."""
    if point["concurrency"] is not None:
        return f"{point['concurrency']} concurrent"
    return "" if point["rate_per_s"] is None else f"{point['rate_per_s']:g}/s"


def _shown(name: str, value: float) -> str:
    return format_seconds(value) if "_s." in name else f"{value:,.1f}"
