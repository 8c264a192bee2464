"""The scheduler of one instance by its layout: ranks side by side, micro-batches in a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.sim.domain import SpeculationSpec
from tonnage.sim.serving.decode import DecodeScheduler
from tonnage.sim.serving.micro_batches import (
    PromptMicroBatches,
    ReceiverMicroBatches,
    SenderMicroBatches,
)
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.plan import PromptTaker, Receiver, Sender
from tonnage.sim.serving.policy import PLAIN, Policy
from tonnage.sim.serving.prompts import PromptQueue
from tonnage.sim.serving.ranks import DecodeRanks, PrefillRanks, RankBook, ServeRanks
from tonnage.sim.serving.scheduler import Limits, PrefillScheduler, Resources, ServeScheduler


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """What the scheduler of one instance needs to know; tokens and limits are the instance's.

    `ranks`: attention-DP ranks, each with an equal share of the pages and running requests, and
    with chunks of its own. `stages`: pipeline stages, as many micro-batches, each with an equal
    share of the running requests.
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

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request that the empty pool of one rank holds."""
        pages = self.kv_tokens // self.ranks // self.page_tokens
        return pages * self.page_tokens - self.extra_tokens

    def page_pool(self) -> PagePool:
        """Return the empty KV memory of one rank."""
        return PagePool(
            self.kv_tokens // self.ranks,
            self.page_tokens,
            self.extra_tokens,
            free_first=self.policy.free_first,
        )

    def lanes(self) -> Iterator[list[Resources]]:
        """Yield, by micro-batch, the resources of each rank; a rank's pool serves all of them."""
        pools = [self.page_pool() for _ in range(self.ranks)]
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


def serve_scheduler(spec: SchedulerSpec) -> PromptTaker:
    """Return the scheduler of a colocated instance."""
    lanes: list[PromptTaker] = []
    book = RankBook(spec.ranks, spec.policy.rank_choice)
    for resources in spec.lanes():
        ranks = [ServeScheduler(one) for one in resources]
        lanes.append(ranks[0] if len(ranks) == 1 else ServeRanks(ranks, book))
    return lanes[0] if len(lanes) == 1 else PromptMicroBatches(lanes)


def prefill_scheduler(spec: SchedulerSpec) -> Sender:
    """Return the scheduler of a prefill instance."""
    lanes: list[Sender] = []
    book = RankBook(spec.ranks, spec.policy.rank_choice)
    for resources in spec.lanes():
        ranks = [PrefillScheduler(one) for one in resources]
        lanes.append(ranks[0] if len(ranks) == 1 else PrefillRanks(ranks, book))
    return lanes[0] if len(lanes) == 1 else SenderMicroBatches(lanes)


def decode_scheduler(spec: SchedulerSpec, *, in_place: bool = False) -> Receiver:
    """Return the scheduler of a decode instance; `in_place`: sequences bring their KV along."""
    lanes: list[Receiver] = []
    book = RankBook(spec.ranks, spec.policy.rank_choice)
    for resources in spec.lanes():
        visited = spec.ranks == spec.stages == 1
        ranks = [DecodeScheduler(one, in_place=in_place, visited=visited) for one in resources]
        lanes.append(ranks[0] if len(ranks) == 1 else DecodeRanks(ranks, book))
    return lanes[0] if len(lanes) == 1 else ReceiverMicroBatches(lanes)
