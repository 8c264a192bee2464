"""Faults of data in a run, and the books of what checks found: per run, on the clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tonnage.sim.engine.clock import Clock, call_at, on_grid
from tonnage.sim.engine.instance import Instance
from tonnage.sim.serving.build import SchedulerSpec
from tonnage.sim.serving.checks import CheckTally
from tonnage.sim.serving.custody import Custody, watch_of
from tonnage.sim.serving.data_faults import FaultSource, FaultSpec
from tonnage.sim.serving.guarded import Guarded
from tonnage.sim.serving.integrity import IntegrityBooks
from tonnage.sim.serving.plan import Plan

_STREAM = 0xFA017  # of random numbers


class RunIntegrity:
    """What watches the pages of all instances of one run, and what goes wrong with them."""

    def __init__(self, env: Clock, faults: tuple[FaultSpec, ...], seed: int) -> None:
        """Start with empty books."""
        self.books = IntegrityBooks()
        self.custody = Custody() if faults else None
        self._env = env
        self._faults = faults
        self._seed = seed

    def watched(self, role: str, number: int, spec: SchedulerSpec) -> WatchedInstance | None:
        """Return what looks after one instance, numbered in its pool; None if nothing does."""
        if spec.integrity.tracker == "none" and not self._faults:
            return None
        return WatchedInstance(self, role, number, spec)

    def sources(self, role: str, number: int, rank: int) -> list[tuple[FaultSpec, FaultSource]]:
        """Return what goes wrong at one rank of an instance, each with its own random numbers."""
        return [
            (spec, FaultSource(spec, self._random(which, number, rank)))
            for which, spec in enumerate(self._faults)
            if spec.pool == role and spec.instance in (None, number)
        ]

    def _random(self, *which: int) -> np.random.Generator:
        return np.random.default_rng([_STREAM, self._seed, *which])

    def at(self, time_s: float, call: Any, argument: Any) -> None:
        """Do something at an instant that has not passed."""
        instant_s = on_grid(time_s)
        if instant_s >= self._env.now:
            call_at(self._env, instant_s, call, argument)

    def result(self) -> IntegrityBooks | None:
        """Return the books, None if nothing was watched."""
        books = self.books
        return books if self._faults or books.checks.runs else None


class WatchedInstance:
    """Counts the checks of one instance and lets its faults happen."""

    def __init__(self, run: RunIntegrity, role: str, number: int, spec: SchedulerSpec) -> None:
        """Count into the books of the run."""
        self._run = run
        self._role = role
        self._number = number
        self._identified = spec.identified
        self._tally = CheckTally(
            spec.integrity, spec.page_tokens, spec.extra_tokens, run.books.checks
        )

    def start(self, instance: Instance) -> None:
        """Let what is due happen at the pools of its scheduler, which is new."""
        if not self._identified:
            return
        for rank, pool in enumerate(instance.scheduler.pools()):
            watch = watch_of(pool)
            watch.books = self._run.books
            for spec, source in self._run.sources(self._role, self._number, rank):
                watch.faults.append(source)
                for time_s in spec.at_s if rank == 0 else ():
                    self._run.at(time_s, self._strike, (instance, source))

    def _strike(self, what: Any) -> None:
        instance, source = what
        source.due_now()
        for lane in instance.scheduler.lanes:
            for guarded in getattr(lane, "ranks", (lane,)):
                if isinstance(guarded, Guarded):
                    guarded.interrupt()
        instance.notify()

    def stepped(self, plan: Plan, steps: int) -> None:
        """Count the checks of a step that was done so many times."""
        if plan.step is not None:
            self._tally.take_in(plan.step, steps, plan.load_tokens)


def identified(spec: SchedulerSpec) -> SchedulerSpec:
    """Return a scheduler whose pages have an identity."""
    return replace(spec, identified=True)
