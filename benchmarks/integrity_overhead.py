"""What watching the KV costs, variant by variant, beside the one published measurement.

Prints Markdown; with `--write` it puts it into docs/integrity_cost.md instead. It simulates the
scenario `integrity-overhead`: with the fixed lengths of the published run, at the likely price of
every item of a check and at both ends of its interval; and with drawn lengths over several seeds,
the same seeds with and without a check. Takes about half a minute on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from tonnage.pools import BuiltPool, built_pools, deployment_of, times_of
from tonnage.runs import asked_for
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.cost.handoff_checks import SideChecks
from tonnage.sim.cost.operator_times import OperatorTime, interval_factors, total_s
from tonnage.sim.cost.watched import WatchedExecutor
from tonnage.sim.domain import PromptChunk, Step
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.handoff import Handoff
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.planning.integrity_risk import FaultRate, YearlyCount, fleet_risk
from tonnage.sim.results.summary import latency, throughput
from tonnage.sim.traffic.build import build_load
from tonnage.sim.traffic.spec import LoadPoint
from tonnage.step_times import StepTimes

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "integrity_cost.md"
SCENARIO, UNWATCHED = "integrity-overhead", "none"
_BEGIN, _END = "<!-- begin generated -->", "<!-- end generated -->"

# Cloudflare, "Smaller, faster, safer models", 3 August 2026: a mid-size model, 1 and 8 users.
PUBLISHED_LOSS = (0.0038, 0.0079)
PUBLISHED_P95_INCREASE = (0.0042, 0.0080)
ILLUSTRATION = 1e-9  # faults per request, the rate that its text calculates with

SEEDS = range(8)
DRAWN = (
    "traffic.input_tokens={kind: lognormal, mean: 8192, p95: 16384, max: 65536}",
    "traffic.output_tokens={kind: lognormal, mean: 1000, p95: 2000, max: 8000}",
)
METRICS = ("throughput loss", "TPOT p95", "e2e p95", "TTFT p95")
Figures = Mapping[str, float]
NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Variant:
    """A scenario with its pools and what predicts their steps."""

    scenario: Scenario
    pools: Mapping[Role, BuiltPool]
    times: Mapping[Role, StepTimes]

    @classmethod
    def of(cls, scenario: Scenario) -> Variant:
        """Build the pools of a scenario."""
        pools = built_pools(scenario)
        return cls(scenario, pools, times_of(scenario, pools))

    def points(self) -> Sequence[LoadPoint]:
        """Return the points of the load."""
        return self.scenario.traffic_spec().points()

    def deployment(self, *, high: bool | None = None) -> Deployment:
        """Return what runs; `high`: every item of a check at that end of its interval."""
        times = dict(self.times)
        if high is not None:
            times = {role: _at_end(one, high=high) for role, one in times.items()}
        deployment = deployment_of(self.scenario, dict(self.pools), times)
        if high is None or deployment.handoff is None:
            return deployment
        return replace(deployment, handoff=_handoff_at_end(deployment.handoff, high=high))

    def figures(self, point: LoadPoint, seed: int = 0, *, high: bool | None = None) -> Figures:
        """Return throughput and the p95 of every latency of one run."""
        load = build_load(self.scenario.traffic_spec(), point, seed)
        run = simulate(self.deployment(high=high), load, seed=seed)
        rate = throughput(run, 1, resident=False)["output_tokens_per_s"]
        assert rate is not None
        spread = latency(run, resident=False)
        names = {"TPOT p95": "tpot_s", "e2e p95": "e2e_s", "TTFT p95": "ttft_s"}
        p95 = {shown: spread[name]["p95"] for shown, name in names.items()}
        return {"throughput loss": rate, **p95}


def _at_end(times: StepTimes, *, high: bool) -> StepTimes:
    executor = times.executor
    if not isinstance(executor, WatchedExecutor):
        return times
    check = executor.check
    return replace(times, executor=executor.checked_by(check.priced(check.prices.end(high=high))))


def _handoff_at_end(handoff: Handoff, *, high: bool) -> Handoff:
    ended = {
        name: replace(check, prices=check.prices.end(high=high))
        for name in ("sender_check_s", "receiver_check_s")
        if isinstance(check := getattr(handoff, name), SideChecks)
    }
    return replace(handoff, **ended)


def overheads(without: Figures, watched: Figures) -> dict[str, float]:
    """Return the loss of throughput and the increase of every p95, as shares."""
    loss = 1.0 - watched["throughput loss"] / without["throughput loss"]
    rises = {name: watched[name] / without[name] - 1.0 for name in METRICS[1:]}
    return {"throughput loss": loss, **rises}


# --- the table of the published traffic -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overhead:
    """A share at the likely prices, and between which ends it lies."""

    likely: float
    low: float
    high: float


def fixed_overheads(without: Variant, watched: Variant, point: LoadPoint) -> dict[str, Overhead]:
    """Return every overhead at one point of the load, with the operators' intervals.

    At an end every item of the check is at that end, and the step that it is compared with at the
    other end of its own.
    """
    base = without.figures(point)
    likely, low, high = (
        overheads(base, watched.figures(point, high=end)) for end in (None, False, True)
    )
    found = {}
    for name in METRICS:
        shortest, longest = step_factors(without, point, "prefill" if "TTFT" in name else "decode")
        ends = low[name] / longest, high[name] / shortest
        found[name] = Overhead(likely[name], min(ends), max(ends))
    return found


def step_factors(variant: Variant, point: LoadPoint, role: Role) -> tuple[float, float]:
    """Return how far the steps of a pool may be off, as factors, at the load of a point."""
    step = decode_step(variant, point) if role == "decode" else prompt_step(variant)
    return interval_factors(variant.times[role].executor.times(step))


def decode_step(variant: Variant, point: LoadPoint) -> Step:
    """Return the step of the users of one decode instance in the middle of their answers."""
    traffic = variant.scenario.traffic_spec()
    instances = variant.pools["decode"].spec.instances
    requests = max(1, round((point.concurrency or 1) / instances))
    context = round(traffic.input_tokens.mean() + traffic.output_tokens.mean() / 2)
    contexts = np.full(requests, context, dtype=np.int64)
    return Step(contexts, int(contexts.sum()), ())


def prompt_step(variant: Variant) -> Step:
    """Return the step of one mean prompt, or of a full chunk of it."""
    tokens = round(variant.scenario.traffic_spec().input_tokens.mean())
    chunk = min(tokens, variant.pools["prefill"].spec.chunk_tokens)
    return Step(NONE, 0, (PromptChunk(chunk, 0),))


def drawn_overheads(
    without: Variant, watched: Variant, point: LoadPoint, seeds: Sequence[int]
) -> dict[str, Overhead]:
    """Return the mean overhead over seeds and its 95 % interval (Student's t, paired by seed)."""
    rows = [overheads(without.figures(point, seed), watched.figures(point, seed)) for seed in seeds]
    found = {}
    for name in METRICS:
        values = np.array([row[name] for row in rows])
        half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
        mean = float(values.mean())
        found[name] = Overhead(mean, mean - half, mean + half)
    return found


# --- Markdown -------------------------------------------------------------------------------------


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns


def _percent(one: Overhead) -> str:
    shown = f"{one.likely:.2%} ({one.low:.2%} to {one.high:.2%})"
    return shown.replace("-0.00%", "0.00%")


def _counted(number: int | None, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _microseconds(one: OperatorTime) -> str:
    shown = f"{one.seconds * 1e6:.1f} ({one.low_s * 1e6:.1f} to {one.high_s * 1e6:.1f})"
    return f"{shown}, {one.hidden_s * 1e6:.1f} beside" if one.hidden_s else shown


def overhead_table(variants: Mapping[str, Variant], *, drawn: bool) -> str:
    """Return the overhead of every variant at every point of the load."""
    without = variants[UNWATCHED]
    lines = [_line("users", "variant", *METRICS), _rule(2 + len(METRICS))]
    for point in without.points():
        for name, variant in variants.items():
            if name == UNWATCHED:
                continue
            found = (
                drawn_overheads(without, variant, point, SEEDS)
                if drawn
                else fixed_overheads(without, variant, point)
            )
            cells = [_percent(found[metric]) for metric in METRICS]
            lines.append(_line(f"{point.concurrency}", name, *cells))
    low, high = PUBLISHED_LOSS
    slow, slower = PUBLISHED_P95_INCREASE
    published = f"{low:.2%} to {high:.2%}", f"p95 {slow:.2%} to {slower:.2%}", "", ""
    lines.append(_line("1 and 8", "published", *published))
    return "\n".join(lines)


def item_table(variants: Mapping[str, Variant]) -> str:
    """Return the items of a decode step with the users of either point, and its share."""
    without = variants[UNWATCHED]
    points = without.points()
    heads = [f"{_counted(point.concurrency, 'user')}, us" for point in points]
    lines = [_line("variant", "item", *heads, "source"), _rule(3 + len(points))]
    for name, variant in variants.items():
        columns = [list(_check_items(variant, point)) for point in points]
        for items in zip(*columns, strict=True):
            label = items[0].name.removeprefix("integrity.").replace("_", " ")
            cells = [_microseconds(one) for one in items]
            lines.append(_line(name, label, *cells, items[0].source))
        if columns[0]:
            sums = [
                f"**{total_s(items) * 1e6:.1f}, {total_s(items) / _step_s(without, point):.2%}**"
                for items, point in zip(columns, points, strict=True)
            ]
            lines.append(_line(name, "**together, of the step**", *sums, ""))
    return "\n".join(lines)


def _check_items(variant: Variant, point: LoadPoint) -> Iterator[OperatorTime]:
    times = variant.times["decode"].executor.times(decode_step(variant, point))
    yield from (one for one in times if one.name.startswith("integrity."))


def _step_s(variant: Variant, point: LoadPoint) -> float:
    step = decode_step(variant, point)
    return float(variant.times["decode"].executor.run(step, 1)[0])


def handoff_table(variants: Mapping[str, Variant]) -> str:
    """Return what a prompt's handoff takes longer, item by item."""
    tokens = round(variants[UNWATCHED].scenario.traffic_spec().input_tokens.mean())
    names: dict[tuple[str, ...], list[str]] = {}
    for name, variant in variants.items():
        handoff = variant.deployment().handoff
        assert handoff is not None
        sides = {"sender": handoff.sender_check_s, "receiver": handoff.receiver_check_s}
        for side, check in sides.items():
            for one in check.items(tokens) if isinstance(check, SideChecks) else ():
                label = one.name.removeprefix("handoff.").replace("_", " ")
                names.setdefault((side, label, _microseconds(one), one.source), []).append(name)
    rows = [_line(", ".join(found), *cells) for cells, found in names.items()]
    return "\n".join([_line("variant", "side", "item", "us", "source"), _rule(5), *rows])


def growth_table(variant: Variant) -> str:
    """Return what a check in the graph adds to a step, by batch, context and tokens of a page."""
    batches, sizes = (1, 8, 32, 128), (1, 16, 64)
    contexts = (2048, 8192, 32768)
    heads = [_counted(batch, "request") for batch in batches]
    lines = [_line("page, tokens", "context", *heads), _rule(2 + len(batches))]
    executor = variant.times["decode"].executor
    assert isinstance(executor, WatchedExecutor)
    for size in sizes:
        check = _with_pages(executor.check, size, variant.pools["decode"].model.max_context_tokens)
        sized = executor.checked_by(check)
        for context in contexts:
            steps = [np.full(batch, context, dtype=np.int64) for batch in batches]
            cells = []
            for contexts_of in steps:
                times = sized.times(Step(contexts_of, int(contexts_of.sum()), ()))
                added = [one for one in times if one.name.startswith("integrity.")]
                cells.append(
                    f"{total_s(added) * 1e6:.1f} us, {total_s(added) / total_s(times):.2%}"
                )
            lines.append(_line(f"{size}", f"{context:,}", *cells))
    return "\n".join(lines)


def _with_pages(check: Any, page_tokens: int, max_context_tokens: int) -> Any:
    """Return the same check over pages of another size."""
    return replace(check, page_tokens=page_tokens, table_pages=max_context_tokens / page_tokens)


def risk_table() -> str:
    """Return the wrong reads and aborts of a year at the published illustration of a fault rate."""
    heads = "requests a day", "a fault per", "wrong reads, no check", "any in a year"
    lines = [_line(*heads, "aborts, nine of ten caught", "wrong reads left"), _rule(6)]
    pages = 9192 / 64
    for requests in (1e6, 1e7, 1e8, 1e9):
        for rate, what in (
            (FaultRate.assumed(ILLUSTRATION), "request"),
            (FaultRate.assumed(ILLUSTRATION, "allocation"), "page given"),
        ):
            risk = fleet_risk(requests, rate, 0.9, allocations_per_request=pages)
            without = risk.wrong_reads_without
            cells = [_yearly(one) for one in (without, risk.aborts_with, risk.wrong_reads_with)]
            any_share = f"{without.any_probability:.1%}"
            lines.append(_line(f"{requests:,.0f}", what, cells[0], any_share, *cells[1:]))
    return "\n".join(lines)


def _yearly(one: YearlyCount) -> str:
    mean = f"{one.expected:,.0f}" if one.expected >= 100 else f"{one.expected:.3g}"
    return f"{mean} ({one.low:,} to {one.high:,})"


def variants_of(overrides: Sequence[str] = ()) -> dict[str, Variant]:
    """Return every variant of the scenario, built."""
    asked = asked_for(SCENARIO, overrides)
    return {name: Variant.of(scenario) for name, scenario in asked.scenarios.items()}


def generated_section() -> str:
    """Return the part of docs/integrity_cost.md that this program writes."""
    variants = variants_of()
    parts = {
        "### Lengths as published": overhead_table(variants, drawn=False),
        f"### Drawn lengths, {len(SEEDS)} seeds": overhead_table(variants_of(DRAWN), drawn=True),
        "### A decode step, item by item": item_table(variants),
        "### A handoff of 8,192 tokens, item by item": handoff_table(variants),
        "### How a check in the graph grows": growth_table(variants["batched"]),
        "### A year of a fleet": risk_table(),
    }
    return "\n".join(f"{title}\n\n{table}\n" for title, table in parts.items())


def with_section(document: str, section: str) -> str:
    """Return the document with its generated part replaced."""
    before, rest = document.split(_BEGIN)
    return f"{before}{_BEGIN}\n{section}{_END}{rest.split(_END)[1]}"


def main() -> None:
    """Print the tables, or write them into the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/integrity_cost.md")
    arguments = parser.parse_args()
    section = generated_section()
    if arguments.write:
        DOCUMENT.write_text(with_section(DOCUMENT.read_text(), section))
    else:
        print(section)


if __name__ == "__main__":
    main()
