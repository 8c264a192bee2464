"""Faults of data, by class, as they act on the pages of one pool.

Classes: docs/integrity.md. Each takes the place of bugs that serving engines have had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tonnage.sim.serving.integrity import Watch
from tonnage.sim.serving.physical import Flaw, Held, Injection


class FaultClass(StrEnum):
    """What can go wrong with a page."""

    STALE_PAGE_TABLE = "stale_page_table"
    EARLY_REUSE = "early_reuse"
    DOUBLE_FREE = "double_free"
    RECYCLED_ROW = "recycled_row"
    LEASE_EXPIRY = "lease_expiry"
    LATE_WRITER = "late_writer"
    READ_BEFORE_LOAD = "read_before_load"
    WRONG_SCALE = "wrong_scale"
    CORRUPTED_TRANSFER = "corrupted_transfer"


_NEVER = 2**31
PAGE_IDENTITY = frozenset(list(FaultClass)[:5])
CONTENT = frozenset(list(FaultClass)[6:])


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One kind of fault and how often it happens in each instance of a pool.

    Exactly one of `per_allocation` and `per_step`, probabilities, and `at_s`. `instance`: in that
    one alone. `layers`: of the model; a fault of content hits one of them. `most`: in one run, per
    rank of an instance; None: no limit.
    """

    kind: FaultClass
    pool: str
    per_allocation: float | None = None
    per_step: float | None = None
    at_s: tuple[float, ...] = ()
    instance: int | None = None
    layers: int = 1
    most: int | None = None


class FaultSource:
    """Says when faults of one kind are due at one pool, and makes them happen.

    One that is due and finds nothing to act on happens as soon as it does.
    """

    def __init__(self, spec: FaultSpec, rng: np.random.Generator) -> None:
        """Draw when the first is due."""
        self._spec = spec
        self._rng = rng
        self._act = _ACTIONS[spec.kind]
        self._done = 0
        self._pending = 0
        self._steps_left = None if spec.per_step is None else self._draw(spec.per_step)
        self._next_allocation = (
            None if spec.per_allocation is None else self._draw(spec.per_allocation)
        )

    def _draw(self, probability: float) -> int:
        return int(self._rng.geometric(probability))

    def due_now(self) -> None:
        """Let one be due, whatever the rates say."""
        self._pending += 1

    def act(self, watch: Watch, steps: int) -> None:
        """Go wrong as often as is due, now that so many steps have passed."""
        spec = self._spec
        if self._steps_left is not None:
            assert spec.per_step is not None
            self._steps_left -= steps
            while self._steps_left <= 0:
                self._pending += 1
                self._steps_left += self._draw(spec.per_step)
        if self._next_allocation is not None:
            assert spec.per_allocation is not None
            while self._next_allocation <= watch.pages.allocations:
                self._pending += 1
                self._next_allocation += self._draw(spec.per_allocation)
        if self._pending and self._over:
            self._pending = 0
        while self._pending and self._strike(watch):
            self._pending -= 1
            self._done += 1
            if self._over:
                self._pending = 0

    @property
    def _over(self) -> bool:
        return self._spec.most is not None and self._done >= self._spec.most

    def _strike(self, watch: Watch) -> bool:
        injection = Injection(self._spec.kind)
        if not self._act(watch, self._rng, injection, self._spec.layers):
            return False
        watch.books.injections.append(injection)
        return True

    def steps_to_next(self) -> int:
        """Return the most steps that may pass before it is asked to act again."""
        if self._pending:
            return 1
        return _NEVER if self._steps_left is None or self._over else self._steps_left


# --- what each does -----------------------------------------------------------------------------

Rng = np.random.Generator


def _running(watch: Watch) -> list[Held]:
    """Return who still needs what it has: the finished ones only wait to be freed."""
    return [
        held
        for held in watch.pages.held.values()
        if held.ledger
        and not held.sequence.ended
        and held.sequence.aborted is None
        and held.sequence.generated_tokens < held.sequence.request.output_tokens
    ]


def _choose(rng: Rng, among: list[Held]) -> Held | None:
    return among[int(rng.integers(len(among)))] if among else None


def _position(rng: Rng, held: Held) -> int:
    return int(rng.integers(len(held.ledger)))


def _stale_page_table(watch: Watch, rng: Rng, injection: Injection, layers: int) -> bool:
    """An entry of the page table still points to another page than its request was given."""
    held = _choose(rng, _running(watch))
    if held is None or len(watch.pages.tags) < 2:
        return False
    position = _position(rng, held)
    page = int(rng.integers(len(watch.pages.tags) - 1))
    page += page >= held.ledger[position].page
    held.row[position] = page
    held.cause = injection
    watch.pages.touch(held.id)
    return True


