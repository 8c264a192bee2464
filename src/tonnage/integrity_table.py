"""The tables of `tonnage integrity`: the matrix, its counts, what checks cost, a fleet's year."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from tonnage.terminal import new_table

Json = Mapping[str, Any]

_COUNTS = (
    ("injected", "injected"),
    ("met", "met"),
    ("before", "caught_before"),
    ("after", "caught_after"),
    ("missed", "missed"),
    ("wrong reads", "wrong_reads"),
    ("aborted", "aborted"),
    ("clean ones", "clean_aborted"),
    ("writes refused", "refused_writes"),
    ("stops", "stops"),
    ("lost", "lost"),
)


def print_integrity(console: Console, runs: Mapping[str, Json]) -> None:
    """Print all tables of every variant."""
    for label, report in runs.items():
        if label:
            console.print(label, style="bold", soft_wrap=True)
        _print_report(console, report)


def _print_report(console: Console, report: Json) -> None:
    _print_coverage(console, report)
    console.print()
    _print_matrix(console, report)
    _print_counts(console, report)
    if report["impossible"]:
        text = ", ".join(report["impossible"])
        console.print(f"Cannot happen in these pools, or found no occasion: {text}", soft_wrap=True)
    console.print()
    _print_costs(console, report)
    console.print()
    _print_year(console, report)
    console.print(wrap_text(report["tag_wrap"]), soft_wrap=True)
    console.print(consequence_text(report), soft_wrap=True)
    for note in report["notes"]:
        console.print(f"  - {note}", soft_wrap=True)


def _print_coverage(console: Console, report: Json) -> None:
    for role, pool in report["coverage"].items():
        console.print(f"{role}: {coverage_text(pool)}", soft_wrap=True)
        if pool["tracker"] == "batched":
            for place, risk in pool["not_covered"].items():
                console.print(f"  not covered: {place}: {risk}", soft_wrap=True)


def coverage_text(pool: Json) -> str:
    """Say what a pool's own check compares."""
    summed = ", a checksum at the handoff" if pool["handoff_checksum"] else ""
    if pool["tracker"] == "none":
        return f"no tracker{summed}"
    if pool["tracker"] == "canary":
        return f"a canary per token slot{summed}"
    every = pool["every_steps"]
    steps = "" if every == 1 else f", one decode step in {every}"
    beside = ", beside the step: a bad step runs once" if pool["overlapped"] else ""
    return f"page tags at {', '.join(pool['covers'])}{steps}{beside}{summed}"


def caught_text(row: Json) -> str:
    """Say what share of the faults a check caught; a dash where none led to anything."""
    before, late = row["before_share"], row["late_share"]
    if before is None:
        return "-"
    parts = [f"{before:.0%}"] if before or not late else []
    parts += [f"{late:.0%} late"] if late else []
    return ", ".join(parts)


def matrix_cells(report: Json) -> Iterator[tuple[str, str, dict[str, Json]]]:
    """Yield each class, its family, and its row by check."""
    by_class: dict[tuple[str, str], dict[str, Json]] = {}
    for row in report["matrix"]:
        by_class.setdefault((row["class"], row["family"]), {})[row["check"]] = row
    for (name, family), rows in by_class.items():
        yield name, family, rows


def _print_matrix(console: Console, report: Json) -> None:
    checks = report["settings"]["checks"]
    title = "Faults caught before the first wrong read; late: after it; the rest was missed"
    console.print(title, style="bold", soft_wrap=True)  # a table would fold it to its own width
    table = new_table(console, "", ("class", "of", *checks), numbers_from=2)
    for name, family, rows in matrix_cells(report):
        table.add_row(name, family, *(caught_text(rows[check]) for check in checks))
    console.print(table)


def _print_counts(console: Console, report: Json) -> None:
    heads = ("class", "check", *(title for title, _ in _COUNTS))
    table = new_table(console, "", heads, numbers_from=2)
    for name, _, rows in matrix_cells(report):
        for number, (check, row) in enumerate(rows.items()):
            cells = [f"{row[key]:,}" for _, key in _COUNTS]
            table.add_row("" if number else name, check, *cells)
    console.print(table)


