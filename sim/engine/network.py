"""The path of KV from prefill to decode instances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy

from tonnage.sim.domain import LinkSpec
from tonnage.sim.engine.clock import call_at, on_grid


class Link:
    """The network port of one prefill instance: transfers go one after the other.

    Every GPU of the instance sends its own share of the KV, so a transfer takes
    ``setup + bytes per GPU / bandwidth per GPU``.
    """

    def __init__(self, env: simpy.Environment, spec: LinkSpec) -> None:
        self._env = env
        self._spec = spec
        self._free_at_s = 0.0
        self.bytes_per_gpu = 0.0

    def send(self, bytes_per_gpu: float, on_arrival: Callable[[Any], None], argument: Any) -> float:
        """Queue a transfer, call ``on_arrival(argument)`` when it is through; return its start."""
        duration_s = self._spec.setup_s + bytes_per_gpu / self._spec.bandwidth_bytes_per_s
        start_s = max(self._env.now, self._free_at_s)
        self._free_at_s = start_s + on_grid(duration_s)
        self.bytes_per_gpu += bytes_per_gpu
        call_at(self._env, self._free_at_s, on_arrival, argument)
        return start_s
