"""What a check of KV is made of, priced: kernels, launches, copies to the host, the host's work.

Measured rows of a profile come first (`page_tags`, `launch`, all-reduces); what it lacks is a
physical estimate with a wide interval, none of them drawn from a published overhead of a whole
check. docs/integrity_cost.md lists the figures and their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tonnage.sim.cost.estimate import Source
from tonnage.sim.cost.models.comm import CommModel
from tonnage.sim.cost.models.grid import monotone
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.domain import FloatArray, GpuSpec

if TYPE_CHECKING:
    import pandas as pd

ENTRY_BYTES = 16  # table, ledger page, ledger tag and live tag of an entry, int32 each
SECTOR_BYTES = 32  # what a gather of one live tag moves
SINGLE_PAGES = 4096  # pages of a table row that one program walks; wider rows need zeroed results
BLOCK_PAGES = 1024  # pages that a program compares at once
_MEASURED_SPREAD = 1.25  # how far the samples of a row may lie apart before it is measured again
_MOST_ENTRIES = 2.0**44


class Price(NamedTuple):
    """Seconds of one event, how far they may be off, and where they come from."""

    seconds: float
    low_s: float
    high_s: float
    source: Source = "datasheet"
    inside: bool = False

    @classmethod
    def spread(cls, seconds: float, factor: float, source: Source = "datasheet") -> Price:
        """Return a price that may be off by a factor, either way."""
        is_measured = source == "measured"
        return cls(seconds, seconds / factor, seconds * factor, source, is_measured)

    def times(self, count: float) -> Price:
        """Return the price of so many of them."""
        return self._replace(
            seconds=self.seconds * count, low_s=self.low_s * count, high_s=self.high_s * count
        )

    def share(self, part: Price) -> Price:
        """Return a share of it that is itself not sure."""
        return self._replace(
            seconds=self.seconds * part.seconds,
            low_s=self.low_s * part.low_s,
            high_s=self.high_s * part.high_s,
        )

    def end(self, *, high: bool) -> Price:
        """Return the price at one end of what it may be, as if it were sure."""
        seconds = self.high_s if high else self.low_s
        return self._replace(seconds=seconds, low_s=seconds, high_s=seconds)

    def plus(self, other: Price) -> Price:
        """Return the price of both, off the same way; its source is the weaker one's."""
        weaker = self if self.source == "datasheet" else other
        return Price(
            self.seconds + other.seconds,
            self.low_s + other.low_s,
            self.high_s + other.high_s,
            weaker.source,
            self.inside and other.inside,
        )

    def item(self, name: str, roofline_s: float = 0.0) -> OperatorTime:
        """Return it as an operator of a step; but for bytes the datasheet asks for no time."""
        return OperatorTime(
            name, self.seconds, self.low_s, self.high_s, roofline_s, self.source, self.inside
        )

    def hidden(self, name: str, roofline_s: float = 0.0) -> OperatorTime:
        """Return it as an operator beside the step, which takes none of the step's time."""
        return OperatorTime(
            name, 0.0, 0.0, 0.0, roofline_s, self.source, self.inside, hidden_s=self.seconds
        )


NOTHING = Price(0.0, 0.0, 0.0, "measured", True)


