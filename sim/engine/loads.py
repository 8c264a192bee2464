"""Prefixes on their way to the host memory of an instance, on the clock."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from tonnage.sim.engine.clock import Clock, call_at, on_grid
from tonnage.sim.engine.instance import Instance
from tonnage.sim.serving.plan import PromptTaker
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.tiers import HierarchySpec, LoadPlan, TierSpec


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a load that comes from one tier: its blocks go from `begins_s` to `ends_s`."""

    begins_s: float
    ends_s: float
    block_s: float

    def blocks_by(self, time_s: float) -> float:
        """Return how many of its blocks are there."""
        if time_s >= self.ends_s:
            return inf
        return max((time_s - self.begins_s) // self.block_s, 0.0) if self.block_s else 0.0


class _Wire:
    """The way from one tier to the host: loads go one after the other."""

    def __init__(self, spec: TierSpec) -> None:
        self._spec = spec
        self._free_at_s = 0.0

    def send(self, now_s: float, until_s: float, tokens: int, block_tokens: int) -> _Part:
        """Queue a load that is given up at `until_s`."""
        starts_s = max(now_s, self._free_at_s)
        ends_s = starts_s + on_grid(self._spec.load_s(tokens))
        self._free_at_s = min(ends_s, max(starts_s, until_s))
        begins_s = starts_s + self._spec.latency_s
        return _Part(begins_s, ends_s, block_tokens * self._spec.s_per_token)


class Loader:
    """What brings prefixes to the host memory of one instance, from NVMe and from the store.

    A load of which a request has waited long enough stops, with the blocks that are there.
    """

    def __init__(self, env: Clock, tiers: HierarchySpec) -> None:
        """Start with idle wires."""
        self._env = env
        self._wires = {name: _Wire(tiers.tier(name)) for name in tiers.names if name != "host"}

    def start(self, plan: LoadPlan) -> tuple[float, int]:
        """Start a load; return when it ends, and how many blocks it has brought by then."""
        now_s = self._env.now
        waits = 0 < plan.most_wait_s < inf
        until_s = now_s + on_grid(plan.most_wait_s) if waits else inf
        parts = {
            name: self._wires[name].send(now_s, until_s, tokens, plan.block_tokens)
            for name, tokens in plan.tokens_by_tier().items()
        }
        ends_s = max(part.ends_s for part in parts.values())
        if ends_s <= until_s:
            return ends_s, len(plan.block_ids)
        there = {name: part.blocks_by(until_s) for name, part in parts.items()}
        blocks = 0
        for name in plan.tiers:  # one that is not there makes those behind it useless
            if there[name] < 1:
                break
            there[name] -= 1
            blocks += 1
        return until_s, blocks


class Intake:
    """Where prompts come in at one instance: those of which a prefix is on its way wait for it."""

    def __init__(
        self, env: Clock, scheduler: PromptTaker, instance: Instance, tiers: HierarchySpec | None
    ) -> None:
        """Queue prompts at an instance."""
        self._env = env
        self._scheduler = scheduler
        self._instance = instance
        self._loader = None if tiers is None else Loader(env, tiers)

    def take(self, sequence: Sequence) -> None:
        """Queue a prompt, or have its prefix loaded first."""
        plan = self._scheduler.add(sequence, self._instance.lead())
        if plan is not None:
            assert self._loader is not None
            ends_s, blocks = self._loader.start(plan)
            call_at(self._env, ends_s, self._loaded, (sequence, plan, blocks))
        self._instance.notify()

    def _loaded(self, load: Any) -> None:
        sequence, plan, blocks = load
        self._scheduler.loaded(sequence, plan, blocks, self._instance.lead())
        self._instance.notify()
