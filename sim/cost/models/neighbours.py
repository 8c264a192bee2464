"""Which measured shapes stand in for an attention shape that nobody measured, and by how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Literal

from tonnage.sim.cost.models.attention import AttentionShape

# How near the measured shapes are: the shape itself; others of its kind, head size and formats;
# beyond the heads that were measured; another head size, window, format or model.
Regime = Literal["measured", "heads", "outside", "scaled"]

_INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class StandIns:
    """Measured shapes and their weights, which sum to one."""

    shapes: tuple[tuple[AttentionShape, float], ...]
    regime: Regime


def stand_ins(
    shape: AttentionShape,
    measured: Mapping[AttentionShape, str],
    place: Callable[[AttentionShape], float],
    closeness: Callable[[AttentionShape], float],
) -> StandIns | None:
    """Return what to interpolate between, None where no shape of the kind was measured.

    `measured`: the kernel that ran each shape; those of another kernel than most of the shapes
    with the nearest ratio of heads to KV heads do not stand in.
    `place` orders shapes along the axis of interpolation (in logs); among shapes at one place the
    one whose `closeness` is nearest in logs is taken.
    """
    if shape in measured:
        return StandIns(((shape, 1.0),), "measured")
    pool, is_relaxed = _nearest_family(shape, measured)
    if not pool:
        return None
    pool = _of_one_kernel(shape, pool, measured)
    places = sorted({place(one) for one in pool})
    wanted = place(shape)
    below = [one for one in places if one <= wanted]
    above = [one for one in places if one >= wanted]
    low, high = (below or above)[-1 if below else 0], (above or below)[0 if above else -1]
    share = 0.0 if low == high else log(wanted / low) / log(high / low)
    chosen = tuple(
        (_closest(shape, [one for one in pool if place(one) == at], closeness), weight)
        for at, weight in ((low, 1.0 - share), (high, share))
        if weight > 0
    )
    inside = bool(below) and bool(above)
    return StandIns(chosen, "scaled" if is_relaxed else "heads" if inside else "outside")


def _of_one_kernel(
    shape: AttentionShape, pool: list[AttentionShape], kernels: Mapping[AttentionShape, str]
) -> list[AttentionShape]:
    """Return the shapes whose kernel is that of most shapes with the nearest ratio of heads."""
    nearest = min(abs(log(one.group / shape.group)) for one in pool)
    alike = [one for one in pool if abs(log(one.group / shape.group)) <= nearest + 1e-9]
    kernel = Counter(kernels[one] for one in alike).most_common(1)[0][0]
    return [one for one in pool if kernels[one] == kernel]


def _closest(
    shape: AttentionShape,
    pool: list[AttentionShape],
    closeness: Callable[[AttentionShape], float],
) -> AttentionShape:
    wanted = closeness(shape)
    return min(pool, key=lambda one: (abs(log(closeness(one) / wanted)), -one.heads))


def _nearest_family(
    shape: AttentionShape, measured: Collection[AttentionShape]
) -> tuple[list[AttentionShape], bool]:
    """Return shapes that differ in heads alone, or else in as little more as there is."""
    pool = [one for one in measured if one.kind == shape.kind]
    if not pool and shape.kind == "dsa_shared":
        pool = [one for one in measured if one.kind == "dsa_full"]
    is_relaxed = bool(pool) and pool[0].kind != shape.kind
    distances: tuple[Callable[[AttentionShape], float], ...] = (
        lambda one: float(one.kv_format != shape.kv_format),
        lambda one: _apart(one.hidden_size, shape.hidden_size),
        lambda one: float(one.projection_format != shape.projection_format),
        lambda one: _apart(one.head_dim, shape.head_dim),
        lambda one: _window_apart(one.window_tokens, shape.window_tokens),
    )
    for distance in distances:
        nearest = min(map(distance, pool), default=0.0)
        pool = [one for one in pool if distance(one) == nearest]
        is_relaxed = is_relaxed or nearest > 0
    return pool, is_relaxed


def _apart(one: int | None, other: int | None) -> float:
    if one == other:
        return 0.0
    return _INFINITY if one is None or other is None else abs(log(one / other))


def _window_apart(one: int | None, other: int | None) -> float:
    """Prefer no window at all to another one: a window is a limit on what is read."""
    return 0.0 if one == other else 1.0 if one is None else 1.0 + _apart(one, other)


def with_format(shape: AttentionShape, kv_format: str) -> AttentionShape:
    """Return the same shape over another KV format."""
    return replace(shape, kv_format=kv_format)
