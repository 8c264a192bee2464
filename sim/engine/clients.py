"""Clients that try again: attempts of one request, on the clock; a request ends once.

An attempt is a sequence of its own, with a number of its own, so that a server may still be at an
attempt that its client has left.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from copy import copy
from dataclasses import replace
from typing import Protocol

import numpy as np

from tonnage.sim.domain import Request
from tonnage.sim.engine.breakers import Breakers, Periods
from tonnage.sim.engine.clock import TICK_S, Clock, call_at, on_grid
from tonnage.sim.engine.door import BREAKER_OPEN, PASSING
from tonnage.sim.engine.fleet import Fleet
from tonnage.sim.engine.gaps import TokenGaps
from tonnage.sim.engine.instance import Instance
from tonnage.sim.results.attempts import AttemptLog, OutageLog
from tonnage.sim.results.records import Attempts
from tonnage.sim.serving.draws import Draws
from tonnage.sim.serving.outages import Lost
from tonnage.sim.serving.retries import ClientSpec, Failure
from tonnage.sim.serving.sequence import Sequence

CRASHED = "its instance crashed"
_FIRST_NUMBER = 2**40  # of attempts after the first: no request has such a number
_MILESTONES = (
    "prefill_start_s",
    "prefill_end_s",
    "transfer_start_s",
    "transfer_end_s",
    "first_token_s",
)
_STREAM = 7_102  # of a seed's random numbers: nobody else's


class Users(Protocol):
    """Those who wait for answers, and who keeps the records."""

    def free_user(self, sequence: Sequence, *, answered: bool) -> None:
        """Let whoever waited for a request send what follows."""

    def record(self, sequence: Sequence, attempts: Attempts) -> None:
        """Take in that a request has ended for its client and at every server."""


class _Call:
    """A request: its attempts so far, and the tokens that all of them cost."""

    __slots__ = (
        "attempts",
        "computed_tokens",
        "deadline_s",
        "generated_tokens",
        "last",
        "over",
        "request",
        "under_way",
    )

    def __init__(self, request: Request, deadline_s: float | None) -> None:
        self.request = request
        self.deadline_s = deadline_s
        self.attempts = 0
        self.under_way = 0  # sequences that a server still has
        self.over = False  # for the client
        self.last: _Attempt | None = None  # the one that was served, or else the latest
        self.computed_tokens = 0
        self.generated_tokens = 0


class _Attempt:
    """One attempt: the sequence that serves it now, and those before it that died in a crash."""

    __slots__ = (
        "arriving",
        "before",
        "call",
        "closed",
        "left_s",
        "lost",
        "periods",
        "row",
        "sequence",
        "written_tokens",
    )

    def __init__(self, call: _Call, sequence: Sequence, row: int) -> None:
        self.call = call
        self.sequence = sequence
        self.row = row  # of the log
        self.arriving = False  # at the fleet, which has not taken it in yet
        self.closed = False  # its client knows how it ended
        self.left_s: float | None = None  # when its client left and no server was told
        self.lost: Lost | None = None  # with an instance
        self.before: list[Sequence] = []
        self.periods: Periods = []
        self.written_tokens = sequence.generated_tokens  # before it came (a resident load)


class Clients:
    """Send requests to a fleet, again when they fail; tell users and records how they ended."""

    def __init__(
        self,
        env: Clock,
        spec: ClientSpec,
        users: Users,
        seed: int,
        *,
        timeout_s: float | None,
        lost_abort: float = 0.0,
        resident: bool = False,
    ) -> None:
        """`timeout_s`: of an attempt; `lost_abort`: the probability that no server is told."""
        self.fleet: Fleet
        self.breakers = Breakers(env, spec.breaker)
        self.attempts = AttemptLog()
        self.outages = OutageLog()
        self.gaps = TokenGaps()  # those that a move to another instance makes
        self._env = env
        self._spec = spec
        self._users = users
        self._timeout_s = None if timeout_s is None else max(on_grid(timeout_s), TICK_S)
        self._lost_abort = lost_abort
        self._resident = resident
        self._draws = Draws(np.random.default_rng([_STREAM, seed]))
        self._attempts: dict[Sequence, _Attempt] = {}  # that a server has
        self._newly_lost: list[_Attempt] = []  # by the crash at hand
        self._number = _FIRST_NUMBER

    def in_flight(self) -> list[Sequence]:
        """Return the sequences that some server has, in the order in which they were sent."""
        return list(self._attempts)

    # --- attempts -------------------------------------------------------------------------------

    def send(self, sequence: Sequence) -> None:
        """Send a request for the first time."""
        deadline_s = self._spec.deadline_s
        if deadline_s is not None:
            deadline_s = on_grid(sequence.request.arrival_s) + max(on_grid(deadline_s), TICK_S)
        self._try(_Call(sequence.request, deadline_s), sequence)

    def _try_again(self, call: _Call) -> None:
        sequence = Sequence(self._renumbered(call.request))
        sequence.generated_tokens = int(self._resident)
        self._try(call, sequence)

    def _renumbered(self, request: Request) -> Request:
        self._number += 1
        return replace(request, id=self._number, arrival_s=self._env.now)

    def _try(self, call: _Call, sequence: Sequence) -> None:
        call.attempts += 1
        row = self.attempts.begin(call.request.id, call.attempts, self._env.now)
        attempt = call.last = _Attempt(call, sequence, row)
        if not self.breakers.admit():
            sequence.rejected = BREAKER_OPEN
            self._close(attempt, "refused")
            self._failed(attempt, "rejected")
            self._record_if_out(call)
            return
        until_s = self._patience_ends_s(call)
        if until_s is not None:
            call_at(self._env, until_s, self._time_is_up, attempt)
        attempt.periods = self.breakers.begin()
        self._enter(attempt, sequence)

    def _patience_ends_s(self, call: _Call) -> float | None:
        ends_s = [] if self._timeout_s is None else [self._env.now + self._timeout_s]
        if call.deadline_s is not None:
            ends_s.append(max(call.deadline_s, self._env.now))
        return min(ends_s, default=None)

    def _enter(self, attempt: _Attempt, sequence: Sequence) -> None:
        attempt.call.under_way += 1
        attempt.arriving = True
        self._attempts[sequence] = attempt
        self.fleet.arrive(sequence)
        if not attempt.closed:  # else its end has seen to it
            attempt.periods += self.breakers.begin_at(sequence)
        attempt.arriving = False

    def _time_is_up(self, attempt: _Attempt) -> None:
        """The client has waited long enough: it leaves, and the server is told, or is not."""
        if attempt.closed:
            return
        self._close(attempt, "timed_out")
        if self._lost_abort and self._draws.uniform() < self._lost_abort:
            attempt.left_s = self._env.now
            self.outages.lost_aborts += 1
        else:
            attempt.sequence.gave_up = True
            self.fleet.give_up(attempt.sequence)
        self.breakers.failed(attempt.periods)
        self._failed(attempt, "timed_out")
        self._record_if_out(attempt.call)

    def _close(self, attempt: _Attempt, outcome: str) -> None:
        attempt.closed = True
        self.attempts.end(attempt.row, self._env.now, outcome)

    # --- what becomes of them -------------------------------------------------------------------

    def out(self, sequence: Sequence) -> None:
        """Take in that no server has a sequence any more, served or not."""
        attempt = self._attempts.pop(sequence)
        call, moved = attempt.call, attempt.sequence is not sequence
        sequence.ended = True
        call.under_way -= 1
        call.computed_tokens += sequence.computed_tokens
        call.generated_tokens += sequence.generated_tokens
        if not moved and not attempt.before:
            call.generated_tokens -= attempt.written_tokens
        if moved:
            pass  # its client has another one
        elif attempt.left_s is not None:
            _forget_after(sequence, attempt.left_s)
        elif attempt.lost is not None:
            sequence.gave_up, sequence.aborted = False, CRASHED
        elif not attempt.closed:
            self._tell(attempt)
        self._record_if_out(call)

    def _tell(self, attempt: _Attempt) -> None:
        """Tell the client how its attempt ended at the server."""
        sequence, call = attempt.sequence, attempt.call
        if attempt.arriving:
            attempt.periods += self.breakers.begin_at(sequence)
        if sequence.rejected is None and sequence.aborted is None:
            self._close(attempt, "served")
            self.breakers.succeeded(attempt.periods)
            call.over, call.last = True, attempt
            self._users.free_user(sequence, answered=True)
            return
        failure: Failure = "aborted" if sequence.rejected is None else "rejected"
        self._close(attempt, failure)
        passing = sequence.rejected is None or sequence.rejected in PASSING
        if passing:
            self.breakers.failed(attempt.periods)
        else:
            self.breakers.withdrawn(attempt.periods)
        self._failed(attempt, failure, again=passing)

    def _failed(self, attempt: _Attempt, failure: Failure, *, again: bool = True) -> None:
        """Let the client try again after a while, or give its request up."""
        call, spec = attempt.call, self._spec
        if again and failure in spec.retry_on and call.attempts < spec.attempts:
            uniform = self._draws.uniform() if spec.back_off.jitter_share else 0.5
            next_s = on_grid(self._env.now + spec.back_off.delay_s(call.attempts, uniform))
            if call.deadline_s is None or next_s < call.deadline_s:
                call_at(self._env, max(next_s, self._env.now), self._try_again, call)
                return
        call.over = True
        self._users.free_user(attempt.sequence, answered=False)

    # --- crashes --------------------------------------------------------------------------------

    def lose(self, instance: Instance, sequences: ListLike[Sequence], lost: Lost) -> None:
        """Take in that sequences are about to be dropped, for an instance has died.

        One whose client has left is nobody's loss: it is not moved, though no server was told.
        """
        for sequence in sequences:
            attempt = self._attempts[sequence]
            sequence.gave_up = True
            if attempt.closed or attempt.lost is not None:
                continue
            attempt.lost = lost
            self._newly_lost.append(attempt)
            if sequence.first_token_s is not None and sequence.last_token_s is None:
                sequence.last_token_s = instance.last_token_s()

    def go_on(self) -> None:
        """Let clients, or the router, do what they do about the attempts that were lost.

        Other servers may not have dropped them yet.
        """
        lost, self._newly_lost = self._newly_lost, []
        for attempt in lost:
            if attempt.lost == "recompute":
                self._move(attempt)
                continue
            self._close(attempt, "aborted")
            self.breakers.failed(attempt.periods)
            self._failed(attempt, "aborted", again=attempt.lost == "retry")
            self._record_if_out(attempt.call)

    def _move(self, attempt: _Attempt) -> None:
        """Send the prompt and the tokens that the client has to other instances."""
        old = attempt.sequence
        has = old.generated_tokens if old.first_token_s is not None else 0
        limit = old.request.output_limit_tokens
        request = replace(
            self._renumbered(old.request),
            input_tokens=old.request.input_tokens + has,
            output_tokens=old.request.output_tokens - has,
            output_limit_tokens=None if limit is None else max(limit - has, 1),
        )
        self.outages.moved += 1
        attempt.before.append(old)
        attempt.lost = None
        attempt.periods = self.breakers.moved(attempt.periods)
        attempt.sequence = Sequence(request)
        self._enter(attempt, attempt.sequence)

    # --- the end --------------------------------------------------------------------------------

    def _record_if_out(self, call: _Call) -> None:
        """Write the record of a request that is over, when no server is at it any more."""
        if not call.over or call.under_way:
            return
        last = call.last
        assert last is not None
        sequence = last.sequence
        if sequence.request is not call.request:
            self._add_pauses(last)
            sequence = _whole(last, call.request)
        lost_tokens = call.generated_tokens - (sequence.generated_tokens - last.written_tokens)
        computed_tokens = call.computed_tokens - sequence.computed_tokens
        self._users.record(sequence, Attempts(call.attempts, computed_tokens, lost_tokens))

    def _add_pauses(self, attempt: _Attempt) -> None:
        """Count the gaps between the last token before a move and the first one after it."""
        last_s: float | None = None
        for sequence in (*attempt.before, attempt.sequence):
            if last_s is not None and sequence.first_token_s is not None:
                self.gaps.add_one(sequence.first_token_s - last_s)
            last_s = sequence.last_token_s if sequence.first_token_s is not None else last_s


def _whole(attempt: _Attempt, request: Request) -> Sequence:
    """Return what the sequences of an attempt did together, for the record of its request.

    A copy: the last of them may linger in its batch.
    """
    parts = [*attempt.before, attempt.sequence]
    whole = copy(attempt.sequence)
    whole.request = request
    whole.generated_tokens += attempt.sequence.request.input_tokens - request.input_tokens
    whole.computed_tokens = sum(part.computed_tokens for part in parts)
    whole.retractions = sum(part.retractions for part in parts)
    whole.cached_tokens, whole.prefix = parts[0].cached_tokens, parts[0].prefix
    for name in _MILESTONES:
        times_s = (getattr(part, name) for part in parts)
        setattr(whole, name, next((time_s for time_s in times_s if time_s is not None), None))
    return whole


def _forget_after(sequence: Sequence, left_s: float) -> None:
    """Leave out of a record what happened after the client had left."""
    sequence.gave_up, sequence.finish_s = True, None
    if sequence.first_token_s is not None and sequence.first_token_s > left_s:
        sequence.first_token_s = None
