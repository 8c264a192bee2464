"""One scheduler under way, and books of the tokens that each of its requests stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import Any

from tonnage.sim.domain import Request
from tonnage.sim.serving.build import SchedulerSpec, decode_scheduler, serve_scheduler
from tonnage.sim.serving.plan import Outcome, Plan
from tonnage.sim.serving.policy import Policy
from tonnage.sim.serving.sequence import Sequence


def most_steps(requests: ListLike[Request]) -> int:
    """Return a bound on the steps until everybody has ended.

    Every step that decodes gives a token, if only to somebody who has ended (once each), and so
    does every prompt that is completed; no token is lost with its pages. Before each token, a
    prompt is computed at most once, its length in steps at worst: it loses its pages half-way in
    a step that decodes, or when its client goes.
    """
    tokens = sum(request.output_tokens + 2 for request in requests)
    longest = max(request.total_tokens for request in requests)
    return (tokens + 1) * (longest + 1)


class Books:
    """The tokens that each request stores at a scheduler, by what its plans and steps have said."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._policy: Policy = scheduler.policy
        self._wasted_step = self._policy.wasted_step and self._policy.lag_steps > 0
        self.stored: dict[Sequence, int] = {}
        self._under_way: Sequence | None = None
        self._decoding: list[Sequence] = []
        self._leaving: list[tuple[Sequence, int]] = []  # steps to go
        self._complete_with_prompt: list[Sequence] = []

    def plan(self) -> Plan:
        """Take the next plan in, as `next_step` makes it."""
        plan: Plan = self._scheduler.look()
        if plan.step is None:
            for sequence, _ in self._leaving:
                del self.stored[sequence]
            self._leaving.clear()
            self._scheduler.look_again(plan)
        self._move(plan)
        if plan.step is not None:
            self._chunks(plan)
            self._tokens(plan)
        self.check()
        return plan

    def _move(self, plan: Plan) -> None:
        for sequence in (*plan.dropped, *plan.failed, *plan.retracted):
            self.stored.pop(sequence, None)
            if sequence in self._decoding:
                self._decoding.remove(sequence)
        one = self._under_way
        if one is not None and not one.prefilled_tokens:  # it has to start again
            self.stored.pop(one, None)
        for sequence in (*plan.admitted, *plan.restored):
            outputs = max(sequence.generated_tokens - 1, 0)
            self.stored[sequence] = sequence.request.input_tokens + outputs

    def _chunks(self, plan: Plan) -> None:
        assert plan.step is not None
        chunks = plan.step.prefill_chunks
        continued = [self._under_way] * (len(chunks) - len(plan.started))
        for sequence, chunk in zip([*continued, *plan.started], chunks, strict=True):
            assert sequence is not None
            self.stored[sequence] = chunk.past_tokens + chunk.new_tokens
            self._under_way = sequence

    def _tokens(self, plan: Plan) -> None:
        assert plan.step is not None
        self._decoding += plan.newcomers
        if not plan.step.decode_requests:
            return
        wasted = [sequence for sequence, _ in self._leaving] if self._wasted_step else []
        for sequence in (*self._decoding, *wasted):
            self.stored[sequence] += 1
        computed = len(self._decoding) + len(wasted)
        assert (plan.decoding, plan.step.decode_requests) == (len(self._decoding), computed)
        contexts = sorted(self.stored[one] for one in (*self._decoding, *wasted))
        assert sorted(plan.step.decode_context_tokens.tolist()) == contexts

    def commit(self) -> Outcome:
        """Take a step in."""
        outcome: Outcome = self._scheduler.commit(1)
        for sequence in outcome.dropped:
            del self.stored[sequence]
        leaving = [(one, steps - 1) for one, steps in self._leaving]
        for sequence in outcome.finished:
            assert sequence.generated_tokens == sequence.request.output_tokens
            leaving.append((sequence, self._policy.lag_steps))
            if sequence in self._decoding:
                self._decoding.remove(sequence)
        for sequence, _ in (one for one in leaving if not one[1]):
            del self.stored[sequence]
        self._leaving = [one for one in leaving if one[1]]
        self.check()
        return outcome

    def check(self) -> None:
        """The pages in use are those of the requests, and none is lost or found."""
        pool = self._scheduler.pool
        assert pool.used_pages == sum(map(pool.pages_for, self.stored.values()))
        assert 0 <= pool.free_pages == pool.capacity_pages - pool.used_pages
        assert self._scheduler.used_pages() == pool.used_pages


