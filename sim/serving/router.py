"""Which instances serve a request: a region, then one instance of each pool in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from tonnage.sim.domain import Request
from tonnage.sim.serving.hash_ring import VIRTUAL_NODES, HashRing
from tonnage.sim.serving.regions import Regions
from tonnage.sim.serving.router_policies import (
    CacheAware,
    CacheRules,
    Chance,
    LeastRequests,
    Loads,
    PowerOfTwo,
    RoundRobin,
    RouterPolicy,
    TokenAware,
)

PolicyName = Literal[
    "round_robin", "random", "least_requests", "token_aware", "power_of_two", "cache_aware"
]
POLICIES: tuple[PolicyName, ...] = (
    "round_robin",
    "random",
    "least_requests",
    "token_aware",
    "power_of_two",
    "cache_aware",
)
Affinity = Literal["none", "session", "prefix"]
_ANY_LOAD = float("inf")
_STREAM = 7_101  # of a seed's random numbers: nobody else's


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How requests are spread over instances and regions.

    `policies`: of a pool by its role, where it is not `policy`. `affinity`: the key that makes
    requests return to one instance of the pool that computes prompts: their session, or their first
    `prefix_tokens` tokens; a request without it goes by the policy. `load_factor`: an instance with
    more than that times the mean of the requests in flight is full, and the next one on the ring is
    taken; None: never full. `down`: instances that are not there, by role. `waits`: while no region
    has an instance of every pool, requests wait for one; else they are rejected.
    """

    policy: PolicyName = "token_aware"
    policies: Mapping[str, PolicyName] = field(default_factory=dict, hash=False)
    affinity: Affinity = "none"
    prefix_tokens: int = 256
    load_factor: float | None = None
    virtual_nodes: int = VIRTUAL_NODES
    cache: CacheRules = field(default_factory=CacheRules)
    regions: int = 1
    hop_probability: float = 0.0
    down: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    waits: bool = False

    def policy_of(self, role: str) -> PolicyName:
        """Return the policy of a pool."""
        return self.policies.get(role, self.policy)

    def key_of(self, request: Request) -> int | None:
        """Return what a request's affinity is bound to; None if it has none."""
        if self.affinity == "session":
            return request.session
        if self.affinity == "prefix" and request.block_ids:
            blocks = max(self.prefix_tokens // request.block_tokens, 1)
            prompt_blocks = -(-request.input_tokens // request.block_tokens)
            # An id stands for all blocks before it too.
            return request.block_ids[min(blocks, prompt_blocks, len(request.block_ids)) - 1]
        return None


class Router:
    """Spread requests over some instances of one pool, and count what is in flight on each."""

    def __init__(
        self,
        spec: RoutingSpec,
        policy: PolicyName,
        instances: int,
        rng: np.random.Generator,
        first_index: int = 0,
    ) -> None:
        """Start with idle instances, all up; `first_index` numbers them in the whole pool."""
        self.loads = Loads.none(instances)
        self.up = list(range(instances))
        self._down: set[int] = set()
        self._shunned: set[int] = set()
        self._load_factor = spec.load_factor
        self._policy = _policy(policy, spec.cache, instances, rng)
        self._first_index = first_index
        self._ring: HashRing | None = None
        if spec.affinity != "none":
            numbers = range(first_index, first_index + instances)
            self._ring = HashRing(numbers, spec.virtual_nodes)

    def assign(self, request: Request, key: int | None = None) -> int:
        """Return the instance for a request, by its key or else by the policy, and count it in."""
        if key is None or self._ring is None:
            index = self._policy.choose(request, self.loads, self.up)
        else:
            index = self._by_key(key, self._ring)
        self._policy.sent(request, index)
        self.loads.requests[index] += 1
        self.loads.tokens[index] += request.input_tokens
        return index

    def done(self, index: int, request: Request) -> None:
        """Count a request out."""
        self.loads.requests[index] -= 1
        self.loads.tokens[index] -= request.input_tokens

    def mark_down(self, index: int) -> None:
        """Send nothing to an instance any more; its cache is lost."""
        self._down.add(index)
        self._policy.lost(index)
        self._find_up()

    def mark_up(self, index: int) -> None:
        """Use an instance again."""
        self._down.discard(index)
        self._find_up()

    def shun(self, index: int) -> None:
        """Send nothing to an instance for a while, though it may be there, cache and all."""
        self._shunned.add(index)
        self._find_up()

    def shun_no_more(self, index: int) -> None:
        """Use an instance again that was shunned, unless it is down."""
        self._shunned.discard(index)
        self._find_up()

    def _find_up(self) -> None:
        gone = self._down | self._shunned
        self.up = [index for index in range(len(self.loads.requests)) if index not in gone]

    def _by_key(self, key: int, ring: HashRing) -> int:
        """Return the first instance on the ring that has room, or the first that is up.

        The bound is a factor of the mean load, in which the request at hand counts.
        """
        most = _ANY_LOAD
        requests, first, up = self.loads.requests, self._first_index, self.up
        if self._load_factor is not None:
            most = self._load_factor * (sum(requests) + 1) / len(up)
        preferred = ring.preferred(key) - first
        if requests[preferred] <= most and len(up) == len(requests):
            return preferred
        chosen = ring.first(key, lambda node: requests[node - first] <= most and node - first in up)
        assert chosen is not None  # not all of them are above the mean
        return chosen - first


def _policy(
    name: PolicyName, cache: CacheRules, instances: int, rng: np.random.Generator
) -> RouterPolicy:
    makers: dict[PolicyName, Callable[[], RouterPolicy]] = {
        "round_robin": RoundRobin,
        "random": lambda: Chance(rng),
        "least_requests": LeastRequests,
        "token_aware": TokenAware,
        "power_of_two": lambda: PowerOfTwo(rng),
        "cache_aware": lambda: CacheAware(cache, instances),
    }
    return makers[name]()


def regions_of(instances: int, regions: int) -> list[range]:
    """Return which instances of a pool stand in each region: blocks as equal as can be."""
    edges = [region * instances // regions for region in range(regions + 1)]
    return [range(first, end) for first, end in pairwise(edges)]


class Dispatcher:
    """Choose the region of a request and in it one instance of every pool.

    The affinity key decides in the pool that computes prompts, where prefixes are cached; decode
    instances are always chosen by their policy.
    """

    def __init__(self, spec: RoutingSpec, pools: Mapping[str, int], seed: int) -> None:
        """`pools`: instances by role, at least one per region."""
        self._spec = spec
        self._has_keys = spec.affinity != "none"
        rng = np.random.default_rng([_STREAM, seed, 1])
        self._regions = Regions(spec.regions, spec.hop_probability, rng)
        self.pools = [
            _Pool(spec, role, instances, number, seed)
            for number, (role, instances) in enumerate(pools.items())
        ]
        self._by_role = {pool.role: pool for pool in self.pools}
        self.roles = list(pools)
        self._find_usable()

    def _find_usable(self) -> None:
        self._usable = [
            region
            for region in range(self._spec.regions)
            if all(pool.routers[region].up for pool in self.pools)
        ]

    @property
    def available(self) -> bool:
        """Whether some region has an instance of every pool."""
        return bool(self._usable)

    def mark(self, role: str, index: int, *, up: bool, shunned: bool = False) -> None:
        """Take in that an instance is up or not; `shunned`: that it is used again or not."""
        self._by_role[role].mark(index, up=up, shunned=shunned)
        self._find_usable()

    def assign(self, request: Request) -> list[int]:
        """Return the instances for a request, one of each pool, and count it in everywhere.

        Ask only while `available`.
        """
        key = self._spec.key_of(request) if self._has_keys else None
        region = 0
        if self._spec.regions > 1:
            region = self._regions.enter(request.session, key)
            if region not in self._usable:  # the next one that is
                region = next((one for one in self._usable if one > region), self._usable[0])
        return [pool.assign(region, request, key) for pool in self.pools]

    def done(self, role: str, index: int, request: Request) -> None:
        """Count a request out of a pool."""
        self._by_role[role].done(index, request)


class _Pool:
    """The routers of one pool, one per region."""

    def __init__(
        self, spec: RoutingSpec, role: str, instances: int, number: int, seed: int
    ) -> None:
        self.role = role
        self._by_key = role != "decode"
        regions = regions_of(instances, spec.regions)
        self._firsts = [region.start for region in regions]
        self.routers = [
            Router(
                spec,
                spec.policy_of(role),
                len(indices),
                np.random.default_rng([_STREAM, seed, 2 + number, region]),
                indices.start,
            )
            for region, indices in enumerate(regions)
        ]
        self._region_of = [region for region, indices in enumerate(regions) for _ in indices]
        for index in spec.down.get(role, ()):
            region = self._region_of[index]
            self.routers[region].mark_down(index - self._firsts[region])

    def mark(self, index: int, *, up: bool, shunned: bool) -> None:
        """Take in that an instance, numbered in the whole pool, is up or not, shunned or not."""
        region = self._region_of[index]
        router, local = self.routers[region], index - self._firsts[region]
        if shunned:
            (router.shun_no_more if up else router.shun)(local)
        else:
            (router.mark_up if up else router.mark_down)(local)

    def assign(self, region: int, request: Request, key: int | None) -> int:
        """Return the instance in a region, numbered in the whole pool."""
        chosen = self.routers[region].assign(request, key if self._by_key else None)
        return self._firsts[region] + chosen

    def done(self, index: int, request: Request) -> None:
        """Count a request out."""
        region = self._region_of[index]
        self.routers[region].done(index - self._firsts[region], request)
