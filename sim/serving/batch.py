"""The running decode batch, kept so that a change costs the request that changes, not the batch."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable

import numpy as np

from tonnage.sim.domain import IntArray
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.sequence import NOT_IN_BATCH, Sequence

_NEVER = 2**62


class DecodeBatch:
    """Sequences that each get one token per step.

    Between two changes every context grows by one token per step, so it is stored as an offset to
    the batch's own step counter: a step touches no sequence, joining and leaving touch one.

    A sequence that has all its tokens leaves `lag_steps` later. Meanwhile it holds its pages, and
    with `wasted_step` it is still computed.
    """

    def __init__(self, pool: PagePool, lag_steps: int = 0, *, wasted_step: bool = False) -> None:
        self.version = 0  # changes with the set of sequences that are computed
        self._pool = pool
        self._lag_steps = lag_steps
        self._wasted_step = wasted_step
        self._steps = 0  # of the batch
        self._engine_steps = 0  # of the instance, those too in which the batch was not computed
        self._offsets: IntArray = np.zeros(64, dtype=np.int64)  # context = offset + steps
        self._offset_sum = 0
        self._limits: IntArray = np.zeros(64, dtype=np.int64)  # steps at which max_new is reached
        self._turns = [0] * pool.page_tokens  # sequences by the step (mod page) that takes a page
        self._slot_of: dict[int, int] = {}  # request id -> slot
        self._sequences: list[Sequence] = []  # by slot
        self._ends: list[tuple[int, int, Sequence]] = []  # heap of (last step, order, sequence)
        self._leaving: deque[tuple[int, Sequence]] = deque()  # (engine step, sequence)
        self._order = itertools.count()
        self._newcomers: list[Sequence] = []

    def __len__(self) -> int:
        """Sequences that are computed, those included whose token nobody waits for."""
        return len(self._sequences)

    @property
    def places(self) -> int:
        """Sequences that count against the limit on running ones."""
        return len(self._sequences) + (0 if self._wasted_step else len(self._leaving))

    @property
    def live(self) -> int:
        """Sequences that get a token in the next step."""
        return len(self._sequences) - (len(self._leaving) if self._wasted_step else 0)

    @property
    def context_tokens(self) -> IntArray:
        """Tokens `[requests]` that each sequence's attention reads in the next step."""
        return self._offsets[: len(self._sequences)] + self._steps

    @property
    def context_sum(self) -> int:
        """Sum of `context_tokens`."""
        return self._offset_sum + self._steps * len(self._sequences)

    @property
    def steps_to_change(self) -> int:
        """Steps until a sequence has all its tokens or leaves: nothing changes before."""
        while self._ends and self._ends[0][2].batch_order != self._ends[0][1]:
            heapq.heappop(self._ends)  # it was removed before its end
        ends = self._ends[0][0] - self._steps if self._ends else _NEVER
        leaves = self._leaving[0][0] - self._engine_steps if self._leaving else _NEVER
        return min(ends, leaves)

    # --- pages ----------------------------------------------------------------------------------

    def pages_for_steps(self, steps: int) -> int:
        """Return the pages that the next `steps` steps take."""
        page_tokens = self._pool.page_tokens
        cycles, rest = divmod(steps, page_tokens)
        pages = cycles * len(self._sequences)
        for step in range(self._steps, self._steps + rest):
            pages += self._turns[-step % page_tokens]
        return pages

    def steps_within(self, pages: int, most: int) -> int:
        """Return how many steps, at most `most`, take no more than `pages` pages."""
        page_tokens, sequences = self._pool.page_tokens, len(self._sequences)
        if sequences * (most // page_tokens + 1) <= pages:
            return most
        steps = pages // sequences * page_tokens
        left = pages % sequences
        while steps < most:
            left -= self._turns[-(self._steps + steps) % page_tokens]
            if left < 0:
                break
            steps += 1
        return min(steps, most)

    def _stored_tokens(self, sequence: Sequence) -> int:
        return int(self._offsets[self._slot_of[sequence.request.id]]) + self._steps - 1

    def outputs_to_come(self, most: int) -> int:
        """Return the sum over sequences of the tokens each may still get, at most `most` each."""
        left = self._limits[: len(self._sequences)] - self._steps
        return int(np.clip(left, 0, most).sum())

    def output_tokens(self) -> tuple[int, int]:
        """Return (tokens generated so far, tokens allowed) summed over the live sequences."""
        live = list(self.live_sequences())
        allowed = sum(sequence.request.max_new_tokens for sequence in live)
        return sum(map(self.generated, live)), allowed

    def longest_total_tokens(self, most: int) -> int:
        """Return the most tokens that one sequence may hold in the end, `most` of them outputs."""
        return max(
            sequence.request.input_tokens + min(sequence.request.max_new_tokens, most)
            for sequence in self._sequences
        )

    # --- sequences ------------------------------------------------------------------------------

    def live_sequences(self) -> Iterable[Sequence]:
        """Return the sequences that get a token in the next step."""
        return (one for one in self._sequences if one.batch_order != NOT_IN_BATCH)

    def holds(self, sequence: Sequence) -> bool:
        """Tell whether a sequence is in this batch and gets a token in the next step."""
        return sequence.batch_order != NOT_IN_BATCH and sequence.request.id in self._slot_of

    def generated(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence of the batch has got so far."""
        return self._stored_tokens(sequence) + 1 - sequence.request.input_tokens

    def join(self, sequence: Sequence) -> None:
        """Add a sequence that has its first token."""
        slot = len(self._sequences)
        if slot == len(self._offsets):
            self._offsets = np.concatenate([self._offsets, np.zeros_like(self._offsets)])
            self._limits = np.concatenate([self._limits, np.zeros_like(self._limits)])
        request = sequence.request
        offset = request.input_tokens + sequence.generated_tokens - self._steps
        self._offsets[slot] = offset
        self._offset_sum += offset
        self._limits[slot] = self._steps + request.max_new_tokens - sequence.generated_tokens
        self._turns[self._turn(offset)] += 1
        self._slot_of[request.id] = slot
        self._sequences.append(sequence)
        self.version += 1
        sequence.prompt_pages = sequence.decode_pages = 0  # from here on counted by context
        remaining = sequence.remaining_output_tokens
        if remaining:
            sequence.batch_order = next(self._order)
            entry = (self._steps + remaining, sequence.batch_order, sequence)
            heapq.heappush(self._ends, entry)
            self._newcomers.append(sequence)
        else:  # complete with its prompt, which the engine does not know yet
            self._leaving.append((self._engine_steps + self._lag_steps, sequence))

    def linger(self, sequence: Sequence) -> None:
        """Hold the pages of a sequence that is complete with its prompt until it leaves."""
        sequence.decode_pages, sequence.prompt_pages = sequence.prompt_pages, 0
        self._leaving.append((self._engine_steps + self._lag_steps, sequence))

    def _turn(self, offset: int) -> int:
        """Return the residue of the step at which a context takes its next page, negated."""
        return (offset + self._pool.extra_tokens - 1) % self._pool.page_tokens

    def take_newcomers(self) -> list[Sequence]:
        """Return the sequences that joined since the last call."""
        newcomers, self._newcomers = self._newcomers, []
        return newcomers

    def advance(self, steps: int) -> tuple[list[Sequence], list[Sequence]]:
        """Give every sequence `steps` tokens; return (complete ones, ones that leave).

        Those that leave have their pages in `decode_pages`, to be released.
        """
        self._steps += steps
        self._engine_steps += steps
        complete = []
        while self._ends and self._ends[0][0] <= self._steps:
            _, order, sequence = heapq.heappop(self._ends)
            if sequence.batch_order != order:
                continue
            sequence.batch_order = NOT_IN_BATCH
            sequence.generated_tokens = sequence.request.output_tokens
            complete.append(sequence)
            self._leaving.append((self._engine_steps + self._lag_steps, sequence))
            if not self._wasted_step:
                self._remove(sequence)
        return complete, self._leave(self._engine_steps)

    def stand_by(self, steps: int) -> list[Sequence]:
        """Let `steps` steps of the instance pass without the batch; return those that leave."""
        self._engine_steps += steps
        return self._leave(self._engine_steps)

    def _leave(self, engine_step: int) -> list[Sequence]:
        left = []
        while self._leaving and self._leaving[0][0] <= engine_step:
            sequence = self._leaving.popleft()[1]
            if sequence.request.id in self._slot_of:
                self._remove(sequence)
            left.append(sequence)
        return left

    def flush(self) -> list[Sequence]:
        """Let those go that only wait to leave, for an engine that has nothing else to do."""
        return self._leave(self._engine_steps + self._lag_steps)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a live sequence out; its pages are then in `decode_pages`, its progress kept."""
        sequence.batch_order = NOT_IN_BATCH
        sequence.generated_tokens = self.generated(sequence)
        if sequence in self._newcomers:
            self._newcomers.remove(sequence)
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        sequence.decode_pages = self._pool.pages_for(self._stored_tokens(sequence))
        slot = self._slot_of.pop(sequence.request.id)
        offset = int(self._offsets[slot])
        self._offset_sum -= offset
        self._turns[self._turn(offset)] -= 1
        last = self._sequences.pop()
        if last is not sequence:
            moved = len(self._sequences)
            self._sequences[slot] = last
            self._offsets[slot] = self._offsets[moved]
            self._limits[slot] = self._limits[moved]
            self._slot_of[last.request.id] = slot
        self.version += 1
