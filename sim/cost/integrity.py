"""What watching the KV adds to a step, item by item: page tags in one batched check, or canaries.

A check of page tags (`kernels/ops/tag_check.py`) compares, for every page that a step reads, the
row of the page table on the device and the live tag with the request's ledger. Every rank of an
instance checks its own table: page tables and ledgers are the same on all tensor-parallel ranks,
each on its own device, and an all-reduce makes the ranks agree on the verdict before the host acts.

- *in a graph*: kernel, agreement, a mask for the slots of bad requests and a copy of the verdict
  are nodes at the head of the captured step; attention waits for them, and the host reads the
  verdict with the tokens that it waits for anyway.
- *launched*: the host launches the check, waits for the verdict and only then launches the step;
  its launches and its own work are then in the way of the step. So are steps with prompts.
- *overlapped*: all of it runs beside the step; what is left is a look at a verdict that is there,
  the bandwidth that the check takes from the step, and the new pages' ledger entries on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from tonnage.sim.cost.check_prices import ENTRY_BYTES, CheckPrices, Price
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.domain import (
    Coverage,
    FloatArray,
    GqaAttention,
    IntegritySpec,
    ModelSpec,
    ParallelLayout,
)

_RECORD_BYTES = 32  # of a canary: token, position, chain hash, hash of the KV
_SLOT_BYTES = 12  # what a verifier reads beside it: the slot's number and the token
_PASS_KERNELS = 6  # plan, verify and write, before and after the pass


class Watched(NamedTuple):
    """What one rank looks at before it reads, in the steps of a segment.

    `contexts` `[steps]`: tokens of all decoding requests; `growth` of them are new in every step.
    `past_tokens`, `new_tokens`: KV that prompt chunks read and write. `captured`: the step runs
    as a graph.
    """

    requests: float
    contexts: FloatArray
    growth: float
    query_tokens: int
    past_tokens: float
    new_tokens: float
    captured: bool


class StepCheck(Protocol):
    """Knows what watching the KV adds to steps."""

    @property
    def prices(self) -> CheckPrices:
        """What the check is made of, priced."""

    def priced(self, prices: CheckPrices) -> StepCheck:
        """Return the same check at other prices."""

    def seconds(self, watched: Watched) -> FloatArray:
        """Return the seconds added to each step `[steps]`."""

    def items(self, watched: Watched) -> list[OperatorTime]:
        """Return every item of the first of the steps, those that run beside it too."""


def step_check(
    spec: IntegritySpec,
    model: ModelSpec,
    layout: ParallelLayout,
    page_tokens: int,
    prices: CheckPrices,
) -> StepCheck | None:
    """Return what a pool's tracker adds to its steps, None where it adds nothing."""
    if spec.tracker == "batched":
        table_pages = model.max_context_tokens / page_tokens / layout.dcp
        return TagCheck(spec, layout, page_tokens, table_pages, prices)
    if spec.tracker == "canary":
        has_values = any(isinstance(layer.attention, GqaAttention) for layer in model.layers)
        return Canary(layout, 4 if has_values else 2, prices)
    return None


