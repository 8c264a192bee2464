"""How the contexts of a decode batch grow, step by step, and the pages that they take for it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tonnage.sim.domain import FloatArray, IntArray, SpeculationSpec
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.speculation import steps_for

_SLOTS = 64  # to begin with


class Contexts(Protocol):
    """The contexts of a batch by slot; slots 0 ... size - 1 are taken."""

    query_tokens: int
    steps: int

    @property
    def growth(self) -> float | None:
        """Tokens by which the sum grows per step; None for one per sequence."""

    def steps_needed(self, sequence: Sequence) -> int:
        """Return the steps that a sequence needs for its remaining tokens."""

    def place(self, sequence: Sequence, steps_needed: int) -> None:
        """Give a sequence the next slot."""

    def vacate(self, slot: int) -> None:
        """Free a slot; the last one takes its place."""

    def tokens(self) -> IntArray:
        """Return the tokens `[size]` that each attention reads in the next step."""

    def sum_after(self, steps: int) -> float:
        """Return the sum of the contexts after some more steps."""

    def advance(self, steps: int) -> None:
        """Let steps pass."""

    def pages_for_steps(self, steps: int) -> int:
        """Return the pages that the next `steps` steps take."""

    def steps_within(self, pages: int, most: int) -> int:
        """Return how many steps, at most `most`, take no more than `pages` pages."""

    def pages_after(self, steps: int) -> IntArray:
        """Return the pages `[size]` that each sequence holds after some more steps."""

    def tokens_of(self, slot: int) -> int:
        """Return the tokens that one attention reads in the next step."""

    def pages_of(self, slot: int) -> int:
        """Return the pages that a sequence holds."""

    def tokens_together(self, slot: int) -> int:
        """Return how many of a sequence's tokens since it joined came with another one."""


