"""Prompts that wait or are being computed: who starts, and how many tokens of it a step takes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tonnage.sim.domain import PromptChunk
from tonnage.sim.serving.pages import Found, PagePool
from tonnage.sim.serving.policy import PLAIN, Policy
from tonnage.sim.serving.sequence import Sequence

ANY_STEP = 2**62


class Chunk(NamedTuple):
    """Tokens of one prompt that one step computes, and those computed before them."""

    sequence: Sequence
    tokens: int
    past_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete with it."""
        return self.past_tokens + self.tokens == self.sequence.prompt_tokens


class PromptQueue:
    """First come, first served prompts, cut into chunks; one prompt is under way at a time.

    Pages are allocated chunk by chunk, but a prompt starts only if all of it fits. One that does
    not fit shuts the queue until something is given back, as the engines' `batch_is_full` does.
    """

    def __init__(self, pool: PagePool, policy: Policy = PLAIN) -> None:
        """Make an empty queue that takes pages from a pool."""
        self.waiting: deque[Sequence] = deque()
        self.under_way: Sequence | None = None
        self._pool = pool
        self._policy = policy
        self._stores_scheduled = pool.stores_when == "scheduled"
        self._shut_at = -1  # what `pool.times_given_back` was
        self._started: list[Sequence] = []
        self._admitted = 0

    @property
    def shut(self) -> bool:
        """Whether the first prompt did not fit, and nothing has been given back since."""
        return self._shut_at == self._pool.times_given_back

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, sequence: Sequence, eligible_step: int) -> None:
        """Queue a prompt that can start with that step of its scheduler."""
        sequence.eligible_step = eligible_step
        self.waiting.append(sequence)

    def put_back(self, sequence: Sequence, eligible_step: int, *, first: bool) -> None:
        """Queue a sequence that lost its pages: its prompt is now all that it had."""
        sequence.prompt_tokens = sequence.request.input_tokens + sequence.generated_tokens
        sequence.prefilled_tokens = 0
        sequence.eligible_step = eligible_step
        if first:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def steps_to_head(self, step_index: int) -> int | None:
        """Return the steps until the first prompt can be looked at; None if none could start."""
        if self.shut or not self.waiting:
            return None
        return max(self.waiting[0].eligible_step - step_index, 0)

    def chunks(
        self,
        budget_tokens: int,
        slots: int,
        step_index: int,
        room: OutputRoom | None = None,
        step_tokens: int = 0,
    ) -> list[Chunk]:
        """Choose the prompt tokens of one step and allocate their pages.

        `step_tokens`: what a step holds, where prompts that fit one are not cut.
        """
        chosen: list[Chunk] = []
        if self.under_way is not None and budget_tokens > 0:
            self._continue(self.under_way, budget_tokens, chosen)
            if room is not None and chosen:
                room.charge(chosen[0])
        while self.under_way is None and slots > 0 and self._head_is_eligible(step_index):
            left = budget_tokens - sum(self._budget_tokens(chunk.tokens) for chunk in chosen)
            if left <= 0:
                break
            found = self._pool.find(self.waiting[0])
            if self._policy.whole_prompts and left < self._to_compute(found) <= step_tokens:
                break
            if chosen and self._policy.aligns_chunks and self._splits(found, left):
                left -= left % self._pool.page_tokens
            if left <= 0:
                break
            if not self._head_fits(found, room):
                self._shut_at = self._pool.times_given_back
                break
            self._start(self.waiting.popleft(), found)
            slots -= 1
            assert self.under_way is not None
            self._continue(self.under_way, left, chosen)
        return chosen

    def _head_is_eligible(self, step_index: int) -> bool:
        return bool(self.waiting) and self.waiting[0].eligible_step <= step_index

    def _budget_tokens(self, tokens: int) -> int:
        """Return what a chunk takes of a step's budget: whole pages where chunks are aligned."""
        if not self._policy.aligns_chunks:
            return tokens
        return -(-tokens // self._pool.page_tokens) * self._pool.page_tokens

    def _splits(self, found: Found, budget_tokens: int) -> bool:
        """Tell whether the head would be cut: what fills up a step ends with a page."""
        return self._budget_tokens(self._to_compute(found)) > budget_tokens

    def _to_compute(self, found: Found) -> int:
        """Return the tokens of the head that are not in place."""
        in_place = (found.pages + found.loaded_pages) * self._pool.page_tokens
        return self.waiting[0].prompt_tokens - in_place

    def _head_fits(self, found: Found, room: OutputRoom | None) -> bool:
        head = self.waiting[0]
        if self._pool.pages_for(head.prompt_tokens) - found.held_pages > self._pool.free_pages:
            return False
        return room is None or room.take(head, head.prompt_tokens, found)

    def number(self, sequence: Sequence) -> None:
        """Note that a sequence is the latest to be let in."""
        self._admitted += 1
        sequence.admission_order = self._admitted

    def _start(self, sequence: Sequence, found: Found) -> None:
        self.under_way = sequence
        self.number(sequence)
        sequence.prompt_pages = pages = self._pool.claim(sequence, found)
        most = sequence.prompt_tokens - 1  # one token at least is computed, to get the next
        sequence.prefilled_tokens = min(pages * self._pool.page_tokens, most)
        self._started.append(sequence)

    def _continue(self, sequence: Sequence, budget_tokens: int, chosen: list[Chunk]) -> None:
        tokens = min(budget_tokens, sequence.remaining_input_tokens)
        pages = self._pool.pages_for(sequence.prefilled_tokens + tokens)
        if not self._pool.allocate(max(pages - sequence.prompt_pages, 0)):
            self.drop_under_way(first=True)
            return
        sequence.prompt_pages = max(pages, sequence.prompt_pages)
        chosen.append(Chunk(sequence, tokens, sequence.prefilled_tokens))
        sequence.prefilled_tokens += tokens
        if self._stores_scheduled:
            self._pool.store(sequence, sequence.prefilled_tokens)
        if not sequence.remaining_input_tokens:
            self.under_way = None

    def drop_under_way(self, *, first: bool) -> None:
        """Take the pages of the prompt that is under way and let it wait again."""
        sequence = self.under_way
        assert sequence is not None
        kept_tokens = sequence.prefilled_tokens if self._policy.keeps == "all" else 0
        self._pool.give_back(sequence, sequence.prompt_pages, kept_tokens, comes_back=True)
        sequence.retractions += 1
        self.under_way = None
        sequence.prompt_pages = 0
        self.put_back(sequence, 0, first=first)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out, wherever in the queue it is; tell whether it was there."""
        if self.under_way is sequence:
            self._pool.give_back(sequence, sequence.prompt_pages)
            sequence.prompt_pages = 0
            self.under_way = None
            return True
        if sequence in self.waiting:
            self._pool.abandon(sequence)
            self.waiting.remove(sequence)
            return True
        return False

    def take_started(self) -> list[Sequence]:
        """Return the prompts that started since the last call."""
        started = self._started
        if not started:
            return []  # not the list that later ones are put into
        self._started = []
        return started


class OutputRoom:
    """The tokens that a step may still promise, where prompts are charged their outputs."""

    def __init__(self, pool: PagePool, owed_tokens: float, output_most: int) -> None:
        """Start from the free pages less what the running requests are expected to write."""
        self._left_tokens = pool.free_tokens - owed_tokens
        self._output_most = output_most
        self._page_tokens = pool.page_tokens
        self.empty = pool.used_pages == 0

    def take(self, sequence: Sequence, prompt_tokens: int, found: Found) -> bool:
        """Charge a prompt, its outputs and a page; an empty pool takes its first in any case.

        Cached pages that nobody holds were counted as free: the prompt takes them.
        """
        computed = prompt_tokens - found.pages * self._page_tokens
        promised = self._outputs(sequence) + self._page_tokens
        left_tokens = self._left_tokens - found.idle_pages * self._page_tokens
        if computed + promised >= left_tokens and not self.empty:
            return False
        self._left_tokens = left_tokens - (self._whole_pages(computed) + promised)
        self.empty = False
        return True

    def charge(self, chunk: Chunk) -> None:
        """Charge a chunk of the prompt under way, and with its last one the outputs."""
        self._left_tokens -= self._whole_pages(chunk.tokens) + self._page_tokens
        if chunk.is_last:
            self._left_tokens -= self._outputs(chunk.sequence)

    def _outputs(self, sequence: Sequence) -> int:
        left = sequence.request.max_new_tokens - sequence.generated_tokens
        return min(left, self._output_most)

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens) * self._page_tokens


class NewTokenRatio:
    """The share of their remaining tokens that running requests are expected to write.

    It falls with every decode step in which nobody was retracted, and is set from the requests
    at hand when somebody is (SGLang 0.5.23, `schedule_batch.py`).
    """

    def __init__(self, start: float, least: float, decay_steps: int) -> None:
        self._start = self._from = start
        self._least = least
        self._decay_per_step = (start - least) / decay_steps
        self._steps = 0

    @property
    def value(self) -> float:
        """The ratio now."""
        return max(self._from - self._decay_per_step * max(self._steps, 0), self._least)

    def decoded(self, steps: int) -> None:
        """Take in decode steps; that of a retraction does not count."""
        self._steps += steps

    def retracted(self, generated: int, allowed: int, requests: int, ahead_steps: int) -> None:
        """Set the ratio from the requests that stay."""
        self._from = min(1.0, (generated + ahead_steps * requests) / (allowed + 1))
        self._steps = -1  # the step at hand is taken in next

    def reset(self) -> None:
        """Start anew, as an idle engine does."""
        self._from, self._steps = self._start, 0


def prompt_chunks(chunks: list[Chunk]) -> tuple[PromptChunk, ...]:
    """Return the chunks as the cost model sees them."""
    if not chunks:
        return ()
    return tuple(PromptChunk(chunk.tokens, chunk.past_tokens) for chunk in chunks)


def commit_chunks(chunks: list[Chunk]) -> list[Sequence]:
    """Take in that the chunks were computed; return the prompts that have one more token by it."""
    complete = []
    for chunk in chunks:
        sequence = chunk.sequence
        sequence.computed_tokens += chunk.tokens
        if chunk.is_last:
            sequence.generated_tokens += 1
            complete.append(sequence)
    return complete