class TagForm(NamedTuple):
    """Seconds of the tag-check kernel: a start, dependent reads of a program, bytes of all.

    A program walks at most `SINGLE_PAGES` pages of a row in blocks of `BLOCK_PAGES`; each block
    reads the row, then the live tags that it names.
    """

    start_s: float
    block_s: float
    entry_s: float

    def seconds(self, entries: FloatArray, row_pages: FloatArray) -> FloatArray:
        """Return the seconds for so many entries, in rows of so many pages each."""
        walked_s = self.block_s * self.blocks(row_pages)
        found: FloatArray = self.start_s + walked_s + self.entry_s * entries
        return found

    def blocks(self, row_pages: FloatArray) -> FloatArray | float:
        """Return the blocks that a program walks of rows that do not get shorter."""
        most = SINGLE_PAGES / BLOCK_PAGES
        if row_pages[0] >= SINGLE_PAGES:
            return most
        if row_pages[-1] <= BLOCK_PAGES:
            return 1.0
        found: FloatArray = np.minimum(np.maximum(row_pages / BLOCK_PAGES, 1.0), most)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class TagRows:
    """Measured checks: log seconds over log entries, the last slope going on to any number."""

    log_entries: FloatArray
    log_seconds: FloatArray

    @classmethod
    def of(cls, rows: pd.DataFrame) -> TagRows:
        """Return them from the table `page_tags`, the median of rows with as many entries."""
        entries = (rows["requests"] * rows["pages"]).astype(np.float64)
        medians = rows["seconds"].groupby(entries).median().sort_index()
        points = np.log(medians.index.to_numpy(np.float64))
        logs = monotone(np.log(medians.to_numpy(np.float64)))
        slope = (logs[-1] - logs[-2]) / (points[-1] - points[-2]) if len(points) > 1 else 1.0
        last = np.log(_MOST_ENTRIES)
        beyond = logs[-1] + slope * (last - points[-1])
        return cls(np.append(points, last), np.append(logs, beyond))

    def seconds(self, entries: FloatArray) -> FloatArray:
        """Return the seconds for so many entries."""
        logs = np.log(np.maximum(entries, 1.0))
        found: FloatArray = np.exp(np.interp(logs, self.log_entries, self.log_seconds))
        return found

    def scaled(self, factor: float) -> TagRows:
        """Return rows that take so many times as long."""
        return TagRows(self.log_entries, self.log_seconds + np.log(factor))

    def is_inside(self, entries: float) -> bool:
        """Say whether rows stand around it."""
        return bool(self.log_entries[0] <= np.log(max(entries, 1.0)) <= self.log_entries[-2])


@dataclass(frozen=True, slots=True)
class CheckRows:
    """What a profile measured of a check: the kernel, and launches eager and in a graph."""

    tags: TagRows | None = None
    eager_launch_s: float | None = None
    graph_launch_s: float | None = None

    @classmethod
    def from_tables(cls, tables: Mapping[str, pd.DataFrame]) -> CheckRows:
        """Return them from the tables `page_tags` and `launch`, as far as they are there."""
        tags, launch = tables.get("page_tags"), tables.get("launch")
        return cls(
            None if tags is None else TagRows.of(tags),
            None if launch is None else _launch_s(launch, in_graph=False),
            None if launch is None else _launch_s(launch, in_graph=True),
        )


def _launch_s(rows: pd.DataFrame, *, in_graph: bool) -> float | None:
    """Return the median of the launches of one way, None where none was measured."""
    seconds = rows["seconds"][rows["in_graph"].astype(bool) == in_graph]
    return float(seconds.median()) if len(seconds) else None


NOT_MEASURED = CheckRows()


