"""The `outages` list: instances that die, links that are slow or dead, aborts that get lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, model_validator

from tonnage.scenarios.schema_base import (
    Number,
    Positive,
    PositiveSeconds,
    Seconds,
    Section,
    WholeOrZero,
    did_you_mean,
    field_error,
    shown,
)
from tonnage.sim.serving.outages import InstanceCrash, LinkFault, Outages

PoolName = Literal["any", "prefill", "decode", "serve"]


def _any(value: object) -> object:
    return None if value == "any" else value


AnyInstance = Annotated[WholeOrZero | None, BeforeValidator(_any)]


class _Placed(Section):
    """What hits an instance: of which pool, and which one; `any` is any, for links all."""

    pool: PoolName = "any"
    instance: AnyInstance = None

    @property
    def role(self) -> str | None:
        """The pool; None is any."""
        return None if self.pool == "any" else self.pool


class CrashSection(_Placed):
    """An instance dies with all KV on it, `at` a time or `rate_per_hour` of each that it may hit.

    It is back, empty, after `restart`; null: never. The router notices after `noticed`. `lost`:
    what becomes of its requests, as in docs/retries.md.
    """

    kind: Literal["instance_crash"] = "instance_crash"
    at: Seconds | None = None
    rate_per_hour: Positive | None = None
    restart: Seconds | None = 60.0
    noticed: Seconds = 0.0
    lost: Literal["retry", "fail", "recompute"] = "retry"

    @model_validator(mode="after")
    def _happens(self) -> CrashSection:
        if (self.at is None) == (self.rate_per_hour is None):
            raise field_error("at", "a crash needs a time, such as 60s, or a rate_per_hour")
        return self

    def spec(self) -> InstanceCrash:
        """Return the crash."""
        return InstanceCrash(
            self.role,
            self.instance,
            self.at,
            self.rate_per_hour,
            self.restart,
            self.noticed,
            self.lost,
        )


class _Span(_Placed):
    """What lasts from `at` to `until`."""

    at: Seconds = 0.0
    until: PositiveSeconds | None = None

    @model_validator(mode="after")
    def _ends(self) -> _Span:
        if self.until is None or self.until <= self.at:
            raise field_error("until", f"write the time at which it ends, after {self.at:g} s")
        return self


class SlowLinkSection(_Span):
    """KV travels at `factor` times its rate for a while."""

    kind: Literal["slow_link"] = "slow_link"
    factor: Annotated[Number, Field(gt=0, lt=1)] = 0.1

    def spec(self) -> LinkFault:
        """Return the fault."""
        assert self.until is not None
        return LinkFault(self.at, self.until, self.factor, self.role, self.instance)


class DeadLinkSection(_Span):
    """KV does not travel for a while; what is on its way waits."""

    kind: Literal["dead_link"] = "dead_link"

    def spec(self) -> LinkFault:
        """Return the fault."""
        assert self.until is not None
        return LinkFault(self.at, self.until, 0.0, self.role, self.instance)


class LostAbortSection(Section):
    """The abort of a client that leaves does not reach the server, with a probability."""

    kind: Literal["lost_abort"] = "lost_abort"
    probability: Annotated[Number, Field(gt=0, le=1)] = 1.0


_KINDS = ("instance_crash", "slow_link", "dead_link", "lost_abort")


def _with_kind(value: object) -> object:
    if isinstance(value, Section):
        return value
    if not isinstance(value, dict):
        example = "{kind: instance_crash, pool: decode, at: 60s}"
        raise field_error("", f"{shown(value)} is no outage; write it like {example}")
    kind = value.get("kind")
    if kind not in _KINDS:
        raise field_error("kind", f"{shown(kind)}: {did_you_mean(str(kind), _KINDS)}")
    return value


Outage = Annotated[
    Annotated[
        CrashSection | SlowLinkSection | DeadLinkSection | LostAbortSection, Discriminator("kind")
    ],
    BeforeValidator(_with_kind),
]


def _a_list(value: Any) -> Any:
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list | tuple):
        example = "[{kind: instance_crash, pool: decode, at: 60s}]"
        raise field_error("", f"{shown(value)} is not a list; write it like {example}")
    return value


OutageList = Annotated[tuple[Outage, ...], BeforeValidator(_a_list)]


def check_outages(
    outages: Sequence[Outage],
    instances: Mapping[str, int],
    *,
    resident: bool,
    waits: bool,
    gives_up: bool,
) -> None:
    """Raise where an outage could not happen in a deployment, given as instances by role."""
    for number, outage in enumerate(outages):
        if resident:
            problem = "kind resident holds its requests in one instance that stays up"
            raise field_error(f"outages.{number}", f"{problem}; use kind closed")
        if isinstance(outage, LostAbortSection):
            if not gives_up:
                problem = "no client leaves before its answer; set traffic.timeout"
                raise field_error(f"outages.{number}", problem)
            continue
        _check_place(f"outages.{number}", outage, instances)
        if isinstance(outage, _Span) and "serve" in instances:
            problem = "a serve pool sends no KV anywhere; use prefill and decode pools"
            raise field_error(f"outages.{number}.kind", problem)
        if isinstance(outage, CrashSection) and outage.restart is None and waits:
            problem = "requests that wait for an instance might wait for ever; give a time"
            raise field_error(f"outages.{number}.restart", problem)


def _check_place(field: str, outage: _Placed, instances: Mapping[str, int]) -> None:
    roles = list(instances) if outage.role is None else [outage.role]
    if roles[0] not in instances:
        raise field_error(f"{field}.pool", f"there is no such pool; use {' or '.join(instances)}")
    most = max(instances[role] for role in roles)
    if outage.instance is not None and outage.instance >= most:
        problem = f"there is no instance {outage.instance}; they are 0 to {most - 1}"
        raise field_error(f"{field}.instance", problem)


def outages_spec(outages: Sequence[Outage]) -> Outages | None:
    """Return what goes wrong; None where nothing does. Aborts get lost independently."""
    lost_abort = 0.0
    for outage in outages:
        if isinstance(outage, LostAbortSection):
            lost_abort += outage.probability * (1.0 - lost_abort)
    found = Outages(
        tuple(one.spec() for one in outages if isinstance(one, CrashSection)),
        tuple(one.spec() for one in outages if isinstance(one, SlowLinkSection | DeadLinkSection)),
        lost_abort,
    )
    return found if found else None
