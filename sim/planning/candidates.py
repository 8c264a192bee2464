"""Fleets as rows of arrays: pool configurations, replicas and routers, thousands at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.sim.domain import FloatArray, IntArray
from tonnage.sim.planning.pool_model import DecodeTimes, PromptTimes

NO_POOL = -1


@dataclass(frozen=True, slots=True, eq=False)
class PoolOption:
    """One configuration of a pool, by its figures; `config` is whatever describes it.

    `concurrency`: requests of the mean length that an instance holds at once, not a whole number,
    on `decode_ranks` that hold their own. `prompt` and `decode` are there where the role has that
    phase.
    """

    config: Hashable
    role: str  # prefill | decode | serve
    gpus: int
    usd_per_hour: float
    kv_tokens: int
    concurrency: float
    prompt: PromptTimes | None = None
    decode: DecodeTimes | None = None
    host_tokens: int = 0  # that the tiers below the GPU hold
    decode_ranks: int = 1


@dataclass(frozen=True, slots=True)
class RouterOption:
    """A routing policy; `returns`: requests go back to where their prefix lies."""

    name: str
    returns: bool


@dataclass(frozen=True, slots=True)
class PairTransfer:
    """How the KV of a prompt gets from one configuration to another, per GPU that sends."""

    bytes_per_token: float
    bandwidth_bytes_per_s: float
    fixed_s: float
    convert_s_per_token: float
    tail_tokens: int | None  # sent after the prompt is computed; None: all of it


@dataclass(frozen=True, slots=True, eq=False)
class Fleets:
    """Candidates `[fleets]`: indices into the options, replicas, price. NO_POOL: colocated."""

    first: IntArray  # prefill, or serve
    first_instances: IntArray
    second: IntArray  # decode
    second_instances: IntArray
    router: IntArray
    gpus: IntArray
    usd_per_hour: FloatArray

    def __len__(self) -> int:
        return len(self.first)

    def take(self, rows: IntArray) -> Fleets:
        """Return some of them, in that order."""
        return Fleets(
            self.first[rows],
            self.first_instances[rows],
            self.second[rows],
            self.second_instances[rows],
            self.router[rows],
            self.gpus[rows],
            self.usd_per_hour[rows],
        )


def colocated(
    options: Sequence[PoolOption], counts: Sequence[Sequence[int]], routers: int, max_gpus: int
) -> Fleets:
    """Return every serve option with its numbers of instances, under every router."""
    rows = [
        (index, instances, NO_POOL, 0, router)
        for index, tried in enumerate(counts)
        for instances in tried
        for router in range(1 if instances == 1 else routers)
    ]
    gpus = [options[row[0]].gpus * row[1] for row in rows]
    usd = [options[row[0]].usd_per_hour * row[1] for row in rows]
    return _within(_fleets(rows, gpus, usd), max_gpus)


def disaggregated(
    prefills: Sequence[PoolOption],
    prefill_counts: Sequence[Sequence[int]],
    decodes: Sequence[PoolOption],
    decode_counts: Sequence[Sequence[int]],
    routers: int,
    max_gpus: int,
) -> Fleets:
    """Return every prefill with every decode option, both with their numbers of instances."""
    firsts = np.array(
        [(i, n) for i, tried in enumerate(prefill_counts) for n in tried], dtype=np.int64
    ).reshape(-1, 2)
    seconds = np.array(
        [(i, n) for i, tried in enumerate(decode_counts) for n in tried], dtype=np.int64
    ).reshape(-1, 2)
    first, second, router = (
        grid.ravel()
        for grid in np.meshgrid(
            np.arange(len(firsts)), np.arange(len(seconds)), np.arange(routers), indexing="ij"
        )
    )
    one, other = firsts[first], seconds[second]
    # One instance of each leaves a router nothing to choose.
    kept = (router == 0) | (one[:, 1] > 1) | (other[:, 1] > 1)
    one, other, router = one[kept], other[kept], router[kept]
    gpus = _of(prefills, "gpus", one) + _of(decodes, "gpus", other)
    usd = _of(prefills, "usd_per_hour", one) + _of(decodes, "usd_per_hour", other)
    fleets = Fleets(
        one[:, 0], one[:, 1], other[:, 0], other[:, 1], router, gpus.astype(np.int64), usd
    )
    return _within(fleets, max_gpus)


def _of(options: Sequence[PoolOption], name: str, chosen: IntArray) -> FloatArray:
    each = np.array([getattr(option, name) for option in options], dtype=np.float64)
    return each[chosen[:, 0]] * chosen[:, 1] if len(each) else np.zeros(0)


def _fleets(rows: Sequence[tuple[int, ...]], gpus: Sequence[int], usd: Sequence[float]) -> Fleets:
    table = np.asarray(rows, dtype=np.int64).reshape(-1, 5)
    first, first_instances, second, second_instances, router = table.T
    return Fleets(
        first,
        first_instances,
        second,
        second_instances,
        router,
        np.asarray(gpus, dtype=np.int64),
        np.asarray(usd, dtype=np.float64),
    )


def _within(fleets: Fleets, max_gpus: int) -> Fleets:
    return fleets.take(np.flatnonzero(fleets.gpus <= max_gpus))