@dataclass(frozen=True, slots=True)
class CheckPrices:
    """Everything a check may need on one device.

    `node`: one more small kernel or copy in a captured pass. `launch`: one more launched by the
    host, which the step waits for. `readback`: a copy to the host that it waits for. `host_read`:
    a look at a result that is there already. `ledger`: the host's work when pages are given, once
    and per page; `host_waited`: the share of that work which a step waits for where the host runs
    ahead. `agree_graph`, `agree_eager`: the all-reduce of a verdict among the ranks. `byte_s`: a
    byte that a kernel reads. `canary_graph`, `canary_eager`: one kernel of a canary. `sum_start`,
    `sum_batched`, `sum_byte_s`: a checksum, alone or one of a batch, and per byte.
    """

    node: Price
    launch: Price
    readback: Price
    host_read: Price
    ledger: Price
    ledger_page: Price
    host_waited: Price
    agree_graph: Price
    agree_eager: Price
    byte_s: Price
    canary_graph: Price
    canary_eager: Price
    sum_start: Price
    sum_batched: Price
    sum_byte_s: Price
    form: TagForm
    form_low: TagForm
    form_high: TagForm
    rows: TagRows | None = None

    def zeroing_kernels(self, row_pages: float) -> int:
        """Return the kernels that zero the results of wide rows; measured rows hold theirs."""
        return 2 if row_pages > SINGLE_PAGES and self.rows is None else 0

    def kernel_s(self, entries: FloatArray, row_pages: FloatArray) -> FloatArray:
        """Return the seconds of the tag check of so many entries."""
        if self.rows is not None:
            return self.rows.seconds(entries)
        return self.form.seconds(entries, row_pages)

    def kernel(self, entries: float, row_pages: float) -> Price:
        """Return the same with all that is known about it."""
        count, pages = np.array([entries]), np.array([row_pages])
        seconds = float(self.kernel_s(count, pages)[0])
        if self.rows is not None:
            low, high = seconds / _MEASURED_SPREAD, seconds * _MEASURED_SPREAD
            return Price(seconds, low, high, "measured", self.rows.is_inside(entries))
        low, high = (
            float(form.seconds(count, pages)[0]) for form in (self.form_low, self.form_high)
        )
        return Price(seconds, low, high)

    def end(self, *, high: bool) -> CheckPrices:
        """Return all of them at one end of what they may be, as if they were sure."""
        form = self.form_high if high else self.form_low
        spread = _MEASURED_SPREAD if high else 1 / _MEASURED_SPREAD
        moved: dict[str, Any] = {
            one.name: price.end(high=high)
            for one in fields(self)
            if isinstance(price := getattr(self, one.name), Price)
        }
        moved |= dict.fromkeys(("form", "form_low", "form_high"), form)
        moved["rows"] = None if self.rows is None else self.rows.scaled(spread)
        return replace(self, **moved)


def check_prices(
    gpu: GpuSpec,
    measured: CheckRows = NOT_MEASURED,
    comm: CommModel | None = None,
    ways: int = 1,
) -> CheckPrices:
    """Return the prices on a GPU or a CPU, measured ones first.

    `comm` and `ways`: the all-reduces of the profile, and the ranks that must agree on a verdict.
    """
    prices = _on_cpu(gpu) if gpu.compute_capability == "0.0" else _on_gpu(gpu, measured, comm, ways)
    return replace(prices, rows=measured.tags)


# Host work, timed on one core of an x86 server with Python 3.11 and NumPy 2.4: new tags for the
# pages of a step and their ledger entries take 2.0 to 2.8 us and 6 ns a page in arrays, 85 ns a
# page in a loop of Python.
_LEDGER = Price.spread(2.5e-6, 2.0)
_LEDGER_PAGE = Price(6e-9, 3e-9, 170e-9)
_HOST_READ = Price.spread(2e-6, 2.0)
_HOST_WAITED = Price(0.0, 0.0, 1.0)
# SGLang's checksum (sgl-project/sglang pull request 39229): 81 us with readback for a request that
# is summed alone, 9 us for one of a batch; 650 to 710 GB/s over all of its bytes, the slow end.
_SUM_START = Price(81e-6, 56e-6, 162e-6)
_SUM_BATCHED = Price(9e-6, 4.5e-6, 81e-6)
_SLOWEST_SUM_S_PER_BYTE = 1 / 650e9


