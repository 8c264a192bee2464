"""What ships with the package, as rows: models, GPUs, prices, profiles and scenarios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from tonnage.scenarios.catalogue import (
    gpu_names,
    load_gpu,
    load_model,
    model_names,
    scenario_names,
)
from tonnage.scenarios.load import load_scenario
from tonnage.scenarios.prices import load_table, table_names
from tonnage.scenarios.profiles import is_shipped, profile_paths
from tonnage.sim.cost.profile import load_header
from tonnage.sim.units import format_bytes
from tonnage.terminal import new_table

Row = dict[str, Any]


def models() -> list[Row]:
    """Return a row per shipped model; a figure that was not verified says so."""
    specs = (load_model(name) for name in model_names())
    return [
        {
            "name": spec.name,
            "parameters": spec.parameters,
            "layers": len(spec.layers),
            "max_context_tokens": spec.max_context_tokens,
            "native_weights": spec.native_weight_format,
            "verified": spec.verified,
        }
        for spec in specs
    ]


def gpus() -> list[Row]:
    """Return a row per shipped GPU; rates are one direction."""
    specs = (load_gpu(name) for name in gpu_names())
    return [
        {
            "name": spec.name,
            "memory_bytes": spec.memory_bytes,
            "memory_bandwidth_bytes_per_s": spec.memory_bandwidth_bytes_per_s,
            "nvlink_bytes_per_s": spec.nvlink_bytes_per_s,
            "gpus_per_node": spec.gpus_per_node,
        }
        for spec in specs
    ]


def prices() -> list[Row]:
    """Return a row per GPU of every shipped price table; the tables say more of their source."""
    tables = ((name, load_table(name)) for name in table_names())
    return [
        {
            "name": name,
            "gpu": gpu,
            "usd_per_gpu_hour": table.price(gpu),
            "date": table.date.isoformat(),
            "source": table.source.split(",")[0].strip(),
        }
        for name, table in tables
        for gpu in table.names()
    ]


def profiles() -> list[Row]:
    """Return a row per profile that has a name, this user's and the shipped ones."""
    headers = ((name, path, load_header(path)) for name, path in profile_paths().items())
    return [
        {
            "name": name,
            "gpu": header.gpu,
            "engine": f"{header.engine} {header.engine_version}",
            "source": header.source,
            "date": header.date,
            "place": "shipped" if is_shipped(path) else str(path),
        }
        for name, path, header in headers
    ]


def scenarios() -> list[Row]:
    """Return a row per shipped scenario."""
    shipped = (load_scenario(name) for name in scenario_names())
    return [{"name": one.name, "description": one.description} for one in shipped]


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Print rows as a table, figures to the right."""
    if not rows:
        console.print("None.")
        return
    titles = {name: name.removesuffix("_bytes").replace("_bytes_per_s", "") for name in rows[0]}
    texts = all(isinstance(value, str) for value in rows[0].values())
    heads = [title.replace("_", " ") for title in titles.values()]
    table = new_table(console, "", heads, numbers_from=len(heads) if texts else 1)
    for row in rows:
        table.add_row(*[_spell(name, value) for name, value in row.items()])
    console.print(table)


def _spell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:,.0f} GB/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name == "parameters":
        return f"{value / 1e9:,.1f} B"
    return f"{value:,}" if isinstance(value, int) else str(value)
