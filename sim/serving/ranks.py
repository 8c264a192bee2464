"""Attention-DP ranks of one instance: a scheduler each, all stepping together."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from itertools import chain
from typing import Generic, TypeVar

import numpy as np

from tonnage.sim.domain import IntArray, Step
from tonnage.sim.serving.decode import DecodeScheduler
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.plan import Lane, Outcome, Plan
from tonnage.sim.serving.scheduler import PrefillScheduler, ServeScheduler
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.tiers import LoadPlan

_IDLE = Step(np.zeros(0, dtype=np.int64), 0, ())
Kind = TypeVar("Kind", bound=ServeScheduler)


class RankBook:
    """Which attention-DP rank holds which request: the next in turn, or the one with fewest."""

    def __init__(self, ranks: int, choice: str) -> None:
        """Start with idle ranks; `choice` is `round_robin` or `least_requests`."""
        self._choice = choice
        self._rank_of: dict[int, int] = {}  # request id -> rank
        self._requests = [0] * ranks
        self._next = 0

    def assign(self, sequence: Sequence) -> int:
        """Choose the rank of a new sequence."""
        if self._choice == "round_robin":
            rank = self._next
            self._next = (self._next + 1) % len(self._requests)
        else:
            rank = min(range(len(self._requests)), key=lambda one: self._requests[one])
        self._rank_of[sequence.request.id] = rank
        self._requests[rank] += 1
        return rank

    def rank_of(self, sequence: Sequence) -> int | None:
        """Return the rank that holds a sequence; None if it has gone."""
        return self._rank_of.get(sequence.request.id)

    def forget(self, sequence: Sequence) -> None:
        """Count a sequence out that no rank holds any more."""
        self._requests[self._rank_of.pop(sequence.request.id)] -= 1


class Ranks(Generic[Kind]):
    """Attention-DP: each rank has its own requests and pages, and all ranks step together.

    The step of the instance is that of all ranks, an idle one's empty; it is repeated as long as
    no rank's batch changes by itself. A request stays on the rank that it is given at arrival.
    """

    def __init__(self, ranks: ListLike[Kind], book: RankBook) -> None:
        """Join the schedulers of the ranks; micro-batches of one instance share the book."""
        self.ranks = ranks
        self.lag_steps = ranks[0].lag_steps
        self._book = book

    @property
    def lanes(self) -> ListLike[Lane]:
        """One batch at a time, spread over the ranks."""
        return (self,)

    def _assign(self, sequence: Sequence) -> Kind:
        return self.ranks[self._book.assign(sequence)]

    def _rank_of(self, sequence: Sequence) -> Kind:
        rank = self._book.rank_of(sequence)
        assert rank is not None
        return self.ranks[rank]

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence at the next boundary."""
        if self._book.rank_of(sequence) is not None:
            self._rank_of(sequence).abort(sequence)

    def loaded(self, sequence: Sequence, plan: LoadPlan, blocks: int, lead: int = 0) -> None:
        """Take in that blocks are on the host of a rank, unless the sequence has gone."""
        if self._book.rank_of(sequence) is not None:
            self._rank_of(sequence).loaded(sequence, plan, blocks, lead)

    def interruption_after(self, lead: int) -> int | None:
        """Return the steps after which a segment should end for the first rank that wants it."""
        wanted = [rank.interruption_after(lead) for rank in self.ranks]
        return min((steps for steps in wanted if steps is not None), default=None)

    def visit_after(self, lead: int) -> int | None:
        """Ranks decide at boundaries only."""
        return None

    def visit(self, steps: int) -> Plan:
        """Decide nothing."""
        return Plan(max_steps=steps)

    def waiting_requests(self) -> int:
        """Return how many requests wait at all ranks."""
        return sum(rank.waiting_requests() for rank in self.ranks)

    def used_pages(self) -> int:
        """Return the pages that requests hold at all ranks."""
        return sum(rank.used_pages() for rank in self.ranks)

    def pools(self) -> ListLike[PagePool]:
        """Return the pages of each rank."""
        return [rank.pool for rank in self.ranks]

    def pool_of(self, sequence: Sequence) -> PagePool:
        """Return the pages of the rank that a sequence is at."""
        return self._rank_of(sequence).pool

    def settle(self) -> None:
        """Write the progress of the running sequences of all ranks to them."""
        for rank in self.ranks:
            rank.settle()

    def next_step(self) -> Plan:
        """Plan every rank and join the plans."""
        plans = [rank.look() for rank in self.ranks]
        if all(plan.step is None for plan in plans):  # one idle rank waits for the others
            for rank, plan in zip(self.ranks, plans, strict=True):
                rank.look_again(plan)
        joint = _joint(plans)
        for sequence in chain(joint.dropped, joint.failed):
            self._book.forget(sequence)
        return joint

    def commit(self, steps: int) -> Outcome:
        """Commit every rank, an idle one too: its step number goes on with the others'."""
        outcomes = [rank.commit(steps) for rank in self.ranks]
        joint = Outcome(
            _all(outcome.prefilled for outcome in outcomes),
            _all(outcome.finished for outcome in outcomes),
            _all(outcome.dropped for outcome in outcomes),
            sum(outcome.tokens_together for outcome in outcomes),
            list(chain.from_iterable(outcome.parts for outcome in outcomes)),
        )
        for sequence in chain(joint.finished, joint.dropped):
            self._book.forget(sequence)
        return joint


