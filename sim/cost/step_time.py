"""From a step to its seconds, whatever the times of single operators come from.

The layout is handled here: the rows that each block sees, the slowest attention-DP rank, padding to
captured batch sizes. docs/layouts.md says how each layout is charged. A step passes all pipeline
stages one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.domain import FloatArray, IntArray, ParallelLayout, PromptChunk, Step

RAMP = np.arange(8192, dtype=np.float64)


class Rows(NamedTuple):
    """Rows that the matrix products of one pass work on.

    What is split over more ranks than attention is given the `gathered` rows of all attention-DP
    ranks, the rest those of the fullest `rank`; of them so many `outputs` go through the head.
    Experts get the real `tokens`: rows of padding are all alike and reach few experts more.
    `in_graph`: the pass is a captured one, of decoding requests alone.
    """

    tokens: int
    rank: float
    gathered: float
    rank_outputs: float
    gathered_outputs: float
    in_graph: bool


class Decoding(NamedTuple):
    """The decoding requests of one attention-DP rank.

    `share`: of `contexts` `[requests of the instance]` that the rank has; their sum and growth per
    step are the rank's own.
    """

    requests: float
    context_sum: float
    growth: float
    contexts: IntArray
    share: float
    query_tokens: int


class StepPredictor(Protocol):
    """Knows how long steps take, and of what their time is made."""

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions `[max_steps]`."""

    def times(self, step: Step) -> list[OperatorTime]:
        """Return every operator of one step that is spread evenly over the attention-DP ranks."""


class StepExecutor(ABC):
    """Predict the durations of steps of one instance; cheap enough to ask before every step.

    A step of decoding requests alone is padded to the next of `captured_sizes` (requests of one
    attention-DP rank, rising), if there is one. A step without `ranks` is taken as spread evenly
    over the attention-DP ranks; with them the slowest sets the time of what each does alone.
    """

    def __init__(self, layout: ParallelLayout, captured_sizes: tuple[int, ...]) -> None:
        self.layout = layout
        self._captured_sizes = captured_sizes
        self._captured_most = captured_sizes[-1] if captured_sizes else 0

    @abstractmethod
    def products_s(self, rows: Rows) -> float:
        """Return the time of what depends on rows alone: products, collectives, small kernels."""

    @abstractmethod
    def prefill_s(self, chunks: Sequence[PromptChunk]) -> float:
        """Return the time of the attention of prompt chunks on one rank."""

    @abstractmethod
    def decode_s(self, decoding: Decoding, ramp: FloatArray) -> FloatArray:
        """Return the time of one rank's attention in the steps of `ramp`, counted from 0."""

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions `[max_steps]`."""
        if step.ranks:
            return self._run_ranks(step, max_steps)
        ranks = self.layout.attention_dp
        decodes, chunks = len(step.decode_context_tokens), step.prefill_chunks
        fixed_s = self.products_s(self.rows_of(step))
        if chunks:
            fixed_s += self.prefill_s(chunks) / ranks
        if not decodes:
            return np.array([fixed_s])
        return self.decode_s(self.decoding_of(step), RAMP[:max_steps]) + fixed_s

    @abstractmethod
    def times(self, step: Step) -> list[OperatorTime]:
        """Return every operator of one step that is spread evenly over the attention-DP ranks."""

    def decoding_of(self, step: Step) -> Decoding:
        """Return the decoding requests of one rank of a step that is spread evenly over them."""
        ranks = self.layout.attention_dp
        return Decoding(
            len(step.decode_context_tokens) / ranks,
            step.decode_context_sum / ranks,
            growth_of(step) / ranks,
            step.decode_context_tokens,
            1 / ranks,
            step.query_tokens,
        )

    def rows_of(self, step: Step) -> Rows:
        """Return the rows of a step that is spread evenly over the ranks."""
        ranks, query = self.layout.attention_dp, step.query_tokens
        decodes, chunks = len(step.decode_context_tokens), step.prefill_chunks
        if not chunks:
            return self._decode_rows(decodes, decodes / ranks, query)
        rows = decodes * query + sum(chunk.new_tokens for chunk in chunks)
        outputs = decodes * query + len(chunks)
        return Rows(rows, rows / ranks, rows, outputs / ranks, outputs, in_graph=False)

    def _decode_rows(self, requests: int, rank_requests: float, query: int) -> Rows:
        """Return the rows of a step without prompt chunks, padded.

        Verification scores every token, so each goes through the head.
        """
        in_graph = rank_requests <= self._captured_most
        if in_graph:
            rank_requests = self._captured_sizes[bisect_left(self._captured_sizes, rank_requests)]
        rows = rank_requests * query
        gathered = rows * self.layout.attention_dp
        return Rows(requests * query, rows, gathered, rows, gathered, in_graph)

    # --- attention-DP ranks in lockstep ---------------------------------------------------------

    def _run_ranks(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds `[max_steps]` of a step whose ranks wait for each other in each layer.

        What is split over more ranks than attention works on the rows of all ranks: padded to those
        of the fullest, or their sum when there are prompt chunks (SGLang's `DpPaddingMode`).
        """
        query, ranks = step.query_tokens, step.ranks
        distinct = list({id(rank): rank for rank in ranks}.values())  # others take as long
        if step.prefill_chunks:
            rows = self._mixed_rank_rows(ranks, query)
            alone_s = np.array([self.prefill_s(rank.prefill_chunks) for rank in distinct])
        else:
            fullest = max(len(rank.decode_context_tokens) for rank in ranks)
            rows = self._decode_rows(step.decode_requests, fullest, query)
            alone_s = np.zeros(len(distinct))
        fixed_s = self.products_s(rows)
        if not step.decode_requests:
            return np.full(1, fixed_s + alone_s.max())
        decode_s = self._ranks_decode_s(distinct, query, RAMP[:max_steps])
        slowest: FloatArray = (alone_s[:, None] + decode_s).max(axis=0)
        return fixed_s + slowest

    def _mixed_rank_rows(self, ranks: tuple[Step, ...], query: int) -> Rows:
        decoding = [len(rank.decode_context_tokens) * query for rank in ranks]
        rows = [
            tokens + sum(chunk.new_tokens for chunk in rank.prefill_chunks)
            for tokens, rank in zip(decoding, ranks, strict=True)
        ]
        outputs = [
            tokens + len(rank.prefill_chunks) for tokens, rank in zip(decoding, ranks, strict=True)
        ]
        return Rows(sum(rows), max(rows), sum(rows), max(outputs), sum(outputs), in_graph=False)

    def _ranks_decode_s(self, ranks: Sequence[Step], query: int, ramp: FloatArray) -> FloatArray:
        """Return the seconds `[ranks, steps]` of each rank's attention over its own requests."""
        seconds = np.zeros((len(ranks), len(ramp)))
        for index, rank in enumerate(ranks):
            requests = len(rank.decode_context_tokens)
            if requests:
                decoding = Decoding(
                    requests,
                    rank.decode_context_sum,
                    growth_of(rank),
                    rank.decode_context_tokens,
                    1.0,
                    query,
                )
                seconds[index] = self.decode_s(decoding, ramp)
        return seconds


def growth_of(step: Step) -> float:
    """Return the tokens that all contexts of a step grow by from one step to the next."""
    growth = step.decode_context_growth
    return float(len(step.decode_context_tokens)) if growth is None else growth
