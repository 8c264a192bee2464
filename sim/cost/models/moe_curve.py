"""What routed experts take for any number of tokens, and what uniform routing makes of it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.cost.estimate import Estimate, Source
from tonnage.sim.cost.experts import busiest_rank_experts, busiest_rank_rows
from tonnage.sim.cost.models.moe_form import MoeShape
from tonnage.sim.domain import FloatArray, MoeMlp

Interval = tuple[float, float]

_STEPS_PER_DOUBLING = 8
_MOST_TOKENS = 2**21  # curves end here; beyond, the last slope carries on


@dataclass(frozen=True, slots=True)
class MoeCurve:
    """What the experts of one rank take for any number of tokens: logs at rising tokens."""

    log_tokens: list[float]
    log_seconds: list[float]
    log_roofline_s: list[float]
    most_tokens: float
    near_interval: Interval
    far_interval: Interval
    source: Source
    is_inside: bool

    def at(self, tokens: float) -> float:
        return self._read(self.log_seconds, tokens)

    def _read(self, logs: list[float], tokens: float) -> float:
        where, points = log(max(tokens, 1.0)), self.log_tokens
        high = min(bisect_right(points, where), len(points) - 1)
        share = (where - points[high - 1]) / (points[high] - points[high - 1])
        return exp(logs[high - 1] + share * (logs[high] - logs[high - 1]))

    def estimate(self, tokens: float) -> Estimate:
        inside = self.is_inside and tokens <= self.most_tokens
        low, up = self.near_interval if tokens <= self.most_tokens else self.far_interval
        bound_s = self._read(self.log_roofline_s, tokens)
        return Estimate(self.at(tokens), low, up, self.source, inside, bound_s)

    def estimates(self, tokens: FloatArray) -> Estimate:
        if not tokens.size:
            return replace(self.estimate(1.0), seconds=tokens * 1.0, roofline_s=tokens * 1.0)
        found = [self.estimate(one) for one in tokens.ravel().tolist()]
        widest = self.estimate(float(tokens.max()))
        seconds = np.array([one.seconds for one in found]).reshape(tokens.shape)
        bound_s = np.array([one.roofline_s for one in found]).reshape(tokens.shape)
        return replace(widest, seconds=seconds, roofline_s=bound_s)


def tokens_of_curve(full_tokens: float) -> FloatArray:
    """Return tokens from 1 to `_MOST_TOKENS`, eight per doubling, and where balance is full."""
    doublings = int(np.log2(_MOST_TOKENS))
    regular = 2.0 ** (np.arange(doublings * _STEPS_PER_DOUBLING + 1) / _STEPS_PER_DOUBLING)
    return np.unique(np.append(regular, max(full_tokens, 1.0)))


def uniform_log_seconds(shape: MoeShape, tokens: FloatArray, balanced: FloatArray) -> FloatArray:
    """Return log seconds under uniform routing from those under balanced routing, at `tokens`."""
    mlp = MoeMlp(shape.experts, shape.top_k, shape.inter)
    per_token = shape.top_k / shape.ep
    experts = np.array([busiest_rank_experts(mlp, shape.ep, float(one)) for one in tokens])
    rows = np.array([busiest_rank_rows(mlp, shape.ep, float(one)) for one in tokens])
    touching, working = experts / per_token, rows / per_token
    full = max(shape.full_tokens, 1.0)
    logs = np.log(tokens)

    def read(wanted: ArrayLike) -> FloatArray:
        found: FloatArray = np.interp(np.log(wanted), logs, balanced)
        return found

    added = read(np.maximum(working, full)) - read(full)
    mixed: FloatArray = read(np.minimum(touching, full)) + added
    return np.maximum.accumulate(mixed)