def _all(lists: Iterable[ListLike[Sequence]]) -> list[Sequence]:
    return list(chain.from_iterable(lists))


def _joint(plans: list[Plan]) -> Plan:
    joint = Plan(
        decoding=sum(plan.decoding for plan in plans),
        tokens_per_step=sum(plan.tokens_per_step for plan in plans),
        batch_version=sum(plan.batch_version for plan in plans),
        started=_all(plan.started for plan in plans),
        newcomers=_all(plan.newcomers for plan in plans),
        retracted=_all(plan.retracted for plan in plans),
        admitted=_all(plan.admitted for plan in plans),
        restored=_all(plan.restored for plan in plans),
        failed=_all(plan.failed for plan in plans),
        dropped=_all(plan.dropped for plan in plans),
        ranks=plans,
    )
    steps = [plan.step for plan in plans if plan.step is not None]
    if steps:
        joint.step = _joint_step(tuple(plan.step or _IDLE for plan in plans), steps)
        joint.max_steps = min(plan.max_steps for plan in plans)
        joint.load_tokens = max(plan.load_tokens for plan in plans)  # GPUs load side by side
    return joint


def _joint_step(ranks: tuple[Step, ...], steps: list[Step]) -> Step:
    contexts: IntArray = np.concatenate([step.decode_context_tokens for step in steps])
    growths = [step.decode_context_growth for step in steps]
    growth = None
    if any(one is not None for one in growths):
        growth = sum(
            float(step.decode_requests) if one is None else one
            for one, step in zip(growths, steps, strict=True)
        )
    return Step(
        contexts,
        sum(step.decode_context_sum for step in steps),
        tuple(chain.from_iterable(step.prefill_chunks for step in steps)),
        growth,
        max(step.query_tokens for step in steps),
        ranks,
    )


class ServeRanks(Ranks[ServeScheduler]):
    """Attention-DP ranks of a colocated instance."""

    def add(self, sequence: Sequence, lead: int = 0) -> LoadPlan | None:
        """Queue a request at a rank."""
        return self._assign(sequence).add(sequence, lead)


class PrefillRanks(Ranks[PrefillScheduler]):
    """Attention-DP ranks of a prefill instance."""

    def add(self, sequence: Sequence, lead: int = 0) -> LoadPlan | None:
        """Queue a prompt at a rank."""
        return self._assign(sequence).add(sequence, lead)

    def hand_over(self, sequence: Sequence) -> None:
        """Free the pages of a prompt."""
        self._rank_of(sequence).hand_over(sequence)
        self._book.forget(sequence)


class DecodeRanks(Ranks[DecodeScheduler]):
    """Attention-DP ranks of a decode instance."""

    @property
    def admitted(self) -> int:
        """Sequences that hold pages at any rank."""
        return sum(rank.admitted for rank in self.ranks)

    def request_pages(self, sequence: Sequence, lead: int = 0) -> None:
        """Queue a sequence for pages at a rank."""
        self._assign(sequence).request_pages(sequence, lead)

    def join(self, sequence: Sequence, lead: int = 0) -> None:
        """Let a sequence whose KV has arrived into its rank's batch."""
        self._rank_of(sequence).join(sequence, lead)

    def release(self, sequence: Sequence) -> None:
        """Free the pages of a sequence that does not run."""
        self._rank_of(sequence).release(sequence)
        self._book.forget(sequence)
