"""What-ifs of a plan for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from tonnage.plan_tornado import Cost
from tonnage.plan_what_if import Growth, InstancesDown, WhatIf
from tonnage.sim.planning.fleet_plan import PlannedObjective
from tonnage.terminal import new_table


def print_what_if(console: Console, found: WhatIf) -> None:
    """Print what happens to the best plan."""
    console.print("\nwhat if, for the best plan")
    for text in _lines(found):
        console.print(f"  {text}", soft_wrap=True)
    console.print("\nwhat the cost hangs on: the cheapest fleet by closed form, USD/h and USD/Mtok")
    table = new_table(console, "", ["input", "in the plan", "lower", "higher"], numbers_from=4)
    for one in found.tornado:
        table.add_row(one.name, _cost(one.base), _cost(one.low), _cost(one.high))
    console.print(table)


def _lines(found: WhatIf) -> Iterator[str]:
    for one in found.instances_down:
        yield f"{one.down} of {one.down + one.left} {one.role} instances down: {_down(one)}"
    for region in found.region_down:
        verdict = "the others carry its load" if region.holds else "the others do not carry it"
        yield (
            f"one of {region.regions} such regions down: {verdict} "
            f"({region.load_factor:.2f} times theirs; by closed form)"
        )
    yield _growth(found.growth)


def _down(one: InstancesDown) -> str:
    if not one.objectives:
        return "nothing is left to run"
    return "the objectives hold" if one.holds else f"missed: {_missed(one.objectives)}"


def _missed(objectives: Sequence[PlannedObjective]) -> str:
    return ", ".join(
        f"{one.name} {one.reached.value:.3g} s (limit {one.limit_s:g} s)"
        for one in objectives
        if not one.met
    )


def _growth(one: Growth) -> str:
    if one.months is None:
        return f"growth of {one.per_month:.0%} a month: not full in ten years"
    text = (
        f"growth of {one.per_month:.0%} a month: full after {one.months} months, at "
        f"{one.load_factor:.2f} times the load; {one.binds} is missed then (by closed form)"
    )
    if one.objectives is None:
        return text
    missed = _missed(one.objectives)
    verdict = f"misses {missed}" if missed else "meets the objectives"
    return f"{text}; simulated, month {one.months} {verdict}"


def _cost(one: Cost) -> str:
    value = f"{one.value}: " if one.value else ""
    if one.usd_per_hour is None or one.usd_per_million_output_tokens is None:
        return f"{value}no fleet does"
    return f"{value}{one.usd_per_hour:,.2f}, {one.usd_per_million_output_tokens:.3g}"
