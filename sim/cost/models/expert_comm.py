"""Seconds of dispatching tokens to expert-parallel ranks and combining their results (DeepEP).

Form, per token of one rank: ``t0 + e experts + tokens x hidden x copies x bytes / B``. Low-latency
kernels send a copy per chosen expert; normal kernels one per rank that holds any,
``g (1 - (1 - 1/g)^k)`` of g ranks, and copy locally besides (`local`). Shapes between those that
were measured take the mean of their residuals over the tokens, weighted by nearness in logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.cost.estimate import Estimate, Source
from tonnage.sim.cost.models.grid import LogCurve, refined
from tonnage.sim.domain import FloatArray, GpuSpec

Mode = Literal["low_latency", "normal"]
Phase = Literal["dispatch", "combine"]
Interval = tuple[float, float]

PAYLOAD_BYTES = {"bf16": 2.0, "fp8": 1.0 + 4.0 / 128.0}  # FP8 with an FP32 scale per 128
_MOST_TOKENS = 2**21
_NEAR = 0.01  # square of a distance in logs at which neighbours stop gaining weight
_UNMEASURED_INTERVAL = (0.5, 3.0)  # assumed: nothing was measured between nodes


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What a dispatch moves besides the number of tokens."""

    gpus: int
    hidden: int
    top_k: int
    experts: int

    def distance(self, other: ExpertShape) -> float:
        """Return the squared distance in the logs of hidden size, top-k and experts."""
        own, others = (
            np.log([shape.hidden, shape.top_k, shape.experts]) for shape in (self, other)
        )
        return float(np.square(own - others).sum())


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """The physical form of one phase in one mode."""

    t0_s: float
    expert_s: float
    bytes_per_s: float
    local: float  # copies besides those that travel

    def copies(self, mode: str, shape: ExpertShape) -> float:
        """Return the copies of a token that one rank sends."""
        if mode == "low_latency":
            return self.local + shape.top_k
        return self.local + shape.gpus * (1.0 - (1.0 - 1.0 / shape.gpus) ** shape.top_k)

    def seconds(self, mode: str, shape: ExpertShape, payload: str, tokens: ArrayLike) -> FloatArray:
        """Return the seconds for so many tokens of one rank, within a node."""
        token_bytes = shape.hidden * PAYLOAD_BYTES[payload] * self.copies(mode, shape)
        moved_s = np.asarray(tokens, dtype=np.float64) * token_bytes / self.bytes_per_s
        seconds: FloatArray = self.t0_s + self.expert_s * shape.experts + moved_s
        return seconds


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """One phase in one mode: its form and, by measured shape, log residuals over tokens."""

    mode: str
    payload: str
    form: ExpertForm
    residuals: Mapping[ExpertShape, tuple[FloatArray, FloatArray]]
    interval: Interval = (1.0, 1.0)  # factors on the seconds, of shapes between the measured ones
    outside_interval: Interval = (1.0, 1.0)

    @property
    def most_tokens(self) -> float:
        """Most tokens of a rank that were measured."""
        return float(max(tokens[-1] for tokens, _ in self.residuals.values()))

    def spans(self, shape: ExpertShape) -> bool:
        """Return whether a shape lies between those measured, among as many GPUs."""
        known = np.array([(one.hidden, one.top_k, one.experts) for one in self.residuals])
        wanted = np.array([shape.hidden, shape.top_k, shape.experts])
        is_between = bool(((known.min(axis=0) <= wanted) & (wanted <= known.max(axis=0))).all())
        return is_between and any(one.gpus == shape.gpus for one in self.residuals)

    def curve(self, shape: ExpertShape, payload: str) -> tuple[FloatArray, FloatArray]:
        """Return tokens of one rank and the log seconds there, never falling, of a shape."""
        knots = np.unique(np.concatenate([tokens for tokens, _ in self.residuals.values()]))
        points = refined(knots, _MOST_TOKENS)
        total, weights = np.zeros(len(points)), 0.0
        for known, (tokens, residuals) in self.residuals.items():
            weight = (known.distance(shape) + _NEAR) ** -2
            if known == shape:
                weight *= 1e6
            total += weight * np.interp(np.log(points), np.log(tokens), residuals)
            weights += weight
        logs = np.log(self.form.seconds(self.mode, shape, payload, points)) + total / weights
        return points, np.maximum.accumulate(logs)


def expert_table(
    mode: str, payload: str, columns: Mapping[str, ArrayLike], form: ExpertForm
) -> ExpertTable:
    """Return the table of one phase and mode from its rows, sorted by tokens within a shape."""
    names = ("gpus", "hidden", "top_k", "experts")
    shapes = np.stack([np.asarray(columns[name], dtype=np.int64) for name in names], axis=1)
    tokens = np.asarray(columns["tokens"], dtype=np.float64)
    seconds = np.asarray(columns["seconds"], dtype=np.float64)
    residuals = {}
    for values in np.unique(shapes, axis=0):
        shape = ExpertShape(*(int(value) for value in values))
        own = (shapes == values).all(axis=1)
        formed = form.seconds(mode, shape, payload, tokens[own])
        residuals[shape] = (tokens[own], np.log(seconds[own] / formed))
    return ExpertTable(mode, payload, form, residuals)


