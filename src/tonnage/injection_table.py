"""The matrix of injected faults and what caught them, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from tonnage.terminal import new_table

Json = Mapping[str, Any]

_COLUMNS = (
    ("class", "name"),
    ("family", "family"),
    ("injected", "injected"),
    ("changed output", "changed_output"),
    ("tags", "caught_by_tags"),
    ("writer", "caught_by_writer"),
    ("checksum", "caught_by_checksum"),
    ("false alarms", "false_alarms"),
    ("neighbours equal", "neighbours_equal"),
    ("wrong, returned", "wrong_returned"),
)


def print_injection(console: Console, injection: Json, variant: str = "") -> None:
    """Print what was injected into real pages, and what of it each check caught."""
    low, high = injection["context_tokens"]
    place = f"{variant}: " if variant else ""
    console.print(
        f"{place}faults injected on real pages of the {injection['pool']} pool: "
        f"{injection['model']}, {injection['layers_run']} layers on {injection['device']} "
        f"({injection['backend']} kernels), {injection['kv']} KV on pages of "
        f"{injection['page_tokens']}, {injection['requests']} requests of {low:,} to {high:,} "
        "tokens",
        soft_wrap=True,
    )
    table = new_table(console, "", tuple(title for title, _ in _COLUMNS))
    for row in injection["classes"]:
        table.add_row(*(_cell(row, key) for _, key in _COLUMNS))
    console.print(table)
    console.print(
        "caught by: page tags before a read; the generation of whoever writes; a checksum of the "
        "handoff. Neighbours: bit-equal to a run without the fault, the victim masked.",
        soft_wrap=True,
    )


def _cell(row: Json, key: str) -> str:
    value = row[key]
    if isinstance(value, str):
        return value
    if not row["injected"]:
        return "0" if key == "injected" else "-"
    return f"{value:,}"