@dataclass(frozen=True, slots=True)
class TagCheck:
    """One batched comparison of page tags per step.

    `table_pages`: the width of a row of the page table, that of the longest context; above
    `SINGLE_PAGES` the results are zeroed by two more kernels. With `every_steps` n, the mean of n
    steps is charged to each; a step with prompts is always checked.
    """

    spec: IntegritySpec
    layout: ParallelLayout
    page_tokens: int
    table_pages: float
    prices: CheckPrices
    _graph_s: float = field(init=False)  # what a check takes beside its kernel
    _launched_s: float = field(init=False)

    def __post_init__(self) -> None:
        for name, captured in (("_graph_s", True), ("_launched_s", False)):
            seconds = sum(one.seconds for one in self._fixed(captured=captured))
            object.__setattr__(self, name, seconds)

    def priced(self, prices: CheckPrices) -> TagCheck:
        """Return the same check at other prices."""
        return replace(self, prices=prices)

    # --- what is looked at ----------------------------------------------------------------------

    def entries(self, watched: Watched) -> FloatArray:
        """Return the page-table entries compared in each step, on average over page borders.

        A context of c tokens holds ceil(c / P) pages: c / P + (P - 1) / 2P where c is anywhere in a
        page. A prompt chunk's past is read whether it was cached or computed a step before.
        """
        per_token, always = self._entry_terms(watched)
        found: FloatArray = watched.contexts * per_token + always
        return found

    def _entry_terms(self, watched: Watched) -> tuple[float, float]:
        """Return the entries per token of context, and those however long contexts are."""
        size, covers, dcp = self.page_tokens, self.spec.covers, self.layout.dcp
        per_token, always = 0.0, 0.0
        if Coverage.DECODE in covers:
            per_token = 1.0 / (size * dcp)
            always = watched.requests * (size - 1) / (2 * size * dcp)
        if Coverage.PREFIX in covers:
            always += watched.past_tokens / (size * dcp)
        if Coverage.WRITER in covers:
            always += watched.requests * (1 + (watched.query_tokens - 1) / size)
            always += watched.new_tokens / size
        return per_token, always

    def _row_pages(self, watched: Watched) -> FloatArray:
        """Return the pages of a mean row, which one program walks."""
        size = self.page_tokens * self.layout.dcp
        if not watched.requests:
            return np.full(len(watched.contexts), watched.past_tokens / size)
        found: FloatArray = watched.contexts / (watched.requests * size)
        return found

    def _new_pages(self, watched: Watched) -> tuple[float, float]:
        """Return the pages given in a step, and the share of steps in which any is."""
        size = self.page_tokens
        pages = (watched.growth + watched.new_tokens) / size
        if watched.new_tokens:
            return pages, 1.0
        if not watched.requests:
            return 0.0, 0.0
        each = min(watched.growth / watched.requests / size, 1.0)
        return pages, 1.0 - (1.0 - each) ** watched.requests

    # --- seconds --------------------------------------------------------------------------------

    def seconds(self, watched: Watched) -> FloatArray:
        """Return the seconds added to each step `[steps]`; asked at every step, so in numbers."""
        prices, weight = self.prices, self._share(watched) * self.layout.pp
        per_token, always = self._entry_terms(watched)
        base_s = self._kept_s(watched)
        if not (per_token * watched.contexts[0] + always):
            return np.full(len(watched.contexts), base_s)
        base_s += self._share(watched) * (self._graph_s if watched.captured else self._launched_s)
        if prices.rows is not None:
            return weight * self._measured_s(watched) + base_s
        if self.spec.overlapped:
            start_s, block_s, entry_s = 0.0, 0.0, ENTRY_BYTES * prices.byte_s.seconds
        else:
            start_s, block_s, entry_s = prices.form
        found: FloatArray = watched.contexts * (weight * entry_s * per_token)
        found += base_s + weight * (start_s + entry_s * always)
        if block_s:
            found += weight * block_s * prices.form.blocks(self._row_pages(watched))
        return found

    def _measured_s(self, watched: Watched) -> FloatArray:
        """Return the seconds of one kernel where rows of it were measured, or what it leaves."""
        entries = self.entries(watched)
        seconds = self.prices.kernel_s(entries, self._row_pages(watched))
        if not self.spec.overlapped:
            return seconds
        taken: FloatArray = np.minimum(seconds, ENTRY_BYTES * self.prices.byte_s.seconds * entries)
        return taken

    def _kept_s(self, watched: Watched) -> float:
        """Return the seconds of `_bookkeeping`."""
        pages, share = self._new_pages(watched)
        if not pages:
            return 0.0
        prices = self.prices
        host_s = share * prices.ledger.seconds + pages * prices.ledger_page.seconds
        if self._waits_for_host(watched.captured):
            return host_s + share * prices.launch.seconds
        return share * prices.node.seconds + host_s * prices.host_waited.seconds

    def _waits_for_host(self, captured: bool) -> bool:
        """Say whether steps wait for the host, which else runs ahead of the device."""
        return not (self.spec.overlapped or (self.spec.in_graph and captured))

    def items(self, watched: Watched) -> list[OperatorTime]:
        """Return every item of the first of the steps, those that run beside it too."""
        kept = list(self._bookkeeping(watched))
        entries = float(self.entries(watched)[0])
        if not entries:
            return kept
        share = self._share(watched)
        kernel = self._kernel(entries, float(self._row_pages(watched)[0]))
        fixed = self._fixed(captured=watched.captured)
        found = [one.scaled(share) for one in (*kernel, *fixed)]
        return [*found, *kept]

    def _share(self, watched: Watched) -> float:
        """Return the share of such steps that are checked."""
        has_prompts = watched.new_tokens > 0
        return 1.0 if has_prompts else 1.0 / self.spec.every_steps

    def _kernel(self, entries: float, row_pages: float) -> Iterator[OperatorTime]:
        moved = self.prices.byte_s.times(self.layout.pp * ENTRY_BYTES * entries)
        price = self.prices.kernel(entries, row_pages).times(self.layout.pp)
        if not self.spec.overlapped:
            yield price.item("integrity.tag_check", moved.low_s)
            return
        yield price.hidden("integrity.tag_check", moved.low_s)
        if moved.seconds > price.seconds:
            moved = price
        yield moved.item("integrity.bandwidth_taken")

    def _fixed(self, *, captured: bool) -> Iterator[OperatorTime]:
        """Yield what a check takes beside its kernel, however many pages it looks at."""
        prices, stages = self.prices, self.layout.pp
        # In a graph the mask, else the step itself, which nobody launches ahead any more.
        others = prices.zeroing_kernels(self.table_pages) + (0 if self.spec.overlapped else 1)
        if self.spec.in_graph and captured:
            launches = prices.node.times(stages * others)
            readback, agreed = prices.node, prices.agree_graph
        else:
            launches = prices.launch.times(stages * (others + 1))
            readback, agreed = prices.readback, prices.agree_eager
        parts = {"launch": launches, "agreement": agreed.times(stages), "readback": readback}
        for name, price in parts.items():
            if not price.seconds:
                continue
            named = f"integrity.{name}"
            yield price.hidden(named) if self.spec.overlapped else price.item(named)
        if self.spec.overlapped:
            yield prices.host_read.item("integrity.host_read")

    def _bookkeeping(self, watched: Watched) -> Iterator[OperatorTime]:
        """Yield what new pages cost: new tags, ledger entries, and both on the device.

        The host's share is in the way of the step only where the step waits for the host; else the
        host runs ahead, and the interval alone says what it takes where it does not.
        """
        pages, share = self._new_pages(watched)
        if not pages:
            return
        prices = self.prices
        host = prices.ledger.times(share).plus(prices.ledger_page.times(pages))
        device = prices.node.times(share)
        if self._waits_for_host(watched.captured):
            whole = host.plus(prices.launch.times(share))
            yield whole.item("integrity.bookkeeping")
            return
        exposed = device.plus(host.share(prices.host_waited))
        item = exposed.item("integrity.bookkeeping")
        yield replace(item, hidden_s=host.seconds * (1 - prices.host_waited.seconds))


