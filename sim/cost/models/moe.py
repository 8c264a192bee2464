"""Seconds of the routed experts of one rank, from measured rows by weight format.

A row covers the grouped products of gate, up and down, activation, permuting and summing; without
expert parallelism also the selection of the top k (and three copies of small tensors on the FP8
and BF16 paths of SGLang), never the router's product, shared experts or collectives. A physical
form times a table of residuals predicts it; `calibrate/fit_moe.py` makes both. The time never falls
with tokens. A format without rows is scaled from one that has them, by the bytes of its weights
and the rate of its arithmetic; without any, the datasheet's roofline answers.

Uniform routing is not measured. Up to ``E / k`` tokens the balanced curve is read where it touches
as many experts, at ``T' = E (1 - (1 - k/E)^T) / k`` tokens; beyond, where it touches all, times
what its rows add: ``t(T') t(max(T, E/k)) / t(E/k)``. Under expert parallelism both are those of the
busiest rank (`sim/cost/experts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.cost.estimate import Estimate, Source
from tonnage.sim.cost.models.moe_curve import (
    Interval,
    MoeCurve,
    tokens_of_curve,
    uniform_log_seconds,
)
from tonnage.sim.cost.models.moe_form import (
    BALANCED,
    INT4,
    MEASURED_ROUTINGS,
    ROUTINGS,
    UNIFORM,
    MoeForm,
    MoeShape,
    precision,
    roofline_s,
    weight_bits,
)
from tonnage.sim.cost.models.moe_table import MoeTable, Nearness, moe_tables
from tonnage.sim.domain import BadInputError, FloatArray, GpuSpec
from tonnage.sim.model.formats import FORMATS

# Formats whose rows are the same as another's.
_SAME_ROWS = {name: INT4 for name in FORMATS if name.startswith("int4_g")} | {"fp16": "bf16"}
# Whose rows stand in for those of a format that has none, by its arithmetic, the nearest first.
_STAND_INS = {
    "fp4": ("nvfp4", "fp8_block", "fp8", "bf16"),
    "fp8": ("fp8", "fp8_block", "bf16"),
    "int8": ("fp8", "fp8_block", "bf16"),
}
_WEIGHT_ONLY_STAND_INS = (INT4, "mxfp4", "bf16")  # few bits, multiplied in BF16
# Nothing was measured: small batches are far above their roofline.
_DATASHEET_INTERVAL = (1.0, 5.0)
# Stand-ins for formats of a weight size of which no format has rows.
_STAND_IN_INTERVAL = (0.4, 2.5)


class MoeModel:
    """Predict routed experts; a curve per format, shape and routing is kept, so asking is cheap."""

    def __init__(
        self,
        columns: Mapping[str, ArrayLike] | None,
        fitted: Mapping[str, Any],
        rates: GpuSpec,
    ) -> None:
        """Take the rows of a profile, `fitted["moe"]` of its header, and the GPU's datasheet."""
        self._columns = columns
        self._fitted = fitted
        self._rates = rates
        self._forms: dict[str, dict[str, MoeForm]] = {}
        for pool in fitted.get("pools", ()) if columns is not None else ():
            self._forms.setdefault(pool["format"], {})[pool["kernel"]] = MoeForm(**pool["form"])
        self._tables: dict[str, tuple[MoeTable, ...]] = {}
        self._curves: dict[tuple[str, tuple[int, ...], str], MoeCurve] = {}

    @classmethod
    def from_tables(
        cls,
        tables: Mapping[str, Any],
        fitted: Mapping[str, Any],
        rates: GpuSpec,
    ) -> MoeModel:
        """Build from a profile's tables (`moe`), its header's `fitted`, and the GPU's datasheet.

        A profile without either predicts everything from the datasheet. The rows of a format are
        looked through when it is first asked for.
        """
        return cls(tables.get("moe"), fitted.get("moe", {}), rates)

    def seconds(
        self,
        weight_format: str,
        tokens: float | FloatArray,
        hidden: int,
        inter: int,
        experts: int,
        top_k: int,
        tp: int,
        ep: int,
        routing: str = UNIFORM,
    ) -> Estimate:
        """Return the seconds of one layer's routed experts on one rank.

        `tokens`, a number or an array, are those of all ranks that share the experts; `inter` is
        the full width of an expert, of which a rank holds ``1 / tp`` in each of ``experts / ep``
        experts. Fewer tokens than one cost as much as one. Raises BadInputError for an unknown
        routing or a layout that such experts cannot have.
        """
        curve = self.curve(weight_format, (hidden, inter, experts, top_k, tp, ep), routing)
        return curve.estimates(tokens) if isinstance(tokens, np.ndarray) else curve.estimate(tokens)

    def curve(self, weight_format: str, sizes: tuple[int, ...], routing: str) -> MoeCurve:
        """Return the curve over tokens of experts, the fields of a `MoeShape`, made once."""
        key = (weight_format, sizes, routing)
        found = self._curves.get(key)
        if found is None:
            if routing not in ROUTINGS:
                raise BadInputError(f"routing {routing!r}: use one of {', '.join(ROUTINGS)}")
            found = self._curves[key] = self._new_curve(weight_format, MoeShape(*sizes), routing)
        return found

    # --- one curve ------------------------------------------------------------------------------

    def _new_curve(self, weight_format: str, shape: MoeShape, routing: str) -> MoeCurve:
        tokens = tokens_of_curve(shape.full_tokens)
        bound_s = roofline_s(shape, weight_format, tokens, routing, self._rates)
        name = _SAME_ROWS.get(weight_format, weight_format)
        table = self.nearest_table(name, shape)
        stand_in = None if table else self._stand_in(name, shape)
        if stand_in is None and table is None:
            logs, most, intervals = np.log(bound_s), 0.0, (_DATASHEET_INTERVAL,) * 2
            source: Source = "datasheet"
            is_inside = False
        elif stand_in is not None:
            logs, _ = self._log_seconds(stand_in, shape, tokens, routing, name)
            tried = self._fitted.get("stand_in_intervals", {})
            low, high = tried.get(weight_bits(name), _STAND_IN_INTERVAL)
            most, intervals = float(stand_in.knots[-1]), ((low, high),) * 2
            source, is_inside = "scaled", False
        else:
            assert table is not None
            logs, nearness = self._log_seconds(table, shape, tokens, routing)
            is_scaled = _is_scaled(table, shape, nearness)
            most, intervals = float(table.knots[-1]), self._intervals(table, nearness, is_scaled)
            source = "scaled" if is_scaled else self._fitted.get("source", "imported")
            is_inside = nearness != "outside" and not is_scaled
        wider = _group_bytes_ratio(weight_format, shape)
        near, far = ((low, high * wider) for low, high in intervals)
        return MoeCurve(
            log_tokens=np.log(tokens).tolist(),
            log_seconds=np.maximum.accumulate(logs).tolist(),
            log_roofline_s=np.log(bound_s).tolist(),
            most_tokens=most,
            near_interval=near,
            far_interval=far,
            source=source,
            is_inside=is_inside,
        )

    def _log_seconds(
        self,
        table: MoeTable,
        shape: MoeShape,
        tokens: FloatArray,
        routing: str,
        as_format: str | None = None,
    ) -> tuple[FloatArray, Nearness]:
        form, expert_bytes = table.form, shape.expert_bytes(as_format or table.weight_format)
        if as_format is not None:
            rates = self._rates.dense_flops_per_s
            faster = (
                rates[precision(as_format, rates)] / rates[precision(table.weight_format, rates)]
            )
            form = replace(form, flops_per_s=form.flops_per_s * faster)
        if routing in MEASURED_ROUTINGS:
            return table.log_seconds(shape, tokens, routing, form, expert_bytes)
        logs, nearness = table.log_seconds(shape, tokens, BALANCED, form, expert_bytes)
        return uniform_log_seconds(shape, tokens, logs), nearness

    def _intervals(
        self, table: MoeTable, nearness: Nearness, is_scaled: bool
    ) -> tuple[Interval, Interval]:
        """Return the factors within the measured tokens and beyond them."""
        given = self._fitted["formats"][table.weight_format]
        near = given["scaled_interval"] if is_scaled else given[f"{nearness}_interval"]
        far = given["outside_interval"]
        widest = (min(near[0], far[0]), max(near[1], far[1]))
        return (near[0], near[1]), widest

    # --- which rows -----------------------------------------------------------------------------

    def nearest_table(self, weight_format: str, shape: MoeShape) -> MoeTable | None:
        """Return the table of the kernel that the experts run: measured, else the usual one.

        Which kernel an engine picks for experts that were not measured cannot be told from their
        sizes. The usual one is the first in the profile that ran with expert parallelism, or
        without it, as these do.
        """

        def closeness(table: MoeTable) -> tuple[bool, bool, bool]:
            alike = table.families_at(shape.ep)
            return shape in table.shapes, shape.family in alike, bool(alike)

        return max(self._tables_of(weight_format), key=closeness, default=None)

    def _tables_of(self, weight_format: str) -> tuple[MoeTable, ...]:
        """Return the tables of a format, one per kernel, made once."""
        if weight_format not in self._tables:
            forms = self._forms.get(weight_format, {})
            columns = self._columns
            found = () if columns is None else moe_tables(columns, weight_format, forms)
            self._tables[weight_format] = tuple(found)
        return self._tables[weight_format]

    def _stand_in(self, weight_format: str, shape: MoeShape) -> MoeTable | None:
        """Return the table of the nearest format that has rows."""
        arithmetic = precision(weight_format, self._rates.dense_flops_per_s)
        is_weight_only = arithmetic == "bf16" and shape.expert_bytes(
            weight_format
        ) < 0.9 * shape.expert_bytes("bf16")
        usual = _WEIGHT_ONLY_STAND_INS if is_weight_only else ("bf16",)
        for name in (*_STAND_INS.get(arithmetic, usual), *self._forms):
            table = self.nearest_table(name, shape)
            if table is not None:
                return table
        return None


def _is_scaled(table: MoeTable, shape: MoeShape, nearness: Nearness) -> bool:
    """Return whether rows scaled from another table decide: its own, or some of its neighbours."""
    return shape in table.scaled if nearness == "measured" else bool(table.scaled)


def _group_bytes_ratio(weight_format: str, shape: MoeShape) -> float:
    """Return the bytes of INT4 experts in their group over those counted for the rows."""
    if _SAME_ROWS.get(weight_format) != INT4:
        return 1.0
    return max(shape.expert_bytes(weight_format) / shape.expert_bytes(INT4), 1.0)
