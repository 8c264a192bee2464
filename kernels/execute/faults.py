"""Faults of bookkeeping, writing and content, done to the real pages of a scene.

Each acts at one moment of a play, on pages or rows that its own random choice names. Nothing here
tells a check that something happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from tonnage.kernels.execute.scene import OTHER, Scene
from tonnage.sim.domain import BadInputError


class Moment(StrEnum):
    """When a fault acts in a play."""

    PROMPT = "before the victim's KV is computed"
    LEASE = "before the handoff reads its pages"
    TRANSIT = "before the handoff is known to have arrived"
    ADMISSION = "before the newcomer is given pages"
    STEP = "before the step"
    LATE = "after the step's pages were given, before it runs"


@dataclass(frozen=True, slots=True)
class Fault:
    """A class of faults."""

    name: str
    family: str  # page identity, write, content
    moment: Moment
    act: Callable[[Scene], None]
    only_fp8: bool = False


def _stale_page_table(scene: Scene) -> None:
    """Let an entry of the victim's row name the page of another, as it did in another time."""
    others = [page for one in scene.running if one.key for page in one.held.pages]
    entry = _entry_read(scene)
    scene.memory.page_table[scene.victim.held.row, entry] = scene.choice.choice(others)


def _early_reuse(scene: Scene) -> None:
    """Free a page that the victim still reads; the newcomer is given it."""
    scene.memory.free_unchecked([scene.victim.held.pages[_entry_read(scene)]])


def _double_free(scene: Scene) -> None:
    """Free the ended request's pages again, some of which are the victim's by now."""
    pages = scene.former.pages
    count = scene.choice.randint(1, len(pages))
    scene.memory.free_unchecked(scene.choice.sample(pages, count))


def _recycled_row(scene: Scene) -> None:
    """Free the victim's row of the page table; the newcomer is given it."""
    scene.memory.recycle_row(scene.victim.held)


def _lease_expiry(scene: Scene) -> None:
    """Free pages that the handoff has not read yet; another request computes its KV there."""
    scene.source.free_unchecked([scene.choice.choice(scene.sent.pages)])
    other = scene.source.open(scene.size.page_tokens)
    scene.write(scene.source, other, scene.size.page_tokens, OTHER)


def _late_writer(scene: Scene) -> None:
    """Let the ended request's last step, under way when it ended, write its KV now."""
    scene.late_is_due = True


def _read_before_load(scene: Scene) -> None:
    """Let a page not have come back from a lower tier yet, from some layer on."""
    entry = _entry_read(scene)
    first = scene.choice.randrange(len(scene.memory.layers))
    page = scene.victim.held.pages[entry]
    for layer, before in zip(scene.memory.layers[first:], scene.before_load[first:], strict=True):
        for part, old in zip(layer.parts, before, strict=True):
            part.view(torch.uint8)[page] = old[entry]


def _wrong_scale(scene: Scene) -> None:
    """Divide the victim's FP8 numbers by another scale than they are read with."""
    scene.victim_content_scale = scene.choice.choice((0.25, 0.5, 2.0, 4.0))


def _corrupted_transfer(scene: Scene) -> None:
    """Change some bytes of one token on the way."""
    layer = scene.choice.choice(scene.memory.layers)
    rows = scene.choice.choice(layer.parts).flatten(2).flatten(0, 1).view(torch.uint8)
    token = scene.choice.randrange(scene.victim.context - 1)  # the last is written by the step
    slot = int(scene.memory.slots(scene.victim.held, token, token + 1))
    first = scene.choice.randrange(rows.shape[1])
    last = min(rows.shape[1], first + scene.choice.randint(1, 64))
    rows[slot, first:last] ^= scene.choice.randint(1, 255)


def _entry_read(scene: Scene) -> int:
    return scene.choice.randrange(len(scene.victim.held.pages))


_FAULTS = (
    Fault("stale_page_table", "page identity", Moment.STEP, _stale_page_table),
    Fault("early_reuse", "page identity", Moment.ADMISSION, _early_reuse),
    Fault("double_free", "page identity", Moment.ADMISSION, _double_free),
    Fault("recycled_row", "page identity", Moment.ADMISSION, _recycled_row),
    Fault("lease_expiry", "page identity", Moment.LEASE, _lease_expiry),
    Fault("late_writer", "write", Moment.LATE, _late_writer),
    Fault("read_before_load", "content", Moment.STEP, _read_before_load),
    Fault("wrong_scale", "content", Moment.PROMPT, _wrong_scale, only_fp8=True),
    Fault("corrupted_transfer", "content", Moment.TRANSIT, _corrupted_transfer),
)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _FAULTS}


def faults_named(names: str) -> tuple[Fault, ...]:
    """Return classes by a list with commas, or `all`; raise BadInputError for one unknown."""
    if names == "all":
        return tuple(FAULTS.values())
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in FAULTS:
            raise BadInputError(
                f"--inject {name!r}: no such class of faults; use all, or some of "
                f"{', '.join(FAULTS)}"
            )
    return tuple(FAULTS[name] for name in dict.fromkeys(wanted))
