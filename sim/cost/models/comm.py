"""Seconds of collectives within an instance, from measured rows by number of GPUs and message.

A message is the largest buffer of one rank, in bytes: what an all-reduce sums, an all-gather's
output, a reduce-scatter's input, what an all-to-all sends to all (its own share included).

Form: ``t0 + hop (g - 1) + moved / B`` times a table of residuals over (GPUs, bytes). `moved` is
what a ring moves per GPU: ``2 (g - 1) / g`` of the message for an all-reduce, ``(g - 1) / g`` for
the others. Numbers of GPUs that were not measured are scaled by it. Nothing was measured between
nodes: rings there cross a node's border on all of its network adapters at once, an all-to-all
sends each GPU's remote share over its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.cost.estimate import Estimate, OperatorCurve, Source
from tonnage.sim.cost.models.grid import Grid, LogCurve, grid_from_columns, refined
from tonnage.sim.domain import FloatArray, GpuSpec

OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "all_gather",  # in the same table of a profile
    "all_to_all": "all_to_all",
}
_MOST_BYTES = 2**36
# Assumed: no collective was measured between nodes, nor any on a GPU without a table.
_UNMEASURED_INTERVAL = (0.5, 3.0)


Interval = tuple[float, float]


def moved_share(op: str, gpus: int) -> float:
    """Return what a GPU sends of a message, in messages."""
    return (2.0 if op == "all_reduce" else 1.0) * (gpus - 1) / gpus


@dataclass(frozen=True, slots=True)
class RingForm:
    """``t0 + hop (g - 1) + moved bytes / B``, for one collective launched in one way."""

    t0_s: float
    hop_s: float
    bytes_per_s: float

    def seconds(self, op: str, gpus: ArrayLike, message_bytes: ArrayLike) -> FloatArray:
        """Return the seconds within a node; the arguments broadcast against each other."""
        count = np.asarray(gpus, dtype=np.float64)
        share = (2.0 if op == "all_reduce" else 1.0) * (count - 1.0) / count
        moved_s = share * np.asarray(message_bytes, dtype=np.float64) / self.bytes_per_s
        seconds: FloatArray = self.t0_s + self.hop_s * (count - 1.0) + moved_s
        return seconds


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """One collective launched in one way: its form and log residuals `[GPUs, bytes]`.

    Intervals are factors on the seconds, among numbers of GPUs that were measured and others.
    """

    op: str
    form: RingForm
    residuals: Grid
    interval: Interval = (1.0, 1.0)
    outside_interval: Interval = (1.0, 1.0)

    def curve(self, gpus: int) -> tuple[FloatArray, FloatArray]:
        """Return message bytes and the log seconds there, never falling, among so many GPUs."""
        points = refined(self.residuals.knots[1], _MOST_BYTES)
        logs = np.log(self.form.seconds(self.op, gpus, points)) + self.residuals.at(gpus, points)
        return points, np.maximum.accumulate(logs)

    def is_measured(self, gpus: int) -> bool:
        """Return whether rows exist for so many GPUs."""
        return gpus in self.residuals.knots[0]


def collective_table(op: str, columns: Mapping[str, ArrayLike], form: RingForm) -> CollectiveTable:
    """Return the table of one collective from its rows: columns gpus, message_bytes, seconds."""
    formed = form.seconds(op, columns["gpus"], columns["message_bytes"])
    residuals = np.log(np.asarray(columns["seconds"], dtype=np.float64) / formed)
    return CollectiveTable(
        op, form, grid_from_columns(columns, ("gpus", "message_bytes"), residuals)
    )


@dataclass(frozen=True, slots=True)
class _Curve:
    seconds: LogCurve
    most_bytes: float
    low: float
    high: float
    source: Source
    is_measured: bool
    roofline_byte_s: float

    def at(self, message_bytes: float) -> float:
        return self.seconds.at(message_bytes)

    def estimate(self, message_bytes: float | FloatArray) -> Estimate:
        if isinstance(message_bytes, np.ndarray):
            seconds: float | FloatArray = self.seconds.at_each(message_bytes)
            inside = self.is_measured and bool((message_bytes <= self.most_bytes).all())
        else:
            seconds = self.seconds.at(message_bytes)
            inside = self.is_measured and message_bytes <= self.most_bytes
        roofline_s = message_bytes * self.roofline_byte_s
        return Estimate(seconds, self.low, self.high, self.source, inside, roofline_s)


class CommModel:
    """Predict collectives; a curve per operation and number of GPUs is kept."""

    def __init__(
        self,
        tables: Mapping[tuple[str, bool], CollectiveTable],
        fitted: Mapping[str, Any],
        rates: GpuSpec,
    ) -> None:
        self._tables = dict(tables)
        self._fitted = fitted
        self._rates = rates
        # A rack of GB200 shares NVLink; elsewhere a node does.
        self._nvlink_gpus = int(fitted.get("nvlink_gpus") or rates.gpus_per_node)
        self._curves: dict[tuple[str, int, bool], _Curve] = {}

    @classmethod
    def from_tables(
        cls,
        tables: Mapping[str, Any],
        fitted: Mapping[str, Any],
        rates: GpuSpec,
    ) -> CommModel:
        """Build from a profile's tables, its header's `fitted`, and the GPU's datasheet.

        Tables: `all_reduce`, `all_gather` (with reduce-scatter) and `all_to_all`; those that are
        absent are predicted from the datasheet.
        """
        parameters = fitted.get("comm", {})
        found = {}
        for key, of_operation in parameters.get("operations", {}).items():
            op, _, launch = key.partition("/")
            rows = tables.get(OPERATIONS[op])
            if rows is None:
                continue
            in_graph = launch == "graph"
            own = (np.asarray(rows["op"], dtype=str) == op) & (
                np.asarray(rows["in_graph"], dtype=bool) == in_graph
            )
            columns = {
                name: np.asarray(rows[name])[own] for name in ("gpus", "message_bytes", "seconds")
            }
            table = collective_table(op, columns, RingForm(**of_operation["form"]))
            inside, outside = of_operation["interval"], of_operation["outside_interval"]
            found[op, in_graph] = replace(
                table, interval=(inside[0], inside[1]), outside_interval=(outside[0], outside[1])
            )
        return cls(found, parameters, rates)

    def all_reduce(
        self, gpus: int, message_bytes: float | FloatArray, *, in_graph: bool = True
    ) -> Estimate:
        """Return the seconds of the engine's own all-reduce, captured or launched eagerly."""
        return self._estimate("all_reduce", gpus, message_bytes, in_graph)

    def all_reduce_curve(self, gpus: int, *, in_graph: bool) -> OperatorCurve:
        """Return the all-reduce of two GPUs or more over the bytes of its message; made once."""
        return self._curve("all_reduce", gpus, in_graph)

    def all_gather(self, gpus: int, message_bytes: float | FloatArray) -> Estimate:
        """Return the seconds of NCCL's all-gather of a message in all."""
        return self._estimate("all_gather", gpus, message_bytes, False)

    def reduce_scatter(self, gpus: int, message_bytes: float | FloatArray) -> Estimate:
        """Return the seconds of NCCL's reduce-scatter of a message."""
        return self._estimate("reduce_scatter", gpus, message_bytes, False)

    def all_to_all(self, gpus: int, message_bytes: float | FloatArray) -> Estimate:
        """Return the seconds of NCCL's all-to-all of what a rank sends to all."""
        return self._estimate("all_to_all", gpus, message_bytes, False)

    def p2p(self, message_bytes: float | FloatArray, *, within_node: bool = True) -> Estimate:
        """Return the seconds of sending a message to one GPU.

        Within a node it is scaled from an all-to-all of two GPUs, half of whose message travels;
        to another node, the network's bandwidth and no latency.
        """
        if within_node:
            found = self._estimate("all_to_all", 2, 2.0 * message_bytes, False)
            source: Source = "datasheet" if found.source == "datasheet" else "scaled"
            return Estimate(
                found.seconds, found.low, found.high, source, found.inside, found.roofline_s
            )
        seconds = message_bytes / self._rates.network_bytes_per_s
        return Estimate(seconds, *_UNMEASURED_INTERVAL, "datasheet", False, seconds)

    def _estimate(
        self, op: str, gpus: int, message_bytes: float | FloatArray, in_graph: bool
    ) -> Estimate:
        if gpus == 1:
            nothing = 0.0 * message_bytes
            return Estimate(nothing, 1.0, 1.0, "datasheet", True, nothing)
        return self._curve(op, gpus, in_graph).estimate(message_bytes)

    def _curve(self, op: str, gpus: int, in_graph: bool) -> _Curve:
        key = (op, gpus, in_graph)
        if key not in self._curves:
            self._curves[key] = self._new_curve(op, gpus, in_graph)
        return self._curves[key]

    def _new_curve(self, op: str, gpus: int, in_graph: bool) -> _Curve:
        byte_s = self._datasheet_byte_s(op, gpus)
        own = self._tables.get((op, in_graph))
        # The other way of launching is nearer than a datasheet without latencies.
        table = own or self._tables.get((op, not in_graph))
        if table is None:
            points = refined(np.array([1.0]), _MOST_BYTES)
            curve = LogCurve.of(points, np.log(points * byte_s))
            return _Curve(curve, 0.0, *_UNMEASURED_INTERVAL, "datasheet", False, byte_s)
        points, logs = table.curve(gpus)
        is_measured = own is not None and table.is_measured(gpus)
        low, high = table.interval if is_measured else table.outside_interval
        if gpus > self._nvlink_gpus:
            low, high = _UNMEASURED_INTERVAL
            # The network is taken to reach the share of its datasheet that NVLink reaches.
            within_byte_s = moved_share(op, gpus) / table.form.bytes_per_s
            reached = self._datasheet_byte_s(op, gpus, within_node=True) / within_byte_s
            logs = np.log(np.exp(logs) + points * max(byte_s / reached - within_byte_s, 0.0))
        source: Source = self._fitted.get("source", "imported") if is_measured else "scaled"
        most_bytes = float(table.residuals.knots[1][-1])
        return _Curve(LogCurve.of(points, logs), most_bytes, low, high, source, is_measured, byte_s)

    def _datasheet_byte_s(self, op: str, gpus: int, *, within_node: bool = False) -> float:
        """Return the datasheet's seconds per byte of a message."""
        rates = self._rates
        if within_node or gpus <= self._nvlink_gpus:
            link_bytes_per_s = rates.nvlink_bytes_per_s or rates.pcie_bytes_per_s
            return moved_share(op, gpus) / link_bytes_per_s
        if op == "all_to_all":
            return (gpus - self._nvlink_gpus) / gpus / rates.network_bytes_per_s
        return moved_share(op, gpus) / (rates.network_bytes_per_s * self._nvlink_gpus)
