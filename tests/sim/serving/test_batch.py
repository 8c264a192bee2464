"""The decode batch against a list of requests that are stepped one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tonnage.sim.domain import Request
from tonnage.sim.serving.batch import DecodeBatch
from tonnage.sim.serving.contexts import UnitContexts
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.sequence import Sequence


@dataclass
class Row:
    """One request of the list: its tokens so far, and the steps until it leaves once complete."""

    sequence: Sequence
    generated: int
    leaves_in: int | None = None
    computed: bool = field(default=True)

    @property
    def context(self) -> int:
        return self.sequence.request.input_tokens + self.generated


class BatchMachine(RuleBasedStateMachine):
    """The batch never touches a sequence in a step; the list touches all of them."""

    @initialize(
        page=st.sampled_from([1, 3, 16]),
        extra=st.sampled_from([0, 0, 5]),
        lag_steps=st.integers(0, 2),
        wasted_step=st.booleans(),
    )
    def start(self, page: int, extra: int, lag_steps: int, wasted_step: bool) -> None:
        self.pool = PagePool(1_000_000, page, extra)
        self.lag_steps = lag_steps
        self.wasted_step = wasted_step and lag_steps > 0
        contexts = UnitContexts(self.pool)
        self.batch = DecodeBatch(contexts, lag_steps, wasted_step=self.wasted_step)
        self.rows: list[Row] = []
        self.joined = 0

    def live(self) -> list[Row]:
        return [row for row in self.rows if row.leaves_in is None]

    def computed(self) -> list[Row]:
        return [row for row in self.rows if row.leaves_in is None or self.wasted_step]

    @rule(
        inputs=st.integers(1, 40),
        outputs=st.integers(1, 12),
        further=st.integers(0, 5),
        written=st.integers(0, 11),
    )
    def join(self, inputs: int, outputs: int, further: int, written: int) -> None:
        request = Request(self.joined, 0.0, inputs, outputs, outputs + further)
        sequence = Sequence(request)
        self.joined += 1
        least = 0 if self.wasted_step else 1  # without a wasted step, a complete one never joins
        sequence.generated_tokens = max(min(1 + written, outputs - least), 1)
        if not least <= sequence.remaining_output_tokens:
            return
        self.batch.join(sequence)
        complete = not sequence.remaining_output_tokens
        leaves_in = self.lag_steps if complete else None
        self.rows.append(Row(sequence, sequence.generated_tokens, leaves_in))

    @precondition(lambda self: self.rows)
    @rule(steps=st.integers(1, 30))
    def advance(self, steps: int) -> None:
        steps = min(steps, self.batch.steps_to_change)
        held = {row.sequence.request.id: row.context - 1 + steps for row in self.computed()}
        finished, left = self.batch.advance(steps)
        expected_finished, expected_left = [], []
        for row in self.rows:
            was_complete = row.leaves_in is not None
            if not was_complete or self.wasted_step:
                row.generated += steps
            if was_complete:
                row.leaves_in -= steps
            elif row.generated == row.sequence.request.output_tokens:
                row.leaves_in = self.lag_steps
                expected_finished.append(row.sequence)
            if row.leaves_in == 0:
                expected_left.append(row.sequence)
        assert set(finished) == set(expected_finished)
        self.check_left(left, expected_left, held)

    @precondition(lambda self: self.rows)
    @rule(steps=st.integers(1, 3))
    def stand_by(self, steps: int) -> None:
        """Steps of other ranks, or of a prompt: nobody gets a token."""
        steps = min(steps, self.batch.steps_to_change)
        left = self.batch.stand_by(steps)
        expected = []
        for row in self.rows:
            if row.leaves_in is not None:
                row.leaves_in -= steps
                if row.leaves_in == 0:
                    expected.append(row.sequence)
        self.check_left(left, expected, {})

    @rule()
    def flush(self) -> None:
        expected = [row.sequence for row in self.rows if row.leaves_in is not None]
        self.check_left(self.batch.flush(), expected, {})

    def check_left(
        self, left: list[Sequence], expected: list[Sequence], held: dict[int, int]
    ) -> None:
        assert set(left) == set(expected)
        by_id = {row.sequence.request.id: row for row in self.rows}
        for sequence in left:
            row = by_id[sequence.request.id]
            tokens = held.get(sequence.request.id, row.context - 1)
            assert sequence.decode_pages == self.pool.pages_for(tokens)
        self.rows = [row for row in self.rows if row.sequence not in expected]

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 99))
    def withdraw(self, which: int) -> None:
        row = self.live()[which % len(self.live())]
        self.batch.withdraw(row.sequence)
        assert row.sequence.generated_tokens == row.generated
        assert row.sequence.decode_pages == self.pool.pages_for(row.context - 1)
        self.rows.remove(row)

    # --- what the batch knows without looking at anybody ----------------------------------------

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "batch"):
            return
        live, computed = self.live(), self.computed()
        assert (len(self.batch), self.batch.live) == (len(computed), len(live))
        assert self.batch.places == len(self.rows)
        contexts = self.batch.contexts
        assert sorted(contexts.tokens().tolist()) == sorted(row.context for row in computed)
        assert contexts.sum_after(0) == sum(row.context for row in computed)
        assert contexts.sum_after(7) == sum(row.context + 7 for row in computed)
        outputs = sum(row.generated for row in live)
        allowed = sum(row.sequence.request.max_new_tokens for row in live)
        assert self.batch.output_tokens() == (outputs, allowed)
        to_come = [
            min(max(row.sequence.request.max_new_tokens - row.generated, 0), 4) for row in computed
        ]
        assert self.batch.outputs_to_come(4) == sum(to_come)

    @invariant()
    def pages_of_the_next_steps(self) -> None:
        if not hasattr(self, "batch"):
            return
        pages_for = self.pool.pages_for
        stored = [row.context - 1 for row in self.computed()]
        needed = [
            sum(pages_for(tokens + steps) - pages_for(tokens) for tokens in stored)
            for steps in range(40)
        ]
        contexts = self.batch.contexts
        assert [contexts.pages_for_steps(steps) for steps in range(40)] == needed
        if stored:
            for pages in (0, 1, needed[7], needed[20] - 1):
                most = max(steps for steps in range(40) if needed[steps] <= max(pages, 0))
                assert contexts.steps_within(max(pages, 0), 39) == most

    @invariant()
    def next_change(self) -> None:
        if not getattr(self, "rows", None):
            return
        ends = [row.sequence.request.output_tokens - row.generated for row in self.live()]
        leaves = [row.leaves_in for row in self.rows if row.leaves_in is not None]
        assert self.batch.steps_to_change == min([*ends, *leaves])


BatchMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBatchAgainstAList = BatchMachine.TestCase


def test_a_sequence_that_came_back_in_another_micro_batch_ends_there() -> None:
    """It is number 0 in both batches; the first one's note of its end is void."""
    pool = PagePool(1000, 1)
    first, second = (DecodeBatch(UnitContexts(pool)) for _ in range(2))
    moved, stays = (Sequence(Request(number, 0.0, 4, 5 + 4 * number)) for number in range(2))
    moved.generated_tokens = stays.generated_tokens = 1
    first.join(moved)
    first.join(stays)
    first.withdraw(moved)
    second.join(moved)
    assert first.steps_to_change == 8
    assert first.advance(8) == ([stays], [stays])
    assert second.advance(4) == ([moved], [moved])
