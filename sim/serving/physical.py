"""Physical pages of one instance: who was given which, in which generation, and what each holds.

A page is an index and a tag. The tag, 32 bits, changes whenever the page is given to somebody. A
request has a ledger of the pages and tags that it was given, and a row of the page table, which
attention reads; faults change one without the other. What a page holds is known too, so that a
wrong read is seen whether anything checks for it or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tonnage.sim.domain import Request
from tonnage.sim.serving.sequence import Sequence

TAG_BITS = 32
_TAGS = 1 << TAG_BITS

Key = tuple[int, int, int]  # (0, request, entry) or (1, block of known content, entry)


class Entry(NamedTuple):
    """A page as it was given: its index, and the generation that began with it."""

    page: int
    tag: int


@dataclass(slots=True, eq=False)
class Injection:
    """One fault that was injected, and what became of it.

    `met`: something was to be read, or written, through it. `caught`: a check found it, before or
    after the first wrong read. `wrong_reads`: pages that requests read wrongly because of it.
    """

    kind: str
    met: bool = False
    caught: str | None = None
    wrong_reads: int = 0

    def found(self) -> None:
        """Take in that a check has found it."""
        self.met = True
        if self.caught is None:
            self.caught = "after" if self.wrong_reads else "before"

    def read(self, *, beside_check: bool = False) -> None:
        """Take in that a page was read wrongly because of it; a check beside the step is late."""
        self.met = True
        if beside_check and not self.wrong_reads and self.caught is not None:
            self.caught = "after"
        self.wrong_reads += 1


class Flaw(NamedTuple):
    """What is wrong with the content of a page that its own request wrote, and in which layer."""

    kind: str
    layer: int = 0


class Written(NamedTuple):
    """What a page holds: who wrote it last, which of its entries, and whether that is right."""

    writer: int | None  # request; None: somebody who is not known any more
    key: Key
    flaw: Flaw | None = None
    cause: Injection | None = None


MIXED = Flaw("mixed")  # two have written to one page


@dataclass(slots=True, eq=False)
class Held:
    """What one request holds at one pool.

    `ledger`: the pages it was given, in order of its tokens; `own`: those of them that it gives
    back itself (the others are those of a prefix cache). `row`: the page table's, which another
    request may share by mistake. `cause`: the fault that changed the row.
    """

    sequence: Sequence
    ledger: list[Entry] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    cause: Injection | None = None

    @property
    def id(self) -> int:
        """The request's number."""
        return self.sequence.request.id

    def point(self, position: int, page: int) -> None:
        """Let an entry of the page table point to a page."""
        if position < len(self.row):
            self.row[position] = page
        else:
            self.row.append(page)


