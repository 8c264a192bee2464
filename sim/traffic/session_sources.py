"""Where sessions come from: draws from distributions, and recorded ones replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.sim.domain import BadInputError, FloatArray
from tonnage.sim.traffic.session_traces import read_sessions
from tonnage.sim.traffic.sessions import Session, SessionSource, Turn
from tonnage.sim.traffic.shapes import Arrivals
from tonnage.sim.traffic.spec import SessionSpec, SessionTrace

# Ids of blocks: whose they are, which text of theirs, where in it. Number 0 owns the shared
# prefixes. Text 0 of a session is its first; each time the context is rewritten a new one begins.
_OWNER_BITS, _TEXT_BITS = 40, 24
_NO_LIMIT = 1 << _TEXT_BITS  # tokens: more than ids can tell apart is no context


def _first_id(owner: int, text: int) -> int:
    return (owner << _OWNER_BITS) | (text << _TEXT_BITS)


# --- drawn --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrawnSessions(SessionSource):
    """`spec.count` sessions; `arrivals` None: they have no start of their own."""

    spec: SessionSpec
    arrivals: Arrivals | None
    seed: np.random.SeedSequence

    def __iter__(self) -> Iterator[Session]:
        starts, sessions = _two_streams(self.seed)
        streams = _Streams(sessions)
        shares = np.cumsum(_zipf(self.spec.shared_prefixes, self.spec.zipf_exponent))
        starts_s = _starts_s(self.arrivals, starts, self.spec.count)
        for number, start_s in enumerate(starts_s):
            draws = _Draws(self.spec, shares, streams, number)
            turns = tuple(_turns(self.spec, number, draws))
            yield Session(number, start_s, self.spec.block_tokens, turns)


def _two_streams(seed: np.random.SeedSequence) -> tuple[np.random.SeedSequence, ...]:
    return tuple(_child(seed, index) for index in range(2))


def _child(seed: np.random.SeedSequence, index: int) -> np.random.SeedSequence:
    """Return a stream of its own; unlike `spawn`, the same one each time."""
    return np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, index))


def _starts_s(
    arrivals: Arrivals | None, seed: np.random.SeedSequence, count: int
) -> Iterator[float]:
    if arrivals is None:
        yield from (0.0 for _ in range(count))
        return
    for block_s in arrivals.times_s(np.random.default_rng(seed), count):
        yield from block_s.tolist()


def _zipf(count: int, exponent: float) -> FloatArray:
    """Return the shares of `count` kinds, the n-th most frequent as n to the power -exponent."""
    weights: FloatArray = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return weights / np.sum(weights)


class _Streams:
    """A stream of random numbers for every quantity of every session.

    Philox is a function of a key and a counter (Salmon and others 2011): a stream is a key, and to
    set one costs less than to seed a generator.
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._bits = np.random.Philox(seed)
        self._state = self._bits.state  # counter 0, nothing in the buffer
        self._generator = np.random.Generator(self._bits)

    def at(self, session: int, quantity: int) -> np.random.Generator:
        """Return the stream, from its beginning; the one before is no more."""
        self._state["state"]["key"][1] = (session << 4) | quantity
        self._bits.state = self._state
        return self._generator


class _Draws:
    """Everything random about one session."""

    def __init__(
        self, spec: SessionSpec, prefix_shares: FloatArray, streams: _Streams, session: int
    ) -> None:
        def at(quantity: int) -> np.random.Generator:
            return streams.at(session, quantity)

        self.prefix = int(prefix_shares[:-1].searchsorted(at(0).random(), side="right"))
        self.turns = int(spec.turns.sample(at(1), 1)[0])
        self.first_input_tokens = int(spec.first_input_tokens.sample(at(2), 1)[0])
        self.new_input_tokens: list[int] = spec.new_input_tokens.sample(at(3), self.turns).tolist()
        self.output_tokens: list[int] = spec.output_tokens.sample(at(4), self.turns).tolist()
        self.think_s: list[float] = spec.think_time.sample(at(5), self.turns).tolist()
        self.compacted_tokens: list[int] = spec.compacted_tokens.sample(at(6), self.turns).tolist()
        self.rewritten: list[bool] = (at(7).random(self.turns) < spec.rewrite_share).tolist()