class UnitContexts:
    """Contexts that grow by one token per step.

    Each is an offset to the step counter, so that a step touches none of them; and as it takes a
    page whenever it fills one, sequences are counted by the step, modulo the page, in which they
    do.
    """

    query_tokens = 1
    growth = None

    def __init__(self, pool: PagePool) -> None:
        """Start empty."""
        self.steps = 0
        self._pool = pool
        self._size = 0
        self._offsets: IntArray = np.zeros(_SLOTS, dtype=np.int64)  # context = offset + steps
        self._offset_sum = 0
        self._turns = [0] * pool.page_tokens

    def steps_needed(self, sequence: Sequence) -> int:
        """Return the steps that a sequence needs for its remaining tokens."""
        return sequence.remaining_output_tokens

    def place(self, sequence: Sequence, steps_needed: int) -> None:
        """Give a sequence the next slot."""
        slot = self._size
        if slot == len(self._offsets):
            self._offsets = doubled(self._offsets)
        offset = sequence.request.input_tokens + sequence.generated_tokens - self.steps
        self._offsets[slot] = offset
        self._offset_sum += offset
        self._turns[self._turn(offset)] += 1
        self._size += 1

    def vacate(self, slot: int) -> None:
        """Free a slot; the last one takes its place."""
        offset = int(self._offsets[slot])
        self._offset_sum -= offset
        self._turns[self._turn(offset)] -= 1
        self._size -= 1
        self._offsets[slot] = self._offsets[self._size]

    def _turn(self, offset: int) -> int:
        """Return the negated step, modulo the page, in which a context takes pages."""
        return (offset + self._pool.extra_tokens - 1) % self._pool.page_tokens

    def tokens(self) -> IntArray:
        """Return the tokens `[size]` that each attention reads in the next step."""
        return self._offsets[: self._size] + self.steps

    def sum_after(self, steps: int) -> float:
        """Return the sum of the contexts after some more steps."""
        return self._offset_sum + (self.steps + steps) * self._size

    def advance(self, steps: int) -> None:
        """Let steps pass."""
        self.steps += steps

    def pages_for_steps(self, steps: int) -> int:
        """Return the pages that the next `steps` steps take."""
        page_tokens = self._pool.page_tokens
        cycles, rest = divmod(steps, page_tokens)
        pages = cycles * self._size
        for step in range(self.steps, self.steps + rest):
            pages += self._turns[-step % page_tokens]
        return pages

    def steps_within(self, pages: int, most: int) -> int:
        """Return how many steps, at most `most`, take no more than `pages` pages."""
        page_tokens = self._pool.page_tokens
        if self._size * (most // page_tokens + 1) <= pages:
            return most
        cycles, left = divmod(pages, self._size)
        steps = cycles * page_tokens
        while steps < most:
            left -= self._turns[-(self.steps + steps) % page_tokens]
            if left < 0:
                break
            steps += 1
        return min(steps, most)

    def pages_after(self, steps: int) -> IntArray:
        """Return the pages `[size]` that each sequence holds after some more steps."""
        tokens = self.tokens() + (steps - 1 + self._pool.extra_tokens)
        pages: IntArray = -(-tokens // self._pool.page_tokens)
        return pages

    def tokens_of(self, slot: int) -> int:
        """Return the tokens that one attention reads in the next step."""
        return int(self._offsets[slot]) + self.steps

    def pages_of(self, slot: int) -> int:
        """Return the pages that a sequence holds."""
        return self._pool.pages_for(self.tokens_of(slot) - 1)

    def tokens_together(self, slot: int) -> int:
        """Every token comes alone."""
        return 0


class SpeculativeContexts:
    """Contexts that grow by one token and the accepted draft tokens per step.

    How many steps a sequence needs is drawn when it joins, from the distribution of accepted
    lengths and random numbers of its own; in between its context grows evenly. Every step writes
    the KV of all draft tokens, so the pages of that many tokens are held beyond the context.
    """

    def __init__(self, pool: PagePool, speculation: SpeculationSpec, seed: int) -> None:
        """Start empty; requests draw the same numbers whatever else happens."""
        self.query_tokens = 1 + speculation.draft_tokens
        self.steps = 0
        self._pool = pool
        self._probabilities = speculation.accept_probabilities
        self._seed = seed
        self._size = 0
        # By slot: context = start + rate x steps, pages held, step and context of joining.
        self._starts: FloatArray = np.zeros(_SLOTS)
        self._rates: FloatArray = np.zeros(_SLOTS)
        self._held: IntArray = np.zeros(_SLOTS, dtype=np.int64)
        self._joined: IntArray = np.zeros((_SLOTS, 2), dtype=np.int64)
        self._start_sum = self._rate_sum = 0.0

    @property
    def growth(self) -> float | None:
        """Tokens by which the sum grows per step."""
        return self._rate_sum

    def steps_needed(self, sequence: Sequence) -> int:
        """Draw the steps that a sequence needs for its remaining tokens."""
        rng = np.random.default_rng([self._seed, sequence.request.id, sequence.retractions])
        return steps_for(sequence.remaining_output_tokens, self._probabilities, rng)

    def place(self, sequence: Sequence, steps_needed: int) -> None:
        """Give a sequence the next slot."""
        slot = self._size
        if slot == len(self._starts):
            self._starts, self._rates = doubled(self._starts), doubled(self._rates)
            self._held, self._joined = doubled(self._held), doubled(self._joined)
        context = sequence.request.input_tokens + sequence.generated_tokens
        rate = sequence.remaining_output_tokens / steps_needed if steps_needed else 1.0
        start = context - rate * self.steps
        self._starts[slot], self._rates[slot] = start, rate
        self._start_sum += start
        self._rate_sum += rate
        self._held[slot] = self._pool.pages_for(context - 1)
        self._joined[slot] = self.steps, context
        self._size += 1

    def vacate(self, slot: int) -> None:
        """Free a slot; the last one takes its place."""
        self._start_sum -= float(self._starts[slot])
        self._rate_sum -= float(self._rates[slot])
        self._size -= 1
        for values in (self._starts, self._rates, self._held, self._joined):
            values[slot] = values[self._size]
        if not self._size:  # nothing is left of rounding either
            self._start_sum = self._rate_sum = 0.0

    def _tokens_after(self, steps: int) -> IntArray:
        starts, rates = self._starts[: self._size], self._rates[: self._size]
        # A rate is a quotient: what ought to be a whole number must not fall short of it.
        whole: IntArray = np.floor(starts + rates * (self.steps + steps) + 1e-6).astype(np.int64)
        return whole

    def tokens(self) -> IntArray:
        """Return the tokens `[size]` that each attention reads in the next step."""
        return self._tokens_after(0)

    def sum_after(self, steps: int) -> float:
        """Return the sum of the contexts after some more steps, before they are made whole."""
        return self._start_sum + self._rate_sum * (self.steps + steps)

    def advance(self, steps: int) -> None:
        """Let steps pass."""
        if self._size:
            self._held[: self._size] = self._held_after(steps)
        self.steps += steps

    def _held_after(self, steps: int) -> IntArray:
        pool = self._pool
        tokens = self._tokens_after(steps - 1) + self.query_tokens - 1
        pages: IntArray = -(-(tokens + pool.extra_tokens) // pool.page_tokens)
        return np.maximum(pages, self._held[: self._size])

    def pages_for_steps(self, steps: int) -> int:
        """Return the pages that the next `steps` steps take."""
        if not steps or not self._size:
            return 0
        return int((self._held_after(steps) - self._held[: self._size]).sum())

    def steps_within(self, pages: int, most: int) -> int:
        """Return how many steps, at most `most`, take no more than `pages` pages."""
        if self.pages_for_steps(most) <= pages:
            return most
        fits, fails = 0, most
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.pages_for_steps(middle) <= pages:
                fits = middle
            else:
                fails = middle
        return fits

    def pages_after(self, steps: int) -> IntArray:
        """Return the pages `[size]` that each sequence holds after some more steps."""
        return self._held_after(steps) if steps else self._held[: self._size]

    def tokens_of(self, slot: int) -> int:
        """Return the tokens that one attention reads in the next step."""
        return int(self._tokens_after(0)[slot])

    def pages_of(self, slot: int) -> int:
        """Return the pages that a sequence holds."""
        return int(self._held[slot])

    def tokens_together(self, slot: int) -> int:
        """Return how many of a sequence's tokens since it joined came with another one."""
        step, context = int(self._joined[slot, 0]), int(self._joined[slot, 1])
        return self.tokens_of(slot) - context - (self.steps - step)


def doubled(values: NDArray[Any]) -> NDArray[Any]:
    """Return an array with as many rows again."""
    return np.concatenate([values, np.zeros_like(values)])