class PhysicalPages:
    """The queue of free pages, the tag and the content of each, and who holds which.

    Pages freed first are given away first. `doubled`: entries of the queue that faults added to
    those that the count of free pages knows. It falls when an older holder gives back a page that
    has been given to another since and the tags say so, and when an idle pool looks through its
    queue (`mend`). Without faults every page is once in the queue or once with a holder.
    """

    def __init__(self, pages: int, *, checks_frees: bool) -> None:
        """Make all pages free; `checks_frees`: only pages whose tag is the holder's are freed."""
        self.queue = deque(range(pages))
        self.tags = [0] * pages
        self.content: list[Written | None] = [None] * pages
        self.former: list[int | None] = [None] * pages  # who gave the page back last
        self.held: dict[int, Held] = {}  # by request
        self.unassigned: deque[Entry] = deque()  # given, to be shared out among requests
        self.retained: dict[int, list[Entry]] = {}  # free, and kept for their request
        self.causes: dict[int, Injection] = {}  # by page: why it is in the queue twice
        self.suspects: set[int] = set()  # requests whose pages may not be theirs any more
        self.unchecked: set[int] = set()  # suspects of whom something changed since a check
        self.unread: set[int] = set()  # and since they read all that they have
        self.touched: set[int] = set()  # requests that a fault has touched
        self.doubled = 0
        self.allocations = 0
        self.to_free_twice: deque[Injection] = deque()
        self._checks_frees = checks_frees
        self._holders = [0] * pages

    # --- giving and taking ----------------------------------------------------------------------

    def take(self, pages: int) -> None:
        """Take pages from the queue, each in a new generation; `assign` shares them out."""
        self.allocations += pages
        for _ in range(pages):
            page = self.queue.popleft()
            self.tags[page] = tag = next_tag(self.tags[page])
            if self._holders[page]:  # it was in the queue though somebody has it
                self.suspect_holders(page, touched=True)
            self.unassigned.append(Entry(page, tag))

    def hold(self, sequence: Sequence) -> Held:
        """Return what a request holds, nothing to begin with."""
        held = self.held.get(sequence.request.id)
        if held is None:
            held = self.held[sequence.request.id] = Held(sequence)
        return held

    def assign(self, held: Held, pages: int) -> range:
        """Give a request so many pages in all; return the positions of the new ones."""
        first = len(held.ledger)
        for _ in range(first, pages):
            self.append(held, self.unassigned.popleft(), own=True)
        return range(first, len(held.ledger))

    def append(self, held: Held, entry: Entry, *, own: bool) -> None:
        """Add a page to what a request holds."""
        held.point(len(held.ledger), entry.page)
        held.ledger.append(entry)
        held.own.append(own)
        self._holders[entry.page] += 1
        if self.tags[entry.page] != entry.tag:
            self.touch(held.id)
        if held.cause is not None:  # its row may be another's too
            for other in self.held.values():
                if other is not held and other.row is held.row:
                    self.suspect(other.id)

    def replace(self, held: Held, position: int, entry: Entry) -> None:
        """Let a request hold another's page in the place of its own, which is freed."""
        old = held.ledger[position]
        self._holders[old.page] -= 1
        self._holders[entry.page] += 1
        held.ledger[position] = entry
        held.own[position] = False
        held.point(position, entry.page)
        self.free(old, held.id)
        if self.tags[entry.page] != entry.tag:
            self.touch(held.id)

    def close(self, sequence: Sequence, pages: int, kept: Iterable[int] = ()) -> list[Entry]:
        """Take everything from a request; free its own pages but those at the `kept` positions.

        What it was given beyond `pages` pages waits to be returned. Returns those that are kept.
        """
        held = self.held.pop(sequence.request.id, None)
        if held is None:
            return []
        self.trust(held.id)
        positions = set(kept)
        for entry in held.ledger:
            self._holders[entry.page] -= 1
        while len(held.ledger) > pages:
            self.unassigned.appendleft(held.ledger.pop())
        own = [position for position in range(len(held.ledger)) if held.own[position]]
        for position in reversed(own):
            if position not in positions:
                self.free(held.ledger[position], held.id)
        freed = [one for one in own if one not in positions]
        if self.to_free_twice and freed:
            self._free_again(held.ledger[freed[0]], self.to_free_twice.popleft())
        return [held.ledger[position] for position in own if position in positions]

    def free(self, entry: Entry, owner: int | None = None) -> None:
        """Give a page back, unless the tags say that it is somebody else's by now."""
        if self._checks_frees and self.tags[entry.page] != entry.tag:
            self.doubled -= 1
            return
        self.queue.append(entry.page)
        if owner is not None:
            self.former[entry.page] = owner

    def return_unassigned(self, pages: int) -> None:
        """Give back pages that turned out not to be needed."""
        for _ in range(pages):
            self.free(self.unassigned.pop())

    def enter_again(self, page: int, cause: Injection) -> None:
        """Put a page into the queue that is there already, or that somebody holds."""
        self.queue.append(page)
        self.doubled += 1
        self.causes[page] = cause

    def _free_again(self, entry: Entry, cause: Injection) -> None:
        if self.tags[entry.page] == entry.tag:
            self.enter_again(entry.page, cause)
        else:
            self.to_free_twice.appendleft(cause)

    def mend(self, elsewhere: Iterable[Entry] = ()) -> None:
        """Let a pool of which nobody holds anything drop what is twice in its queue.

        `elsewhere`: free pages that are not in the queue, for somebody may want what they hold.
        Those of a former generation go from there when they are freed, where that is checked.
        """
        kept = [*elsewhere, *(entry for entries in self.retained.values() for entry in entries)]
        seen = {page for page, tag in kept if not self._checks_frees or self.tags[page] == tag}
        once: list[int] = []
        for page in self.queue:
            if page not in seen:
                seen.add(page)
                once.append(page)
        self.doubled -= len(self.queue) - len(once)
        self.queue = deque(once)

    # --- what is wrong --------------------------------------------------------------------------

    def touch(self, request: int) -> None:
        """Note that a fault has touched a request."""
        self.touched.add(request)
        self.suspect(request)

    def suspect(self, request: int) -> None:
        """Note that a request may not read what it should."""
        self.suspects.add(request)
        self.unchecked.add(request)
        self.unread.add(request)

    def trust(self, request: int) -> None:
        """Note that a request reads what it should, or nothing any more."""
        self.suspects.discard(request)
        self.unchecked.discard(request)
        self.unread.discard(request)

    def suspect_holders(self, page: int, *, touched: bool = False) -> None:
        """Note that whoever holds a page may not read from it what it should."""
        for held in self.holders(page):
            self.suspect(held.id)
            if touched:
                self.touched.add(held.id)

    def holder_count(self, page: int) -> int:
        """Return how many requests have a page in their ledger."""
        return self._holders[page]

    def holders(self, page: int) -> Iterator[Held]:
        """Return who has a page in its ledger, or reads it through its row."""
        for held in self.held.values():
            known = any(entry.page == page for entry in held.ledger)
            if known or (held.cause is not None and page in held.row):
                yield held

    def mismatches(self, held: Held, entries: range) -> list[int]:
        """Return the positions whose row, ledger and live tag do not agree."""
        tags, row = self.tags, held.row
        return [
            position
            for position in entries
            if row[position] != held.ledger[position].page
            or tags[held.ledger[position].page] != held.ledger[position].tag
        ]

    def cause_of(self, held: Held, position: int) -> Injection | None:
        """Return the fault behind a mismatch."""
        entry = held.ledger[position]
        if held.row[position] != entry.page:
            return held.cause
        return self.causes.get(entry.page)


def next_tag(tag: int) -> int:
    """Return the generation after one; after 2^32 of them it is the first one's again."""
    return (tag + 1) % _TAGS


def key_of(request: Request, position: int, page_tokens: int) -> Key:
    """Return what an entry of a request holds: tokens of known content are the same for all."""
    if request.block_ids:
        block = ((position + 1) * page_tokens - 1) // request.block_tokens
        if block < len(request.block_ids):
            return 1, request.block_ids[block], position
    return 0, request.id, position
