"""vLLM 0.19's scheduler, as plainly as it can be written: block by block, step by step.

It follows `v1/core/sched/scheduler.py`, `v1/core/kv_cache_manager.py`, `v1/core/block_pool.py` and
the batch queue of `v1/engine/core.py` as released with 0.19.0, for one model with full attention
and no speculation. It exists to check the simulator's scheduler, and has no other use.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.truth.vllm_log import BLOCK_TOKENS, LoggedRequest, VllmRun
from tonnage.sim.domain import FloatArray


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that can be switched off, to see which of them matter; all on is vLLM."""

    token_budget: int
    max_num_seqs: int
    blocks: int
    plans_ahead: bool = True  # async scheduling
    reuses_blocks: bool = True  # prefix caching, of a preempted request's own blocks
    frees_tail_first: bool = True
    reserves_full_prompt: bool = True
    requeues_at_head: bool = True
    watermark_blocks: int = 0

    @classmethod
    def of(cls, run: VllmRun) -> Rules:
        """Return those of a logged run; unknown memory is taken to be more than it ever uses."""
        return cls(run.token_budget, run.max_num_seqs, run.usable_blocks or 20_000)


@dataclass(slots=True, eq=False)
class Sequence:
    """`computed`: tokens whose KV is written or will be by planned steps; `in_flight`: tokens that
    planned steps will give."""

    index: int
    prompt_tokens: int
    output_tokens: int
    generated: int = 0
    computed: int = 0
    in_flight: int = 0
    blocks: list[int] = field(default_factory=list)
    hashed_blocks: int = 0
    running: bool = False
    preemptions: int = 0
    first_plan: int | None = None
    first_step: int | None = None
    last_step: int | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated


Batch = dict[Sequence, int]  # tokens of the step, by sequence


class Blocks:
    """The pool: free blocks in order of eviction, and what each block still holds."""

    def __init__(self, count: int) -> None:
        self.free = OrderedDict.fromkeys(range(count))
        self._count = count
        self._holds: dict[int, tuple[int, int]] = {}  # block: (sequence, block of the sequence)
        self._found: dict[tuple[int, int], list[int]] = {}

    @property
    def used_share(self) -> float:
        return 1 - len(self.free) / self._count

    def take(self, count: int) -> list[int]:
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            if block in self._holds:
                self._found[self._holds.pop(block)].remove(block)
        return taken

    def put_back(self, blocks: Iterable[int]) -> None:
        self.free.update(dict.fromkeys(blocks))

    def remember(self, block: int, key: tuple[int, int]) -> None:
        self._holds[block] = key
        self._found.setdefault(key, []).append(block)

    def find(self, key: tuple[int, int]) -> int | None:
        return next(iter(self._found.get(key, [])), None)


