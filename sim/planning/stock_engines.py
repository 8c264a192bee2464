"""What stock engines cannot start today, as data: why a plan needs more than they have.

Sources: SGLang 0.5.23 `srt/disaggregation/common/conn.py` (page size and KV type must be the same
on both sides) and pull request 19398 (no conversion in the transfer path); vLLM's NIXL connector
(its compatibility hash covers the KV type); SGLang router 0.3.2 and vLLM's router 0.1.17
`router_args.py` (policies).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tonnage.sim.planning.fleet_plan import PlannedPool, PlannedRouter

# Policies that the engines' own routers have.
STOCK_ROUTERS = {
    "sglang": ("random", "round_robin", "cache_aware", "power_of_two"),
    "vllm": ("random", "round_robin", "cache_aware", "power_of_two"),
}


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that stock engines do not do, and how to see that a fleet asks for it."""

    text: str
    asked: Callable[[str, dict[str, PlannedPool], PlannedRouter], bool]


def _differ(name: str) -> Callable[[str, dict[str, PlannedPool], PlannedRouter], bool]:
    def asked(_engine: str, pools: dict[str, PlannedPool], _router: PlannedRouter) -> bool:
        return len({getattr(pool, name) for pool in pools.values()}) > 1

    return asked


def _any_pool(wants: Callable[[PlannedPool], bool]) -> Callable[..., bool]:
    def asked(_engine: str, pools: dict[str, PlannedPool], _router: PlannedRouter) -> bool:
        return any(wants(pool) for pool in pools.values())

    return asked


def _router_is_not_stock(engine: str, pools: dict[str, PlannedPool], router: PlannedRouter) -> bool:
    if all(pool.instances == 1 for pool in pools.values()):
        return False  # nothing to choose between
    if router.affinity == "session":
        return False  # both take a routing key or consistent hashing in front
    return router.policy not in STOCK_ROUTERS.get(engine, ())


LACKS = (
    Lack(
        "KV conversion at the handoff: prefill and decode keep KV in different formats",
        _differ("kv"),
    ),
    Lack("a handoff between pages of different sizes", _differ("page_tokens")),
    Lack(
        "a page-tag check of the KV (tracker batched)",
        _any_pool(lambda pool: pool.integrity.tracker == "batched"),
    ),
    Lack(
        "a draft that costs nothing",
        _any_pool(lambda pool: pool.speculation is not None and pool.speculation.draft == "free"),
    ),
    Lack("a router with the policy of the plan", _router_is_not_stock),
)


def lacks(engine: str, pools: tuple[PlannedPool, ...], router: PlannedRouter) -> Iterator[str]:
    """Yield what a fleet needs that the stock engine does not have."""
    by_role = {str(pool.role): pool for pool in pools}
    for lack in LACKS:
        if lack.asked(engine, by_role, router):
            yield lack.text