def _early_reuse(watch: Watch, rng: Rng, injection: Injection, layers: int) -> bool:
    """A page that a running request still uses goes to the free queue."""
    pages = watch.pages
    held = _choose(rng, _running(watch))
    if held is None:
        return False
    entry = held.ledger[_position(rng, held)]
    if pages.tags[entry.page] != entry.tag or entry.page in pages.causes:
        return False
    pages.enter_again(entry.page, injection)
    return True


def _double_free(watch: Watch, rng: Rng, injection: Injection, layers: int) -> bool:
    """The next request that gives its pages back enters one of them twice."""
    watch.pages.to_free_twice.append(injection)
    return True


def _recycled_row(watch: Watch, rng: Rng, injection: Injection, layers: int) -> bool:
    """A request is given a row of the page table that another one still reads through."""
    running = _running(watch)
    if len(running) < 2:
        return False
    first, second = rng.choice(len(running), 2, replace=False).tolist()
    reader, newcomer = running[first], running[second]
    if reader.row is newcomer.row:
        return False
    reader.row[: len(newcomer.ledger)] = [entry.page for entry in newcomer.ledger]
    newcomer.row = reader.row
    for held in (reader, newcomer):
        held.cause = injection
        watch.pages.touch(held.id)
    return True


def _lease_expiry(watch: Watch, rng: Rng, injection: Injection, layers: int) -> bool:
    """The pages of a prompt are freed before a decode instance has them all."""
    pages = watch.pages
    waiting = [
        held
        for held in pages.held.values()
        if held.ledger
        and not held.sequence.remaining_input_tokens
        and held.sequence.transfer_end_s is None
        and not held.sequence.gave_up
        and held.ledger[-1].page not in pages.causes
    ]
    held = _choose(rng, waiting)
    if held is None:
        return False
    for entry, own in zip(held.ledger, held.own, strict=True):
        if own and pages.tags[entry.page] == entry.tag and entry.page not in pages.causes:
            pages.enter_again(entry.page, injection)
    return True


def _late_writer(watch: Watch, rng: Rng, injection: Injection, layers: int) -> bool:
    """Somebody who had a page before writes to it, though it is another's now."""
    held = _choose(rng, _running(watch))
    if held is None:
        return False
    position = _position(rng, held)
    entry = held.ledger[position]
    former = watch.pages.former[entry.page]
    if former is None or former == held.id or held.row[position] != entry.page:
        return False
    if entry.tag < 2 or watch.pages.tags[entry.page] != entry.tag:
        return False
    watch.write_late(entry.page, entry.tag - 1, former, injection)
    return True


def _read_before_load(watch: Watch, rng: Rng, injection: Injection, layers: int) -> bool:
    """A request reads a page that comes from elsewhere before it is all there."""
    if not watch.fresh:
        return False
    held, positions = watch.fresh[int(rng.integers(len(watch.fresh)))]
    return _spoil(watch, rng, held, positions, injection, layers, for_one_step=True)


def _wrong_scale(watch: Watch, rng: Rng, injection: Injection, layers: int) -> bool:
    """A page is written in FP8 with one scale and read with another."""
    held = _choose(rng, [one for one in _running(watch) if one.sequence.generated_tokens])
    if held is None:
        return False
    return _spoil(watch, rng, held, range(len(held.ledger)), injection, layers)


def _spoil(
    watch: Watch,
    rng: Rng,
    held: Held,
    positions: range,
    injection: Injection,
    layers: int,
    *,
    for_one_step: bool = False,
) -> bool:
    position = positions[int(rng.integers(len(positions)))]
    there = watch.pages.content[held.row[position]]
    if there is None or there.flaw is not None or there.key != watch.key(held, position):
        return False
    flaw = Flaw(injection.kind, int(rng.integers(layers)))
    written = there._replace(flaw=flaw, cause=injection)
    watch.spoil(held, position, written, for_one_step=for_one_step)
    return True


def _corrupted_transfer(watch: Watch, rng: Rng, injection: Injection, layers: int) -> bool:
    """A page of the next prompt that arrives is changed on its way."""
    watch.corrupts_next.append((injection, int(rng.integers(layers)), float(rng.random())))
    return True


_ACTIONS: dict[FaultClass, Callable[[Watch, Rng, Injection, int], bool]] = {
    FaultClass.STALE_PAGE_TABLE: _stale_page_table,
    FaultClass.EARLY_REUSE: _early_reuse,
    FaultClass.DOUBLE_FREE: _double_free,
    FaultClass.RECYCLED_ROW: _recycled_row,
    FaultClass.LEASE_EXPIRY: _lease_expiry,
    FaultClass.LATE_WRITER: _late_writer,
    FaultClass.READ_BEFORE_LOAD: _read_before_load,
    FaultClass.WRONG_SCALE: _wrong_scale,
    FaultClass.CORRUPTED_TRANSFER: _corrupted_transfer,
}