@dataclass(frozen=True, slots=True)
class _Curve:
    """Seconds over tokens of one rank, for one phase, shape and payload; None without rows."""

    seconds: LogCurve | None
    most_tokens: float
    low: float
    high: float
    source: Source
    is_inside: bool
    roofline_token_s: float


class ExpertCommModel:
    """Predict dispatch and combine of one layer; every rank sends as many tokens as the others."""

    def __init__(
        self,
        tables: Mapping[tuple[str, str], ExpertTable],
        fitted: Mapping[str, Any],
        rates: GpuSpec,
    ) -> None:
        self._tables = dict(tables)
        self._fitted = fitted
        self._rates = rates
        self._nvlink_gpus = int(fitted.get("nvlink_gpus") or rates.gpus_per_node)
        self._curve = lru_cache(maxsize=256)(self._new_curve)

    @classmethod
    def from_tables(
        cls,
        tables: Mapping[str, Any],
        fitted: Mapping[str, Any],
        rates: GpuSpec,
    ) -> ExpertCommModel:
        """Build from a profile's `expert_comm` table, its header's `fitted`, and the datasheet."""
        parameters = fitted.get("expert_comm", {})
        rows = tables.get("expert_comm")
        found = {}
        if rows is not None:
            ops, modes = (np.asarray(rows[name], dtype=str) for name in ("op", "mode"))
            names = ("gpus", "hidden", "top_k", "experts", "tokens", "seconds")
            for key, of_phase in parameters.get("phases", {}).items():
                op, _, mode = key.partition("/")
                own = (ops == op) & (modes == mode)
                columns = {name: np.asarray(rows[name])[own] for name in names}
                form = ExpertForm(**of_phase["form"])
                table = expert_table(mode, of_phase["payload"], columns, form)
                (low, high), (lowest, highest) = of_phase["interval"], of_phase["outside_interval"]
                found[op, mode] = replace(
                    table, interval=(low, high), outside_interval=(lowest, highest)
                )
        return cls(found, parameters, rates)

    def seconds(
        self, op: Phase, mode: Mode, shape: ExpertShape, tokens: float, payload: str = ""
    ) -> Estimate:
        """Return the seconds of a phase for `tokens` of each rank.

        `payload`: the format that travels, by default that of the rows (FP8 to the experts, BF16
        back); another one, or a number of GPUs without rows, is scaled by the bytes.
        """
        curve = self._curve(op, mode, shape, payload)
        bound_s = tokens * curve.roofline_token_s
        if curve.seconds is None:
            return Estimate(bound_s, *_UNMEASURED_INTERVAL, "datasheet", False, bound_s)
        inside = curve.is_inside and tokens <= curve.most_tokens
        seconds = curve.seconds.at(tokens)
        return Estimate(seconds, curve.low, curve.high, curve.source, inside, bound_s)

    def _new_curve(self, op: str, mode: str, shape: ExpertShape, payload: str) -> _Curve:
        table = self._tables.get((op, mode))
        default = "fp8" if op == "dispatch" else "bf16"
        wanted = payload or (table.payload if table is not None else default)
        token_s, network_token_s = self._datasheet_token_s(mode, shape, wanted)
        if table is None:
            return _Curve(None, 0.0, *_UNMEASURED_INTERVAL, "datasheet", False, token_s)
        points, logs = table.curve(shape, wanted)
        is_measured = wanted == table.payload and table.spans(shape)
        low, high = table.interval if is_measured else table.outside_interval
        if network_token_s:
            logs = np.maximum(logs, np.log(table.form.t0_s + points * network_token_s))
            low, high = _UNMEASURED_INTERVAL
        source: Source = self._fitted.get("source", "imported") if is_measured else "scaled"
        curve = LogCurve.of(points, logs)
        return _Curve(curve, table.most_tokens, low, high, source, is_measured, token_s)

    def _datasheet_token_s(
        self, mode: str, shape: ExpertShape, payload: str
    ) -> tuple[float, float]:
        """Return the datasheet's seconds per token, and those of the network's share of it."""
        rates = self._rates
        token_bytes = shape.hidden * PAYLOAD_BYTES[payload]
        token_bytes *= ExpertForm(0.0, 0.0, 1.0, 0.0).copies(mode, shape)
        link_bytes_per_s = rates.nvlink_bytes_per_s or rates.pcie_bytes_per_s
        remote = max(shape.gpus - self._nvlink_gpus, 0) / shape.gpus
        network_token_s = remote * token_bytes / rates.network_bytes_per_s
        return max(token_bytes / link_bytes_per_s, network_token_s), network_token_s
