"""Sessions as they are found in a running system, so that a short run shows its steady state.

Sessions that begin together have short contexts for as long as one of them lasts, which can be
hours. Here every user is somewhere in the middle of one: at a time drawn evenly over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tonnage.sim.traffic.session_sources import DrawnSessions
from tonnage.sim.traffic.sessions import Session, SessionSource, Turn

_SERVED_S = 5.0  # nominal time of an answer: turns are laid out in time with it, not timed
_STREAM = 91_733  # of a seed's random numbers: nobody else's
_FIRST_OWN = 1 << 40  # ids below are of shared prefixes (`session_sources`)
_USER_BITS = 52  # above the ids of drawn sessions


@dataclass(frozen=True, slots=True)
class StationarySessions(SessionSource):
    """`users` sessions cut out of a `source`: what follows a random time, for about `span_s`.

    The first turn of each puts the context of before that time into the caches, with an answer of
    one token. Those turns are the warm-up of a run: its requests 0 to `users - 1`.
    """

    source: SessionSource
    users: int
    span_s: float
    seed: int

    def __iter__(self) -> Iterator[Session]:
        sessions = list(self.source)
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, _STREAM]))
        ends_s = np.cumsum([_lasts_s(session.turns) for session in sessions])
        for user, time_s in enumerate(rng.uniform(0.0, ends_s[-1], self.users).tolist()):
            index = int(np.searchsorted(ends_s, time_s, side="right"))
            left_s = float(ends_s[index]) - time_s
            turns = tuple(self._turns(sessions, index, left_s, user))
            yield Session(user, 0.0, sessions[index].block_tokens, turns)

    def _turns(
        self, sessions: Sequence[Session], index: int, left_s: float, user: int
    ) -> Iterator[Turn]:
        """Yield the turns of a user whose session has `left_s` to go, then of those after it."""
        # Two users may be in the middle of the same drawn session, whose text is not shared.
        offset = (user + 1) << _USER_BITS if isinstance(self.source, DrawnSessions) else 0
        turns = sessions[index].turns
        position, wait_s = _next_turn(turns, left_s)
        yield _warm_up(turns[:position], offset)
        passed_s = 0.0
        while True:
            for turn in turns[position:]:
                yield replace(turn, think_s=wait_s, new_block_ids=_own(turn.new_block_ids, offset))
                passed_s += wait_s + _SERVED_S
                if passed_s >= self.span_s:
                    return
                position += 1
                wait_s = turns[position].think_s if position < len(turns) else 0.0
            index = (index + 1) % len(sessions)
            offset += (self.users << _USER_BITS) if offset else 0
            turns, position = sessions[index].turns, 0
            wait_s = turns[0].think_s


def _lasts_s(turns: Sequence[Turn]) -> float:
    return sum(turn.think_s + _SERVED_S for turn in turns)


def _next_turn(turns: Sequence[Turn], left_s: float) -> tuple[int, float]:
    """Return the turn that is sent next when `left_s` of a session are left, and in how long."""
    for position in reversed(range(len(turns))):
        turn_s = turns[position].think_s + _SERVED_S
        if left_s <= turn_s:
            return position, max(left_s - _SERVED_S, 0.0)
        left_s -= turn_s
    return 0, turns[0].think_s


def _warm_up(before: Sequence[Turn], offset: int) -> Turn:
    """Return the turn that computes the context which those before have left."""
    if not before:
        return Turn(0.0, 1, 1, 0, ())
    ids: list[int] = []
    for turn in before:
        ids = [*ids[: turn.kept_blocks], *_own(turn.new_block_ids, offset)]
    last = before[-1]
    return Turn(0.0, last.input_tokens + last.output_tokens - 1, 1, 0, ids)


def _own(ids: Sequence[int], offset: int) -> Sequence[int]:
    """Make ids of a session a user's own; those of shared prefixes stay shared."""
    if not offset:
        return ids
    if isinstance(ids, range) and (not ids or ids[0] >= _FIRST_OWN):
        return range(ids.start + offset, ids.stop + offset)
    return [one if one < _FIRST_OWN else one + offset for one in ids]