class Scheduler:
    """`plan` is vLLM's `schedule`, `update` its `update_from_output`."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.pool = Blocks(rules.blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.recomputed_tokens = 0

    def plan(self, step: int) -> tuple[Batch, list[Sequence]]:
        """Return the tokens to compute, and the sequences that then get a token."""
        batch: Batch = {}
        if not self._plan_running(batch):
            self._plan_waiting(batch, step)
        sampled = []
        for sequence, tokens in batch.items():
            sequence.computed += tokens
            if sequence.computed == sequence.tokens + sequence.in_flight:
                sequence.in_flight += 1
                sampled.append(sequence)
        return batch, sampled

    def _plan_running(self, batch: Batch) -> bool:
        """Plan the running sequences; return whether any was preempted."""
        budget, position, preempted = self.rules.token_budget, 0, False
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            wanted = sequence.tokens + sequence.in_flight - sequence.computed
            if sequence.generated + sequence.in_flight == sequence.output_tokens or not wanted:
                position += 1  # its last token is on its way
                continue
            tokens = min(wanted, budget)
            while not self._allocate(sequence, tokens):
                preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is sequence:
                    return True
            batch[sequence] = tokens
            budget -= tokens
            position += 1
        return preempted

    def _plan_waiting(self, batch: Batch, step: int) -> None:
        budget = self.rules.token_budget - sum(batch.values())
        while self.waiting and budget > 0 and len(self.running) < self.rules.max_num_seqs:
            sequence = self.waiting[0]
            reused = self._reusable(sequence)
            tokens = min(sequence.tokens - len(reused) * BLOCK_TOKENS, budget)
            fits = sequence.tokens
            if not self.rules.reserves_full_prompt:
                fits = len(reused) * BLOCK_TOKENS + tokens
            if _blocks_of(fits) + self.rules.watermark_blocks > len(self.pool.free):
                return
            for block in reused:
                del self.pool.free[block]
            sequence.blocks = reused
            sequence.hashed_blocks = len(reused)
            sequence.computed = len(reused) * BLOCK_TOKENS
            assert self._allocate(sequence, tokens)
            self.running.append(self.waiting.popleft())
            sequence.running = True
            if sequence.first_plan is None:
                sequence.first_plan = step
            else:
                self.recomputed_tokens += sequence.tokens - sequence.computed
            batch[sequence] = tokens
            budget -= tokens

    def _reusable(self, sequence: Sequence) -> list[int]:
        """Return the unbroken run of its first blocks that nobody has taken.

        The block of its last token is never reused: a step must compute at least one token.
        """
        found: list[int] = []
        if self.rules.reuses_blocks:
            for index in range((sequence.tokens - 1) // BLOCK_TOKENS):
                block = self.pool.find((sequence.index, index))
                if block is None:
                    break
                found.append(block)
        return found

    def _allocate(self, sequence: Sequence, tokens: int) -> bool:
        needed = _blocks_of(sequence.computed + tokens) - len(sequence.blocks)
        if needed > len(self.pool.free):
            return False
        if needed > 0:
            sequence.blocks += self.pool.take(needed)
        self._hash_full_blocks(sequence, min(sequence.computed + tokens, sequence.tokens))
        return True

    def _hash_full_blocks(self, sequence: Sequence, known_tokens: int) -> None:
        for index in range(sequence.hashed_blocks, known_tokens // BLOCK_TOKENS):
            self.pool.remember(sequence.blocks[index], (sequence.index, index))
            sequence.hashed_blocks = index + 1

    def _free(self, sequence: Sequence) -> None:
        blocks = sequence.blocks
        self.pool.put_back(reversed(blocks) if self.rules.frees_tail_first else blocks)
        sequence.blocks = []
        sequence.hashed_blocks = 0

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.running = False
        sequence.computed = 0
        sequence.preemptions += 1
        if self.rules.requeues_at_head:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def update(self, sampled: list[Sequence], step: int) -> None:
        """Take in the tokens of a step that has ended."""
        for sequence in sampled:
            sequence.generated += 1
            sequence.in_flight -= 1
            if sequence.first_step is None:
                sequence.first_step = step
            if sequence.generated == sequence.output_tokens:
                sequence.last_step = step
                (self.running if sequence.running else self.waiting).remove(sequence)
                self._free(sequence)
            elif sequence.running:
                self._hash_full_blocks(sequence, sequence.computed - sequence.in_flight)


def _blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True)
class Replay:
    """What happened: per update the time, counts and share of blocks; per step its batch."""

    updates: list[tuple[float, int, int, float, int]] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)  # sequences, tokens
    sequences: list[Sequence] = field(default_factory=list)
    recomputed_tokens: int = 0

    def column(self, index: int) -> FloatArray:
        """Return one column of the updates: time, running, waiting, used share, tokens."""
        return np.array([update[index] for update in self.updates], dtype=float)

    def at_samples(self, run: VllmRun, index: int) -> FloatArray:
        """Return, for each second of the log, a column's last value before its end, else 0."""
        last = np.searchsorted(self.column(0), run.sample_ends_s) - 1
        return np.where(last < 0, 0.0, self.column(index)[np.maximum(last, 0)])

    def tokens_per_second(self, run: VllmRun) -> FloatArray:
        """Return the tokens given in each second of the log."""
        edges = np.concatenate([[run.sample_ends_s[0] - 1], run.sample_ends_s])
        return np.histogram(self.column(0), edges, weights=self.column(4))[0]


def replay(requests: list[LoggedRequest], step_s: FloatArray, rules: Rules) -> Replay:
    """Run requests through the scheduler with given durations of the steps, in order.

    With `plans_ahead` two batches are under way: when a step ends, its tokens are taken in, then
    arrivals, and the step after the next is planned. Statistics are read between the two.
    """
    scheduler = Scheduler(rules)
    result = Replay(sequences=[_sequence(i, request) for i, request in enumerate(requests)])
    arriving = deque(zip(requests, result.sequences, strict=True))
    under_way: deque[tuple[list[Sequence], int, float]] = deque()
    durations = _durations(step_s)
    now_s = idle_from_s = arriving[0][0].arrival_s
    while arriving or scheduler.waiting or scheduler.running:
        if not (scheduler.waiting or scheduler.running):
            now_s = max(now_s, arriving[0][0].arrival_s)
        while arriving and arriving[0][0].arrival_s <= now_s:
            scheduler.waiting.append(arriving.popleft()[1])
        step = len(result.batches)
        batch, sampled = scheduler.plan(step)
        if batch:
            idle_from_s = max(idle_from_s, now_s) + next(durations)
            under_way.append((sampled, step, idle_from_s))
            result.batches.append((len(batch), sum(batch.values())))
            if rules.plans_ahead and len(under_way) < 2:
                continue
        sampled, step, now_s = under_way.popleft()
        scheduler.update(sampled, step)
        counts = len(scheduler.running), len(scheduler.waiting)
        result.updates.append((now_s, *counts, scheduler.pool.used_share, len(sampled)))
    result.recomputed_tokens = scheduler.recomputed_tokens
    return result


def _sequence(index: int, request: LoggedRequest) -> Sequence:
    return Sequence(index, request.input_tokens, request.output_tokens)


def _durations(step_s: FloatArray) -> Iterator[float]:
    """Yield the durations; a replay that needs more steps than the log repeats the last one."""
    yield from map(float, step_s)
    while True:
        yield float(step_s[-1])
