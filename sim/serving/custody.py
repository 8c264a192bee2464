"""KV on its way from one pool to another: what is compared, and what arrives."""

from __future__ import annotations

from tonnage.sim.domain import Coverage
from tonnage.sim.serving.identified import IdentifiedCache, IdentifiedPool
from tonnage.sim.serving.integrity import Watch
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.physical import Flaw, Held, Injection, Written
from tonnage.sim.serving.sequence import Sequence


class Custody:
    """The prompts that travel, and the sums of those whose sender made one.

    The sender's pages are compared before a prompt leaves and again when it is there: they must
    not have been given to anybody else meanwhile. The receiver's are compared before it is taken
    in. What arrives is what the sender's pages hold when the last of it does.
    """

    def __init__(self) -> None:
        """Start with nothing under way."""
        self._sums: dict[int, list[Written | None]] = {}  # by request: what the sender summed

    def may_leave(self, sequence: Sequence, pool: PagePool) -> bool:
        """Check a complete prompt before it leaves, and sum it; False if it must not."""
        sender = watch_of(pool)
        held = sender.pages.held.get(sequence.request.id)
        if held is None:
            return True
        entries = range(sender.pages_of(sequence.request.input_tokens))
        if self._fails(sender, held, entries):
            return False
        if sender.spec.handoff_checksum:
            content = sender.pages.content
            self._sums[held.id] = [content[held.row[position]] for position in entries]
        return True

    def arrived(self, sequence: Sequence, sender_pool: PagePool, receiver_pool: PagePool) -> None:
        """Take a prompt in, unless a check says that it is not what it should be."""
        sender, receiver = watch_of(sender_pool), watch_of(receiver_pool)
        summed = self._sums.pop(sequence.request.id, None)
        source = sender.pages.held.get(sequence.request.id)
        target = receiver.pages.held.get(sequence.request.id)
        if source is None or target is None or sequence.gave_up:
            return
        tokens = sequence.request.input_tokens
        sent, taken = range(sender.pages_of(tokens)), range(receiver.pages_of(tokens))
        if self._fails(sender, source, sent) or self._fails(receiver, target, taken):
            return
        self._copy(sender, source, receiver, target, taken)
        corrupted = self._corrupt(receiver, target, taken)
        if summed is not None:
            self._compare(sender, source, summed, corrupted)

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a prompt that does not arrive."""
        self._sums.pop(sequence.request.id, None)

    def _fails(self, watch: Watch, held: Held, entries: range) -> bool:
        suspect = held.id in watch.pages.suspects
        if not suspect or not watch.refused(held, entries, Coverage.HANDOFF):
            return False
        wrong = watch.pages.mismatches(held, entries)
        self._abort(watch, held, watch.reason(held, wrong[0]))
        return True

    def _abort(self, watch: Watch, held: Held, reason: str) -> None:
        held.sequence.aborted = reason
        watch.note_abort(held.sequence)

    def _copy(
        self, sender: Watch, source: Held, receiver: Watch, target: Held, entries: range
    ) -> None:
        """Write what the sender's pages hold to the receiver's, page by page."""
        last = sender.pages_of(source.sequence.request.input_tokens) - 1
        content = receiver.pages.content
        suspect = target.id in receiver.pages.suspects
        for position in entries:
            first_token = position * receiver.page_tokens
            first = min(first_token // sender.page_tokens, last)
            end = min((first_token + receiver.page_tokens - 1) // sender.page_tokens, last)
            page = target.row[position]
            written = Written(target.id, receiver.key(target, position))
            for sent in range(first, end + 1):
                there = sender.pages.content[source.row[sent]]
                if there is None or there.flaw or there.key != sender.key(source, sent):
                    written = _as_received(there, written, sender.pages.cause_of(source, sent))
            content[page] = written
            if written.cause is not None or written.flaw is not None:
                receiver.pages.suspect(target.id)
            astray = page != target.ledger[position].page
            if suspect and (astray or receiver.pages.holder_count(page) > 1):
                receiver.pages.suspect_holders(page)

    def _corrupt(self, receiver: Watch, target: Held, entries: range) -> Injection | None:
        if not receiver.corrupts_next or not entries:
            return None
        injection, layer, share = receiver.corrupts_next.pop(0)
        position = entries[int(share * len(entries))]
        page = target.row[position]
        written = Written(
            target.id, receiver.key(target, position), Flaw(injection.kind, layer), injection
        )
        receiver.pages.content[page] = written
        receiver.pages.suspect_holders(page)
        return injection

    def _compare(
        self,
        sender: Watch,
        source: Held,
        summed: list[Written | None],
        corrupted: Injection | None,
    ) -> None:
        """Compare the sum of what arrived with the sender's."""
        content = sender.pages.content
        causes = [corrupted]
        changed = corrupted is not None
        for position, before in enumerate(summed):
            now = content[source.row[position]]
            if now is not before:
                changed = True
                causes.append(now.cause if now is not None and now.cause else None)
                causes.append(sender.pages.causes.get(source.row[position]))
        if not changed:
            return
        sender.books.detected += 1
        for cause in causes:
            if cause is not None:
                cause.found()
        sender.pages.touched.add(source.id)  # whatever it was, what it sent was not its own
        self._abort(sender, source, "integrity: the KV that arrived is not what was sent")


def _as_received(there: Written | None, right: Written, cause: Injection | None) -> Written:
    """Return what a page holds that was filled from a wrong one."""
    if there is None:
        return Written(None, (0, -1, -1), None, cause)
    if there.flaw is not None:
        return right._replace(flaw=there.flaw, cause=there.cause or cause)
    return Written(there.writer, there.key, None, there.cause or cause)


def watch_of(pool: PagePool) -> Watch:
    """Return what watches an identified pool."""
    assert isinstance(pool, IdentifiedPool | IdentifiedCache)
    return pool.watch
