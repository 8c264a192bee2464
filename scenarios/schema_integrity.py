"""How the KV of a pool is watched: page tags, canaries, checksums."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from tonnage.scenarios.schema_base import Section, Whole, did_you_mean, field_error, shown
from tonnage.sim.domain import Coverage, IntegritySpec

Tracker = Literal["none", "batched", "canary"]
_PLACES = tuple(place.value for place in Coverage)


def _known_places(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise field_error("", f"{shown(value)} is not a list; write it like [decode, handoff]")
    for place in value:
        if place not in _PLACES:
            raise field_error("", f"{shown(place)}: {did_you_mean(str(place), _PLACES)}")
    return tuple(place for place in _PLACES if place in value)


class IntegritySection(Section):
    """What watches a pool's KV; `integrity: batched` is short for `{tracker: batched}`.

    `covers`: where page tags are compared (all places unless some are named). `every_steps`: one
    decode step in so many is checked.
    """

    tracker: Tracker = "none"
    every_steps: Whole = 1
    covers: Annotated[tuple[str, ...], BeforeValidator(_known_places)] = _PLACES
    in_graph: bool = True
    overlapped: bool = False
    handoff_checksum: bool = False

    def spec(self) -> IntegritySpec:
        """Return what the engine and the cost model need of it."""
        return IntegritySpec(
            self.tracker,
            self.every_steps,
            frozenset(Coverage(place) for place in self.covers),
            self.in_graph,
            self.overlapped,
            self.handoff_checksum,
        )


def tracker_alone(value: object) -> object:
    """Let `integrity: batched` stand for a section with that tracker."""
    return {"tracker": value} if isinstance(value, str) else value
