"""A trace as a table: one row per request with its session, its turn, and what it could reuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from tonnage.sim.domain import Request
from tonnage.sim.traffic.blocks import InfiniteCache
from tonnage.sim.traffic.session_traces import RecordedSession, read_sessions
from tonnage.sim.traffic.spec import TraceSource
from tonnage.sim.traffic.traces import format_of, read_trace

_IDS_OF_ONE_SESSION = 1 << 40  # apart, so that sessions of one file share none by chance


@dataclass(frozen=True, slots=True)
class TraceTable:
    """All requests of a trace, and the endless cache that saw them in order.

    `rows` has, per request: `arrival_s`, `input_tokens`, `output_tokens`, `blocks`, `hit_blocks`,
    `hit_tokens`; and where sessions are known `session`, `turn` (from 0), `think_s`,
    `new_input_tokens` (beyond the context before: its input and output) and `kept_share` (of that
    context's blocks), NaN of a first turn. `sessions_are`: recorded | inferred | unknown.
    `common_clock`: arrivals are on one clock, not each session's own.
    """

    format: str
    rows: pd.DataFrame
    cache: InfiniteCache
    block_tokens: int | None
    sessions_are: str
    common_clock: bool
    recorded: tuple[RecordedSession, ...]


def read_table(source: TraceSource, kept_s: Sequence[float] = ()) -> TraceTable:
    """Read a whole trace; `kept_s` as of `InfiniteCache`."""
    found = format_of(source)
    rows = _Rows(InfiniteCache(kept_s))
    if found == "sessions":
        sessions = tuple(read_sessions(source.path))
        for number, session in enumerate(sessions):
            rows.add_session(number, session)
        common_clock, sessions_are = len(sessions) == 1, "recorded"
    else:
        sessions = ()
        for request in read_trace(source):
            rows.add(request)
        common_clock, sessions_are = True, "inferred" if rows.block_tokens else "unknown"
    frame = rows.frame(with_sessions=sessions_are != "unknown")
    return TraceTable(
        found, frame, rows.cache, rows.block_tokens, sessions_are, common_clock, sessions
    )


def requests_of(number: int, session: RecordedSession) -> Iterator[Request]:
    """Yield the requests of a recorded session at their times since it began."""
    offset = 0 if session.shares_ids else number * _IDS_OF_ONE_SESSION
    first_s = session.turns[0].start_s
    ids: tuple[int, ...] = ()
    for index, turn in enumerate(session.turns):
        ids = turn.block_ids(ids, offset)
        yield Request(
            index,
            turn.start_s - first_s,
            turn.input_tokens,
            turn.output_tokens,
            None,
            number,
            ids,
            session.block_tokens if ids else 0,
        )


@dataclass(slots=True)
class _Before:
    """The turn before, of some session."""

    session: int
    turn: int
    arrival_s: float
    tokens: int  # input and output


def _whole_prompt_blocks(request: Request) -> int:
    if not request.block_ids:
        return 0
    return min(request.input_tokens // request.block_tokens, len(request.block_ids))


class _Rows:
    """Collects the rows; tells sessions by the blocks where nobody wrote them down.

    A prompt that begins with all whole blocks of an earlier prompt goes on with it, the first one
    that does. That prompt must have two whole blocks: one may hold no more than a system prompt.
    """

    def __init__(self, cache: InfiniteCache) -> None:
        self.cache = cache
        self.block_tokens: int | None = None
        self._rows: list[tuple[object, ...]] = []
        self._ends: dict[int, _Before] = {}  # last whole block of a prompt -> that turn
        self._sessions = 0

    def add(self, request: Request) -> None:
        """Add a request whose session, if any, is to be found."""
        before = self._before(request)
        session = self._sessions if before is None else before.session
        self._sessions += before is None
        think_s = None if before is None else request.arrival_s - before.arrival_s
        turn = self._row(request, session, before, think_s, None if before is None else 1.0)
        whole = _whole_prompt_blocks(request)
        if whole > 1:
            self._ends[request.block_ids[whole - 1]] = turn

    def _before(self, request: Request) -> _Before | None:
        """Find the longest prompt that this one goes on with; nothing else goes on with it then."""
        ids = request.block_ids
        places = range(_whole_prompt_blocks(request) - 1, 0, -1)
        end = next((ids[place] for place in places if ids[place] in self._ends), None)
        return None if end is None else self._ends.pop(end)

    def add_session(self, number: int, session: RecordedSession) -> None:
        """Add the turns of a recorded session."""
        before: _Before | None = None
        blocks = 0
        for request, turn in zip(requests_of(number, session), session.turns, strict=True):
            kept = turn.kept_blocks / blocks if before is not None and blocks else None
            before = self._row(request, number, before, turn.think_s if before else None, kept)
            blocks = len(request.block_ids)

    def _row(
        self,
        request: Request,
        session: int,
        before: _Before | None,
        think_s: float | None,
        kept_share: float | None,
    ) -> _Before:
        reuse = self.cache.use(request)
        if request.block_ids:
            self.block_tokens = request.block_tokens
        turn = 0 if before is None else before.turn + 1
        new_input = None if before is None else request.input_tokens - before.tokens
        tokens = (request.input_tokens, request.output_tokens)
        self._rows.append(
            (request.arrival_s, *tokens, *reuse, session, turn, think_s, new_input, kept_share)
        )
        return _Before(session, turn, request.arrival_s, sum(tokens))

    def frame(self, *, with_sessions: bool) -> pd.DataFrame:
        """Return the rows."""
        always = ["arrival_s", "input_tokens", "output_tokens", "blocks", "hit_blocks"]
        always.append("hit_tokens")
        of_session = ["session", "turn", "think_s", "new_input_tokens", "kept_share"]
        frame = pd.DataFrame(self._rows, columns=[*always, *of_session])
        for name in of_session[2:]:
            frame[name] = frame[name].astype(float)
        return frame if with_sessions else frame[always]
