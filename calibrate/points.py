"""What a calibration measures, as data: a kernel and its axes, and how long that should take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Axes = Mapping[str, int]

# The axis that only says how much of a weight or a cache is used, by how a kernel's name begins:
# points that differ in it alone are measured on one set of inputs.
_SHARED_AXES = {
    "gemm_": "m",
    "experts_": "tokens",
    "gqa_decode": "context_tokens",
    "mla_decode": "context_tokens",
}
_OWN_INPUTS = ("gemm_nvfp4",)  # its packed activations cannot be cut


def shared_axis(kernel: str) -> str | None:
    """Return the axis along which a kernel's points share inputs, None where each has its own."""
    if kernel in _OWN_INPUTS:
        return None
    return next((axis for name, axis in _SHARED_AXES.items() if kernel.startswith(name)), None)


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. `estimate_s`: of a call, from the datasheet; `cold`: caches are emptied.

    `held_bytes`: about what its inputs take.
    """

    kernel: str
    axes: Axes = field(hash=False)
    estimate_s: float = field(compare=False)
    held_bytes: float = field(compare=False)
    cold: bool = True
    graph: bool = True

    @property
    def sharing(self) -> tuple[object, ...]:
        """What points have in common that are measured on one set of inputs."""
        cut = shared_axis(self.kernel)
        fixed = tuple((name, value) for name, value in self.axes.items() if name != cut)
        return self.kernel, self.cold, self.graph, fixed

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes it another point."""
        return self.kernel, self.cold, self.graph, tuple(sorted(self.axes.items()))


@dataclass(frozen=True, slots=True)
class Group:
    """Points on one set of inputs, the smallest first; `largest`: the axes that hold them all."""

    points: tuple[Point, ...]

    @property
    def largest(self) -> Axes:
        """The largest value of every axis."""
        first = self.points[0].axes
        return {name: max(one.axes[name] for one in self.points) for name in first}


def grouped(points: Iterable[Point]) -> list[Group]:
    """Return the points by the inputs that they share, each once, in the order of first sight."""
    by_inputs: dict[tuple[object, ...], dict[tuple[object, ...], Point]] = {}
    for point in points:
        by_inputs.setdefault(point.sharing, {}).setdefault(point.identity, point)
    return [
        Group(tuple(sorted(found.values(), key=lambda one: one.estimate_s)))
        for found in by_inputs.values()
    ]
