"""A plan for people: the two answers, the front, and why others lost."""

from __future__ import annotations

from rich.console import Console

from tonnage.plan_margins import Margin
from tonnage.plan_quality import PREFIX as QUALITY
from tonnage.plan_ranks import Ranks
from tonnage.plan_what_if_table import print_what_if
from tonnage.planner import PlanReport
from tonnage.sim.planning.fleet_plan import Estimate, FleetPlan
from tonnage.terminal import new_table

_SHOWN_FRONT = 10
_SHOWN_REJECTED = 16


def print_plan(console: Console, report: PlanReport) -> None:
    """Print everything that was found."""
    console.print(
        f"{report.scenario.name}: {report.load} (headroom {report.scenario.plan.headroom:.0%}), "
        f"{report.candidates:,} fleets of {report.configurations} pool configurations screened"
    )
    _print_answer(console, "best", report.best)
    if report.launchable is None:
        console.print("\nlaunchable: none of the fleets that stock engines can start passed")
    elif report.launchable == report.best:
        console.print("\nlaunchable: the same; stock engines can start it today")
    else:
        _print_answer(console, "launchable", report.launchable)
        console.print(f"price gap: {report.price_gap_usd_per_hour:.2f} USD an hour")
    _print_margins(console, report.margins)
    _print_front(console, report)
    _print_rejected(console, report)
    if report.what_if is not None:
        print_what_if(console, report.what_if)
    if report.ranks is not None:
        _print_ranks(console, report.ranks)
    provenance = report.best.provenance
    console.print(f"\nprofile {provenance.profile}; source {provenance.source}")
    for text in provenance.assumptions:
        console.print(f"  {text}")


def _print_answer(console: Console, title: str, plan: FleetPlan) -> None:
    figures = plan.figures
    console.print(
        f"\n{title}: {plan.gpus} GPUs, {figures.usd_per_hour:,.2f} USD an hour, "
        f"{_text(figures.usd_per_million_output_tokens)} USD per million output tokens"
    )
    columns = [
        "pool",
        "instances",
        "GPU",
        "layout",
        "weights",
        "KV",
        "fraction",
        "running",
        "chunk",
        "page",
        "KV tokens",
    ]
    table = new_table(console, "", columns)
    for pool in plan.pools:
        layout = pool.layout
        ways = [f"TP{layout.tp}"]
        names = (("PP", layout.pp), ("EP", layout.ep), ("DP", layout.attention_dp))
        ways += [f"{name}{size}" for name, size in names if size > 1]
        table.add_row(
            pool.role,
            str(pool.instances),
            pool.gpu,
            " ".join(ways),
            pool.weights,
            pool.kv,
            f"{pool.mem_fraction:.3f}",
            str(pool.max_running_requests),
            str(pool.chunk_tokens),
            str(pool.page_tokens),
            f"{pool.kv_tokens:,}",
        )
    console.print(table)
    for one in figures.objectives:
        verdict = "met" if one.met else "missed"
        console.print(
            f"  {one.name} {_text(one.reached)} s, limit {one.limit_s:g} s: {verdict} "
            f"({figures.replications} runs)"
        )
    console.print(
        f"  {_text(figures.output_tokens_per_s)} output tokens/s, "
        f"{_text(figures.output_tokens_per_s_per_gpu)} per GPU of the fleet, "
        f"{_text(figures.output_tokens_per_s_per_user)} for a user; "
        f"router {plan.router.policy}; what stops a cheaper fleet: {plan.binds}"
    )
    for text in plan.provenance.assumptions:
        if text.startswith(QUALITY):
            console.print(f"  {text}")
    for need in plan.needs:
        console.print(f"  needs {need}; stock {plan.engine} does not have it")


def _print_margins(console: Console, margins: tuple[Margin, ...]) -> None:
    if not margins:
        return
    simulated = any(one.tie is not None for one in margins)
    how = "simulated with the same seeds" if simulated else "by closed form"
    console.print(f"\nother formats in one pool, {how}: what they cost more")
    columns = ["pool", "instead of", "is", "USD/h", "USD/Mtok", "verdict"]
    table = new_table(console, "", columns, numbers_from=3)
    for one in margins:
        if one.usd_per_hour is None or one.usd_per_million_output_tokens is None:
            table.add_row(one.role, one.chosen, one.alternative, "", "", "no fleet does")
            continue
        verdict = "a tie" if one.tie else ""
        table.add_row(
            one.role,
            one.chosen,
            one.alternative,
            f"{one.usd_per_hour:+.2f}",
            _signed(one.usd_per_million_output_tokens),
            verdict,
        )
    console.print(table)


def _print_front(console: Console, report: PlanReport) -> None:
    console.print("\nfront, by closed form: no fleet is better in all three")
    columns = ["fleet", "GPUs", "USD/h", "tok/s/user", "tok/s/GPU", "USD/Mtok", "objectives"]
    table = new_table(console, "", columns)
    for one in report.front[:_SHOWN_FRONT]:
        table.add_row(
            one.fleet,
            str(one.gpus),
            f"{one.usd_per_hour:,.2f}",
            f"{one.output_tokens_per_s_per_user:.1f}",
            f"{one.output_tokens_per_s_per_gpu:.1f}",
            f"{one.usd_per_million_output_tokens:.2f}",
            "met" if one.meets_objectives else "missed",
        )
    console.print(table)


def _print_rejected(console: Console, report: PlanReport) -> None:
    console.print("\nwhy others lost")
    table = new_table(console, "", ["fleet", "USD/h", "why", "by"])
    for one in report.rejected[:_SHOWN_REJECTED]:
        price = "" if one.usd_per_hour is None else f"{one.usd_per_hour:,.2f}"
        table.add_row(one.fleet, price, one.reason, "simulation" if one.simulated else "screening")
    console.print(table)


def _print_ranks(console: Console, ranks: Ranks) -> None:
    console.print(f"\nscreened and simulated order of {len(ranks.fleets)} fleets (Spearman)")
    for name, value in ranks.spearman.items():
        shown = "all alike" if value is None else f"{value:.2f}"
        console.print(f"  {name}: {shown}")


def _signed(one: Estimate) -> str:
    if one.low is None or one.high is None:
        return f"{one.value:+.3g}"
    return f"{one.value:+.3g} ({one.low:+.3g} to {one.high:+.3g})"


def _text(one: Estimate) -> str:
    if one.low is None or one.high is None:
        return f"{one.value:.3g}"
    return f"{one.value:.3g} ({max(one.low, 0.0):.3g} to {one.high:.3g})"
