"""The running decode batch, kept so that a change costs the request that changes, not the batch."""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from tonnage.sim.domain import IntArray
from tonnage.sim.serving.sequence import Sequence


class DecodeBatch:
    """Sequences that each get one token per step.

    Between two changes every context grows by one token per step, so it is stored as an offset to
    the batch's own step counter: a step touches no sequence, joining and leaving touch one.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._offsets: IntArray = np.zeros(64, dtype=np.int64)  # context = offset + steps
        self._offset_sum = 0
        self._slot_of: dict[int, int] = {}  # request id -> slot
        self._sequences: list[Sequence] = []  # by slot
        self._ends: list[tuple[int, int, Sequence]] = []  # heap of (last step, tie break, sequence)
        self._order = itertools.count()
        self._newcomers: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def context_tokens(self) -> IntArray:
        """Tokens `[requests]` that each sequence's attention reads in the next step."""
        return self._offsets[: len(self._sequences)] + self._steps

    @property
    def context_sum(self) -> int:
        """Sum of `context_tokens`."""
        return self._offset_sum + self._steps * len(self._sequences)

    @property
    def steps_to_next_end(self) -> int:
        """Steps until the first sequence has all its tokens: the batch cannot change before."""
        return self._ends[0][0] - self._steps

    def join(self, sequence: Sequence) -> None:
        """Add a sequence that has its first token and needs more."""
        slot = len(self._sequences)
        if slot == len(self._offsets):
            self._offsets = np.concatenate([self._offsets, np.zeros_like(self._offsets)])
        context = sequence.request.input_tokens + sequence.generated_tokens
        self._offsets[slot] = context - self._steps
        self._offset_sum += context - self._steps
        self._slot_of[sequence.request.id] = slot
        self._sequences.append(sequence)
        end = self._steps + sequence.remaining_output_tokens
        heapq.heappush(self._ends, (end, next(self._order), sequence))
        self._newcomers.append(sequence)

    def take_newcomers(self) -> list[Sequence]:
        """Return the sequences that joined since the last call."""
        newcomers, self._newcomers = self._newcomers, []
        return newcomers

    def advance(self, steps: int) -> list[Sequence]:
        """Give every sequence `steps` tokens; remove and return those that are complete."""
        self._steps += steps
        complete = []
        while self._ends and self._ends[0][0] <= self._steps:
            sequence = heapq.heappop(self._ends)[2]
            sequence.generated_tokens = sequence.request.output_tokens
            self._remove(sequence)
            complete.append(sequence)
        return complete

    def _remove(self, sequence: Sequence) -> None:
        slot = self._slot_of.pop(sequence.request.id)
        self._offset_sum -= int(self._offsets[slot])
        last = self._sequences.pop()
        if last is not sequence:
            self._sequences[slot] = last
            self._offsets[slot] = self._offsets[len(self._sequences)]
            self._slot_of[last.request.id] = slot
