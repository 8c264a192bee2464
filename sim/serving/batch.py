"""The running decode batch, kept so that a change costs the request that changes, not the batch."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ListLike

import numpy as np

from tonnage.sim.domain import IntArray
from tonnage.sim.serving.contexts import Contexts, doubled
from tonnage.sim.serving.sequence import NOT_IN_BATCH, Sequence

_NEVER = 2**62


class DecodeBatch:
    """Sequences that each get a token, or several, per step.

    A sequence that has all its tokens leaves `lag_steps` later. Meanwhile it holds its pages, and
    with `wasted_step` it is still computed.
    """

    def __init__(
        self, contexts: Contexts, lag_steps: int = 0, *, wasted_step: bool = False
    ) -> None:
        """Make an empty batch; `contexts` says how its sequences grow."""
        self.contexts = contexts
        self.version = 0  # changes with the set of sequences that are computed
        self._lag_steps = lag_steps
        self._wasted_step = wasted_step
        self._engine_steps = 0  # of the instance, those too in which the batch was not computed
        self._limits: IntArray = np.zeros(64, dtype=np.int64)  # longest context that is allowed
        self._slot_of: dict[int, int] = {}  # request id -> slot
        self._sequences: list[Sequence] = []  # by slot
        self._ends: list[tuple[int, int, Sequence]] = []  # heap of (last step, order, sequence)
        self._leaving: deque[tuple[int, Sequence]] = deque()  # (engine step, sequence)
        self._order = itertools.count()
        self._newcomers: list[Sequence] = []
        self._tokens_together = 0
        self._longest: tuple[tuple[int, int, int], int] = (-1, 0, 0), 0

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
    def steps_to_change(self) -> int:
        """Steps until a sequence has all its tokens or leaves: nothing changes before."""
        while self._ends and not self._is_here(*self._ends[0][1:]):
            heapq.heappop(self._ends)  # it was removed before its end
        ends = self._ends[0][0] - self.contexts.steps if self._ends else _NEVER
        leaves = self._leaving[0][0] - self._engine_steps if self._leaving else _NEVER
        return min(ends, leaves)

    # --- tokens ---------------------------------------------------------------------------------

    def generated(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence of the batch has got so far."""
        slot = self._slot_of[sequence.request.id]
        return self.contexts.tokens_of(slot) - sequence.request.input_tokens

    def outputs_to_come(self, most: int) -> int:
        """Return the sum over sequences of the tokens each may still get, at most `most` each."""
        left = self._limits[: len(self._sequences)] - self.contexts.tokens()
        return int(np.clip(left, 0, most).sum())

    def pages_to_come(self, page_tokens: int) -> int:
        """Return the pages that all sequences together may still take."""
        held = -(-self.contexts.tokens() // page_tokens)
        whole = -(-self._limits[: len(self._sequences)] // page_tokens)
        return int(np.maximum(whole - held, 0).sum())

    def output_tokens(self) -> tuple[int, int]:
        """Return (tokens generated so far, tokens allowed) summed over the live sequences."""
        live = list(self.live_sequences())
        allowed = sum(sequence.request.max_new_tokens for sequence in live)
        return sum(map(self.generated, live)), allowed

    def longest_total_tokens(self, most: int) -> int:
        """Return the most tokens that one sequence may hold in the end, `most` of them outputs."""
        known = (self.version, len(self._sequences), most)
        if self._longest[0] != known:  # asked before every step, and seldom another
            longest = max(
                sequence.request.input_tokens + min(sequence.request.max_new_tokens, most)
                for sequence in self._sequences
            )
            self._longest = known, longest
        return self._longest[1]

    def take_tokens_together(self) -> int:
        """Return the tokens that came with another one, of those that left since the last call."""
        together, self._tokens_together = self._tokens_together, 0
        return together

    # --- sequences ------------------------------------------------------------------------------

    @property
    def members(self) -> ListLike[Sequence]:
        """The sequences that are computed, by slot."""
        return self._sequences

    def live_sequences(self) -> Iterable[Sequence]:
        """Return the sequences that get a token in the next step."""
        return (one for one in self._sequences if one.batch_order != NOT_IN_BATCH)

    def _is_here(self, order: int, sequence: Sequence) -> bool:
        """Tell whether a sequence is still here since it joined as number `order`.

        It may have the same number in the batch of another micro-batch by now.
        """
        return sequence.batch_order == order and sequence.request.id in self._slot_of

    def holds(self, sequence: Sequence) -> bool:
        """Tell whether a sequence is in this batch and gets a token in the next step."""
        return sequence.batch_order != NOT_IN_BATCH and sequence.request.id in self._slot_of

    def join(self, sequence: Sequence) -> None:
        """Add a sequence that has its first token."""
        slot = len(self._sequences)
        if slot == len(self._limits):
            self._limits = doubled(self._limits)
        request = sequence.request
        self._limits[slot] = request.input_tokens + request.max_new_tokens
        self._slot_of[request.id] = slot
        self._sequences.append(sequence)
        self.version += 1
        steps = self.contexts.steps_needed(sequence)
        self.contexts.place(sequence, steps)
        sequence.prompt_pages = sequence.decode_pages = 0  # from here on counted by context
        if steps:
            sequence.batch_order = next(self._order)
            entry = (self.contexts.steps + steps, sequence.batch_order, sequence)
            heapq.heappush(self._ends, entry)
            self._newcomers.append(sequence)
        else:  # complete with its prompt, which the engine does not know yet
            self._leaving.append((self._engine_steps + self._lag_steps, sequence))

    def linger(self, sequence: Sequence) -> None:
        """Hold the pages of a sequence that is complete with its prompt until it leaves."""
        sequence.decode_pages, sequence.prompt_pages = sequence.prompt_pages, 0
        self._leaving.append((self._engine_steps + self._lag_steps, sequence))

    def take_newcomers(self) -> list[Sequence]:
        """Return the sequences that joined since the last call."""
        newcomers = self._newcomers
        if not newcomers:
            return []  # not the list that later ones are put into
        self._newcomers = []
        return newcomers

    def advance(self, steps: int) -> tuple[list[Sequence], list[Sequence]]:
        """Let the batch run for some steps; return (complete sequences, ones that leave).

        Those that leave have their pages in `decode_pages`, to be released.
        """
        self.contexts.advance(steps)
        self._engine_steps += steps
        complete = []
        while self._ends and self._ends[0][0] <= self.contexts.steps:
            _, order, sequence = heapq.heappop(self._ends)
            if not self._is_here(order, sequence):
                continue
            self._count_together(sequence)
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
        self._count_together(sequence)
        sequence.batch_order = NOT_IN_BATCH
        sequence.generated_tokens = self.generated(sequence)
        if sequence in self._newcomers:
            self._newcomers.remove(sequence)
        self._remove(sequence)

    def _count_together(self, sequence: Sequence) -> None:
        self._tokens_together += self.contexts.tokens_together(self._slot_of[sequence.request.id])

    def _remove(self, sequence: Sequence) -> None:
        slot = self._slot_of.pop(sequence.request.id)
        sequence.decode_pages = self.contexts.pages_of(slot)
        self.contexts.vacate(slot)
        last = self._sequences.pop()
        if last is not sequence:
            self._sequences[slot] = last
            self._limits[slot] = self._limits[len(self._sequences)]
            self._slot_of[last.request.id] = slot
        self.version += 1
