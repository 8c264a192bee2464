"""A decode instance of a disaggregated deployment: pages first, then the KV, then tokens."""

from __future__ import annotations

from collections import deque

from tonnage.sim.serving.plan import Plan
from tonnage.sim.serving.scheduler import Resources, ServeScheduler
from tonnage.sim.serving.sequence import Sequence

_MOST_STEPS = 2**31


class DecodeScheduler(ServeScheduler):
    """Sequences get pages for their prompt first, then their KV arrives, then they run.

    Pages are given in order of arrival while a reserve is left for the tokens of those that hold
    pages already (SGLang 0.5.23, `srt/disaggregation/decode.py`). A sequence that loses its pages
    comes back before any new one: with its KV from host memory, or by computing its prompt here.
    `in_place`: sequences bring their KV along and run as soon as they have pages.
    """

    def __init__(
        self, resources: Resources, *, in_place: bool = False, visited: bool = False
    ) -> None:
        """Make an idle scheduler; `visited`: pages are given while a segment goes on."""
        super().__init__(resources)
        self._visited = visited
        self._ahead = 0  # steps of the segment under way that are done at a visit
        self._in_place = in_place
        self._awaiting_pages: deque[Sequence] = deque()
        self._backed_up: deque[Sequence] = deque()  # lost their pages, their KV is on the host
        self._holding: dict[int, Sequence] = {}  # have pages, their KV is on its way
        self._arrived: deque[Sequence] = deque()
        self._shut_at = -1  # what `pool.times_given_back` was when nobody could get pages

    @property
    def admitted(self) -> int:
        """Sequences that hold pages here, arrived or not."""
        return self._batch.places + len(self._holding) + len(self._arrived)

    def request_pages(self, sequence: Sequence, lead: int = 0) -> None:
        """Queue a sequence for the pages of its prompt."""
        sequence.eligible_step = self._eligible(lead)
        self._awaiting_pages.append(sequence)

    def join(self, sequence: Sequence, lead: int = 0) -> None:
        """Let a sequence whose KV has arrived into the batch."""
        self._holding.pop(sequence.request.id)
        sequence.eligible_step = self._eligible(lead)
        self._arrived.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the pages of a sequence that was complete when its KV arrived, or is not wanted."""
        self._holding.pop(sequence.request.id)
        self._release([sequence])

    def waiting_requests(self) -> int:
        """Return how many requests wait here, for pages or for a prompt."""
        waiting = len(self._awaiting_pages) + len(self._backed_up)
        return waiting + super().waiting_requests()

    # --- planning -------------------------------------------------------------------------------

    def _let_in(self, plan: Plan, step_index: int) -> None:
        self._take_arrived(step_index)
        if (self._awaiting_pages or self._backed_up) and not self._shut:
            self._let_wait_no_more(plan, step_index)
            if self._in_place:
                self._take_arrived(step_index)

    def _let_wait_no_more(self, plan: Plan, step_index: int) -> None:
        """Give pages to those that wait for them, the ones that have lost theirs first."""
        empty = self.pool.used_pages == 0
        while self._backed_up:
            sequence = self._backed_up[0]
            if not self._give_pages(sequence, empty):
                return
            self._backed_up.popleft()
            empty = False
            self._holding[sequence.request.id] = sequence
            plan.restored = [*plan.restored, sequence]
        while self._awaiting_pages and not self._recomputes:
            sequence = self._awaiting_pages[0]
            if sequence.eligible_step > step_index:
                return
            if self.admitted >= self._limits.max_running_requests:
                return
            if not self._give_pages(sequence, empty):
                return
            self._awaiting_pages.popleft()
            empty = False
            self._holding[sequence.request.id] = sequence
            plan.admitted = [*plan.admitted, sequence]
            if self._in_place:
                self.join(sequence)

    def visit_after(self, lead: int) -> int | None:
        """Return the steps of a segment after which pages can be given while it goes on."""
        if not self._visited:
            return None
        steps = self._steps_to_pages()
        return None if steps is None else max(steps, lead)

    def visit(self, steps: int) -> Plan:
        """Give pages after that many steps of the segment under way, as its boundary would.

        `max_steps` of the plan: the steps for which the segment still has pages itself.
        """
        plan = Plan()
        contexts = self._batch.contexts
        taken = contexts.pages_for_steps(steps)
        self.pool.allocate(taken - self._pages_taken)
        self._pages_taken = taken
        self._ahead = steps
        if not self._shut:
            self._let_wait_no_more(plan, self._index + steps)
        self._ahead = 0
        plan.max_steps = contexts.steps_within(self.pool.free_pages + taken, _MOST_STEPS)
        return plan

    def _take_arrived(self, step_index: int) -> None:
        while self._arrived and self._arrived[0].eligible_step <= step_index:
            sequence = self._arrived.popleft()
            self._prompts.number(sequence)
            self._batch.join(sequence)

    def _give_pages(self, sequence: Sequence, empty: bool) -> bool:
        """Give a sequence the pages of what it stores if the reserve allows it.

        An empty instance takes its first sequence whatever the reserve.
        """
        pages = self.pool.pages_for(_kv_tokens(sequence))
        allocatable = self._allocatable_tokens(back=sequence.retractions > 0)
        fits = empty or self._needed_tokens(sequence) <= allocatable
        if not fits or not self.pool.allocate(pages):
            self._shut_at = self.pool.times_given_back
            return False
        sequence.decode_pages = pages
        return True

    def _needed_tokens(self, sequence: Sequence) -> int:
        policy = self.policy
        if not policy.evicts:
            return self._whole_tokens(sequence)
        pages = self.pool.pages_for(_kv_tokens(sequence))
        needed = pages * self.pool.page_tokens + policy.reserved_decode_tokens
        if not policy.charges_outputs or sequence.retractions:
            return needed
        outputs = min(sequence.request.max_new_tokens, policy.output_charge_most)
        whole = sequence.request.input_tokens + outputs
        return max(needed, whole - self._retractable_tokens())

    def _whole_tokens(self, sequence: Sequence) -> int:
        """Return the tokens of the pages that a sequence takes in the end."""
        request = sequence.request
        whole = request.input_tokens + request.max_new_tokens
        return self.pool.pages_for(whole) * self.pool.page_tokens

    def _promised_tokens(self) -> int:
        """Return what all that hold pages may still take: none of them is evicted."""
        pages = self._batch.pages_to_come(self.pool.page_tokens)
        coming = [*self._holding.values(), *self._arrived]
        whole = sum(self._whole_tokens(one) for one in coming)
        held_pages = sum(one.decode_pages for one in coming)
        return (pages - held_pages) * self.pool.page_tokens + whole

    def _retractable_tokens(self) -> int:
        return int(self._batch.contexts.sum_after(self._ahead))

    def _allocatable_tokens(self, *, back: bool) -> int:
        """Return the tokens for another sequence: the free ones less a reserve for the others.

        The reserve is so much for each that holds pages, or, unless the sequence comes back, what
        the longest running one needs to finish with all others retracted.
        """
        policy = self.policy
        if not policy.evicts:
            return self.pool.free_tokens - self._promised_tokens()
        reserve = policy.reserved_decode_tokens * self.admitted
        if policy.charges_outputs and len(self._batch) and not back:
            longest = self._batch.longest_total_tokens(policy.output_charge_most)
            reserve = max(reserve, longest - self._retractable_tokens())
        return self.pool.free_tokens - reserve

    def _steps_to_let_in(self) -> int | None:
        steps = super()._steps_to_let_in()
        if self._arrived:
            to_head = max(self._arrived[0].eligible_step - self._index, 0)
            steps = to_head if steps is None else min(steps, to_head)
        to_pages = None if self._visited and not self._in_place else self._steps_to_pages()
        if to_pages is not None:
            steps = to_pages if steps is None else min(steps, to_pages)
        return steps

    def _steps_to_pages(self) -> int | None:
        """Return the steps until a sequence that waits for pages could get them; None: not."""
        if self._shut:
            return None
        if self._backed_up:
            return 0
        if not self._awaiting_pages or self._recomputes:
            return None
        if self.admitted >= self._limits.max_running_requests:
            return None
        return max(self._awaiting_pages[0].eligible_step - self._index, 0)

    def _has_work(self) -> bool:
        waits = self._arrived or self._awaiting_pages or self._backed_up
        return bool(waits) or super()._has_work()

    def _free_slots(self) -> int:
        held = len(self._holding) + len(self._arrived)
        return super()._free_slots() - held

    @property
    def _shut(self) -> bool:
        return self._shut_at == self.pool.times_given_back

    @property
    def _recomputes(self) -> bool:
        """Whether a sequence that lost its pages waits for its prompt or is at it."""
        return bool(self._prompts.waiting) or self._prompts.under_way is not None

    # --- giving back ----------------------------------------------------------------------------

    def _retract(self, victim: Sequence) -> None:
        if not self.policy.backs_up:
            super()._retract(victim)
            return
        victim.retractions += 1
        self._withdraw(victim)
        self._backed_up.append(victim)

    def _drop(self, sequence: Sequence) -> bool:
        """Take a sequence out; one whose KV is on its way goes when it has arrived."""
        for queue in (self._awaiting_pages, self._backed_up, self._arrived):
            if sequence in queue:
                queue.remove(sequence)
                self._release([sequence])
                return True
        return super()._drop(sequence)


def _kv_tokens(sequence: Sequence) -> int:
    """Return the tokens whose KV a sequence brings; its prompt may not be computed yet."""
    return max(sequence.stored_tokens, sequence.request.input_tokens)
