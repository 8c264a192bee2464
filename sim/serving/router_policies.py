"""Which instance of a pool gets a request, by what its router knows: pure choices, no clock.

The rules named like SGLang's are those of sglang_router 0.3.2 (`policies/*.rs`).
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tonnage.sim.domain import Request
from tonnage.sim.serving.draws import Draws
from tonnage.sim.serving.router_tree import Ids, Match, RouterTree, holder


@dataclass(slots=True)
class Loads:
    """What a router sent to each instance that is not done yet."""

    requests: list[int]
    tokens: list[int]  # of their prompts

    @classmethod
    def none(cls, instances: int) -> Loads:
        """Return those of idle instances."""
        return cls([0] * instances, [0] * instances)


@dataclass(frozen=True, slots=True)
class CacheRules:
    """When `cache_aware` follows a prefix and when the load; the defaults are SGLang's.

    `tree_tokens`: the most prompt tokens remembered per instance. SGLang's limit is 2^26 characters
    of text, taken as four to a token here.
    """

    threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    tree_tokens: int = 2**24


class RouterPolicy(Protocol):
    """Chooses among the instances that are up."""

    def choose(self, request: Request, loads: Loads, up: ListLike[int]) -> int:
        """Return one of `up`, which are in ascending order."""

    def sent(self, request: Request, instance: int) -> None:
        """Take in that a request went to an instance, whoever chose it."""

    def lost(self, instance: int) -> None:
        """Take in that an instance went down, and its cache with it."""


class _Forgetful:
    """A policy that looks at the present loads alone."""

    def sent(self, request: Request, instance: int) -> None:
        """Remember nothing."""

    def lost(self, instance: int) -> None:
        """Forget nothing."""


class RoundRobin(_Forgetful):
    """The next one in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, loads: Loads, up: ListLike[int]) -> int:
        """Return the first instance that is up from the next one on."""
        chosen = next((index for index in up if index >= self._next), up[0])
        self._next = chosen + 1
        return chosen


class Chance(_Forgetful):
    """Any of them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._draws = Draws(rng)

    def choose(self, request: Request, loads: Loads, up: ListLike[int]) -> int:
        """Return one at random."""
        return up[self._draws.below(len(up))]


class LeastRequests(_Forgetful):
    """The one with the fewest requests in flight; among equals the lowest index."""

    def choose(self, request: Request, loads: Loads, up: ListLike[int]) -> int:
        """Return the least loaded one."""
        return least(loads.requests, up)


class TokenAware(_Forgetful):
    """The one with the fewest prompt tokens in flight; among equals the lowest index.

    In a prefill pool they are those not yet computed, in a decode pool those of the requests that
    it holds: a router does not know how long outputs will be.
    """

    def choose(self, request: Request, loads: Loads, up: ListLike[int]) -> int:
        """Return the least loaded one."""
        return least(loads.tokens, up)


class PowerOfTwo(_Forgetful):
    """The less loaded of two different ones at random; the first drawn among equals."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._draws = Draws(rng)

    def choose(self, request: Request, loads: Loads, up: ListLike[int]) -> int:
        """Draw two and compare their requests in flight."""
        if len(up) == 1:
            return up[0]
        first = self._draws.below(len(up))
        second = self._draws.below(len(up) - 1)
        one, other = up[first], up[second if second < first else second + 1]
        return one if loads.requests[one] <= loads.requests[other] else other


class CacheAware:
    """The one that probably has most of the prompt, unless loads are out of balance.

    Out of balance (the most requests in flight exceed the fewest by more than `balance_abs` and by
    more than a factor `balance_rel`): the fewest requests. Else, when more than `threshold` of the
    prompt is known: who was last sent that prefix. Else: who was sent the fewest tokens so far.
    """

    def __init__(self, rules: CacheRules, instances: int) -> None:
        self._rules = rules
        self._tree = RouterTree(instances, rules.tree_tokens)
        self._looked_up: tuple[Request, Ids, Match] | None = None  # by `choose`, for `sent`

    def choose(self, request: Request, loads: Loads, up: ListLike[int]) -> int:
        """Return the instance by SGLang's three rules."""
        if self._out_of_balance(loads.requests, up):
            return least(loads.requests, up)
        ids = _prompt_ids(request)
        match = self._tree.match(ids)
        self._looked_up = request, ids, match
        if match[1] * request.block_tokens > self._rules.threshold * request.input_tokens:
            instance = holder(match)
            if instance is not None and (len(up) == len(loads.requests) or instance in up):
                return instance
        return least(self._tree.tokens, up)

    def _out_of_balance(self, requests: ListLike[int], up: ListLike[int]) -> bool:
        if len(up) < len(requests):
            requests = [requests[index] for index in up]
        most = max(requests)
        if most <= self._rules.balance_abs:  # as most often
            return False
        fewest = min(requests)
        return most - fewest > self._rules.balance_abs and most > fewest * self._rules.balance_rel

    def sent(self, request: Request, instance: int) -> None:
        """Remember the prompt."""
        found, self._looked_up = self._looked_up, None
        if found is None or found[0] is not request:
            ids = _prompt_ids(request)
            found = request, ids, self._tree.match(ids)
        block_tokens = request.block_tokens if request.block_ids else request.input_tokens
        self._tree.insert(found[1], block_tokens, instance, found[2])

    def lost(self, instance: int) -> None:
        """Forget what the instance was sent."""
        self._tree.remove(instance)


def _prompt_ids(request: Request) -> Ids:
    """Return the blocks of a prompt; one of its own if nothing is known to be shared."""
    if not request.block_ids:
        return (-1 - request.id,)
    return request.block_ids[: -(-request.input_tokens // request.block_tokens)]


def least(values: ListLike[int], up: ListLike[int]) -> int:
    """Return the index, of those that are up, of the smallest value; the first among equals."""
    if len(up) == len(values):
        return values.index(min(values))
    return min(up, key=values.__getitem__)
