"""What watches the pages of one pool: reads and writes as they happen, and the checks of them.

What a page holds decides whether a read is wrong; what a check compares decides whether it is
found. The two are kept apart: no check looks at content but a canary or a checksum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tonnage.sim.domain import Coverage, IntegritySpec
from tonnage.sim.serving.checks import CheckCount
from tonnage.sim.serving.physical import (
    MIXED,
    Entry,
    Held,
    Injection,
    Key,
    PhysicalPages,
    Written,
    key_of,
)
from tonnage.sim.serving.sequence import Sequence

_READS_KEPT = 1000
_CORRUPTED = "corrupted_transfer"


@dataclass(frozen=True, slots=True)
class WrongRead:
    """A page that a request read, and that did not hold what it should.

    `owner`: whose data it was; None: its own, spoiled, or that of nobody who is known.
    """

    victim: int
    owner: int | None
    place: str  # decode, prompt or handoff


@dataclass(slots=True)
class IntegrityBooks:
    """What the checks of a run found, and what requests read wrongly.

    `detected`: requests of which a check failed; of those `aborted`, and `recomputed` whose cached
    prefix was dropped before they read it. `refused_writes`: writes that were not let through.
    `stops`: of a whole instance, by a canary, with `lost` requests. `wrong_reads`: pages that
    requests read wrongly, each counted once; `seen_before_abort`: of those, read in the step during
    which a check beside it found out. `unknown`: detections that no injected fault explains.
    """

    detected: int = 0
    aborted: int = 0
    recomputed: int = 0
    refused_writes: int = 0
    stops: int = 0
    lost: int = 0
    wrong_reads: int = 0
    seen_before_abort: int = 0
    clean_aborted: int = 0
    doubles_mended: int = 0
    wrong_by_place: Counter[str] = field(default_factory=Counter)
    reads: list[WrongRead] = field(default_factory=list)  # the first ones
    victims: set[int] = field(default_factory=set)
    injections: list[Injection] = field(default_factory=list)
    checks: CheckCount = field(default_factory=CheckCount)

    @property
    def injected(self) -> dict[str, int]:
        """How many faults of each class there were."""
        return dict(Counter(one.kind for one in self.injections))


class Fault(Protocol):
    """Something that goes wrong in a pool again and again."""

    def act(self, watch: Watch, steps: int) -> None:
        """Go wrong as often as is due, now that so many steps have passed."""

    def steps_to_next(self) -> int:
        """Return the most steps that may pass before it is asked to act again."""


class Watch:
    """The pages of one pool, who reads and writes them, and what is compared when."""

    def __init__(
        self, pages: PhysicalPages, spec: IntegritySpec, page_tokens: int, extra_tokens: int
    ) -> None:
        """Watch an empty pool; `extra_tokens`: what a request takes whatever its length."""
        self.pages = pages
        self.spec = spec
        self.books = IntegrityBooks()
        self.faults: list[Fault] = []
        self.violation: str | None = None  # found by a canary, to be acted upon
        self.fresh: list[tuple[Held, range]] = []  # read for the first time after they came
        self.not_loaded: set[Entry] = set()  # in this step: refused
        # Transfers, and where: in which layer, after which share of its pages.
        self.corrupts_next: list[tuple[Injection, int, float]] = []
        self.page_tokens = page_tokens
        self._extra_tokens = extra_tokens
        self._transient: list[int] = []  # pages whose content will be right after this step
        self._known: set[tuple[int, int, Key | None]] = set()

    def pages_of(self, tokens: int) -> int:
        """Return the pages that so many tokens of one request fill."""
        return -(-(tokens + self._extra_tokens) // self.page_tokens)

    def key(self, held: Held, position: int) -> Key:
        """Return what an entry of a request should hold."""
        return key_of(held.sequence.request, position, self.page_tokens)

    # --- writes ---------------------------------------------------------------------------------

    def write_own(self, held: Held, positions: Iterable[int]) -> None:
        """Let a request's entries hold what they should, written through its row."""
        for position in positions:
            self._put(held, position, begins=True)

    def write(self, held: Held, first: int, last: int) -> bool:
        """Write the tokens `first` to `last - 1` of a prompt; False if that was refused.

        Where the writer's generation is checked, nothing is written through a row that points
        elsewhere, nor to a page that is in another generation.
        """
        start = 0 if first == 0 else (first + self._extra_tokens) // self.page_tokens
        positions = range(start, self.pages_of(last))
        suspect = held.id in self.pages.suspects
        if suspect and self.refused(held, positions, Coverage.WRITER):
            return False
        for position in positions:
            begins = first == 0 or position * self.page_tokens >= first + self._extra_tokens
            self._put(held, position, begins=begins)
        return True

    def entry_written(self, held: Held, tokens: int) -> range:
        """Return the entry to which the last of so many tokens is written."""
        position = (tokens - 1 + self._extra_tokens) // self.page_tokens
        return range(len(held.ledger))[position : position + 1]

    def write_token(self, held: Held, tokens: int) -> None:
        """Write the last of so many tokens of a suspect."""
        begins = not (tokens - 1 + self._extra_tokens) % self.page_tokens
        for position in self.entry_written(held, tokens):
            self._put(held, position, begins=begins)

    def write_late(self, page: int, tag: int, writer: int | None, cause: Injection) -> None:
        """Let a writer that was given a page in an earlier generation write to it now."""
        if self.spec.checks(Coverage.WRITER) and self.pages.tags[page] != tag:
            cause.found()
            self.books.detected += 1
            self.books.refused_writes += 1
            return
        self.pages.content[page] = Written(writer, (0, -1, page), None, cause)
        self.pages.suspect_holders(page)

    def _put(self, held: Held, position: int, *, begins: bool) -> None:
        page, key = held.row[position], self.key(held, position)
        content, there = self.pages.content, self.pages.content[held.row[position]]
        astray = page != held.ledger[position].page
        if begins or there is None:
            content[page] = Written(held.id, key, None, held.cause if astray else None)
        elif there.key != key:  # another's, of which a part is left
            cause = there.cause or self.pages.causes.get(page) or held.cause
            content[page] = Written(held.id, key, MIXED, cause)
        else:
            return
        if astray and held.cause is not None:
            held.cause.met = True
        if astray or self.pages.holder_count(page) > 1:
            self.pages.suspect_holders(page)

    def refused(self, held: Held, positions: range, place: Coverage) -> bool:
        """Tell whether a check before a read or write fails, and note it."""
        if not self.spec.checks(place):
            return False
        wrong = self.pages.mismatches(held, positions)
        if not wrong:
            return False
        if place in (Coverage.WRITER, Coverage.TIER):
            self.books.refused_writes += 1
        self.note_detection(held, wrong)
        return True

    # --- reads ----------------------------------------------------------------------------------

    def read(self, held: Held, entries: range, place: str, *, before_abort: bool = False) -> int:
        """Read some entries of a request; return how many pages did not hold what they should."""
        wrong = 0
        for position in entries:
            page = held.row[position]
            written = self.pages.content[page]
            key = self.key(held, position)
            if written is not None and written.flaw is None and written.key == key:
                continue
            wrong += 1
            self._note_wrong(held, position, written, place, before_abort=before_abort)
        return wrong

    def _note_wrong(
        self,
        held: Held,
        position: int,
        written: Written | None,
        place: str,
        *,
        before_abort: bool,
    ) -> None:
        page = held.row[position]
        cause = None if written is None else written.cause
        cause = cause or self.pages.cause_of(held, position) or self.pages.causes.get(page)
        known = held.id, page, None if written is None else written.key
        if known not in self._known:
            self._known.add(known)
            self._count_wrong(held, written, place, before_abort=before_abort)
            if cause is not None:
                cause.read(beside_check=before_abort)
        self._canary(written, cause)

    def _count_wrong(
        self, held: Held, written: Written | None, place: str, *, before_abort: bool
    ) -> None:
        owner = None if written is None or written.writer == held.id else written.writer
        books = self.books
        books.wrong_reads += 1
        books.seen_before_abort += before_abort
        books.wrong_by_place[place] += 1
        books.victims.add(held.id)
        if len(books.reads) < _READS_KEPT:
            books.reads.append(WrongRead(held.id, owner, place))

    def _canary(self, written: Written | None, cause: Injection | None) -> None:
        """See what a record per token slot shows: whose token it is, and layer 0's first bytes.

        KV that comes from a lower tier brings no record along, and a scale is in no hash.
        """
        if self.spec.tracker != "canary":
            return
        flaw = None if written is None else written.flaw
        if flaw not in (None, MIXED) and not (flaw.kind == _CORRUPTED and flaw.layer == 0):
            return
        if cause is not None:
            cause.found()
        self.violation = "the canary found a wrong token record, and the process stopped"

    def reason(self, held: Held, position: int) -> str:
        """Say what does not agree."""
        entry, seen = held.ledger[position], held.row[position]
        if seen != entry.page:
            return f"integrity: the table points to page {seen}, not {entry.page}"
        live = self.pages.tags[entry.page]
        return f"integrity: page {entry.page} of generation {live}, not {entry.tag}"

    def note_detection(self, held: Held, positions: list[int]) -> None:
        """Count that a check of a request failed."""
        self.books.detected += 1
        for position in positions:
            cause = self.pages.cause_of(held, position)
            if cause is not None:
                cause.found()

    def note_abort(self, sequence: Sequence) -> None:
        """Count that a request was aborted."""
        self.books.aborted += 1
        self.books.clean_aborted += sequence.request.id not in self.pages.touched

    def holds_its_own(self, held: Held, entries: Iterable[int]) -> bool:
        """Tell whether pages that a request was given hold what they should."""
        for position in entries:
            written = self.pages.content[held.ledger[position].page]
            if written is None or written.flaw or written.key != self.key(held, position):
                return False
        return True

    def clear(self, held: Held, written_entries: int) -> None:
        """Suspect a request no longer of which everything is as it should be."""
        if held.cause is None and self._is_right(held, range(written_entries)):
            self.pages.trust(held.id)

    def _is_right(self, held: Held, entries: range) -> bool:
        if self.pages.mismatches(held, range(len(held.ledger))):
            return False
        return self.holds_its_own(held, entries)

    def distrust_if_wrong(self, held: Held, entries: range) -> None:
        """Suspect a request that took pages over which are not what they should be."""
        if self.pages.mismatches(held, entries):
            self.pages.touch(held.id)
        elif not self.holds_its_own(held, entries):
            self.pages.suspect(held.id)

    def sound(self, entries: Iterable[Entry]) -> bool:
        """Tell whether pages are still in the generation in which they were given."""
        return all(self.pages.tags[entry.page] == entry.tag for entry in entries)

    # --- what lasts one step --------------------------------------------------------------------

    def spoil(self, held: Held, position: int, written: Written, *, for_one_step: bool) -> None:
        """Let a page hold something else than it should, at once."""
        page = held.row[position]
        self.pages.content[page] = written
        if for_one_step:
            self._transient.append(page)
        self.pages.suspect_holders(page)

    def next_step(self) -> None:
        """Let what was late arrive."""
        for page in self._transient:
            written = self.pages.content[page]
            if written is not None and written.flaw is not None:
                self.pages.content[page] = written._replace(flaw=None, cause=None)
        self._transient.clear()
        self.fresh.clear()
        self.not_loaded.clear()

    @property
    def hazard(self) -> bool:
        """Whether what somebody reads may change from one step to the next."""
        return bool(self.pages.suspects or self.pages.doubled or self.pages.to_free_twice)
