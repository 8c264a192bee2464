"""What each way of watching the KV would cost the pools of a scenario, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tonnage.explain import StepShape, operator_row, steps_of
from tonnage.handoff import handoff_figures
from tonnage.pools import BuiltPool, deployment_of, times_of
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.cost.operator_times import OperatorTime, total_s
from tonnage.sim.domain import IntegritySpec

ALTERNATIVES: Mapping[str, IntegritySpec] = {
    "none": IntegritySpec(),
    "page tags, in the graph": IntegritySpec("batched"),
    "page tags, launched": IntegritySpec("batched", in_graph=False),
    "page tags, overlapped": IntegritySpec("batched", overlapped=True),
    "canary": IntegritySpec("canary"),
    "handoff checksum": IntegritySpec(handoff_checksum=True),
}


def integrity_costs(
    scenario: Scenario,
    pools: dict[Role, BuiltPool],
    shape: StepShape,
    alternatives: Mapping[str, IntegritySpec | None] = ALTERNATIVES,
) -> dict[str, dict[str, Any]]:
    """Return, per way of watching, the seconds added to a step of each kind and to a handoff.

    Every pool is watched in that way, whatever the scenario says of it; None: as it says. `share`
    is of the step without a check; items that run beside the step have `hidden_s`.
    """
    return {name: _costs(scenario, pools, shape, spec) for name, spec in alternatives.items()}


def _costs(
    scenario: Scenario, pools: dict[Role, BuiltPool], shape: StepShape, spec: IntegritySpec | None
) -> dict[str, Any]:
    watched = pools
    if spec is not None:
        watched = {
            role: replace(pool, spec=replace(pool.spec, integrity=spec))
            for role, pool in pools.items()
        }
    times = times_of(scenario, watched)
    steps = {
        name: _added(times[role].executor.times(step))
        for name, (role, step) in steps_of(watched, shape).items()
    }
    handoff = deployment_of(scenario, watched, times).handoff
    if handoff is None:
        return {"steps": steps}
    figures = handoff_figures(handoff, shape.prompt_tokens)
    checks = figures.get("checks", [])
    ends = [sum(row["interval_s"][end] for row in checks) for end in (0, 1)]
    added_s = sum(row["seconds"] for row in checks)
    return {"steps": steps, "handoff": {"seconds": added_s, "interval_s": ends, "items": checks}}


def _added(times: list[OperatorTime]) -> dict[str, Any]:
    """Return what the check adds to a step, in all and item by item."""
    items = [one for one in times if one.name.startswith("integrity.")]
    added_s = total_s(items)
    step_s = total_s(times) - added_s
    return {
        "seconds": added_s,
        "interval_s": [sum(one.low_s for one in items), sum(one.high_s for one in items)],
        "share": added_s / step_s if step_s else 0.0,
        "items": [operator_row(one, step_s) for one in items],
    }
