"""Where requests come in when not all is well: sent on, refused, or kept until somebody is up."""

from __future__ import annotations

from collections.abc import Callable

from tonnage.sim.serving.router import Dispatcher
from tonnage.sim.serving.sequence import Sequence

NO_INSTANCE = "no instance is up"
NOT_THERE = "the instance that it was sent to is down"
BREAKER_OPEN = "a circuit breaker is open"
# Reasons to reject a request that could be served at another time.
PASSING = frozenset((NO_INSTANCE, BREAKER_OPEN))


class Door:
    """Asks the dispatcher, as long as it can; what is sent to a dead instance fails at once.

    A fleet asks here only while `troubled`, else the dispatcher itself.
    """

    def __init__(
        self, dispatcher: Dispatcher, *, waits: bool, on_end: Callable[[Sequence], None]
    ) -> None:
        """`waits`: requests that nobody can take stay; else they are rejected."""
        self.dispatcher = dispatcher
        self.troubled = not dispatcher.available
        self._waits = waits
        self._on_end = on_end
        self._dead: set[tuple[str, int]] = set()
        self._waiting: dict[Sequence, None] = {}

    def enter(self, sequence: Sequence) -> list[int] | None:
        """Return the instances of a request; None if it has ended here, or waits."""
        if not self.dispatcher.available:
            if self._waits:
                self._waiting[sequence] = None
                return None
            sequence.rejected = NO_INSTANCE
            self._on_end(sequence)
            return None
        request = sequence.request
        indices = self.dispatcher.assign(request)
        places = list(zip(self.dispatcher.roles, indices, strict=True))
        if not self._dead.isdisjoint(places):
            for role, index in places:
                self.dispatcher.done(role, index, request)
            _note_places(sequence, dict(places))
            sequence.aborted = NOT_THERE
            self._on_end(sequence)
            return None
        return indices

    def leave(self, sequence: Sequence) -> bool:
        """Let a request go that waits here; tell whether it did."""
        if sequence not in self._waiting:
            return False
        del self._waiting[sequence]
        self._on_end(sequence)
        return True

    def has_died(self, role: str, index: int) -> None:
        """Take in that an instance is dead, whether anybody has noticed it or not."""
        self._dead.add((role, index))
        self.troubled = True

    def is_back(self, role: str, index: int) -> list[Sequence]:
        """Take in that an instance is there again; return those who can come in now."""
        self._dead.discard((role, index))
        return self.mark(role, index, up=True)

    def is_dead(self, role: str, index: int) -> bool:
        """Tell whether an instance is dead."""
        return (role, index) in self._dead

    def mark(self, role: str, index: int, *, up: bool, shunned: bool = False) -> list[Sequence]:
        """Tell the dispatcher of an instance; return those who can come in now."""
        self.dispatcher.mark(role, index, up=up, shunned=shunned)
        available = self.dispatcher.available
        self.troubled = bool(self._dead) or not available
        if not available or not self._waiting:
            return []
        waiting, self._waiting = list(self._waiting), {}
        return waiting


def _note_places(sequence: Sequence, places: dict[str, int]) -> None:
    """Note the instances that a request was sent to."""
    both = places.get("serve")
    sequence.prefill_instance = places.get("prefill", both)
    sequence.decode_instance = places.get("decode", both)
