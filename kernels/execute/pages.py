"""Paged KV memory on a device: physical pages, who holds them, and the generation of each.

A page is `(index, tag)`: the tag, 32 bits, changes whenever the page is given to someone. A request
has a row of the page table, which attention reads, and a ledger of the pages and tags it was
given, both on the device. Rows and ledgers are given out apart: who is given the row of a request
that still reads must not overwrite what that request was given. The rows of a token in all layers
lie in the pages of its request. One page more than there are is nobody's: what a masked request
reads and writes.

Three methods do what no sound engine does, for faults to be injected: `free_unchecked`,
`recycle_row`, `offer_next`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor

import torch

from tonnage.kernels.execute.place import Place
from tonnage.kernels.execute.plan import RowShape
from tonnage.kernels.paged_inputs import E4M3, E4M3_MAX, UNUSED_PAGE, quantised
from tonnage.kernels.spec import Inputs
from tonnage.sim.domain import InfeasibleError
from tonnage.sim.model.formats import kv_element_bytes
from tonnage.sim.units import format_bytes

LARGEST_VALUE = 8.0  # that an FP8 cache holds: norms leave values near one
TABLE_ALIGNMENT = 16  # entries of a table row, so that the tag check reads 128 bits at a time
FILL_NUMBERS = 1 << 20  # drawn to fill a cache, over and over


class OutOfPagesError(InfeasibleError):
    """More pages or table rows were asked for than are free."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """How a paged memory is cut: what its layers store, in which format, on which pages."""

    layers: tuple[RowShape, ...]
    kv_format: str  # bf16 or fp8_e4m3
    pages: int
    page_tokens: int
    requests_max: int
    request_tokens_max: int

    @property
    def table_width(self) -> int:
        """Return the entries of a table row."""
        pages = ceil(self.request_tokens_max / self.page_tokens)
        return _aligned(pages)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token in all layers."""
        return kv_element_bytes(self.kv_format) * sum(layer.numbers for layer in self.layers)

    @property
    def bytes(self) -> int:
        """Return the bytes on the device: caches, nobody's page too, tags, tables and ledgers."""
        tables = 3 * self.requests_max * self.table_width * 4
        return (self.pages + 1) * self.page_tokens * self.token_bytes + 4 * self.pages + tables


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """The pages of one layer, `[pages + 1, page_tokens, ...]` bf16 or e4m3; scale `[1]` f32.

    A latent layer has one tensor, another K and V.
    """

    parts: tuple[torch.Tensor, ...]
    scale: torch.Tensor

    @property
    def latent(self) -> torch.Tensor:
        """Return the latents of a layer that stores nothing else."""
        (latents,) = self.parts
        return latents

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """View each part as rows of a token: `[pages, page_tokens, numbers]`."""
        return tuple(part.flatten(2) for part in self.parts)


@dataclass(slots=True, eq=False)
class HeldPages:
    """What a request was given: a table row, and a ledger of pages and their tags.

    `serial` is the request's own: row and ledger are taken from it only while they bear it.
    """

    row: int
    ledger: int
    serial: int
    tokens: int = 0
    pages: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)


