"""What an instance runs next: pure decisions over waiting and running sequences, no clock.

Every scheduler answers `next_step()` with a step and the number of times it can be repeated before
the batch must change by itself, and takes back how many steps were done in `commit()`.
Admission reserves the pages of the whole request, prompt and output, so that a running sequence
never lacks a page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tonnage.sim.domain import IntArray, PromptChunk, Step
from tonnage.sim.serving.batch import DecodeBatch
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.sequence import Sequence

_NONE: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class Outcome:
    """What a committed step changed: prompts that are complete, requests that are complete."""

    prefilled: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Limits:
    """Batch limits of one instance: prompt tokens per step, sequences that run at a time."""

    chunk_tokens: int
    max_running_requests: int


class Scheduler(Protocol):
    """The seam between an instance and its policy."""

    pool: PagePool

    def next_step(self) -> tuple[Step, int] | None:
        """Return the next step and how often it can be repeated, or None when idle."""

    def commit(self, steps: int) -> Outcome:
        """Take in that the last step returned was done `steps` times."""

    def wants_interruption(self) -> bool:
        """Tell whether a sequence waits that the next step boundary could let in."""

    def take_started(self) -> list[Sequence]:
        """Return the sequences whose first prompt chunk is in the last step returned."""

    def take_newcomers(self) -> list[Sequence]:
        """Return the sequences whose first decode step the last step returned is."""


class _PromptQueue:
    """First come, first served prompts, cut into chunks; one prompt is under way at a time."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.waiting: deque[Sequence] = deque()
        self.under_way: Sequence | None = None
        self._started: list[Sequence] = []

    def head_fits(self) -> bool:
        """Tell whether the next prompt could start now."""
        if self.under_way is not None:
            return True
        return bool(self.waiting) and self.waiting[0].prompt_pages <= self._pool.free_pages

    def chunks(self, budget_tokens: int, slots: int) -> Iterator[tuple[Sequence, int]]:
        """Yield (sequence, prompt tokens) for one step, allocating pages as prompts start."""
        while budget_tokens > 0:
            if self.under_way is None:
                if slots <= 0 or not self.waiting:
                    return
                if not self._pool.allocate(self.waiting[0].prompt_pages):
                    return
                self.under_way = self.waiting.popleft()
                self._started.append(self.under_way)
                slots -= 1
            sequence = self.under_way
            tokens = min(budget_tokens, sequence.remaining_input_tokens)
            budget_tokens -= tokens
            if tokens == sequence.remaining_input_tokens:
                self.under_way = None
            yield sequence, tokens

    def take_started(self) -> list[Sequence]:
        """Return the prompts that started since the last call."""
        started, self._started = self._started, []
        return started


def _prompt_chunks(chunks: list[tuple[Sequence, int]]) -> tuple[PromptChunk, ...]:
    return tuple(PromptChunk(tokens, sequence.prefilled_tokens) for sequence, tokens in chunks)


def _commit_chunks(chunks: list[tuple[Sequence, int]]) -> list[Sequence]:
    """Advance the prompts; return those that are complete and so have their first token."""
    complete = []
    for sequence, tokens in chunks:
        sequence.prefilled_tokens += tokens
        if sequence.remaining_input_tokens == 0:
            sequence.generated_tokens = 1
            complete.append(sequence)
    return complete


