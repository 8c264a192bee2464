"""How many page entries the checks of a pool compare: from counts alone, faults or not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.sim.domain import Coverage, IntArray, IntegritySpec, Step


@dataclass(slots=True)
class CheckCount:
    """Checks that ran, page entries that they compared, and decode steps that none looked at."""

    runs: int = 0
    entries: int = 0
    unchecked_steps: int = 0

    def add(self, entries: int, runs: int = 1) -> None:
        """Count checks of so many entries together."""
        self.runs += runs
        self.entries += entries

    def merge(self, other: CheckCount) -> None:
        """Add those of another pool."""
        self.runs += other.runs
        self.entries += other.entries
        self.unchecked_steps += other.unchecked_steps


class CheckTally:
    """Counts the checks of one instance, step by step or segment by segment alike.

    A decode step reads every page of every request in it and writes one token of each; a prompt
    chunk reads the pages before it and writes its own.
    """

    def __init__(
        self, spec: IntegritySpec, page_tokens: int, extra_tokens: int, count: CheckCount
    ) -> None:
        """Count into `count`."""
        self._spec = spec
        self._page_tokens = page_tokens
        self._extra_tokens = extra_tokens
        self._count = count
        self._decode_steps = 0  # so far

    def take_in(self, step: Step, steps: int, load_tokens: int) -> None:
        """Count the checks of a step that was done `steps` times."""
        spec, count = self._spec, self._count
        if step.decode_requests:
            self._decoded(step, steps)
        for chunk in step.prefill_chunks:
            if chunk.past_tokens and spec.checks(Coverage.PREFIX):
                count.add(self._pages(chunk.past_tokens))
            if spec.checks(Coverage.WRITER):
                first = (chunk.past_tokens + self._extra_tokens) // self._page_tokens
                count.add(self._pages(chunk.past_tokens + chunk.new_tokens) - first)
        if load_tokens and spec.checks(Coverage.TIER):
            count.add(-(-load_tokens // self._page_tokens))

    def _pages(self, tokens: int) -> int:
        return -(-(tokens + self._extra_tokens) // self._page_tokens)

    def _decoded(self, step: Step, steps: int) -> None:
        spec, count, first = self._spec, self._count, self._decode_steps
        self._decode_steps += steps
        if spec.checks(Coverage.WRITER):
            count.add(steps * step.decode_requests * step.query_tokens, steps)
        if not spec.checks(Coverage.DECODE):
            return
        every, growth = spec.every_steps, step.decode_context_growth
        if every == 1 and growth is None:
            first_tokens = step.decode_context_tokens + self._extra_tokens
            before = _page_sum(first_tokens - 1, self._page_tokens)
            after = _page_sum(first_tokens - 1 + steps, self._page_tokens)
            count.add(int((after - before).sum()), steps)
            return
        checked = np.arange(-first % every, steps, every, dtype=np.float64)
        count.unchecked_steps += steps - len(checked)
        if not len(checked):
            return
        rate = 1.0 if growth is None else growth / step.decode_requests
        contexts = step.decode_context_tokens.astype(np.float64)
        tokens = np.floor(contexts[None, :] + rate * checked[:, None] + 1e-6)
        pages = np.ceil((tokens + self._extra_tokens) / self._page_tokens)
        count.add(int(pages.sum()), len(checked))


def _page_sum(tokens: IntArray, page_tokens: int) -> IntArray:
    """Return the sum of the pages that 1, 2, ... so many tokens fill."""
    full, rest = np.divmod(tokens, page_tokens)
    total: IntArray = page_tokens * full * (full + 1) // 2 + rest * (full + 1)
    return total
