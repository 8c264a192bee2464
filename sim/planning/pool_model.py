"""One pool configuration in figures: what a prompt and a step of decoding take, what fits.

A handful of steps is asked of the predictor that a simulation would ask before every step; what is
between them is interpolated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import FloatArray, ParallelLayout, PromptChunk, Step

BATCHES = np.array([1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024], np.float64)
_CHUNK_SIZES = (16, 64, 256, 1024, 2048, 4096, 8192, 16384)
_PAST_TOKENS = 32_768  # at which the attention to what is cached is timed
_NOBODY = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """What prompts take on an instance: chunk by chunk, alone or with every rank busy.

    `[sizes]` over `chunk_sizes` tokens of a rank: `alone_s` with the other attention-DP ranks idle,
    `busy_s` with all of them at work; `past_s` what each cached token adds to it.
    """

    chunk_tokens: int  # of a rank
    ranks: int
    stages: int
    chunk_sizes: FloatArray
    alone_s: FloatArray
    busy_s: FloatArray
    past_s: FloatArray

    @classmethod
    def measured(
        cls, executor: StepPredictor, layout: ParallelLayout, chunk_tokens: int
    ) -> PromptTimes:
        """Time chunks of a few sizes, up to the largest that the engine takes."""
        sizes = [size for size in _CHUNK_SIZES if size < chunk_tokens] + [chunk_tokens]
        ranks = layout.attention_dp
        alone = [_chunk_s(executor, size, 0, ranks, 1) for size in sizes]
        busy = alone
        if ranks > 1:
            busy = [_chunk_s(executor, size, 0, ranks, ranks) for size in sizes]
        later = [_chunk_s(executor, size, _PAST_TOKENS, ranks, 1) for size in sizes]
        alone_s, busy_s = np.asarray(alone), np.asarray(busy)
        past_s = np.maximum(np.asarray(later) - alone_s, 0.0) / _PAST_TOKENS
        sizes_array = np.asarray(sizes, dtype=np.float64)
        return cls(chunk_tokens, ranks, layout.pp, sizes_array, alone_s, busy_s, past_s)

    def alone(self, new_tokens: FloatArray, past_tokens: FloatArray) -> FloatArray:
        """Return what prompts take that meet nobody, of so many new tokens behind cached ones."""
        full, rest = np.divmod(new_tokens, self.chunk_tokens)
        whole_s = np.where(rest > 0, self._at(self.alone_s, rest), 0.0)
        return np.asarray(full * self.alone_s[-1] + whole_s + self._past(new_tokens, past_tokens))

    def shared(self, new_tokens: FloatArray, past_tokens: FloatArray) -> FloatArray:
        """Return the time that prompts take of an instance which always has others to run.

        Steps are full then, on every rank, and every pipeline stage has one.
        """
        per_token_s = self.busy_s[-1] / self.chunk_tokens
        taken_s = new_tokens * per_token_s + self._past(new_tokens, past_tokens)
        return np.asarray(taken_s / self.stages)

    def _past(self, new_tokens: FloatArray, past_tokens: FloatArray) -> FloatArray:
        """Return what reading the tokens before each chunk takes, all chunks together."""
        full, rest = np.divmod(new_tokens, self.chunk_tokens)
        before = past_tokens * full + self.chunk_tokens * full * (full - 1) / 2
        last = past_tokens + self.chunk_tokens * full
        rest_s = np.where(rest > 0, self._at(self.past_s, rest) * last, 0.0)
        return np.asarray(self.past_s[-1] * before + rest_s)

    def _at(self, table_s: FloatArray, tokens: FloatArray) -> FloatArray:
        return np.interp(tokens, self.chunk_sizes, table_s)


def _chunk_s(executor: StepPredictor, tokens: int, past: int, ranks: int, busy: int) -> float:
    chunk = (PromptChunk(tokens, past),)
    step = Step(_NOBODY, 0.0, chunk)
    if ranks > 1:
        idle = Step(_NOBODY, 0.0, ())
        parts = tuple(step if rank < busy else idle for rank in range(ranks))
        step = Step(_NOBODY, 0.0, chunk * busy, ranks=parts)
    return float(executor.run(step, 1)[0])


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """What a decode step takes `[BATCHES]` by requests of an instance, all at one context.

    Under pipeline parallelism a step is that of a micro-batch, and `stages` of them are under way.
    """

    step_s: FloatArray
    tokens_per_step: float  # committed per request, more than one when speculating

    @classmethod
    def measured(
        cls,
        executor: StepPredictor,
        layout: ParallelLayout,
        context_tokens: float,
        query_tokens: int = 1,
        tokens_per_step: float = 1.0,
    ) -> DecodeTimes:
        """Time steps of a few batch sizes at a mean context."""
        steps_s = []
        for batch in BATCHES:
            requests = max(1, round(float(batch) / layout.pp))
            contexts = np.full(requests, round(context_tokens), dtype=np.int64)
            step = Step(contexts, requests * context_tokens, (), None, query_tokens)
            steps_s.append(float(executor.run(step, 1)[0]))
        return cls(np.maximum.accumulate(steps_s), tokens_per_step)
