"""Whether the objectives still hold with one instance of a pool down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console

from tonnage.scenarios.load import changed
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.domain import BadInputError

Json = Mapping[str, Any]
Simulated = Callable[[Scenario, str], list[dict[str, Any]]]  # the points of a scenario, labelled


def check_pools(scenario: Scenario, simulated: Simulated) -> dict[str, Any]:
    """Simulate the scenario once for every pool, with one of its instances down all the time.

    Returns, by pool, whether all objectives hold at every point, and which do at each. Raises as
    `require_objectives` does.
    """
    require_objectives(scenario)
    pools = {role: _check_pool(scenario, role, simulated) for role in scenario.pools.named()}
    return {"holds": all(pool["holds"] for pool in pools.values()), "pools": pools}


def require_objectives(scenario: Scenario) -> None:
    """Raise BadInputError where a scenario has no objectives, or none that a fleet could miss."""
    source, _ = scenario.origin()
    if not scenario.slo:
        raise BadInputError(f"{source}: slo: no objective to hold; give one, such as ttft_p95: 5s")
    if scenario.traffic.kind == "resident":
        problem = "kind resident holds its requests in one instance; use kind closed"
        raise BadInputError(f"{source}: traffic.kind: {problem}")


def _check_pool(scenario: Scenario, role: Role, simulated: Simulated) -> dict[str, Any]:
    instances = scenario.pools.named()[role].instances
    down = scenario.router.down.get(role, ())
    up = [index for index in range(instances) if index not in down]
    found: dict[str, Any] = {"instances": instances, "up": len(up) - 1}
    try:
        without = changed(scenario, [f"router.down.{role}={[*down, up[0]]}"])
    except BadInputError as error:
        why = str(error).rpartition(": ")[2]
        return found | {"holds": False, "why": why, "points": []}
    points = [_judged(point) for point in simulated(without, f"one {role} instance down")]
    return found | {"holds": all(point["holds"] for point in points), "points": points}


def _judged(point: Json) -> dict[str, Any]:
    objectives = dict(point["slo"]["holds"])
    return {
        "concurrency": point["concurrency"],
        "rate_per_s": point["rate_per_s"],
        "holds": all(objectives.values()),
        "objectives": objectives,
        "attainment": point["slo"]["attainment"],
    }


def print_n_plus_one(console: Console, runs: Mapping[str, Json]) -> None:
    """Print a line for every pool; `runs` are by variant, "" for one alone."""
    for variant, report in runs.items():
        for line in _lines(report["n_plus_one"]):
            console.print(f"{variant}: {line}" if variant else line, soft_wrap=True)


def _lines(found: Json) -> Iterator[str]:
    for role, pool in found["pools"].items():
        head = f"one {role} instance of {pool['instances']} down"
        if "why" in pool:
            yield f"{head}: {pool['why']}"
        elif pool["holds"]:
            yield f"{head}: the objectives hold"
        else:
            yield f"{head}: {'; '.join(_failures(pool['points']))}"


def _failures(points: list[Json]) -> Iterator[str]:
    for point in points:
        failed = [name for name, holds in point["objectives"].items() if not holds]
        if not failed:
            continue
        if point["rate_per_s"] is not None:
            load = f" at {point['rate_per_s']:g} per s"
        elif point["concurrency"] is not None:
            load = f" at {point['concurrency']} concurrent"
        else:
            load = ""
        yield f"{' and '.join(failed)} not met{load}"