class PagedMemory:
    """The KV pages of one instance's rank, allocated at random from a free list."""

    def __init__(self, shape: PageShape, place: Place, free_bytes: float | None = None) -> None:
        """Make all pages free; refuse what does not fit `free_bytes` before taking any."""
        if free_bytes is not None and shape.bytes > free_bytes:
            page_bytes = shape.page_tokens * shape.token_bytes + 4
            fitting = max(0, floor((free_bytes - shape.bytes) / page_bytes) + shape.pages)
            raise InfeasibleError(
                f"{shape.pages:,} KV pages take {format_bytes(shape.bytes)}, and "
                f"{format_bytes(free_bytes)} are free; use at most {fitting:,} pages"
            )
        self.shape = shape
        self.place = place
        self.layers = tuple(_cache(layer, shape, place) for layer in shape.layers)
        self.live_tags = self._zeros(shape.pages)
        table = (shape.requests_max, shape.table_width)
        self.page_table = self._zeros(*table).fill_(UNUSED_PAGE)
        self.ledger_pages = self._zeros(*table).fill_(UNUSED_PAGE)
        self.ledger_tags = self._zeros(*table)
        self.page_counts = self._zeros(shape.requests_max)
        order = torch.randperm(shape.pages, generator=place.random, device=place.device)
        self._free_pages: deque[int] = deque(order.tolist())
        self._listed = [1] * shape.pages  # how often a page is among the free ones
        self._free_rows = list(range(shape.requests_max))[::-1]
        self._free_ledgers = list(self._free_rows)
        self._row_serials: list[int | None] = [None] * shape.requests_max
        self._ledger_serials: list[int | None] = [None] * shape.requests_max
        self._serials = 0
        self._tags = [0] * shape.pages

    @property
    def free_pages(self) -> int:
        """Return how many pages can be given away."""
        return len(self._free_pages)

    @property
    def scratch_page(self) -> int:
        """Return the page that is nobody's; it has no tag, and the tag check knows no such page."""
        return self.shape.pages

    def times_listed(self, page: int) -> int:
        """Return how often a page is among the free ones: more than once after a double free."""
        return self._listed[page]

    def tag(self, page: int) -> int:
        """Return the generation that a page is in."""
        return self._tags[page]

    def open(self, tokens: int) -> HeldPages:
        """Give a request a table row and pages for so many tokens."""
        if not self._free_rows or not self._free_ledgers:
            raise OutOfPagesError(
                f"all {self.shape.requests_max} rows of the page table are taken; "
                "free a request first"
            )
        self._require(tokens, 0)
        self._serials += 1
        held = HeldPages(self._free_rows.pop(), self._free_ledgers.pop(), self._serials)
        self._row_serials[held.row] = self._ledger_serials[held.ledger] = held.serial
        self.extend(held, tokens)
        return held

    def extend(self, held: HeldPages, tokens: int) -> None:
        """Let a request hold so many tokens in all, on new pages where its last one is full."""
        self._require(tokens, len(held.pages))
        wanted = ceil(tokens / self.shape.page_tokens) - len(held.pages)
        given = [self._free_pages.pop() for _ in range(max(wanted, 0))]
        held.tokens = max(held.tokens, tokens)
        if not given:
            return
        tags = []
        for page in given:  # the same page twice, after a double free, is two generations of it
            self._listed[page] -= 1
            self._tags[page] = _next_tag(self._tags[page])
            tags.append(self._tags[page])
        self._publish(held, given, tags)

    def close(self, held: HeldPages) -> None:
        """Take a request's row and ledger, and its pages as far as they are still the request's.

        They are while their live tag is the ledger's and they are not free already: neither an
        abort nor a second close of the same request takes what was given on. Pages go back behind
        all that are free: those freed first are given away first.
        """
        for page, tag in zip(held.pages, held.tags, strict=True):
            if self._tags[page] == tag and not self._listed[page]:
                self._listed[page] = 1
                self._free_pages.appendleft(page)
        if self._row_serials[held.row] == held.serial:
            self._row_serials[held.row] = None
            self.page_table[held.row] = UNUSED_PAGE
            self._free_rows.append(held.row)
        if self._ledger_serials[held.ledger] == held.serial:
            self._ledger_serials[held.ledger] = None
            self.page_counts[held.ledger] = 0
            self._free_ledgers.append(held.ledger)
        held.pages, held.tags, held.tokens = [], [], 0

    def free_unchecked(self, pages: Sequence[int]) -> None:
        """Free pages whoever holds them, a fault; they are given away next, the first one first."""
        for page in reversed(pages):
            self._listed[page] += 1
            self._free_pages.append(page)

    def recycle_row(self, held: HeldPages) -> None:
        """Free the table row of a request that still reads it, a fault; it is given away next."""
        if self._row_serials[held.row] == held.serial:
            self._row_serials[held.row] = None
            self._free_rows.append(held.row)

    def offer_next(self, pages: Sequence[int]) -> None:
        """Let free pages be the next that are given away, the first one first."""
        for page in reversed(pages):
            self._free_pages.remove(page)
            self._free_pages.append(page)

    def checked(self, held: Sequence[HeldPages]) -> Inputs:
        """Return the tag check's inputs for some requests: their rows as attention reads them."""
        width = _aligned(max(len(one.pages) for one in held))
        rows, ledgers = self.rows_of(held), self._int64([one.ledger for one in held])
        return {
            "page_table": self.page_table[rows, :width],
            "page_counts": self.page_counts[ledgers],
            "live_tags": self.live_tags,
            "ledger_pages": self.ledger_pages[ledgers, :width],
            "ledger_tags": self.ledger_tags[ledgers, :width],
        }

    def rows_of(self, held: Sequence[HeldPages]) -> torch.Tensor:
        """Return the table rows of requests, int64."""
        return self._int64([one.row for one in held])

    def slots(self, held: HeldPages, first: int, last: int) -> torch.Tensor:
        """Return the slots int64 of a request's tokens `first` to `last - 1`."""
        position = torch.arange(first, last, device=self.place.device)
        page = self.page_table[held.row].long()[position // self.shape.page_tokens]
        slots: torch.Tensor = page * self.shape.page_tokens + position % self.shape.page_tokens
        return slots

    def fill_randomly(self, numbers: int = FILL_NUMBERS) -> None:
        """Fill every page with so many normal numbers in turn, so that any of them can be read."""
        drawn = self.place.normal(numbers)
        for layer in self.layers:
            source = quantised(drawn, layer.scale) if self.is_fp8 else drawn
            for part in layer.parts:
                _tile(part, source)

    @property
    def is_fp8(self) -> bool:
        """Say whether pages hold e4m3."""
        return self.shape.kv_format == "fp8_e4m3"

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.place.device)

    def _int64(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.place.device)

    def _require(self, tokens: int, held_pages: int) -> None:
        if tokens > self.shape.request_tokens_max:
            raise OutOfPagesError(
                f"a request of {tokens:,} tokens is longer than the "
                f"{self.shape.request_tokens_max:,} that a row of the page table was made for"
            )
        missing = ceil(tokens / self.shape.page_tokens) - held_pages
        if missing > len(self._free_pages):
            raise OutOfPagesError(
                f"{missing:,} KV pages are needed and {len(self._free_pages):,} of "
                f"{self.shape.pages:,} are free"
            )

    def _publish(self, held: HeldPages, given: list[int], tags: list[int]) -> None:
        """Write new pages to the request's table row and ledger, and their tags, on the device."""
        place = slice(len(held.pages), len(held.pages) + len(given))
        held.pages += given
        held.tags += tags
        live = [self._tags[page] for page in given]
        rows = torch.tensor([given, tags, live], dtype=torch.int32, device=self.place.device)
        pages_there, tags_there, live_there = rows
        self.live_tags[pages_there.long()] = live_there
        self.page_table[held.row, place] = pages_there
        self.ledger_pages[held.ledger, place] = pages_there
        self.ledger_tags[held.ledger, place] = tags_there
        self.page_counts[held.ledger] = len(held.pages)