def _print_costs(console: Console, report: Json) -> None:
    step = report["step"]
    title = (
        f"What each check adds: {step['requests']:,} requests of {step['context_tokens']:,} "
        f"tokens, a prompt of {step['prompt_tokens']:,}"
    )
    console.print(title, style="bold", soft_wrap=True)
    heads = ("check", "where", "us", "of a step", "throughput lost", "of which, us")
    table = new_table(console, "", heads, numbers_from=2)
    table.columns[-1].justify = "left"
    for check, cost in report["costs"].items():
        for number, (place, one) in enumerate(cost_places(cost)):
            table.add_row("" if number else check, place, *cost_cells(one))
    console.print(table)


def cost_places(cost: Json) -> Iterator[tuple[str, Json]]:
    """Yield every step and the handoff, with what is added there."""
    yield from ((f"{name} step", step) for name, step in cost["steps"].items())
    if "handoff" in cost:
        yield "handoff", cost["handoff"]


def cost_cells(one: Json) -> tuple[str, str, str, str]:
    """Return the microseconds added, their share, the loss of throughput, and the items."""
    if not one["seconds"]:
        return "0", "", "", ""
    items = ", ".join(
        f"{_item_name(item)} {item['seconds'] * 1e6:.1f}" for item in one["items"] if _counts(item)
    )
    if "share" not in one:
        return _microseconds(one), "", "", items
    low, high = one["throughput_loss_interval"]
    lost = f"{one['throughput_loss']:.2%} ({low:.2%} to {high:.2%})"
    return _microseconds(one), f"{one['share']:.2%}", lost, items


def _counts(item: Json) -> bool:
    return bool(item["seconds"])


def _item_name(item: Json) -> str:
    side = f"{item['side']} " if "side" in item else ""
    name = item.get("operator") or item.get("name") or item.get("item") or ""
    return side + str(name).split(".")[-1].replace("_", " ")


def _microseconds(one: Json) -> str:
    low, high = (end * 1e6 for end in one["interval_s"])
    return f"{one['seconds'] * 1e6:.1f} ({low:.1f} to {high:.1f})"


def _print_year(console: Console, report: Json) -> None:
    console.print(year_title(report["year"]), style="bold", soft_wrap=True)
    table = new_table(console, "", YEAR_HEADS, numbers_from=2)
    for row in report["year"]["rows"]:
        table.add_row(*year_cells(row))
    console.print(table)


YEAR_HEADS = (
    "if faults are of",
    "check",
    "caught in time",
    "wrong reads a year",
    "at worst",
    "check fires",
    "aborted per fire",
    "lost per fire",
)


def year_title(year: Json) -> str:
    """Say what is counted over a year."""
    return (
        f"A year of {year['requests_per_day']:,.0f} requests a day ({year['requests_from']}), "
        f"a fault in {year['fault_rate_per_request']:g} of them: "
        f"{count_text(year['faults'])} faults"
    )


def year_cells(row: Json) -> tuple[str, ...]:
    """Return the cells of one family and check."""
    low, high = row["before_interval"]
    return (
        row["family"],
        row["check"],
        f"{row['before_share']:.1%} ({low:.1%} to {high:.1%})",
        count_text(row["wrong_reads"]),
        f"{row['wrong_reads_at_worst']['expected']:.3g}",
        count_text(row["fires"]),
        f"{row['aborted_per_fire']:.2f}",
        f"{row['lost_per_fire']:.2f}",
    )


def count_text(count: Json) -> str:
    """Spell a year's mean, and what 95 % of years lie between."""
    mean = count["expected"]
    shown = f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"
    return f"{shown} ({count['low']:,} to {count['high']:,})"


def wrap_text(wrap: Json) -> str:
    """Say how long tags last."""
    days = wrap["seconds_to_wrap"] / 86_400
    return (
        f"Tags of {wrap['tag_bits']} bits: a page has used all of them after {days:,.0f} days; a "
        f"stale reference as old as a request meets its own again with a chance of "
        f"{wrap['chance']['request']}, one of an hour {wrap['chance']['hour']}"
    )


def consequence_text(report: Json) -> str:
    """Say what clients do about an abort."""
    attempts = report["client_attempts"]
    if attempts == 1:
        return "An aborted request is not sent again: clients try once (clients.attempts)."
    return f"An aborted request is sent again, {attempts} attempts in all (clients.attempts)."
