"""What an instance runs next: pure decisions over waiting and running sequences, no clock.

Every scheduler answers `next_step()` with a plan, and takes back how many steps of it were done in
`commit()`. The rules that differ between engines are data: `policy.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np

from tonnage.sim.domain import IntArray, SpeculationSpec, Step
from tonnage.sim.serving.batch import DecodeBatch
from tonnage.sim.serving.contexts import Contexts, SpeculativeContexts, UnitContexts
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.plan import Lane, Outcome, Plan
from tonnage.sim.serving.policy import PLAIN, Policy
from tonnage.sim.serving.prompts import (
    ANY_STEP,
    Chunk,
    NewTokenRatio,
    OutputRoom,
    PromptQueue,
    commit_chunks,
    prompt_chunks,
)
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.tiers import LoadPlan

_NONE: IntArray = np.zeros(0, dtype=np.int64)
_NO_PAGE = "no KV page is left for it, though it is the last request that runs"


@dataclass(frozen=True, slots=True)
class Limits:
    """Batch limits of one scheduler: prompt tokens per step, sequences that run at a time."""

    chunk_tokens: int
    max_running_requests: int


@dataclass(frozen=True, slots=True)
class Resources:
    """What a scheduler works with: memory, limits, rules, and its queue of prompts.

    The micro-batches of a pipeline share pool and queue (`shares_pool`). They are planned without
    lag: SGLang has no overlapped scheduling with pipeline stages, nor had vLLM until late.
    """

    pool: PagePool
    limits: Limits
    policy: Policy
    prompts: PromptQueue
    shares_pool: bool = False
    speculation: SpeculationSpec | None = None
    seed: int = 0

    @classmethod
    def of(cls, pool: PagePool, limits: Limits, policy: Policy = PLAIN) -> Resources:
        """Return those of a scheduler that shares nothing."""
        return cls(pool, limits, policy, PromptQueue(pool, policy))

    def contexts(self) -> Contexts:
        """Return how the contexts of a batch grow."""
        if self.speculation is None:
            return UnitContexts(self.pool)
        return SpeculativeContexts(self.pool, self.speculation, self.seed)

    @property
    def lag_steps(self) -> int:
        """Steps between a decision and what it knows."""
        return 0 if self.shares_pool else self.policy.lag_steps


class ServeScheduler:
    """A colocated instance: prompts before tokens (SGLang), or both in one step (vLLM).

    Prompts first delays every running sequence by each prompt; a mixed step gives one token to
    every running sequence and fills the rest of its token budget with prompt chunks.
    """

    def __init__(self, resources: Resources) -> None:
        """Make an idle scheduler."""
        self.pool = resources.pool
        self.policy = policy = resources.policy
        self.lag_steps = resources.lag_steps
        self._limits = resources.limits
        self._shares_pool = resources.shares_pool
        self._prompts = resources.prompts
        wasted_step = policy.wasted_step and self.lag_steps > 0
        self._batch = DecodeBatch(resources.contexts(), self.lag_steps, wasted_step=wasted_step)
        self._ratio = NewTokenRatio(
            policy.ratio_start, policy.ratio_least, policy.ratio_decay_steps
        )
        self._index = 0  # of the next step
        self._chunks: list[Chunk] = []
        self._decodes = False  # whether the step under way gives the batch a token
        self._pages_taken = 0  # for the first step of the plan
        self._stores_computed = self.pool.stores_when == "computed"
        self._to_store: deque[tuple[int, Sequence]] = deque()  # (step, complete prompt to share)
        self._aborts: list[Sequence] = []
        self._loading: dict[int, Sequence] = {}  # a prefix of theirs is on its way to the host

    @property
    def lanes(self) -> ListLike[Lane]:
        """The scheduler itself: one batch at a time."""
        return (self,)

    # --- what comes in --------------------------------------------------------------------------

    def add(self, sequence: Sequence, lead: int = 0) -> LoadPlan | None:
        """Queue a request that comes while step `lead` of a segment is in progress (0: none is).

        What is returned is to be loaded; the request waits until it is there, if it waits at all.
        """
        plan = self.pool.prefetch(sequence)
        if plan is not None and plan.most_wait_s:
            self._loading[sequence.request.id] = sequence
        else:
            self._prompts.add(sequence, self._eligible(lead))
        return plan

    def loaded(self, sequence: Sequence, plan: LoadPlan, blocks: int, lead: int = 0) -> None:
        """Take in that the first blocks of a plan are on the host, and queue what waited."""
        self.pool.landed(sequence, plan, blocks)
        if self._loading.pop(sequence.request.id, None) is not None:
            self._prompts.add(sequence, self._eligible(lead))

    def _eligible(self, lead: int) -> int:
        if self._shares_pool:
            return 0  # micro-batches number their steps each for itself, and plan without lag
        return self._index + lead + self.lag_steps if lead else self._index

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence at the next boundary, wherever it is here."""
        self._aborts.append(sequence)

    def interruption_after(self, lead: int) -> int | None:
        """Return the steps after which a segment should end to let in what waits; None: not."""
        if self._aborts:
            return lead
        steps = self._steps_to_let_in()
        return None if steps is None else max(steps, lead)

    def visit_after(self, lead: int) -> int | None:
        """Nothing is decided here while a segment goes on."""
        return None

    def visit(self, steps: int) -> Plan:
        """Decide nothing."""
        return Plan(max_steps=steps)

    def waiting_requests(self) -> int:
        """Return how many requests wait here."""
        return len(self._prompts) + len(self._loading)

    def used_pages(self) -> int:
        """Return the pages that requests hold here."""
        return self.pool.used_pages

    def pools(self) -> ListLike[PagePool]:
        """Return the pages of its one rank."""
        return (self.pool,)

    def pool_of(self, sequence: Sequence) -> PagePool:
        """Return the pages of all its sequences."""
        return self.pool

    def settle(self) -> None:
        """Write the progress of the running sequences to them: a crash takes the batch away."""
        for sequence in self._batch.live_sequences():
            sequence.generated_tokens = self._batch.generated(sequence)

    # --- planning -------------------------------------------------------------------------------

    def next_step(self) -> Plan:
        """Return the next prefill, decode or mixed step, or a plan without one when idle."""
        plan = self.look()
        if plan.step is None:
            self.look_again(plan)
        return plan

    def look(self) -> Plan:
        """Plan with what is known by now, which lags behind what has happened."""
        plan = Plan()
        if self._aborts:
            self._drop_aborted(plan)
        self._plan(plan, self._index)
        self._close(plan)
        return plan

    def look_again(self, plan: Plan) -> None:
        """Complete an empty plan with all that has happened: an idle engine looks at once."""
        self._store_due(ANY_STEP)
        if self._has_work():
            self._release(self._batch.flush())
            self._plan(plan, ANY_STEP)
            self._close(plan)
        if plan.step is None:
            self._ratio.reset()

    def _has_work(self) -> bool:
        """Tell whether there is anything here that could run or leave."""
        return bool(self._prompts.waiting) or self._batch.places > 0

    def _close(self, plan: Plan) -> None:
        plan.started = self._prompts.take_started()
        plan.batch_version = self._batch.version
        if plan.step is None:
            plan.max_steps = self._steps_until_look()

    def _steps_until_look(self) -> int:
        """Return after how many steps of other ranks an idle one must plan again."""
        leaves, let_in = self._steps_to_change(), self._steps_to_let_in()
        return leaves if let_in is None else min(leaves, max(let_in, 1))

    def _steps_to_change(self) -> int:
        """Return the steps until a request has all its tokens or leaves, or a prompt is shared."""
        change = self._batch.steps_to_change
        if self._to_store:
            change = min(change, max(self._to_store[0][0] - self._index, 1))
        return change

    def _plan(self, plan: Plan, step_index: int) -> None:
        self._let_in(plan, step_index)
        if self.policy.mixed:
            self._plan_mixed(plan, step_index)
        else:
            self._plan_prompts_first(plan, step_index)

    def _let_in(self, plan: Plan, step_index: int) -> None:
        """Let in what needs no prompt computed; nothing does here."""

    def _plan_prompts_first(self, plan: Plan, step_index: int) -> None:
        prompts = self._prompts
        self._chunks = []
        if prompts.waiting or prompts.under_way is not None:
            room = self._output_room()
            budget, slots = self._limits.chunk_tokens, self._free_slots()
            self._chunks = prompts.chunks(budget, slots, step_index, room)
        if not self._chunks:
            self._take_pages(plan)
        self._set_step(plan, decodes=not self._chunks and len(self._batch) > 0)

    def _plan_mixed(self, plan: Plan, step_index: int) -> None:
        retracted = self._take_pages(plan)  # before any prompt does
        slots = 0 if retracted else self._free_slots()
        step_tokens = self._limits.chunk_tokens
        budget = step_tokens - len(self._batch)
        room = self._output_room()
        self._chunks = self._prompts.chunks(budget, slots, step_index, room, step_tokens)
        self._set_step(plan, decodes=len(self._batch) > 0)

    def _take_pages(self, plan: Plan) -> bool:
        """Allocate what the batch needs for one step; tell whether others lost pages for it."""
        self._pages_taken = self._batch.contexts.pages_for_steps(1)
        if self.pool.allocate(self._pages_taken):
            return False
        self._make_room(plan)
        self._pages_taken = self._batch.contexts.pages_for_steps(1)
        self.pool.allocate(self._pages_taken)
        return True

    def _free_slots(self) -> int:
        if self._prompts.shut:
            return 0
        under_way = self._prompts.under_way is not None
        return self._limits.max_running_requests - self._batch.places - under_way

    def _output_room(self) -> OutputRoom | None:
        """Return what prompts may be promised; None where they are not charged, or none waits."""
        prompts = self._prompts
        if not self.policy.charges_outputs or not prompts.waiting or prompts.shut:
            return None
        most, page_tokens = self.policy.output_charge_most, self.pool.page_tokens
        if self.policy.evicts:
            owed = self._ratio.value * self._batch.outputs_to_come(most)
        else:
            owed = self._batch.pages_to_come(page_tokens) * page_tokens
        return OutputRoom(self.pool, owed, most)

    def _set_step(self, plan: Plan, *, decodes: bool) -> None:
        batch = self._batch
        self._decodes = decodes
        if not decodes and not self._chunks:
            return
        plan.max_steps = 1
        if self.pool.loading_tokens:
            plan.load_tokens, self.pool.loading_tokens = self.pool.loading_tokens, 0
        if decodes:
            if not self._chunks:
                plan.max_steps = self._steps_until_change()
            plan.decoding = batch.live
            plan.tokens_per_step = self._tokens_per_step()
            plan.newcomers = batch.take_newcomers()
            contexts = batch.contexts
            plan.step = Step(
                contexts.tokens(),
                contexts.sum_after(0),
                prompt_chunks(self._chunks),
                contexts.growth,
                contexts.query_tokens,
            )
        else:
            plan.step = Step(_NONE, 0, prompt_chunks(self._chunks))

    def _tokens_per_step(self) -> float:
        """Return the tokens that clients get per step, those who have left not counted."""
        growth, live = self._batch.contexts.growth, self._batch.live
        return float(live) if growth is None else growth * live / len(self._batch)

    def _steps_until_change(self) -> int:
        most = self._steps_to_change()
        let_in = self._steps_to_let_in()
        if let_in is not None:
            most = min(most, max(let_in, 1))
        return self._batch.contexts.steps_within(self.pool.free_pages + self._pages_taken, most)

    def _steps_to_let_in(self) -> int | None:
        """Return the steps until a waiting request could be let in; None: not before a change."""
        if not self._prompts.waiting or self._free_slots() <= 0:
            return None
        return self._prompts.steps_to_head(self._index)

    # --- running out of pages -------------------------------------------------------------------

    def _make_room(self, plan: Plan) -> None:
        """Take pages from sequences until the others can take one more step."""
        batch = self._batch
        while len(batch) and batch.contexts.pages_for_steps(1) > self.pool.free_pages:
            if self.policy.mixed and self._prompts.under_way is not None:
                self._prompts.drop_under_way(first=True)  # it is the latest to be let in
                continue
            live = list(batch.live_sequences())
            if not live:
                self._release(batch.flush())
                continue
            victim = self._victim(live)
            if len(batch) == 1 and self.policy.aborts_last and not self._shares_pool:
                self._withdraw(victim)
                victim.aborted = _NO_PAGE
                plan.failed = [*plan.failed, victim]
                continue
            self._retract(victim)
            plan.retracted = [*plan.retracted, victim]
        generated, allowed = batch.output_tokens()
        requests = batch.live
        self._ratio.retracted(generated, allowed, requests, self.policy.retract_ahead_steps)

    def _victim(self, live: list[Sequence]) -> Sequence:
        if self.policy.victim == "latest":
            return max(live, key=lambda one: one.admission_order)
        generated = self._batch.generated
        return min(  # the last to join among equals, as SGLang pops from the end of a stable sort
            live, key=lambda one: (generated(one), -one.request.input_tokens, -one.batch_order)
        )

    def _retract(self, victim: Sequence) -> None:
        victim.retractions += 1
        self._withdraw(victim, comes_back=True)
        self._prompts.put_back(victim, self._eligible(0), first=self.policy.requeue_first)

    def _withdraw(self, victim: Sequence, *, comes_back: bool = False) -> None:
        """Take a sequence out of the batch and give its pages back, full ones to be reused."""
        self._batch.withdraw(victim)
        kept_tokens = 0
        if victim.gave_up:
            kept_tokens = victim.stored_tokens
        elif comes_back and self.policy.keeps != "nothing":
            kept_tokens = victim.stored_tokens
            if self.policy.keeps == "prompt":
                kept_tokens = min(kept_tokens, victim.request.input_tokens)
        self.pool.give_back(victim, victim.decode_pages, kept_tokens, comes_back=comes_back)
        victim.decode_pages = 0

    def _drop_aborted(self, plan: Plan) -> None:
        for sequence in self._aborts:
            if self._drop(sequence):
                plan.dropped = [*plan.dropped, sequence]
        self._aborts.clear()

    def _drop(self, sequence: Sequence) -> bool:
        """Take a sequence out, pages and all; False if it is not here or already complete."""
        if self._batch.holds(sequence):
            self._withdraw(sequence)
            return True
        if self._loading.pop(sequence.request.id, None) is not None:
            return True
        return self._prompts.remove(sequence)

    # --- committing -----------------------------------------------------------------------------

    def commit(self, steps: int) -> Outcome:
        """Advance prompts and batch; sequences with their first token join the batch."""
        outcome = Outcome()
        self._index += steps
        if self._decodes:
            if steps > 1:
                needed = self._batch.contexts.pages_for_steps(steps)
                self.pool.allocate(needed - self._pages_taken)
            self._ratio.decoded(steps)
            outcome.finished, left = self._batch.advance(steps)
        else:
            left = self._batch.stand_by(steps)
        outcome.tokens_together = self._batch.take_tokens_together()
        if self._stores_computed:
            self._store()
        if left:
            self._release(left)
        if not self._chunks:
            return outcome
        for sequence in commit_chunks(self._chunks):
            if sequence.gave_up or sequence.aborted:  # while its chunk was being computed
                self.pool.give_back(sequence, sequence.prompt_pages)
                outcome.dropped = [*outcome.dropped, sequence]
                continue
            outcome.prefilled = [*outcome.prefilled, sequence]
            self._complete_prompt(sequence, outcome)
        self._chunks = []
        return outcome

    def _complete_prompt(self, sequence: Sequence, outcome: Outcome) -> None:
        if sequence.remaining_output_tokens:
            self._batch.join(sequence)
            return
        outcome.finished = [*outcome.finished, sequence]
        if not self.lag_steps:
            self.pool.give_back(sequence, sequence.prompt_pages, sequence.stored_tokens)
        elif self.policy.wasted_step:
            self._batch.join(sequence)
        else:
            self._batch.linger(sequence)

    def _release(self, left: list[Sequence]) -> None:
        for sequence in left:
            self.pool.give_back(sequence, sequence.decode_pages, sequence.stored_tokens)
            sequence.decode_pages = 0

    # --- sharing prompts ------------------------------------------------------------------------

    def _store(self) -> None:
        """Share what was computed: a part of a prompt at once, the last one when it is seen."""
        self._store_due(self._index)
        for chunk in self._chunks:
            sequence = chunk.sequence
            computed = min(chunk.past_tokens + chunk.tokens, sequence.prefilled_tokens)
            if sequence.gave_up:
                continue
            if self.lag_steps and chunk.is_last and sequence.prefix is not None:
                sequence.prefix.unstored_tokens = computed
                self._to_store.append((self._index + self.lag_steps, sequence))
            else:
                self.pool.store(sequence, computed)

    def _store_due(self, step_index: int) -> None:
        """Share the prompts whose end has been seen by that step."""
        while self._to_store and self._to_store[0][0] <= step_index:
            sequence = self._to_store.popleft()[1]
            assert sequence.prefix is not None
            self.pool.store(sequence, sequence.prefix.unstored_tokens)


class PrefillScheduler(ServeScheduler):
    """A prefill instance: prompts in chunks; pages stay held until the KV is handed over."""

    def _plan(self, plan: Plan, step_index: int) -> None:
        budget = self._limits.chunk_tokens
        slots = self._free_slots()
        self._chunks = self._prompts.chunks(budget, slots, step_index, step_tokens=budget)
        self._set_step(plan, decodes=False)

    def commit(self, steps: int) -> Outcome:
        """Advance prompts; tell which parts of prompts that go on are in place."""
        parts = [chunk for chunk in self._chunks if not chunk.is_last]
        outcome = super().commit(steps)
        outcome.parts = parts
        return outcome

    def _complete_prompt(self, sequence: Sequence, outcome: Outcome) -> None:
        """Keep its pages; a prompt that waits for its handover takes no place of a running one."""

    def hand_over(self, sequence: Sequence) -> None:
        """Free the pages of a prompt whose KV has arrived elsewhere, or will not be wanted."""
        tokens = sequence.request.input_tokens
        self.pool.give_back(sequence, sequence.prompt_pages, tokens)
        sequence.prompt_pages = 0
