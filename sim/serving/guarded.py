"""Schedulers that know the identity of their pages: what is read is watched, and checked.

They plan as the others do. After each plan, the pages that were taken are shared out, faults that
are due happen, checks compare, the step's writes and reads take place, in this order; whoever fails
a check leaves the step, whose shape and time stay as they were.
"""

from __future__ import annotations

from typing import Any

from tonnage.sim.domain import Coverage
from tonnage.sim.serving.decode import DecodeScheduler
from tonnage.sim.serving.identified import IdentifiedCache, IdentifiedPool
from tonnage.sim.serving.physical import Entry, Held
from tonnage.sim.serving.plan import Plan
from tonnage.sim.serving.prompts import Chunk
from tonnage.sim.serving.scheduler import PrefillScheduler, Resources, ServeScheduler
from tonnage.sim.serving.sequence import Sequence

_MOST_STEPS = 2**31


class Guarded(ServeScheduler):
    """What all kinds share: `look` and `commit` go on as before, `_close` ends in the checks."""

    def __init__(self, resources: Resources, **settings: Any) -> None:
        """Make an idle scheduler of an identified pool."""
        super().__init__(resources, **settings)
        pool = resources.pool
        assert isinstance(pool, IdentifiedPool | IdentifiedCache)
        self._identified = pool
        self.watch = pool.watch
        self._steps_seen = 0
        self._interrupted = False
        self._condemned: dict[int, Sequence] = {}  # to leave at the next boundary

    def interrupt(self) -> None:
        """Let a segment under way end with the step in progress: something is about to happen."""
        self._interrupted = True

    def interruption_after(self, lead: int) -> int | None:
        """Return the steps after which a segment should end; None: not for what waits."""
        return lead if self._interrupted else super().interruption_after(lead)

    # --- leaving --------------------------------------------------------------------------------

    def look(self) -> Plan:
        """Plan without those that failed a check during the last step."""
        failed: list[Sequence] = []
        if self._condemned or self.watch.violation is not None:
            failed = self._leave()
        plan = super().look()
        if failed:
            plan.failed = [*failed, *plan.failed]
        return plan

    def _leave(self) -> list[Sequence]:
        watch = self.watch
        leaving = list(self._condemned.values())
        self._condemned.clear()
        if watch.violation is not None:
            if not self._shares_pool or self._batch.members:
                leaving += self._stopped(watch.violation)
            watch.violation = None
        failed = []
        for sequence in leaving:
            if not sequence.ended and not sequence.gave_up and self._drop(sequence):
                failed.append(sequence)
        return failed

    def _stopped(self, reason: str) -> list[Sequence]:
        """Return all that a stop of the process loses: what runs, and prompts that wait."""
        here = [*self._batch.live_sequences(), *self._prompts.waiting]
        if self._prompts.under_way is not None:
            here.append(self._prompts.under_way)
        for sequence in here:
            sequence.aborted = sequence.aborted or reason
        self.watch.books.stops += 1
        self.watch.books.lost += len(here)
        return here

    def _condemn(self, held: Held, reason: str) -> None:
        sequence = held.sequence
        if held.id not in self._condemned:
            self._condemned[held.id] = sequence
            self.watch.note_abort(sequence)
        sequence.aborted = sequence.aborted or reason

    # --- a step ---------------------------------------------------------------------------------

    def _close(self, plan: Plan) -> None:
        super()._close(plan)
        watch, self._interrupted = self.watch, False
        self._share_out(plan)
        steps, self._steps_seen = self._index - self._steps_seen, self._index
        for fault in watch.faults:
            fault.act(watch, steps)
        if plan.step is not None:
            self._run(plan)
        plan.max_steps = min(plan.max_steps, self._steps_until_trouble())
        watch.next_step()
        self._identified.look_through()

    def _share_out(self, plan: Plan) -> None:
        """Give requests the pages that were taken for them."""
        pages = self.watch.pages
        self._share_out_to_batch(1 if self._decodes else 0)
        for chunk in self._chunks:
            held = pages.hold(chunk.sequence)
            pages.assign(held, chunk.sequence.prompt_pages)
        self._share_out_to_admitted(plan)

    def _share_out_to_batch(self, steps: int) -> None:
        batch, pages = self._batch, self.watch.pages
        if not batch.members:
            return
        counts = batch.contexts.pages_after(steps).tolist()
        for sequence, count in zip(batch.members, counts, strict=True):
            held = pages.hold(sequence)
            if count > len(held.ledger):
                self.watch.write_own(held, pages.assign(held, count))

    def _share_out_to_admitted(self, plan: Plan) -> None:
        pages = self.watch.pages
        for sequence in (*plan.admitted, *plan.restored):
            if sequence.decode_pages:
                pages.assign(pages.hold(sequence), sequence.decode_pages)
        for sequence in plan.restored:
            held = pages.hold(sequence)
            self.watch.write_own(held, range(len(held.ledger)))

    def _run(self, plan: Plan) -> None:
        """Check what the step is about to read and write; then let it write, and read."""
        watch = self.watch
        suspects = watch.pages.suspects
        decoding = self._check_decodes(plan) if self._decodes and suspects else []
        chunks = [one for one in self._chunks if self._may_compute(one) and self._write(one)]
        if len(chunks) < len(self._chunks):
            chunks = self._without_readers_of_unwritten(chunks)
        for held, tokens in decoding:
            watch.write_token(held, tokens)
        if not suspects:
            return
        for chunk in chunks:
            held = watch.pages.hold(chunk.sequence)
            if held.id in suspects and chunk.past_tokens:
                watch.read(held, range(watch.pages_of(chunk.past_tokens)), "prompt")
                watch.clear(held, watch.pages_of(chunk.past_tokens + chunk.tokens))
        for held, _ in decoding:
            if held.id not in watch.pages.unread:  # it would read the same again
                continue
            watch.pages.unread.discard(held.id)
            late = held.id in self._condemned
            watch.read(held, range(len(held.ledger)), "decode", before_abort=late)
            watch.clear(held, len(held.ledger))

    def _may_compute(self, chunk: Chunk) -> bool:
        """Check what a chunk reads that was written before it."""
        watch, held = self.watch, self.watch.pages.hold(chunk.sequence)
        if chunk.sequence.aborted is not None:
            return False
        if held.id not in watch.pages.suspects or not chunk.past_tokens:
            return True
        entries = range(watch.pages_of(chunk.past_tokens))
        if not watch.refused(held, entries, Coverage.PREFIX):
            return True
        self._condemn(held, self._reason(held))
        return False

    def _write(self, chunk: Chunk) -> bool:
        held = self.watch.pages.hold(chunk.sequence)
        last = chunk.past_tokens + chunk.tokens
        if self.watch.write(held, chunk.past_tokens, last):
            return True
        self._condemn(held, self._reason(held))
        return False

    def _without_readers_of_unwritten(self, chunks: list[Chunk]) -> list[Chunk]:
        """Abort who shares, in this very step, blocks that were to be written and were not."""
        pages = self.watch.pages
        empty: set[Entry] = set(self.watch.not_loaded)
        for chunk in self._chunks:
            if chunk in chunks:
                continue
            first = chunk.past_tokens // self.watch.page_tokens
            empty.update(pages.hold(chunk.sequence).ledger[first:])
        staying = []
        for chunk in chunks:
            held = pages.hold(chunk.sequence)
            past = held.ledger[: self.watch.pages_of(chunk.past_tokens)]
            if chunk.past_tokens and not empty.isdisjoint(past):
                pages.touch(held.id)
                self._condemn(held, "integrity: a block that it shares could not be written")
            else:
                staying.append(chunk)
        return staying

    def _reason(self, held: Held) -> str:
        pages = self.watch.pages
        return self.watch.reason(held, pages.mismatches(held, range(len(held.ledger)))[0])

    def _check_decodes(self, plan: Plan) -> list[tuple[Held, int]]:
        """Check the suspects of the batch; return those that stay in the step, with contexts."""
        watch, batch = self.watch, self._batch
        spec, pages = watch.spec, watch.pages
        checked = spec.checks(Coverage.DECODE) and self._index % spec.every_steps == 0
        staying: list[tuple[Held, int]] = []
        tokens = dict(
            zip(
                (one.request.id for one in batch.members),
                batch.contexts.tokens().tolist(),
                strict=True,
            )
        )
        for held in [pages.held[one] for one in sorted(pages.suspects & tokens.keys())]:
            if not batch.holds(held.sequence):
                continue
            wrong = checked and self._fails(held)
            written = watch.entry_written(held, tokens[held.id])
            if (wrong and not spec.overlapped) or watch.refused(held, written, Coverage.WRITER):
                self._mask(held, plan)
                continue
            if wrong:
                self._condemn(held, self._reason(held))
            staying.append((held, tokens[held.id]))
        return staying

    def _fails(self, held: Held) -> bool:
        if held.id in self._condemned or held.id not in self.watch.pages.unchecked:
            return False
        self.watch.pages.unchecked.discard(held.id)
        return self.watch.refused(held, range(len(held.ledger)), Coverage.DECODE)

    def _mask(self, held: Held, plan: Plan) -> None:
        """Abort a request before a step reads its pages; its slot is computed for nobody."""
        sequence, batch = held.sequence, self._batch
        sequence.aborted = self._reason(held)
        self.watch.note_abort(sequence)
        self._withdraw(sequence)
        needed = batch.contexts.pages_for_steps(1)
        self._identified.return_unneeded(self._pages_taken - needed)
        self._pages_taken = needed
        plan.failed = [*plan.failed, sequence]
        plan.newcomers = [one for one in plan.newcomers if one is not sequence]
        plan.decoding = batch.live
        plan.tokens_per_step = self._tokens_per_step() if len(batch) else 0.0
        plan.max_steps = 1

    def _steps_until_trouble(self) -> int:
        """Return the steps for which pages stay as they are, so that single steps see the same."""
        watch = self.watch
        if watch.hazard or self._condemned or watch.violation is not None:
            return 1
        most = _MOST_STEPS
        if self._decodes:
            most = self._batch.contexts.steps_within(self._pages_taken, most)
        for fault in watch.faults:
            most = min(most, fault.steps_to_next())
        return max(most, 1)


class GuardedServe(Guarded):
    """A colocated instance."""


class GuardedPrefill(Guarded, PrefillScheduler):
    """A prefill instance."""


class GuardedDecode(Guarded, DecodeScheduler):
    """A decode instance."""

    def _share_out_to_admitted(self, plan: Plan) -> None:
        super()._share_out_to_admitted(plan)
        if not self._in_place:
            return
        for sequence in plan.admitted:  # it has brought its KV along
            held = self.watch.pages.hold(sequence)
            self.watch.write_own(held, range(len(held.ledger)))

    def _close(self, plan: Plan) -> None:
        for sequence in plan.newcomers:
            held = self.watch.pages.held.get(sequence.request.id)
            if held is not None and not sequence.retractions and held.ledger:
                self.watch.fresh.append((held, range(len(held.ledger))))
        super()._close(plan)

    def _stopped(self, reason: str) -> list[Sequence]:
        here = super()._stopped(reason)
        more = [*self._backed_up, *self._arrived]
        for sequence in more:
            sequence.aborted = sequence.aborted or reason
        self.watch.books.lost += len(more)
        return here + more