def _on_gpu(gpu: GpuSpec, measured: CheckRows, comm: CommModel | None, ways: int) -> CheckPrices:
    # One small kernel of a captured pass and the share of the bandwidth that it reaches are those
    # of the step's other small kernels (`StepAssumptions`).
    node = Price.spread(2.5e-6, 1.6)
    if measured.graph_launch_s is not None:
        node = Price.spread(measured.graph_launch_s, _MEASURED_SPREAD, "measured")
    # 4.7 to 5.6 us through a compiled Triton kernel (GB200, tritonbench pull request 1017), 49 us
    # through its JIT in 2024 (triton pull request 3638).
    launch = Price(15e-6, 4.7e-6, 49e-6)
    if measured.eager_launch_s is not None:
        launch = Price.spread(measured.eager_launch_s, _MEASURED_SPREAD, "measured")
    moved_s = 1.0 / gpu.memory_bandwidth_bytes_per_s
    gathered = ENTRY_BYTES - 4 + SECTOR_BYTES
    # A read that misses the caches takes 600 to over 1,000 cycles on Hopper; a block waits for two.
    miss_s = 0.6e-6
    byte_s = Price(moved_s / 0.6, moved_s, moved_s / 0.3)
    agree_graph, agree_eager = _agreements(comm, ways)
    return CheckPrices(
        node=node,
        launch=launch,
        # 81 us with readback less 56 us without (sgl-project/sglang pull request 39229).
        readback=Price.spread(25e-6, 2.0),
        host_read=_HOST_READ,
        ledger=_LEDGER,
        ledger_page=_LEDGER_PAGE,
        host_waited=_HOST_WAITED,
        agree_graph=agree_graph,
        agree_eager=agree_eager,
        byte_s=byte_s,
        # six kernels of a pass, twelve were K and V apart; outside a graph the host launches ahead
        canary_graph=node._replace(high_s=2 * node.high_s),
        canary_eager=node._replace(high_s=2 * max(node.high_s, launch.high_s)),
        sum_start=_SUM_START,
        sum_batched=_SUM_BATCHED,
        sum_byte_s=byte_s._replace(high_s=max(byte_s.high_s, _SLOWEST_SUM_S_PER_BYTE)),
        form=TagForm(node.seconds, 2 * miss_s, gathered * moved_s / 0.6),
        form_low=TagForm(node.low_s, miss_s, ENTRY_BYTES * moved_s),
        form_high=TagForm(node.high_s, 4 * miss_s, gathered * moved_s / 0.3),
    )


def _agreements(comm: CommModel | None, ways: int) -> tuple[Price, Price]:
    """Return the all-reduce of one number per request among ranks, in a graph and launched."""
    if ways < 2:
        return NOTHING, NOTHING
    if comm is None:  # the smallest of 8 GPUs in the imported tables
        return Price.spread(4.2e-6, 2.0), Price.spread(29e-6, 2.0)
    found = []
    for in_graph in (True, False):
        estimate = comm.all_reduce(ways, 4.0, in_graph=in_graph)
        seconds = float(estimate.seconds)
        low, high = seconds * estimate.low, seconds * estimate.high
        found.append(Price(seconds, low, high, estimate.source, estimate.inside))
    return found[0], found[1]


def _on_cpu(gpu: GpuSpec) -> CheckPrices:
    """Return the prices where host and device are one: nothing to launch, copy or agree on."""
    moved_s = 1.0 / gpu.memory_bandwidth_bytes_per_s
    byte_s = Price(moved_s / 0.6, moved_s, moved_s / 0.3)
    # The CPU backend of the check takes 148 us for 64 entries and 529 us for 32,768 (one thread,
    # docs/kernels.md); its gather alone 15 us and 2.2 ns an entry.
    return CheckPrices(
        node=NOTHING,
        launch=NOTHING,
        readback=NOTHING,
        host_read=_HOST_READ,
        ledger=_LEDGER,
        ledger_page=_LEDGER_PAGE,
        host_waited=_HOST_WAITED,
        agree_graph=NOTHING,
        agree_eager=NOTHING,
        byte_s=byte_s,
        canary_graph=Price.spread(15e-6, 2.0),
        canary_eager=Price.spread(15e-6, 2.0),
        sum_start=Price.spread(15e-6, 2.0),
        sum_batched=Price.spread(15e-6, 2.0),
        sum_byte_s=byte_s,
        form=TagForm(147e-6, 0.0, 11.7e-9),
        form_low=TagForm(15e-6, 0.0, 2.2e-9),
        form_high=TagForm(294e-6, 0.0, 23.4e-9),
    )
