"""A few points that a profile measured, nearest to what a step runs, to be timed again.

What they take now over what they took then says how far the machine has moved since it was
calibrated. The rows of a profile's tables keep shapes and seconds; here they become points again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tonnage.calibrate.grid import EXPERTS, KV_SUFFIX, PAGE_TOKENS, PRODUCTS
from tonnage.calibrate.points import Axes, Point, grouped
from tonnage.calibrate.wanted import ENGINE, Wanted
from tonnage.sim.cost.fused import FusedProduct, fused_products
from tonnage.sim.cost.models.attention import MLA_HEAD_DIM, AttentionShape, attention_shape
from tonnage.sim.cost.profile import Profile
from tonnage.sim.domain import GqaAttention, MlaAttention, MoeMlp, Role, Step

if TYPE_CHECKING:
    import pandas as pd

_CALL_S_MOST = 0.01  # longer calls would take too much of the time for steps
# Of one family, nearest sizes and points of each: rows of one size were measured one after another,
# and a single one of them all may have been measured in a slow spell.
_SIZES, _POINTS = 2, 2
EXPERT_FAMILY = "routed experts"
DECODE_FAMILY, PREFILL_FAMILY = "decode attention", "prefill attention"
COPIES, SMALL_OPERATORS = "KV copies", "small operators"

RowRecord = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A row of a profile: the points that were measured for it one by one, and their sum then."""

    points: tuple[Point, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Reference:
    """Calls of one family of operators."""

    family: str
    calls: tuple[Call, ...]


def references_of(profile: Profile, wanted: Wanted, step: Step, on_gpu: bool) -> list[Reference]:
    """Return references for the operators of a step, one per family that the profile measured."""
    finder = _Finder(profile, wanted, step, on_gpu)
    found = [
        *finder.products(),
        *finder.experts(),
        *finder.decode_attention(),
        *finder.prefill_attention(),
        *finder.small_operators(),
        *finder.copies(),
    ]
    return [one for one in found if one.calls]


def family_of_product(weight_format: str) -> str:
    """Return what the products of a weight format are called."""
    kernel, _ = PRODUCTS.get(weight_format, (None, None))
    return f"products, {(kernel or weight_format).removeprefix('gemm_')}"


@dataclass(frozen=True, slots=True)
class _Finder:
    profile: Profile
    wanted: Wanted
    step: Step
    on_gpu: bool

    # --- families -------------------------------------------------------------------------------

    def products(self) -> Iterator[Reference]:
        """Yield the product of each format with the most weights, at about the step's rows."""
        heaviest: dict[str, tuple[float, FusedProduct]] = {}
        for product, count in fused_products(self.wanted.model, self.wanted.layout, ENGINE):
            kernel, _ = PRODUCTS.get(product.format, (None, None))
            weights = float(count * product.out_features * product.in_features)
            is_sampled = product.role in (Role.HEAD, Role.EMBEDDING)
            if kernel is None or is_sampled:
                continue
            if kernel not in heaviest or weights > heaviest[kernel][0]:
                heaviest[kernel] = weights, product
        for kernel, (_, product) in heaviest.items():
            size = {"n": product.out_features, "k": product.in_features}
            rows = self._nearest("gemm", {"kernel": kernel}, size, {"m": self._rows()})
            calls = [Call(self._product_points(row), row["seconds"]) for row in rows]
            yield Reference(family_of_product(product.format), tuple(calls))

    def experts(self) -> Iterator[Reference]:
        """Yield the routed experts of a layer."""
        layers = (one for one in self.wanted.model.layers if isinstance(one.mlp, MoeMlp))
        layer = next(layers, None)
        if layer is None or not isinstance(layer.mlp, MoeMlp) or self.wanted.layout.ep > 1:
            return
        formats = [one.format for one in layer.weights if one.role is Role.ROUTED_EXPERT]
        kernel = EXPERTS.get(formats[0])
        size = {
            "hidden": self.wanted.model.hidden_size,
            "inter": layer.mlp.intermediate_size,
            "experts": layer.mlp.experts,
            "top_k": layer.mlp.top_k,
            "tp": self.wanted.layout.tp,
        }
        rows = self._nearest("moe", {"kernel": kernel}, size, {"tokens": self._rows()})
        calls = [Call((self._experts_point(row),), row["seconds"]) for row in rows]
        yield Reference(EXPERT_FAMILY, tuple(calls))

    def decode_attention(self) -> Iterator[Reference]:
        """Yield decode attention at about the step's batch and contexts."""
        shape, requests = self._shape(), self.step.decode_requests
        if shape is None or not requests:
            return
        size = {**_heads(shape), "batch": requests}
        along = {"context_tokens": self.step.decode_context_sum / requests}
        rows = self._nearest("attention_decode", _kind(shape), size, along)
        calls = [Call((self._decode_point(row),), row["seconds"]) for row in rows]
        yield Reference(DECODE_FAMILY, tuple(calls))

    def prefill_attention(self) -> Iterator[Reference]:
        """Yield prefill attention of about the step's chunks."""
        shape, chunks = self._shape(), self.step.prefill_chunks
        if shape is None or not chunks:
            return
        size = {**_heads(shape), "batch": len(chunks)}
        along = {"new_tokens": sum(chunk.new_tokens for chunk in chunks) / len(chunks)}
        rows = self._nearest("attention_prefill", _kind(shape), size, along)
        points = [(self._prefill_point(row), row["seconds"]) for row in rows]
        calls = [Call((point,), seconds) for point, seconds in points if point is not None]
        yield Reference(PREFILL_FAMILY, tuple(calls))

    def small_operators(self) -> Iterator[Reference]:
        """Yield norms of about the model's width and the step's rows."""
        size = {"width": self.wanted.model.hidden_size}
        rows = self._nearest("small_ops", {"op": "norm"}, size, {"rows": self._rows()})
        axes = [{"rows": int(row["rows"]), "width": int(row["width"])} for row in rows]
        calls = [
            Call((self._point("norm", one, cold=False),), row["seconds"])
            for one, row in zip(axes, rows, strict=True)
        ]
        yield Reference(SMALL_OPERATORS, tuple(calls))

    def copies(self) -> Iterator[Reference]:
        """Yield the largest copies, which stand for the memory alone."""
        rows = self._nearest("kv_copy", {"target_format": "bf16"}, {"width": 1e9}, {"tokens": 1e9})
        names = ("requests", "page_tokens", "target_page_tokens", "ragged")
        fixed = dict(zip(names, (1, PAGE_TOKENS, PAGE_TOKENS, 0), strict=True))
        calls = []
        for row in rows[:1]:  # smaller ones fit into caches
            axes = {**fixed, "tokens": int(row["tokens"]), "row": int(row["width"])}
            calls.append(Call((self._point("kv_copy_bf16", axes),), row["seconds"]))
        yield Reference(COPIES, tuple(calls))

    # --- rows -----------------------------------------------------------------------------------

    def _rows(self) -> float:
        chunks = sum(chunk.new_tokens for chunk in self.step.prefill_chunks)
        return float(max(self.step.decode_requests + chunks, 1))

    def _shape(self) -> AttentionShape | None:
        for layer in self.wanted.model.layers:
            if isinstance(layer.attention, GqaAttention | MlaAttention):
                (kv_format,) = self.wanted.kv_formats
                return attention_shape(layer.attention, self.wanted.layout, kv_format)
        return None

    def _nearest(
        self,
        table: str,
        equal: Mapping[str, str | None],
        size: Mapping[str, float],
        along: Mapping[str, float],
    ) -> list[RowRecord]:
        """Return rows of the nearest sizes (in logs), of each the nearest along an axis."""
        rows = self.profile.tables.get(table)
        if rows is None:
            return []
        kept = rows[rows["seconds"] <= _CALL_S_MOST]
        for name, value in equal.items():
            kept = kept[kept[name] == value]
        sizes = _closest(kept[list(size)].drop_duplicates(), size, _SIZES)
        found: list[RowRecord] = []
        for values in sizes.itertuples(index=False, name=None):
            is_size = (kept[list(size)] == list(values)).all(axis=1)
            nearest = _closest(kept[is_size], along, _POINTS)
            found += [
                {str(key): one for key, one in row.items()} for row in nearest.to_dict("records")
            ]
        return found

    # --- points ---------------------------------------------------------------------------------

    def _point(self, kernel: str, axes: Axes, cold: bool = True) -> Point:
        return Point(kernel, axes, 0.0, 0.0, cold, self.on_gpu)

    def _product_points(self, row: RowRecord) -> tuple[Point, ...]:
        axes = {name: int(row[name]) for name in ("m", "n", "k")}
        product = self._point(row["kernel"], axes)
        quantiser = dict(PRODUCTS.values())[row["kernel"]]
        if quantiser is None:
            return (product,)
        sides = {"m": axes["m"], "k": axes["k"]}
        return product, self._point(quantiser, sides, cold=False)

    def _experts_point(self, row: RowRecord) -> Point:
        axes = {name: int(row[name]) for name in ("tokens", "experts", "top_k", "hidden")}
        ways = int(row["tp"])
        axes |= {"inter": int(row["inter"]) // ways, "ways": ways, "balanced": 1}
        return self._point(row["kernel"], axes)

    def _decode_point(self, row: RowRecord) -> Point:
        names = ("batch", "heads", "context_tokens")
        axes = {**{name: int(row[name]) for name in names}, **_PAGED}
        if row["kind"] == "gqa":
            axes |= {name: int(row[name]) for name in ("kv_heads", "head_dim")}
        return self._point(f"{row['kernel']}_{KV_SUFFIX[row['kv_format']]}", axes)

    def _prefill_point(self, row: RowRecord) -> Point | None:
        names = ("batch", "heads", "new_tokens")
        axes = {**{name: int(row[name]) for name in names}, "prefix_tokens": 0}
        if row["kind"] == "gqa":
            axes |= {name: int(row[name]) for name in ("kv_heads", "head_dim")} | _PAGED
            kernel = f"{row['kernel']}_{KV_SUFFIX[row['kv_format']]}"
            return self._point(kernel, axes, cold=False)
        machine = self.profile.header.fitted.get("machine", {})
        widths = machine.get("latent_widths", {}).get(str(axes["heads"]))
        if widths is None:  # the table knows the heads alone
            return None
        return self._point("mla_prefill", {**axes, "key": widths[0], "value": widths[1]}, False)


_PAGED = {"page_tokens": PAGE_TOKENS, "ragged": 0}


def _heads(shape: AttentionShape) -> dict[str, float]:
    if shape.kind == "gqa":
        return {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return {"heads": shape.heads, "head_dim": MLA_HEAD_DIM}


def _kind(shape: AttentionShape) -> dict[str, str | None]:
    """Return what rows of a shape share; sparse attention is timed as the dense one is."""
    return {"kind": "gqa" if shape.kind == "gqa" else "mla", "kv_format": shape.kv_format}


def _closest(rows: pd.DataFrame, wanted: Mapping[str, float], most: int) -> pd.DataFrame:
    """Return the rows nearest in logs, the nearest first."""
    names = list(wanted)
    sizes = np.log(rows[names].to_numpy(np.float64))
    distances = np.abs(sizes - np.log(np.array([wanted[name] for name in names]))).sum(axis=1)
    return rows.iloc[np.argsort(distances, kind="stable")[:most]]


Seconds = Callable[[Reference], list[float] | None]


def times_now(device: str, threads: int) -> Seconds:
    """Return what times the calls of a reference on this machine, as a calibration does.

    It answers None where the device has no such kernel, or not the memory for it.
    """
    from tonnage.kernels.point_timing import PointTimer
    from tonnage.kernels.provenance import provenance
    from tonnage.kernels.timing import Method

    method = Method(device, threads=threads, warm_ups=2, samples=5, sample_s=2e-3, budget_s=0.1)
    origin = provenance(device, threads)

    def seconds(reference: Reference) -> list[float] | None:
        timer = PointTimer(method, origin)
        points = [point for call in reference.calls for point in call.points]
        found: dict[tuple[object, ...], float] = {}
        for group in grouped(points):
            for one in group.points:
                row = timer.measure(
                    one.kernel, one.axes, group.largest, cold=one.cold, graph=one.graph
                )
                if row is not None:
                    found[one.identity] = row.timing.seconds_median
        timer.free()  # the steps need the memory
        if any(one.identity not in found for one in points):
            return None
        return [sum(found[one.identity] for one in call.points) for call in reference.calls]

    return seconds
