"""Devices that are watched while steps are measured: how far samples lie apart, how it drifts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from tonnage.calibrate.reference_points import Seconds, times_now
from tonnage.drift import (
    DriftRounds,
    PoolDrift,
    own_profile,
    pool_drift,
    references_of_steps,
    this_machine,
    why_no_comparison,
)
from tonnage.execution import DeviceMaker, StepDevice
from tonnage.pools import BuiltPool, built_pools, times_of
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.domain import Step
from tonnage.step_devices import DeviceChoice

_ROUNDS = 4  # of the reference kernels in a budget, beside those before and after a pool


@runtime_checkable
class SpreadTeller(Protocol):
    """A device that tells how far the samples of its last step lay apart."""

    def spread(self) -> tuple[float, float]:
        """Return the 20 % and the 80 % quantile of the samples over their median."""


@dataclass(slots=True)
class Watch:
    """Opens watched devices, and keeps what was seen.

    `machine`: what a profile measured here would say of it (`this_machine`). `spreads`: of every
    step of a pool, in the order of measuring; `why_not`: why a pool has no drift.
    """

    scenario: Scenario
    machine: dict[str, Any]
    seconds: Seconds
    every_s: float
    on_gpu: bool = False
    spreads: dict[Role, list[tuple[float, float]]] = field(default_factory=dict)
    drift: dict[Role, PoolDrift] = field(default_factory=dict)
    profile: str | None = None
    why_not: str | None = None

    @classmethod
    def of(cls, scenario: Scenario, choice: DeviceChoice, budget_s: float) -> Watch:
        """Return what watches this machine's device."""
        return cls(
            scenario,
            this_machine(choice.device, choice.threads),
            times_now(choice.device, choice.threads),
            budget_s / _ROUNDS,
            not choice.device.startswith("cpu"),
        )

    def devices(self, make: DeviceMaker) -> DeviceMaker:
        """Return a maker of watched devices."""

        def opened(
            role: Role, pool: BuiltPool, steps: Sequence[Step]
        ) -> AbstractContextManager[StepDevice]:
            return self._opened(make, role, pool, steps)

        return opened

    @contextmanager
    def _opened(
        self, make: DeviceMaker, role: Role, pool: BuiltPool, steps: Sequence[Step]
    ) -> Iterator[StepDevice]:
        """Time the references before the device is opened, while it is, and once it is closed."""
        rounds = self._rounds(pool, steps)
        rounds.again()
        with make(role, pool, steps) as device:
            watched = _Watched(device, rounds.again, self.every_s)
            yield watched
            self.spreads[role] = watched.spreads
        rounds.again()
        families = rounds.families()
        if families:
            predictor = times_of(self.scenario, built_pools(self.scenario))[role].executor
            self.drift[role] = pool_drift(families, pool, predictor, steps)

    def _rounds(self, pool: BuiltPool, steps: Sequence[Step]) -> DriftRounds:
        profile = own_profile(self.scenario, pool)
        why_not = why_no_comparison(profile, self.machine)
        self.why_not = self.why_not or why_not
        if profile is None or why_not is not None:
            return DriftRounds((), self.seconds)
        self.profile = profile.header.name
        return DriftRounds(references_of_steps(profile, pool, steps, self.on_gpu), self.seconds)


@dataclass(slots=True)
class _Watched:
    """A device; now and then the references are timed between two of its steps."""

    device: StepDevice
    again: Callable[[], None]
    every_s: float
    spreads: list[tuple[float, float]] = field(default_factory=list)
    _last_s: float = field(default_factory=monotonic)

    def measure(self, step: Step) -> float:
        if monotonic() - self._last_s > self.every_s:
            self.again()
            self._last_s = monotonic()
        seconds = self.device.measure(step)
        told = self.device.spread() if isinstance(self.device, SpreadTeller) else (1.0, 1.0)
        self.spreads.append(told)
        return seconds

    def facts(self) -> dict[str, Any]:
        return self.device.facts()
