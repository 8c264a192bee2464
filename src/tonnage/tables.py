"""The report of a simulation as tables, from the JSON form that every reader sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tonnage.cache_table import print_caches
from tonnage.sim.units import format_bytes, format_seconds
from tonnage.terminal import natural_width, new_table

Json = Mapping[str, Any]
_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class _Column:
    """One column: its title, the figures it shows by dotted name, and how each is spelled."""

    title: str
    figures: tuple[str, ...]
    spell: Callable[[float], str]


def _count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _usd(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.4f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _quantiles(metric: str) -> tuple[str, str]:
    return f"latency.{metric}.p50", f"latency.{metric}.p95"


_COLUMNS = (
    _Column("output tok/s", ("throughput.output_tokens_per_s",), _count),
    _Column("decode tok/s", ("throughput.decode_output_tokens_per_s",), _count),
    _Column("tok/s per GPU", ("throughput.output_tokens_per_s_per_gpu",), _count),
    _Column("input tok/s", ("throughput.input_tokens_per_s",), _count),
    _Column("cached input tok/s", ("throughput.cached_input_tokens_per_s",), _count),
    _Column("hit rate", ("cache.input_token_hit_rate",), _percent),
    _Column("TTFT p50 / p95", _quantiles("ttft_s"), format_seconds),
    _Column("TPOT p50 / p95", _quantiles("tpot_s"), format_seconds),
    _Column("ITL p95", ("latency.itl_s.p95",), format_seconds),
    _Column("e2e p50 / p95", _quantiles("e2e_s"), format_seconds),
    _Column("USD / M output", ("cost.usd_per_million_output_tokens",), _usd),
    _Column("USD / M input", ("cost.usd_per_million_input_tokens",), _usd),
    _Column("USD / M cached", ("cost.usd_per_million_cached_input_tokens",), _usd),
    _Column("decode USD / M", ("cost.decode_pool_usd_per_million_output_tokens",), _usd),
    _Column("day USD / M output", ("cost.over_day_usd_per_million_output_tokens",), _usd),
    _Column("margin USD / h", ("cost.margin_usd_per_hour",), _count),
    _Column("margin", ("cost.margin_share",), _percent),
    _Column("pays from load", ("cost.break_even_load",), _percent),
    _Column("within SLO", ("slo.attainment",), _percent),
    _Column("completed", ("requests.completed",), _whole),
    _Column("rejected", ("requests.rejected",), _whole),
    _Column("timed out", ("requests.timed_out",), _whole),
    _Column("aborted", ("requests.aborted",), _whole),
    _Column("retracted", ("requests.retractions",), _whole),
    _Column("attempts", ("attempts.made",), _whole),
    _Column("crashes", ("outages.crashes",), _whole),
    _Column("wrong reads", ("integrity.wrong_reads",), _whole),
    _Column("caught", ("integrity.detected",), _whole),
)
_LEFT_OUT_FIRST = (  # where the terminal is too narrow for all
    "ITL p95",
    "input tok/s",
    "completed",
    "decode USD / M",
    "decode tok/s",
    "e2e p50 / p95",
    "within SLO",
    "cached input tok/s",
)
_ONLY_WHEN_NOT_ZERO = (
    "rejected",
    "timed out",
    "aborted",
    "retracted",
    "attempts",
    "crashes",
    "wrong reads",
    "caught",
)


def print_simulation(console: Console, runs: Mapping[str, Json]) -> None:
    """Print a report, or several of them side by side; `runs` are by variant, "" for one alone."""
    first = next(iter(runs.values()))
    print_scenario(console, first["scenario"])
    _print_points(console, runs)
    print_caches(console, _heads(runs), [(_name(runs, *one), one[1]) for one in _by_point(runs)])
    for variant, report in runs.items():
        _print_memory_lines(console, variant, report)
    print_provenance(console, runs)


def print_scenario(console: Console, scenario: Json) -> None:
    """Print what was asked: name, model, engine, and the text that describes it."""
    engine = scenario["engine"]
    head = f"{scenario['name']}: {scenario['model']}, {engine['name']} {engine['version']}"
    console.print(head, style="bold", soft_wrap=True)
    if scenario.get("description"):
        console.print(scenario["description"], soft_wrap=True)


def pool_line(scenario: Json, role: str) -> str:
    """Describe a pool, such as `decode: 1 x 8 h200-sxm (TP8), weights native, KV fp8_e4m3`."""
    pool = scenario["pools"][role]
    gpus = pool["tp"] * pool["pp"]
    ways = [f"{name.upper()}{pool[key]}" for key, name in _WAYS if key == "tp" or pool[key] > 1]
    place = f"{pool['instances']} x {gpus} {pool['gpu'] or scenario['gpu']} ({' '.join(ways)})"
    return f"{role}: {place}, weights {pool['weights']}, KV {pool['kv']}"


_WAYS = (("tp", "tp"), ("pp", "pp"), ("ep", "ep"), ("attention_dp", "dp"), ("dcp", "dcp"))


def _print_points(console: Console, runs: Mapping[str, Json]) -> None:
    """Print one row per point and variant, the variants of a point next to each other."""
    points = [point for _, point in _by_point(runs)]
    columns = [column for column in _COLUMNS if _is_used(column, points)]
    left_out = []
    table = _points_table(console, runs, columns)
    for title in _LEFT_OUT_FIRST:
        if natural_width(console, table) <= console.width:
            break
        left_out += [column.title for column in columns if column.title == title]
        columns = [column for column in columns if column.title != title]
        table = _points_table(console, runs, columns)
    console.print(table)
    if left_out:
        text = f"Too narrow for {', '.join(left_out)}: widen the window, or use --json or --out."
        console.print(text, style="dim", soft_wrap=True)


def _points_table(console: Console, runs: Mapping[str, Json], columns: Sequence[_Column]) -> Table:
    heads = _heads(runs)
    titles = [_title(column, runs) for column in columns]
    table = new_table(console, "", [*heads, *titles], numbers_from=len(heads))
    for variant, point in _by_point(runs):
        cells = [_cell(column, point) for column in columns]
        table.add_row(*_name(runs, variant, point), *cells)
    return table


def _heads(runs: Mapping[str, Json]) -> list[str]:
    return ["load", "variant"] if len(runs) > 1 else ["load"]


def _name(runs: Mapping[str, Json], variant: str, point: Json) -> tuple[str, ...]:
    return (_load(point), variant) if len(runs) > 1 else (_load(point),)


def _by_point(runs: Mapping[str, Json]) -> list[tuple[str, Json]]:
    longest = max(len(report["points"]) for report in runs.values())
    return [
        (variant, report["points"][index])
        for index in range(longest)
        for variant, report in runs.items()
        if index < len(report["points"])
    ]


def _title(column: _Column, runs: Mapping[str, Json]) -> str:
    """Return the title; that of a figure per GPU says which GPUs it divides by."""
    if column.title != "tok/s per GPU":
        return column.title
    points = [point for report in runs.values() for point in report["points"]]
    counts = sorted({str(point["gpus"]) for point in points if "gpus" in point}, key=int)
    return f"{column.title} (of {', '.join(counts)})" if counts else column.title


def _load(point: Json) -> str:
    """Spell a point's load; where memory holds fewer requests than asked for, it says how many."""
    if point.get("rate_per_s") is not None:
        return f"{point['rate_per_s']:g} per s"
    if point.get("concurrency") is None:
        return "trace"
    held = point.get("resident_requests", point["concurrency"])
    fewer = f" ({held} held)" if held < point["concurrency"] else ""
    return f"{point['concurrency']} concurrent{fewer}"


