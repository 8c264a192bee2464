"""Commands of a fleet: what starts an instance of a pool, and what starts the router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tonnage.sim.domain import BadInputError
from tonnage.sim.export.context import ExportContext
from tonnage.sim.export.flags import ArgumentList, FlagTable, Option, argument_list
from tonnage.sim.export.settings import pool_settings
from tonnage.sim.planning.fleet_plan import FleetPlan, PlannedPool


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its options, checked against the list of what it takes."""

    program: tuple[str, ...]
    options: tuple[Option, ...]

    def words(self) -> list[str]:
        """Return it as words for a manifest; what the user has to fill in stands as a name."""
        words = list(self.program)
        for option in self.options:
            words += [option.flag] if option.flag else []
            if option.value is not None:
                words.append(option.value)
            elif option.variable is not None:
                words.append(f"FILL-IN-{option.variable.replace('_', '-')}")
            words += option.values
        return words


def engine_command(
    plan: FleetPlan, pool: PlannedPool, table: FlagTable, context: ExportContext
) -> Command:
    """Return what starts an instance of the pool, without what differs from node to node."""
    options = table.options(pool_settings(plan, pool, table, context))
    return Command(tuple(table.data["program"]), tuple(options))


def checked(command: Command, arguments: ArgumentList) -> Command:
    """Return the command; BadInputError names an option that the program would not take."""
    for option in command.options:
        problem = arguments.problem(option) if option.flag else None
        if problem is not None:
            raise BadInputError(f"{arguments.name} would not start: {problem}; change the plan")
    return command


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router spreads requests: options, what clients must send, what it does otherwise."""

    options: tuple[Option, ...]
    header: str | None = None
    remarks: tuple[str, ...] = ()


def routing(plan: FleetPlan, data: Mapping[str, Any]) -> Routing:
    """Return the router's policies for the plan's; a policy it has not becomes the nearest."""
    policy, remarks = _policy(plan, data)
    if plan.router.affinity not in ("none", *data["affinity"]):
        known = ", ".join(("none", *data["affinity"]))
        raise BadInputError(f"router.affinity: {plan.router.affinity!r} is none of {known}")
    affinity = data["affinity"].get(plan.router.affinity)
    if affinity is None:
        return Routing((Option("--policy", policy),), None, tuple(remarks))
    returning = Option("--policy", affinity["policy"])
    options = [Option(flag, value) for flag, value in affinity["options"]]
    if plan.pool("prefill") is not None:  # requests return to where their prompt was computed
        first = Option("--prefill-policy", affinity["policy"])
        returning = Option("--policy", policy)
        options = [first, Option("--decode-policy", policy), *options]
    else:
        remarks = []  # the policy is for requests without a key alone, which these routers spread
    header = affinity["header"]
    if header is not None:
        remarks.append(f"clients send their session's id in the header {header}")
    elif plan.router.affinity == "prefix":
        remarks.append("affinity prefix: the router follows cached prefixes instead of a hash")
    return Routing((returning, *options), header, tuple(remarks))


def _policy(plan: FleetPlan, data: Mapping[str, Any]) -> tuple[str, list[str]]:
    asked = plan.router.policy
    if asked in data["policies"]:
        return str(data["policies"][asked]), []
    if asked not in data["nearest"]:
        known = ", ".join((*data["policies"], *data["nearest"]))
        raise BadInputError(f"router.policy: {asked!r} is none of {known}")
    nearest = str(data["nearest"][asked])
    remark = f"router.policy {asked}: the router has no such policy; {nearest} stands for it"
    return nearest, [remark]


def needs_router(plan: FleetPlan) -> bool:
    """Tell whether requests have a choice: two pools, or several instances."""
    return len(plan.pools) > 1 or plan.pools[0].instances > 1


def router_command(table: FlagTable, options: list[Option]) -> Command:
    """Return the engine's router with such options, checked."""
    data = table.data["router"]
    command = Command(tuple(data["program"]), tuple(options))
    return checked(command, argument_list(data["arguments"]))