def _aligned(entries: int) -> int:
    """Return the entries of a table row that holds so many."""
    return ceil(entries / TABLE_ALIGNMENT) * TABLE_ALIGNMENT


def _next_tag(tag: int) -> int:
    """Return the next of 2^32 generations, as a signed number."""
    return (tag + 1 + (1 << 31)) % (1 << 32) - (1 << 31)


def _cache(layer: RowShape, shape: PageShape, place: Place) -> LayerCache:
    row = (layer.width,) if layer.kv_heads is None else (layer.kv_heads, layer.width)
    is_fp8 = shape.kv_format == "fp8_e4m3"
    size = (shape.pages + 1, shape.page_tokens, *row)
    dtype = E4M3 if is_fp8 else torch.bfloat16
    parts = tuple(
        torch.zeros(size, dtype=torch.uint8 if is_fp8 else dtype, device=place.device).view(dtype)
        for _ in range(1 if layer.kv_heads is None else 2)
    )
    scale = LARGEST_VALUE / E4M3_MAX if is_fp8 else 1.0
    return LayerCache(parts, torch.tensor([scale], device=place.device))


def _tile(target: torch.Tensor, source: torch.Tensor) -> None:
    """Repeat the numbers of the source over the whole target."""
    flat, numbers = target.view(torch.uint8).flatten(), source.view(torch.uint8).flatten()
    whole = len(flat) // len(numbers) * len(numbers)
    flat[:whole].view(-1, len(numbers)).copy_(numbers)
    flat[whole:].copy_(numbers[: len(flat) - whole])
