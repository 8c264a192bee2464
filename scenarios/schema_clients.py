"""The `clients` section: what those who send requests do when one fails."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from tonnage.scenarios.schema_base import (
    Number,
    PositiveSeconds,
    Seconds,
    Section,
    Whole,
    did_you_mean,
    field_error,
    shown,
)
from tonnage.sim.serving.breaker import BreakerSpec
from tonnage.sim.serving.retries import FAILURES, BackOff, ClientSpec, Failure

_BACK_OFF, _BREAKER = BackOff(), BreakerSpec()


def _known_failures(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise field_error("", f"{shown(value)} is not a list; write it like [aborted, timed_out]")
    for name in value:
        if name not in FAILURES:
            raise field_error("", f"{shown(name)}: {did_you_mean(str(name), FAILURES)}")
    return tuple(name for name in FAILURES if name in value)


class BackOffSection(Section):
    """The wait before the next attempt: `first`, then `factor` times longer each time, to `most`.

    All that times a random number within `jitter` of 1. `first: 0s` is at once, every time.
    """

    first: Seconds = _BACK_OFF.first_s
    factor: Annotated[Number, Field(ge=1)] = _BACK_OFF.factor
    most: PositiveSeconds = _BACK_OFF.most_s
    jitter: Annotated[Number, Field(ge=0, le=1)] = _BACK_OFF.jitter_share

    @model_validator(mode="after")
    def _rises(self) -> BackOffSection:
        if self.first > self.most:
            raise field_error("most", f"{self.most:g} s is less than first, {self.first:g} s")
        return self

    def spec(self) -> BackOff:
        """Return the rule."""
        return BackOff(self.first, self.factor, self.most, self.jitter)


class BreakerSection(Section):
    """After `failures` in a row nobody is asked for `open`; after `successes` in a row all is well.

    `scope`: pool, one breaker that all clients share; instance, one in the router per instance.
    """

    scope: Literal["pool", "instance"] = _BREAKER.scope
    failures: Whole = _BREAKER.failures
    open: PositiveSeconds = _BREAKER.open_s
    successes: Whole = _BREAKER.successes

    def spec(self) -> BreakerSpec:
        """Return the rule."""
        return BreakerSpec(self.scope, self.failures, self.open, self.successes)


class ClientsSection(Section):
    """How all clients behave; the defaults try once.

    `attempts`: of one request, in all; each may take as long as `traffic.timeout` says.
    `retry_on`: aborted by a server, rejected for want of an instance, timed out. `deadline`: of a
    request, all attempts and waits together.
    """

    attempts: Whole = 1
    retry_on: Annotated[tuple[Failure, ...], BeforeValidator(_known_failures)] = FAILURES
    back_off: BackOffSection = BackOffSection()
    breaker: BreakerSection | None = None
    deadline: PositiveSeconds | None = None

    def spec(self) -> ClientSpec | None:
        """Return the behaviour; None where it is to try once and wait."""
        if self.attempts == 1 and self.breaker is None and self.deadline is None:
            return None
        return ClientSpec(
            self.attempts,
            frozenset(self.retry_on),
            self.back_off.spec(),
            None if self.breaker is None else self.breaker.spec(),
            self.deadline,
        )