@dataclass(frozen=True, slots=True)
class Canary:
    """SGLang's canary: a record per token slot at both ends of a pass, for K and for V.

    Every record of the tokens that a pass reads is verified and that of every new token written,
    each time before and after the pass; what is found is copied to the host beside the next step.
    `records`: of one token. Upstream has no adapter for latent attention; its cost is that of one
    record per end.
    """

    layout: ParallelLayout
    records: int
    prices: CheckPrices

    def priced(self, prices: CheckPrices) -> Canary:
        """Return the same check at other prices."""
        return replace(self, prices=prices)

    def seconds(self, watched: Watched) -> FloatArray:
        """Return the seconds added to each step `[steps]`."""
        moved_s = self.prices.byte_s.seconds * self._moved_bytes(watched)
        found: FloatArray = moved_s + self._kernels(watched).seconds
        return found

    def items(self, watched: Watched) -> list[OperatorTime]:
        """Return every item of the first of the steps, those that run beside it too."""
        moved = self.prices.byte_s.times(float(self._moved_bytes(watched)[0]))
        records = moved.item("integrity.canary_records", moved.low_s)
        kernels = self._kernels(watched).item("integrity.canary_kernels")
        return [records, kernels, self.prices.readback.hidden("integrity.readback")]

    def _moved_bytes(self, watched: Watched) -> FloatArray:
        """Return the bytes of the records verified and written on a rank."""
        verified = (watched.contexts + watched.past_tokens) / self.layout.dcp
        written = watched.growth + watched.new_tokens
        each = self.records * _RECORD_BYTES + 2 * _SLOT_BYTES
        moved: FloatArray = self.layout.pp * each * (verified + written)
        return moved

    def _kernels(self, watched: Watched) -> Price:
        """Return the time of the kernels without their records."""
        prices = self.prices
        each = prices.canary_graph if watched.captured else prices.canary_eager
        return each.times(_PASS_KERNELS * self.layout.pp)