class PrefillScheduler:
    """A prefill instance: prompts in chunks; pages stay held until the KV is handed over."""

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self.pool = pool
        self._limits = limits
        self._queue = _PromptQueue(pool)
        self._chunks: list[tuple[Sequence, int]] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt."""
        sequence.prompt_pages = self.pool.pages_for(sequence.request.input_tokens)
        self._queue.waiting.append(sequence)

    def next_step(self) -> tuple[Step, int] | None:
        """Return one step over the next chunks, or None when nothing can start."""
        self._chunks = list(
            self._queue.chunks(self._limits.chunk_tokens, self._limits.max_running_requests)
        )
        if not self._chunks:
            return None
        return Step(_NONE, 0, _prompt_chunks(self._chunks)), 1

    def commit(self, steps: int) -> Outcome:
        """Advance the prompts of the last step."""
        return Outcome(prefilled=_commit_chunks(self._chunks))

    @property
    def has_waiting(self) -> bool:
        """Whether a prompt waits for pages."""
        return bool(self._queue.waiting)

    def hand_over(self, sequence: Sequence) -> None:
        """Free the pages of a prompt whose KV has arrived elsewhere."""
        self.pool.release(sequence.prompt_pages)

    def wants_interruption(self) -> bool:
        """Prefill steps are never repeated, so there is nothing to interrupt."""
        return False

    def take_started(self) -> list[Sequence]:
        """Return the sequences whose first prompt chunk is in the last step returned."""
        return self._queue.take_started()

    def take_newcomers(self) -> list[Sequence]:
        """Nothing decodes here."""
        return []


class DecodeScheduler:
    """A decode instance: sequences get pages first, then their KV arrives, then they run."""

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self.pool = pool
        self._limits = limits
        self._awaiting_pages: deque[Sequence] = deque()
        self._admitted = 0  # sequences that hold pages here, arrived or not
        self._arrived: deque[Sequence] = deque()
        self._batch = DecodeBatch()

    def request_pages(self, sequence: Sequence) -> None:
        """Queue a sequence for the pages of its whole context."""
        self._awaiting_pages.append(sequence)

    def admit(self) -> list[Sequence]:
        """Give pages to as many queued sequences as fit, in order; return them."""
        admitted = []
        while self._awaiting_pages and self._admitted < self._limits.max_running_requests:
            sequence = self._awaiting_pages[0]
            pages = self.pool.pages_for(sequence.request.total_tokens)
            if not self.pool.allocate(pages):
                break
            self._awaiting_pages.popleft()
            sequence.decode_pages = pages
            self._admitted += 1
            admitted.append(sequence)
        return admitted

    def join(self, sequence: Sequence) -> None:
        """Let a sequence whose KV has arrived into the batch at the next step boundary."""
        self._arrived.append(sequence)

    def next_step(self) -> tuple[Step, int] | None:
        """Return one token for every running sequence, until the first of them is complete."""
        while self._arrived:
            self._batch.join(self._arrived.popleft())
        if not len(self._batch):
            return None
        step = Step(self._batch.context_tokens, self._batch.context_sum, ())
        return step, self._batch.steps_to_next_end

    def commit(self, steps: int) -> Outcome:
        """Advance the batch and free the pages of the sequences that are complete."""
        finished = self._batch.advance(steps)
        for sequence in finished:
            self.release(sequence)
        return Outcome(finished=finished)

    def release(self, sequence: Sequence) -> None:
        """Free the pages of a sequence that is complete."""
        self.pool.release(sequence.decode_pages)
        self._admitted -= 1

    def wants_interruption(self) -> bool:
        """Tell whether a sequence has arrived since the batch was formed."""
        return bool(self._arrived)

    def take_started(self) -> list[Sequence]:
        """No prompt starts here."""
        return []

    def take_newcomers(self) -> list[Sequence]:
        """Return the sequences whose first decode step the last step returned is."""
        return self._batch.take_newcomers()


class ServeScheduler:
    """A colocated instance: prompts before tokens (SGLang), or both in one step (vLLM).

    `mixed` False runs a prefill step whenever a prompt can start, which delays every running
    sequence; `mixed` True puts one token of every running sequence into each step and fills the
    rest of the token budget with prompt chunks.
    """

    def __init__(self, pool: PagePool, limits: Limits, *, mixed: bool) -> None:
        self.pool = pool
        self._limits = limits
        self._mixed = mixed
        self._queue = _PromptQueue(pool)
        self._chunks: list[tuple[Sequence, int]] = []
        self._batch = DecodeBatch()
        self._decodes = False  # whether the step under way gives the batch a token

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        sequence.prompt_pages = self.pool.pages_for(sequence.request.total_tokens)
        self._queue.waiting.append(sequence)

    def next_step(self) -> tuple[Step, int] | None:
        """Return the next prefill, decode or mixed step, or None when idle."""
        running = len(self._batch)
        budget = self._limits.chunk_tokens - (running if self._mixed else 0)
        self._chunks = list(
            self._queue.chunks(budget, self._limits.max_running_requests - self._admitted)
        )
        decodes = running > 0 and (self._mixed or not self._chunks)
        self._decodes = decodes
        if not decodes and not self._chunks:
            return None
        contexts = self._batch.context_tokens if decodes else _NONE
        context_sum = self._batch.context_sum if decodes else 0
        steps = 1 if self._chunks else self._batch.steps_to_next_end
        return Step(contexts, context_sum, _prompt_chunks(self._chunks)), steps

    @property
    def _admitted(self) -> int:
        return len(self._batch) + (self._queue.under_way is not None)

    def commit(self, steps: int) -> Outcome:
        """Advance prompts and batch; sequences with their first token join the batch."""
        finished = self._batch.advance(steps) if self._decodes else []
        prefilled = _commit_chunks(self._chunks)
        for sequence in prefilled:
            if sequence.remaining_output_tokens:
                self._batch.join(sequence)
            else:
                finished.append(sequence)
        for sequence in finished:
            self.pool.release(sequence.prompt_pages)
        return Outcome(prefilled, finished)

    def wants_interruption(self) -> bool:
        """Tell whether a prompt waits that could start at the next step boundary."""
        return self._admitted < self._limits.max_running_requests and self._queue.head_fits()

    def take_started(self) -> list[Sequence]:
        """Return the sequences whose first prompt chunk is in the last step returned."""
        return self._queue.take_started()

    def take_newcomers(self) -> list[Sequence]:
        """Return the sequences whose first decode step the last step returned is."""
        return self._batch.take_newcomers() if self._decodes else []
