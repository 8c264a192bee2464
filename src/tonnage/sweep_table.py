"""A sweep on the terminal: the axes that vary, the main figures, and why points are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from tonnage.sim.planning.sweep import Status
from tonnage.sim.results.intervals import replication_interval
from tonnage.sim.units import format_seconds
from tonnage.sweep_plan import PointResult, SweepPlan, value_text
from tonnage.tables import figure
from tonnage.terminal import new_table

_MOST_ROWS = 60
_MOST_REASONS = 5


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    figure: str
    spell: Callable[[float], str]


def _count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"


def _usd(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.4f}"


_GPUS = _Column("GPUs", "gpus", lambda value: f"{value:,.0f}")
_COLUMNS = (
    _GPUS,
    _Column("output tok/s", "throughput.output_tokens_per_s", _count),
    _Column("tok/s per GPU", "throughput.output_tokens_per_s_per_gpu", _count),
    _Column("hit rate", "cache.input_token_hit_rate", lambda value: f"{value:.1%}"),
    _Column("TTFT p95", "latency.ttft_s.p95", format_seconds),
    _Column("TPOT p95", "latency.tpot_s.p95", format_seconds),
    _Column("USD / M output", "cost.usd_per_million_output_tokens", _usd),
)


@dataclass(frozen=True, slots=True)
class _Row:
    """One combination under one load; `points` are its figures, one per seed that has any."""

    where: tuple[str, ...]
    load: str
    points: tuple[Mapping[str, Any], ...]
    status: Status


def print_sweep(console: Console, plan: SweepPlan, results: Sequence[PointResult]) -> None:
    """Print one row per combination and load; several seeds as mean and 95 % half width.

    The half width is Student's, over the seeds that ended (`replication_interval`).
    """
    rows = list(_rows(plan, results))
    points = [point for row in rows for point in row.points]
    columns = [one for one in _COLUMNS if any(figure(p, one.figure) is not None for p in points)]
    gpus = sorted({int(point["gpus"]) for point in points if "gpus" in point})
    if len(gpus) < 2:
        columns = [column for column in columns if column is not _GPUS]
    varying = _varying(plan)
    loads = any(row.load for row in rows)
    titles = [_title(column, gpus) for column in columns] or ["result"]
    heads = [*varying, *(["load"] if loads else [])]
    table = new_table(console, "", [*heads, *titles], numbers_from=len(heads))
    for row in rows[:_MOST_ROWS]:
        cells = [_cell(column, row) for column in columns]
        if not row.points:
            cells = [str(row.status)]
        table.add_row(*row.where, *([row.load] if loads else []), *cells)
    console.print(table)
    if len(rows) > _MOST_ROWS:
        text = f"{len(rows) - _MOST_ROWS} more rows: see sweep.csv."
        console.print(text, style="dim", soft_wrap=True)
    _print_reasons(console, results)


def _title(column: _Column, gpus: Sequence[int]) -> str:
    """Return the title; that of a figure per GPU says how many it divides by."""
    if column.title != "tok/s per GPU":
        return column.title
    return f"{column.title} (of {gpus[0]})" if len(gpus) == 1 else f"{column.title} (all GPUs)"


def _varying(plan: SweepPlan) -> list[str]:
    variant = ["variant"] if plan.variants else []
    return [*variant, *(axis.name for axis in plan.axes if len(axis.values) > 1)]


def _rows(plan: SweepPlan, results: Sequence[PointResult]) -> Iterator[_Row]:
    varying = [name for name in _varying(plan) if name != "variant"]
    for group in _by_cell(plan, results):
        point = group[0].point
        first = [point.variant] if plan.variants else []
        where = (*first, *(value_text(point.over[name]) for name in varying))
        loads = [result.report["points"] for result in group if result.status is Status.DONE]
        if not loads:
            worst = max((result.status for result in group), key=lambda s: s is Status.FAILED)
            yield _Row(where, "", (), worst)
        for figures in zip(*loads, strict=True):  # the same loads under every seed
            load = _load(figures[0]) if len(loads[0]) > 1 else ""
            yield _Row(where, load, figures, Status.DONE)


def _by_cell(plan: SweepPlan, results: Sequence[PointResult]) -> Iterator[list[PointResult]]:
    """Yield the results of a combination together: the seeds are next to each other."""
    group: list[PointResult] = []
    for result in results:
        if group and (group[0].point.variant, group[0].point.over) != (
            result.point.variant,
            result.point.over,
        ):
            yield group
            group = []
        group.append(result)
    yield group


def _load(point: Mapping[str, Any]) -> str:
    if point.get("rate_per_s") is not None:
        return f"{point['rate_per_s']:g} per s"
    return f"{point['concurrency']} concurrent"


def _cell(column: _Column, row: _Row) -> str:
    known = [value for p in row.points if (value := figure(p, column.figure)) is not None]
    if not known:
        return "-"
    mean = sum(known) / len(known)
    interval = replication_interval(known)
    if interval is None or column is _GPUS:
        return column.spell(mean)
    return f"{column.spell(mean)} ± {column.spell((interval[1] - interval[0]) / 2)}"


def _print_reasons(console: Console, results: Sequence[PointResult]) -> None:
    """Print why points have no figures, each reason once."""
    reasons: dict[tuple[Status, str], list[str]] = {}
    for result in results:
        if result.status is not Status.DONE:
            reasons.setdefault((result.status, result.message), []).append(result.point.label)
    for (status, message), labels in list(reasons.items())[:_MOST_REASONS]:
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        console.print(f"{status}: {labels[0]}{more}: {message}", style="dim", soft_wrap=True)
    if len(reasons) > _MOST_REASONS:
        text = f"{len(reasons) - _MOST_REASONS} more reasons: see the column message."
        console.print(text, style="dim", soft_wrap=True)
