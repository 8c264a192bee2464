"""The scheduler of one instance by its layout: ranks side by side, micro-batches in a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tonnage.sim.domain import IntegritySpec, SpeculationSpec
from tonnage.sim.serving.decode import DecodeScheduler
from tonnage.sim.serving.guarded import GuardedDecode, GuardedPrefill, GuardedServe
from tonnage.sim.serving.identified import IdentifiedCache, IdentifiedPool
from tonnage.sim.serving.micro_batches import (
    PromptMicroBatches,
    ReceiverMicroBatches,
    SenderMicroBatches,
)
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.plan import PromptTaker, Receiver, Sender
from tonnage.sim.serving.policy import PLAIN, Policy
from tonnage.sim.serving.prefix_cache import CacheSpec, PrefixCache
from tonnage.sim.serving.prompts import PromptQueue
from tonnage.sim.serving.ranks import DecodeRanks, PrefillRanks, RankBook, ServeRanks
from tonnage.sim.serving.scheduler import Limits, PrefillScheduler, Resources, ServeScheduler
from tonnage.sim.serving.tiers import Hierarchy, SharedTiers, Tier

_UNWATCHED = IntegritySpec()


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """What the scheduler of one instance needs to know; tokens and limits are the instance's.

    `ranks`: attention-DP ranks, each with an equal share of the pages and running requests, and
    with chunks of its own. `stages`: pipeline stages, as many micro-batches, each with an equal
    share of the running requests. `cache`: how prompts share their pages; a decode instance, whose
    prompts are computed elsewhere, has none. `integrity`: what watches the pages. `identified`:
    they have an identity, which faults need, and which takes time.
    """

    kv_tokens: int
    page_tokens: int
    limits: Limits
    policy: Policy = PLAIN
    extra_tokens: int = 0  # of every request, whatever its length (windows, states)
    ranks: int = 1
    stages: int = 1
    speculation: SpeculationSpec | None = None
    seed: int = 0  # of the accepted lengths
    cache: CacheSpec | None = None
    integrity: IntegritySpec = _UNWATCHED
    identified: bool = False

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request that the empty pool of one rank holds."""
        pages = self.kv_tokens // self.ranks // self.page_tokens
        return pages * self.page_tokens - self.extra_tokens

    def page_pool(self, tiers: Hierarchy | None = None) -> PagePool:
        """Return the empty KV memory of one rank."""
        tokens, free_first = self.kv_tokens // self.ranks, self.policy.free_first
        if self.identified:
            return self._identified_pool(tiers)
        if self.cache is None:
            return PagePool(tokens, self.page_tokens, self.extra_tokens, free_first=free_first)
        return PrefixCache(
            tokens,
            self.page_tokens,
            self.extra_tokens,
            free_first=free_first,
            spec=self.cache,
            tiers=tiers,
        )

    def _identified_pool(self, tiers: Hierarchy | None) -> PagePool:
        sizes = self.kv_tokens // self.ranks, self.page_tokens, self.extra_tokens
        free_first = self.policy.free_first
        if self.cache is None:
            return IdentifiedPool(*sizes, free_first=free_first, integrity=self.integrity)
        return IdentifiedCache(
            *sizes, free_first=free_first, spec=self.cache, tiers=tiers, integrity=self.integrity
        )

    def hierarchies(self, shared: SharedTiers | None) -> Iterator[Hierarchy | None]:
        """Yield what each rank of one instance has beyond its GPUs; only NVMe is common to them."""
        spec = None if self.cache is None else self.cache.tiers
        if spec is None:
            yield from [None] * self.ranks
            return
        shared = shared or SharedTiers(spec)
        nvme = None if spec.nvme is None else Tier("nvme", spec.nvme.capacity_tokens, shared.books)
        for _ in range(self.ranks):
            host = Tier("host", spec.host.capacity_tokens // self.ranks, shared.books)
            yield Hierarchy(spec, host, nvme, shared.store, shared.books)

    def lanes(self, shared: SharedTiers | None = None) -> Iterator[list[Resources]]:
        """Yield, by micro-batch, the resources of each rank; a rank's pool serves all of them."""
        pools = [self.page_pool(tiers) for tiers in self.hierarchies(shared)]
        queues = [PromptQueue(pool, self.policy) for pool in pools]
        running = max(self.limits.max_running_requests // (self.ranks * self.stages), 1)
        limits = Limits(self.limits.chunk_tokens, running)
        for _ in range(self.stages):
            yield [
                Resources(
                    pool, limits, self.policy, queue, self.stages > 1, self.speculation, self.seed
                )
                for pool, queue in zip(pools, queues, strict=True)
            ]


def serve_scheduler(spec: SchedulerSpec, shared: SharedTiers | None = None) -> PromptTaker:
    """Return the scheduler of a colocated instance; `shared`: by all instances of the run."""
    lanes: list[PromptTaker] = []
    book = RankBook(spec.ranks, spec.policy.rank_choice)
    for resources in spec.lanes(shared):
        kind = GuardedServe if spec.identified else ServeScheduler
        ranks = [kind(one) for one in resources]
        lanes.append(ranks[0] if len(ranks) == 1 else ServeRanks(ranks, book))
    return lanes[0] if len(lanes) == 1 else PromptMicroBatches(lanes)


def prefill_scheduler(spec: SchedulerSpec, shared: SharedTiers | None = None) -> Sender:
    """Return the scheduler of a prefill instance; `shared`: by all instances of the run."""
    lanes: list[Sender] = []
    book = RankBook(spec.ranks, spec.policy.rank_choice)
    for resources in spec.lanes(shared):
        kind = GuardedPrefill if spec.identified else PrefillScheduler
        ranks = [kind(one) for one in resources]
        lanes.append(ranks[0] if len(ranks) == 1 else PrefillRanks(ranks, book))
    return lanes[0] if len(lanes) == 1 else SenderMicroBatches(lanes)


def decode_scheduler(spec: SchedulerSpec, *, in_place: bool = False) -> Receiver:
    """Return the scheduler of a decode instance; `in_place`: sequences bring their KV along."""
    lanes: list[Receiver] = []
    book = RankBook(spec.ranks, spec.policy.rank_choice)
    spec = replace(spec, cache=None)
    for resources in spec.lanes():
        visited = spec.ranks == spec.stages == 1 and not spec.identified
        kind = GuardedDecode if spec.identified else DecodeScheduler
        ranks = [kind(one, in_place=in_place, visited=visited) for one in resources]
        lanes.append(ranks[0] if len(ranks) == 1 else DecodeRanks(ranks, book))
    return lanes[0] if len(lanes) == 1 else ReceiverMicroBatches(lanes)
