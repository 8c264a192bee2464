"""Sessions: conversations and agent loops whose every turn repeats what was said before.

A session's turns are known before it begins, drawn or read off a trace (`session_sources.py`): what
the system does changes when a turn is sent, never what it asks. The request of a turn is sent a
think time after the answer before it, so this load reacts, as a closed one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tonnage.sim.domain import Request


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, sent `think_s` after the answer before it.

    Its first `kept_blocks` blocks are those of the turn before, output included; `new_block_ids`
    follow.
    """

    think_s: float
    input_tokens: int
    output_tokens: int
    kept_blocks: int
    new_block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation: all of its turns, and when it begins, where it has a time of its own."""

    number: int
    start_s: float
    block_tokens: int
    turns: tuple[Turn, ...]


class SessionSource(Iterable[Session]):
    """Sessions in order of number and start; every iteration gives the same ones."""


# --- a run --------------------------------------------------------------------------------------


class Due(NamedTuple):
    """The next turn of a session, and when to send it."""

    time_s: float
    session: int


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """Sessions that begin at their own times, or `concurrency` of them under way at once.

    With `concurrency` a user begins the next session a think time after the last one has ended, and
    the first one a think time after 0 s. A turn that is not answered (rejected, aborted, given up
    after `timeout_s`) ends its session.
    """

    sessions: SessionSource
    concurrency: int | None = None
    timeout_s: float | None = None
    output_limit_tokens: int | None = None  # as of `Request`

    def run(self) -> SessionRun:
        """Begin; a load can be run any number of times."""
        return SessionRun(self)


class _Live:
    """A session under way: the turn to send next and the blocks of the one before."""

    __slots__ = ("block_ids", "next_turn", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.next_turn = 0
        self.block_ids: tuple[int, ...] = ()


class SessionRun:
    """One run of a `SessionLoad`: which turn is due when. The caller has the clock.

    It sends what is due (`send`), at the time that `starts` or `after` gave for it.
    """

    def __init__(self, load: SessionLoad) -> None:
        self._concurrency = load.concurrency
        self._output_limit_tokens = load.output_limit_tokens
        self._sessions = iter(load.sessions)
        self._waiting = next(self._sessions, None)  # the session to begin next
        self._live: dict[int, _Live] = {}

    @property
    def over(self) -> bool:
        """Whether every turn that will ever be sent has been sent."""
        return self._waiting is None and not self._live

    def starts(self) -> Iterator[Due]:
        """Yield the first turns in order of time: of all sessions, or of the first set."""
        if self._concurrency is None:
            while self._waiting is not None:
                yield self._start(self._waiting.start_s)
            return
        first: list[Due] = []
        while self._waiting is not None and len(first) < self._concurrency:
            first.append(self._start(self._waiting.turns[0].think_s))
        yield from sorted(first)

    def send(self, number: int, request_id: int, now_s: float) -> Request:
        """Return the request of the turn of a session that is due now."""
        live = self._live[number]
        turn = live.session.turns[live.next_turn]
        ids = (*live.block_ids[: turn.kept_blocks], *turn.new_block_ids)
        live.block_ids = ids
        live.next_turn += 1
        if live.next_turn == len(live.session.turns):
            del self._live[number]
        return Request(
            request_id,
            now_s,
            turn.input_tokens,
            turn.output_tokens,
            self._output_limit_tokens,
            number,
            ids,
            live.session.block_tokens if ids else 0,
        )

    def after(self, ended: Request, now_s: float, *, answered: bool) -> Due | None:
        """Return what follows a request that ended now: its session's next turn, or a new session.

        None: nothing, its session is over and no user is free for another.
        """
        assert ended.session is not None
        live = self._live.get(ended.session)
        if live is not None and answered:
            return Due(now_s + live.session.turns[live.next_turn].think_s, ended.session)
        self._live.pop(ended.session, None)
        if self._concurrency is None or self._waiting is None:
            return None
        return self._start(now_s + self._waiting.turns[0].think_s)

    def _start(self, time_s: float) -> Due:
        session = self._waiting
        assert session is not None
        self._waiting = next(self._sessions, None)
        self._live[session.number] = _Live(session)
        return Due(time_s, session.number)
