"""What a report says its figures rest on."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.handoff import Terms, handoff_assumptions
from tonnage.pools import BuiltPool
from tonnage.prefix_caches import cache_assumptions
from tonnage.scenarios.prices import price_sources
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.model.engine_rules import rules_for
from tonnage.sim.serving.policy import policy_for


def assumptions_of(scenario: Scenario, pools: dict[Role, BuiltPool]) -> tuple[str, ...]:
    """Return what the figures of a scenario rest on, step times apart."""
    return tuple(dict.fromkeys(_lines(scenario, pools)))


def _lines(scenario: Scenario, pools: dict[Role, BuiltPool]) -> Iterator[str]:
    chosen = rules_for(scenario.engine_spec())
    if chosen.remark is not None:
        yield chosen.remark
    for role, pool in pools.items():
        yield from (f"{role}: {text}" for text in pool.memory.assumptions)
        if pool.memory.mem_fraction_source == "fitted":
            yield (
                f"{role}: mem_fraction {pool.memory.mem_fraction:g} is fitted to a published "
                "pool size, not known"
            )
        if not pool.model.verified:
            yield f"{pool.model.name}: its geometry is not verified"
    prefill, decode = pools.get("prefill"), pools.get("decode")
    if prefill and decode:
        kv_formats = prefill.spec.kv_format, decode.spec.kv_format
        yield from handoff_assumptions(Terms.of(scenario), *kv_formats)
    policy = policy_for(scenario.engine.spec().name, scenario.engine_spec().version)
    yield f"scheduling: the rules of {policy.name}"
    yield from cache_assumptions(scenario)
    yield from _cost_assumptions(scenario)


def _cost_assumptions(scenario: Scenario) -> Iterator[str]:
    price = scenario.price
    if not price.is_given:
        return
    yield from price_sources(scenario)
    load = price.mean_load()
    if load is not None:
        yield f"cost: over a day the load is {load:.1%} of the point's; all GPUs are paid all day"
    if price.split == "output":
        yield "cost: that of all GPUs is charged to output tokens; price.split: pools splits it"
        return
    source = "given" if "cached_input" in price.model_fields_set else "assumed"
    yield (
        "cost: the prefill pool's is charged to input tokens, a cached one at "
        f"{price.cached_input:g} of one that is computed ({source}), the rest to output tokens"
    )
