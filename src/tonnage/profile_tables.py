"""Profiles as rows and on the terminal: what there is, what one holds, how two differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from tonnage.scenarios.profiles import is_shipped
from tonnage.sim.cost.profile import Profile
from tonnage.terminal import new_table

Json = Mapping[str, Any]


def header_report(profile: Profile, place: Path) -> dict[str, Any]:
    """Return the JSON object of `profile show`: header, place, and rows by table."""
    return {
        "profile": profile.header.model_dump(mode="json"),
        "place": "shipped" if is_shipped(place) else str(place),
        "tables": {
            name: {"rows": len(table), "columns": list(table.columns)}
            for name, table in sorted(profile.tables.items())
        },
    }


def print_header(console: Console, report: Json) -> None:
    """Print what a profile is, its tables, and its held-out errors."""
    header = report["profile"]
    engine = f"{header['engine']} {header['engine_version']}"
    console.print(f"{header['name']}: {header['gpu']}, kernels of {engine}", style="bold")
    for line in header_lines(header):
        console.print(line, soft_wrap=True)
    console.print(f"Place: {report['place']}", soft_wrap=True)
    _print_errors(console, header["errors"])
    table = new_table(console, "", ["table", "rows"])
    for name, facts in report["tables"].items():
        table.add_row(name, f"{facts['rows']:,}")
    console.print(table)
    if header["missing"]:
        console.print(f"Lacks: {', '.join(header['missing'])}", soft_wrap=True)
    for note in header["notes"]:
        console.print(f"  - {note}", style="dim", soft_wrap=True)
    if "page" in report:
        console.print(f"Fit against data: {report['page']}", soft_wrap=True)


def header_lines(header: Json) -> list[str]:
    """Say where a profile is from, in lines."""
    licence = f" ({header['licence']})" if header["licence"] else ""
    lines = [
        f"Source: {header['source']}, {header['source_text']}{licence}",
        f"Made on {header['date']} by tonnage {header['tonnage_version']}",
    ]
    if header["driver"]:
        lines.append(f"Driver {header['driver']}")
    if header["clocks"]:
        clocks = (f"{name} {value:g}" for name, value in header["clocks"].items())
        lines.append(f"Clocks: {', '.join(clocks)}")
    return lines


def _print_errors(console: Console, errors: Json) -> None:
    if not errors:
        console.print("No held-out errors: nobody has checked this profile.")
        return
    heads = ["operator", "format", "held out", "rows", "median", "p90", "true / predicted"]
    table = new_table(console, "Error on shapes held out whole", heads, numbers_from=3)
    for operator, formats in errors.items():
        for name, error in formats.items():
            low, high = error["interval"]
            table.add_row(
                operator,
                name,
                held_out_text(error),
                f"{error['n']:,}",
                f"{error['median']:.1%}",
                f"{error['p90']:.1%}",
                f"{low:.2f} to {high:.2f}",
            )
    console.print(table)


def held_out_text(error: Json) -> str:
    """Say what was held out, and whether that lay beyond what was known."""
    is_beyond = error.get("regime") == "extrapolation"
    return f"{error['held_out']}{' (extrapolation)' if is_beyond else ''}"


def print_diff(console: Console, report: Json) -> None:
    """Print how two profiles differ: their headers, and the ratio of their times by operator."""
    names = [report["first"], report["second"]]
    table = new_table(console, "", ["", *names], numbers_from=3)
    for field, values in report["header"].items():
        table.add_row(field, *[str(value) for value in values])
    console.print(table)
    heads = ["operator", "format", "points", "median ratio", "p10", "p90"]
    title = f"Time of {names[1]} over {names[0]} at common points"
    ratios = new_table(console, title, heads, numbers_from=2)
    for row in report["ratios"]:
        figures = (f"{row[key]:.2f}" for key in ("median", "p10", "p90"))
        ratios.add_row(row["operator"], row["format"], f"{row['points']:,}", *figures)
    console.print(ratios)
    for side, only in zip(names, (report["only_first"], report["only_second"]), strict=True):
        if only:
            console.print(f"Only in {side}: {', '.join(only)}", soft_wrap=True)