def _is_used(column: _Column, points: Sequence[Json]) -> bool:
    figures = [figure(point, name) for point in points for name in column.figures]
    if column.title in _ONLY_WHEN_NOT_ZERO:
        return any(figures)
    return any(value is not None for value in figures)


def _cell(column: _Column, point: Json) -> str:
    values = [figure(point, name) for name in column.figures]
    return " / ".join(_NOTHING if value is None else column.spell(value) for value in values)


def figure(data: Json, dotted: str) -> float | None:
    """Return the number under a dotted name, or None where the report does not have it."""
    value: Any = data
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) and value == value else None


def _print_memory_lines(console: Console, variant: str, report: Json) -> None:
    for role, memory in report.get("memory", {}).items():
        place = f"{variant}: " if variant else ""
        console.print(f"{place}{pool_line(report['scenario'], role)}", soft_wrap=True)
        console.print(f"  {_memory_line(memory)}", soft_wrap=True)
    ceiling = figure(report, "ceilings.memory_concurrency")
    if ceiling is not None:
        console.print(f"  memory allows {ceiling:,.0f} concurrent requests", soft_wrap=True)
    line = _objectives_line(report.get("ceilings", {}))
    if line is not None:
        console.print(f"  {line}", soft_wrap=True)


def _objectives_line(ceilings: Json) -> str | None:
    """Say how far the objectives let the load go; None where there are none to meet."""
    binds = ceilings.get("binds")
    stops = "nothing that was tried stops more" if binds == "none" else f"{binds} stops more"
    users, rate_per_s = ceilings.get("slo_concurrency"), ceilings.get("slo_rate_per_s")
    searched = "probes" in ceilings
    if users is not None:
        found = f"objectives allow {users:,.0f} concurrent requests"
    elif rate_per_s is not None:
        found = f"objectives allow {rate_per_s:.3g} requests per s"
    elif searched:
        return f"no load that was tried meets the objectives: {binds} fails"
    else:
        return None
    if not searched:
        found += ", of the loads above"
    if ceilings.get("monotone") is False:
        stops += "; not sure, for a smaller load failed or a larger one held"
    return f"{found}; {stops}"


def _memory_line(memory: Json) -> str:
    parts = [
        f"per GPU {format_bytes(memory['weights_bytes_per_gpu'])} weights, "
        f"{format_bytes(memory['kv_bytes_per_gpu'])} KV = {memory['kv_tokens']:,} tokens",
        f"memory fraction {fraction_text(memory)}",
    ]
    return "; ".join(parts)


def fraction_text(memory: Json) -> str:
    """Spell the memory fraction and where it is from."""
    return f"{memory['mem_fraction']:.3g} ({memory['mem_fraction_source']})"


def print_provenance(console: Console, runs: Mapping[str, Json]) -> None:
    """Print where the numbers come from and what was assumed, each assumption once."""
    first = next(iter(runs.values()))["provenance"]
    profile = f"{first['profile']} ({first['source']})" if first.get("profile") else _NOTHING
    version = f"tonnage {first['version']}" if first.get("version") else "tonnage"
    text = f"Profile {profile}; {version}; seed {first.get('seed', 0)}"
    console.print(text, style="dim", soft_wrap=True)
    lines = [line for report in runs.values() for line in report["provenance"]["assumptions"]]
    if lines:
        console.print("Assumptions:", style="dim")
    for line in dict.fromkeys(lines):
        console.print(f"  - {line}", style="dim", soft_wrap=True)