class Rehearsal:
    """One scheduler with requests that come, give up and bring their KV during its steps."""

    def __init__(
        self,
        spec: SchedulerSpec,
        requests: Iterable[tuple[int, int, int, int]],
        *,
        decodes: bool,
        kv_steps: int = 0,
    ) -> None:
        """Make the scheduler and its requests.

        `requests`: (input, output, step during which it comes, steps until its client goes).
        `kv_steps`: the steps that KV is on its way at a decode instance.
        """
        self.scheduler: Any = decode_scheduler(spec) if decodes else serve_scheduler(spec)
        self.books = Books(self.scheduler)
        self.sequences: list[Sequence] = []
        self.ends: Counter[str] = Counter()
        self._decodes = decodes
        self._due: list[tuple[int, int, str, Sequence]] = []
        for number, (inputs, outputs, comes, stays) in enumerate(requests):
            sequence = Sequence(Request(number, 0.0, inputs, outputs))
            self.sequences.append(sequence)
            self._due.append((comes, number, "comes", sequence))
            self._due.append((comes + stays, number, "goes", sequence))
        self._kv_steps = kv_steps
        self._kv: list[tuple[int, Sequence]] = []  # on its way, until that step

    def run(self) -> Counter[str]:
        """Step until nothing is left to do; return how requests ended, and the retractions."""
        for step in range(most_steps([one.request for one in self.sequences])):
            plan = self._plan(step)
            if plan is None:
                break
            self._happen(step, 1)
            outcome = self.books.commit()
            self._end(outcome.finished, "completed")
            self._end(outcome.dropped, "gone")
        else:
            raise AssertionError("no end in sight")
        assert not self.books.stored
        assert self.ends.total() == len(self.sequences)
        self.ends["retractions"] = sum(one.retractions for one in self.sequences)
        return self.ends

    def _plan(self, step: int) -> Plan | None:
        while True:
            plan = self.books.plan()
            self._end(plan.failed, "aborted")
            self._end(plan.dropped, "gone")
            for sequence in (*plan.admitted, *plan.restored):
                self._kv.append((step + self._kv_steps, sequence))
            if plan.step is not None:
                return plan
            due = [*(one[0] for one in self._due), *(one[0] for one in self._kv)]
            if not due:
                return None
            self._happen(min(due), 0)

    def _happen(self, step: int, lead: int) -> None:
        """Let happen what is due by that step."""
        arrived = [sequence for due, sequence in self._kv if due <= step]
        self._kv = [one for one in self._kv if one[0] > step]
        for sequence in arrived:
            self._arrive(sequence, lead)
        now = sorted(due[:3] for due in self._due if due[0] <= step)
        self._due = [due for due in self._due if due[0] > step]
        for _, number, what in now:
            sequence = self.sequences[number]
            if what == "goes" and not sequence.ended:
                sequence.gave_up = True
                self.scheduler.abort(sequence)
            elif what == "comes" and self._decodes:
                self.scheduler.request_pages(sequence, lead)
            elif what == "comes":
                self.scheduler.add(sequence, lead)

    def _arrive(self, sequence: Sequence, lead: int) -> None:
        sequence.generated_tokens = max(sequence.generated_tokens, 1)
        if not sequence.gave_up and sequence.remaining_output_tokens:
            self.scheduler.join(sequence, lead)
            return
        self.scheduler.release(sequence)
        del self.books.stored[sequence]
        self._end([sequence], "gone" if sequence.gave_up else "completed")

    def _end(self, sequences: Iterable[Sequence], how: str) -> None:
        for sequence in sequences:
            assert not sequence.ended
            sequence.ended = True
            self.ends[how] += 1
