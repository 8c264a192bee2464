"""What fleets would do under a load, by closed forms: thousands of candidates at once.

Prompts queue as in M/G/k, requests that decode fill a batch whose step time depends on it, a closed
load slows down until what it asks is what is done. docs/plan.md derives it and says how near a
simulation comes. Everything is `[fleets]` unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from tonnage.sim.domain import FloatArray, IntArray, Objective
from tonnage.sim.planning.candidates import (
    NO_POOL,
    Fleets,
    PairTransfer,
    PoolOption,
    RouterOption,
)
from tonnage.sim.planning.pool_model import BATCHES
from tonnage.sim.planning.prompt_rows import PromptRow, prompt_row
from tonnage.sim.planning.quantiles import Wait, waiting_quantile, wavering_quantile
from tonnage.sim.planning.rooms import Room, room, usable
from tonnage.sim.planning.workload import Workload

_BISECTIONS = 16
_BATCH_ROUNDS = 4
_BATCH_SPREAD = 0.8  # of the root of a batch: what a request's average over its life leaves of it
_BUSY_MOST = 0.97
_CHUNK_ROWS = 4096
_OUTPUT_GRID = 16


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """All that can be combined, and the load that it is for."""

    workload: Workload
    firsts: Sequence[PoolOption]  # of one shape: prefill pools, or serve pools
    seconds: Sequence[PoolOption]  # decode pools; none where one pool does both
    routers: Sequence[RouterOption]
    transfers: Sequence[Sequence[PairTransfer]]  # `[firsts][seconds]`


@dataclass(frozen=True, slots=True, eq=False)
class Screened:
    """The figures of fleets. `saturated`: more is asked than is done, or held.

    `ratios` `[fleets, objectives]`: what is reached over the limit, infinite where saturated.
    """

    fleets: Fleets
    rate_per_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    batch: FloatArray
    prefill_busy: FloatArray
    hit_share: FloatArray
    output_tokens_per_s: FloatArray
    saturated: IntArray  # 0 no, 1 prefill, 2 decode, 3 memory
    ratios: FloatArray
    worst: FloatArray  # the largest ratio of each fleet: it meets its objectives up to 1

    @property
    def usd_per_million_output_tokens(self) -> FloatArray:
        """Price of the fleet over what it generates."""
        return self.fleets.usd_per_hour / 3600 / self.output_tokens_per_s * 1e6

    def take(self, rows: IntArray) -> Screened:
        """Return some fleets, in that order."""
        names = [name for name in self.__slots__ if name != "fleets"]
        return Screened(self.fleets.take(rows), *(getattr(self, name)[rows] for name in names))


SATURATED = ("", "prefill", "decode", "memory")


def screen(offer: Offer, fleets: Fleets, objectives: Sequence[Objective]) -> Screened:
    """Return the figures of every fleet of an offer."""
    return _Screen(offer, fleets).figures(objectives)


class _Screen:
    """The arrays that belong to the fleets, gathered once."""

    def __init__(self, offer: Offer, fleets: Fleets) -> None:
        self._offer, self._fleets, self._load = offer, fleets, offer.workload
        self._rows, self._row = self._prompt_rows()
        self._is_serve = fleets.second == NO_POOL
        rows = self._rows
        self._mean_s = np.array([row.mean_s for row in rows])[self._row]
        self._shared_s = np.array([row.shared_s for row in rows])[self._row]
        self._servers = np.array([row.servers for row in rows], dtype=np.float64)[self._row]
        side = np.array([row.side_by_side for row in rows], dtype=np.float64)
        self._side_by_side = side[self._row]
        self._ranks = self._servers / fleets.first_instances
        variation = np.array([row.variation for row in rows])[self._row]
        self._burst = (self._load.arrival_variation + variation) / 2
        self._decoders = offer.firsts if not len(offer.seconds) else offer.seconds
        decoder = fleets.first if not len(offer.seconds) else fleets.second
        counts = np.where(self._is_serve, fleets.first_instances, fleets.second_instances)
        self._instances = counts.astype(np.float64)
        tables = [_decode_row(option) for option in self._decoders]
        self._steps_s = np.array([table for table, _ in tables])[decoder]
        per_step = np.array([tokens for _, tokens in tables])[decoder]
        self._decode_steps = self._load.decode_steps / per_step
        self._per_step = per_step
        most = np.array([option.concurrency for option in self._decoders], dtype=np.float64)
        ranks = np.array([option.decode_ranks for option in self._decoders], dtype=np.float64)
        self._pools = ranks[decoder] * self._instances  # of pages, each with its own requests
        tokens = most / ranks * self._load.held_tokens
        self._usable_tokens = usable(self._load, tokens)[decoder]
        self._backlog_s = np.zeros(len(fleets))  # what users wait beyond chance in a full system
        self._queue_s = self._waits = self._backlog_s  # for prompts before one, and the chance
        self._rooms = Room(self._backlog_s, self._backlog_s, self._backlog_s > 0)
        self._transfer()

    # --- gathering ------------------------------------------------------------------------------

    def _prompt_rows(self) -> tuple[list[PromptRow], IntArray]:
        """Return the distinct rows of prompts, and which is whose."""
        fleets, offer = self._fleets, self._offer
        keys = np.stack([fleets.first, fleets.first_instances, fleets.router], axis=1)
        unique, inverse = np.unique(keys, axis=0, return_inverse=True)
        rows = [
            prompt_row(offer.firsts[first], count, offer.routers[router], self._load)
            for first, count, router in unique.tolist()
        ]
        return rows, np.asarray(inverse).ravel()

    def _transfer(self) -> None:
        """Gather what the handoff of a prompt takes: fixed, per token, and the link's own load."""
        count = len(self._fleets)
        self._sent_s_per_token, self._sent_fixed_s = np.zeros(count), np.zeros(count)
        self._link_s = np.zeros(count)  # of the sending GPUs, per request
        self._tail_most = np.full(count, np.inf)
        if not len(self._offer.seconds):
            return
        first, second = self._fleets.first, self._fleets.second
        pairs = self._offer.transfers
        per_token = np.array(
            [[one.bytes_per_token / one.bandwidth_bytes_per_s for one in row] for row in pairs]
        )
        convert = np.array([[one.convert_s_per_token for one in row] for row in pairs])
        fixed = np.array([[one.fixed_s for one in row] for row in pairs])
        tails = np.array(
            [
                [np.inf if one.tail_tokens is None else one.tail_tokens for one in row]
                for row in pairs
            ]
        )
        self._sent_s_per_token = (per_token + convert)[first, second]
        self._sent_fixed_s = fixed[first, second]
        self._tail_most = tails[first, second]
        self._link_s = per_token[first, second] * self._load.mean_input_tokens

    # --- the fixed point ------------------------------------------------------------------------

    def figures(self, objectives: Sequence[Objective]) -> Screened:
        """Solve for the rate and return everything that follows from it."""
        load = self._load
        count = len(self._fleets)
        if load.rate_per_s is not None:
            rate = np.full(count, load.rate_per_s)
        else:
            rate = self._closed_rate(float(load.users or 1))
        busy, wait_s, waits = self._queue(rate)
        (batch, step_s), slowed = self._decoding(rate, busy), self._slowed(busy)
        room = self._room(rate, busy, wait_s, step_s * slowed / self._per_step)
        saturated = self._saturation(rate, busy, room, batch)
        self._queue_s, self._waits, self._rooms = wait_s, waits, room
        wait_s = wait_s + room.wait_s
        if load.rate_per_s is None:
            self._backlog_s = self._left_of_trip(
                rate, wait_s + step_s * slowed * self._decode_steps
            )
        wait_s = wait_s + self._backlog_s
        ttft_s = wait_s + self._alone(busy) + self._mean_sent_s(rate) + step_s / 2
        tpot_s = step_s * slowed / self._per_step
        hits = np.array([row.hit_share for row in self._rows])[self._row]
        screened = Screened(
            self._fleets,
            rate,
            ttft_s,
            tpot_s,
            batch,
            busy,
            hits,
            rate * load.mean_output_tokens,
            saturated,
            np.zeros((count, len(objectives))),
            np.zeros(count),
        )
        reached = [self._reached(one, screened) / one.limit_s for one in objectives]
        ratios = np.stack(reached, axis=1) if reached else np.zeros((count, 1))
        ratios[saturated > 0] = np.inf
        return replace(screened, ratios=ratios, worst=ratios.max(axis=1))

    def _queue(self, rate: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return how busy the prompts' servers are, the mean wait, and the chance to wait.

        A busy instance fills its steps: the service goes from `mean_s` to `shared_s` with the load.
        The wait is that of M/G/k (Sakasegawa, Annals of the Institute of Statistical Mathematics
        29, 1977).
        """
        demand = rate * self._mean_s / self._servers
        saved = rate * (self._mean_s - self._shared_s) / self._servers
        busy = demand / (1 + saved)
        bounded = np.minimum(busy, _BUSY_MOST)
        servers = self._side_by_side
        waits = bounded ** (np.sqrt(2 * (servers + 1)) - 1)
        wait_s = self._burst * waits / (1 - bounded) * self._alone(bounded) / servers
        if self._load.users is not None:  # no more than all others can be before one
            others_s = (self._load.users - 1) * self._shared_s / self._servers
            wait_s = np.minimum(wait_s, others_s)
        return busy, wait_s, waits

    def _alone(self, busy: FloatArray) -> FloatArray:
        """Return the mean service: between alone and shared, by how busy the instance is."""
        share = np.minimum(busy, 1.0)
        return np.asarray(self._mean_s - share * (self._mean_s - self._shared_s))

    def _slowed(self, busy: FloatArray) -> FloatArray:
        """Return by how much prompts beside it stretch a decode step: a rank's stops them all."""
        free = (1 - np.minimum(busy, _BUSY_MOST)) ** self._ranks
        return np.where(self._is_serve, 1 / np.maximum(free, 1 - _BUSY_MOST), 1.0)

    def _decoding(self, rate: FloatArray, busy: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the batch of an instance, and its step."""
        per_instance = rate / self._instances * self._decode_steps * self._slowed(busy)
        batch = np.minimum(per_instance * self._steps_s[:, 0], BATCHES[-1])  # a step's least
        for _ in range(_BATCH_ROUNDS):
            step_s = self._step_s(batch)
            # Newton on batch = demand x step(batch), by the slope of the table.
            slope = (self._step_s(batch * 1.05 + 0.05) - step_s) / (batch * 0.05 + 0.05)
            excess = batch - per_instance * step_s
            gain = np.maximum(1 - per_instance * slope, 0.02)
            batch = np.clip(batch - excess / gain, 0.0, 2 * BATCHES[-1])
        return batch, self._step_s(batch)

    def _room(
        self, rate: FloatArray, busy: FloatArray, wait_s: FloatArray, per_token_s: FloatArray
    ) -> Room:
        """Return the queue for pages where requests decode.

        SGLang gives decode pages before the prompt is computed: they are held meanwhile.
        """
        before_s = self._alone(busy)
        before_s = before_s + np.where(self._is_serve, 0.0, wait_s + self._mean_sent_s(rate))
        users = None if self._load.users is None else self._load.users / self._pools
        each = rate / self._pools
        return room(self._load, self._usable_tokens, each, before_s, per_token_s, users)

    def _step_s(self, batch: FloatArray) -> FloatArray:
        """Return the step time at a batch, interpolated in the table of each fleet."""
        place = np.clip(np.searchsorted(BATCHES, batch) - 1, 0, len(BATCHES) - 2)
        rows = np.arange(len(batch))
        low_s, high_s = self._steps_s[rows, place], self._steps_s[rows, place + 1]
        share = np.maximum(batch - BATCHES[place], 0.0) / (BATCHES[place + 1] - BATCHES[place])
        return np.asarray(low_s + share * (high_s - low_s))

    def _saturation(
        self, rate: FloatArray, busy: FloatArray, room: Room, batch: FloatArray
    ) -> IntArray:
        code = np.zeros(len(rate), dtype=np.int64)
        code[batch >= BATCHES[-1]] = 2
        code[room.full] = 3
        code[busy >= _BUSY_MOST] = 1
        return code

    def _mean_sent_s(self, rate: FloatArray) -> FloatArray:
        tail = np.minimum(self._tail_most, self._load.mean_input_tokens)
        link_busy = np.minimum(rate / self._fleets.first_instances * self._link_s, _BUSY_MOST)
        return np.asarray(self._sent_fixed_s + self._sent_s_per_token * tail / (1 - link_busy))

    def _closed_rate(self, users: float) -> FloatArray:
        """Return the rate at which so many users find what they ask for done.

        The round trip grows with the rate; bisection finds where users / trip is the rate.
        """
        outputs = self._decode_steps
        high = users / np.maximum(self._load.think_s + self._mean_s, 1e-9)
        low = np.zeros(len(high))
        for _ in range(_BISECTIONS):
            rate = (low + high) / 2
            busy, wait_s, _ = self._queue(rate)
            batch, step_s = self._decoding(rate, busy)
            slow_s = step_s * self._slowed(busy)
            room = self._room(rate, busy, wait_s, slow_s / self._per_step)
            trip_s = self._load.think_s + wait_s + room.wait_s + self._alone(busy)
            trip_s = trip_s + self._mean_sent_s(rate) + outputs * slow_s
            over = (rate * trip_s > users) | (busy >= _BUSY_MOST) | (batch >= BATCHES[-1])
            over |= room.full
            low, high = np.where(over, low, rate), np.where(over, rate, high)
        return low

    def _left_of_trip(self, rate: FloatArray, known_s: FloatArray) -> FloatArray:
        """Return what is left of the round trip of a user: the queue of a system that is full."""
        busy, _, _ = self._queue(rate)
        trip_s = float(self._load.users or 1) / np.maximum(rate, 1e-12)
        known_s = known_s + self._load.think_s + self._alone(busy) + self._mean_sent_s(rate)
        left_s = trip_s - known_s
        # Bisection leaves a small rest where the system is not full.
        return np.where(left_s > 0.01 * trip_s, left_s, 0.0)

    # --- objectives -----------------------------------------------------------------------------

    def _reached(self, objective: Objective, found: Screened) -> FloatArray:
        """Return the quantile of an objective's figure."""
        if objective.metric == "ttft":
            return self._ttft_quantile(objective.quantile, found)
        if objective.metric == "e2e":
            outputs = self._load.all.quantile(self._load.all.output_tokens, objective.quantile)
            return np.asarray(found.ttft_s + outputs * found.tpot_s)
        spread = self._tpot_quantile(objective.quantile, found)
        if objective.metric == "tpot":
            return spread
        return self._itl_quantile(objective.quantile, found)

    def _itl_quantile(self, quantile: float, found: Screened) -> FloatArray:
        """Return the gap between tokens: beside prompts, one in so many gaps holds their chunk."""
        step_s = self._step_s(found.batch + float(ndtri(quantile)) * np.sqrt(found.batch))
        per_s = found.rate_per_s / self._fleets.first_instances
        interrupted = np.minimum(per_s * step_s * self._slowed(found.prefill_busy), 1.0)
        with_chunk = step_s + np.minimum(self._mean_s, 1.0)
        return np.where(self._is_serve & (interrupted > 1 - quantile), with_chunk, step_s)

    def _tpot_quantile(self, quantile: float, found: Screened) -> FloatArray:
        """Return the time per token of a slow request.

        The batch wavers around its mean; beside prompts a request is also stopped by each of them,
        a Poisson number of times in its life.
        """
        batch, slowed = found.batch, self._slowed(found.prefill_busy)
        fuller_s = self._step_s(batch + _BATCH_SPREAD * np.sqrt(batch))
        spread_s = (fuller_s - self._step_s(batch)) * slowed / self._per_step
        z = float(ndtri(quantile))
        apart: FloatArray = np.asarray(found.tpot_s + z * spread_s)
        rows = np.flatnonzero(self._is_serve)
        if len(rows):
            apart[rows] = self._beside_prompts(quantile, found, spread_s, rows)
        return apart

    def _beside_prompts(
        self, quantile: float, found: Screened, spread_s: FloatArray, rows: IntArray
    ) -> FloatArray:
        shares = (np.arange(_OUTPUT_GRID) + 0.5) / _OUTPUT_GRID
        lengths = [self._load.all.quantile(self._load.all.output_tokens, share) for share in shares]
        outputs = np.maximum(np.asarray(lengths) - 1, 1.0)  # [grid]
        mean_s = found.tpot_s[rows, None]
        lasts_s = outputs * mean_s
        per_s = (found.rate_per_s / self._fleets.first_instances)[rows, None]
        # E[S^2] of a prompt, from its mean and variation.
        variation = 2 * self._burst[rows, None] - self._load.arrival_variation
        squares = (self._alone(found.prefill_busy)[rows, None] ** 2) * (1 + variation)
        stopped_s = np.sqrt(per_s * lasts_s * squares) / outputs
        deviation = np.hypot(stopped_s, spread_s[rows, None]) + 1e-12
        return wavering_quantile(quantile, mean_s, deviation)

    def _ttft_quantile(self, quantile: float, found: Screened) -> FloatArray:
        """Return the time to first token of a slow request, some thousand fleets at a time."""
        reached = np.full(len(self._fleets), np.inf)
        usable = np.flatnonzero(found.saturated == 0)
        alone = np.stack([row.alone_s for row in self._rows])
        tails = np.stack([row.tail_tokens for row in self._rows])
        weights = np.stack([row.weights for row in self._rows])
        for start in range(0, len(usable), _CHUNK_ROWS):
            rows = usable[start : start + _CHUNK_ROWS]
            reached[rows] = self._ttft_of(quantile, found, rows, (alone, tails, weights))
        return reached

    def _ttft_of(
        self,
        quantile: float,
        found: Screened,
        rows: IntArray,
        tables: tuple[FloatArray, FloatArray, FloatArray],
    ) -> FloatArray:
        alone, tails, weights = (table[self._row[rows]] for table in tables)
        waits = (
            Wait(self._waits[rows], self._queue_s[rows]),
            Wait(self._rooms.waits[rows], self._rooms.wait_s[rows]),
        )
        # Busier instances serve by full steps: shorter than alone, by the same share for all.
        shorter = (self._alone(found.prefill_busy) / self._mean_s)[rows, None]
        tail = np.minimum(tails, self._tail_most[rows, None])
        served_s = alone * shorter + self._sent_s_per_token[rows, None] * tail
        fixed_s = self._sent_fixed_s + self._backlog_s + found.tpot_s / 2
        served_s = served_s + fixed_s[rows, None]
        return waiting_quantile(quantile, served_s, weights, waits)


def _decode_row(option: PoolOption) -> tuple[FloatArray, float]:
    assert option.decode is not None
    return option.decode.step_s, option.decode.tokens_per_step