def _turns(spec: SessionSpec, number: int, draws: _Draws) -> Iterator[Turn]:
    """Yield the turns of one session: the context grows, until it is compacted or rewritten."""
    size = spec.block_tokens
    prefix_ids = range(
        first := _first_id(0, draws.prefix), first + spec.shared_prefix_tokens // size
    )
    text, blocks = 0, 0
    context = spec.shared_prefix_tokens  # before the turn's own input
    for turn in range(draws.turns):
        output_tokens = draws.output_tokens[turn]
        own = draws.new_input_tokens[turn] if turn else draws.first_input_tokens
        most = _most_input_tokens(spec, output_tokens)
        compacted = turn > 0 and context + own > most
        if compacted:
            context, own = spec.shared_prefix_tokens, draws.compacted_tokens[turn]
        input_tokens = min(context + own, most)
        kept = blocks
        if turn and (compacted or draws.rewritten[turn]):
            text += 1
            kept = len(prefix_ids)
        context = input_tokens + output_tokens
        blocks = context // size
        kept = min(kept, blocks)
        new_ids = _new_ids(kept, blocks, prefix_ids, _first_id(number + 1, text))
        yield Turn(draws.think_s[turn], input_tokens, output_tokens, kept, new_ids)


def _most_input_tokens(spec: SessionSpec, output_tokens: int) -> int:
    """Return the longest prompt whose answer stays within the limit of the context."""
    if spec.compact_at_tokens is None:
        return _NO_LIMIT
    return max(spec.compact_at_tokens - output_tokens, spec.shared_prefix_tokens + 1)


def _new_ids(kept: int, blocks: int, prefix_ids: range, first_id: int) -> Sequence[int]:
    """Return the ids from block `kept` on: those of the shared prefix, then the session's own."""
    own = range(first_id + max(kept, len(prefix_ids)), first_id + blocks)
    return own if kept >= len(prefix_ids) else [*prefix_ids[kept:blocks], *own]


# --- recorded -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedSessions(SessionSource):
    """Sessions of a trace in a random order; their block ids are made different from each other.

    A think time that was not recorded is taken as none.
    """

    trace: SessionTrace
    arrivals: Arrivals | None
    seed: np.random.SeedSequence

    def __iter__(self) -> Iterator[Session]:
        recorded = list(read_sessions(self.trace.path))
        wanted = len(recorded) if self.trace.count is None else self.trace.count
        if wanted > len(recorded):
            problem = f"{self.trace.path}: holds {len(recorded)} sessions, not {wanted}"
            raise BadInputError(f"{problem}; lower traffic.session.count or set it to null")
        starts, order = _two_streams(self.seed)
        chosen = np.random.default_rng(order).permutation(len(recorded))[:wanted].tolist()
        starts_s = _starts_s(self.arrivals, starts, wanted)
        for number, (index, start_s) in enumerate(zip(chosen, starts_s, strict=True)):
            session = recorded[index]
            offset = 0 if session.shares_ids else _first_id(number + 1, 0)
            turns = tuple(
                Turn(
                    turn.think_s or 0.0,
                    turn.input_tokens,
                    turn.output_tokens,
                    turn.kept_blocks,
                    _shifted(turn.new_block_ids, offset),
                )
                for turn in session.turns
            )
            yield Session(number, start_s, session.block_tokens, turns)


def _shifted(ids: Sequence[int], offset: int) -> Sequence[int]:
    if isinstance(ids, range):
        return range(ids.start + offset, ids.stop + offset)
    return [one + offset for one in ids]
