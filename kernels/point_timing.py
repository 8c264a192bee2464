"""Time points of a kernel one after another, keeping the weights and caches that they share.

Making a weight takes far longer than timing a product with it: inputs are made once for the
largest point, copied to empty caches once, and cut for each point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import torch

from tonnage.kernels.part_specs import PART_KERNELS
from tonnage.kernels.provenance import Provenance
from tonnage.kernels.registry import KERNELS
from tonnage.kernels.spec import Axes, Inputs, KernelSpec
from tonnage.kernels.timing import (
    Method,
    TimingRow,
    copies_for,
    rotated,
    time_calls,
)

COPIED_BYTES_MAX = 128 << 20  # of a CPU: copying must not take longer than timing
# What a packed weight was made of; no kernel reads it.
UNREAD = ("levels", "scales", "zeros")

Cut = Callable[[Inputs, Axes], Inputs]


@cache
def measured_kernels() -> Mapping[str, KernelSpec]:
    """Return every kernel and part of a step, with their CPU backends."""
    return {**KERNELS, **{spec.name: spec for spec in PART_KERNELS}}


def backend_of(spec: KernelSpec, device: str) -> str | None:
    """Return what runs a kernel on a device: torch where a GPU has no Triton kernel for it."""
    wanted = ("cpu",) if torch.device(device).type == "cpu" else ("triton", "torch")
    return next((name for name in wanted if name in spec.runs), None)


class PointTimer:
    """Measures points with one method; keeps the inputs of the last set."""

    def __init__(self, method: Method, origin: Provenance) -> None:
        self._method = method
        self._origin = origin
        self._kept: tuple[object, tuple[Inputs, ...]] = (None, ())

    def measure(
        self, name: str, axes: Axes, largest: Axes, *, cold: bool, graph: bool
    ) -> TimingRow | None:
        """Measure a point; None where the device has no such kernel, or not the memory for it.

        `largest`: axes whose inputs hold those of every point measured with them.
        """
        try:
            return self._measured(name, axes, largest, cold, graph)
        except torch.OutOfMemoryError:
            self.free()
            return None

    def free(self) -> None:
        """Give back the memory of the inputs that are kept."""
        self._kept = (None, ())
        if self._method.on_gpu:
            torch.cuda.empty_cache()

    def _measured(
        self, name: str, axes: Axes, largest: Axes, cold: bool, graph: bool
    ) -> TimingRow | None:
        spec = measured_kernels()[name]
        backend = backend_of(spec, self._method.device)
        if backend is None:
            return None
        method = replace(self._method, backend=backend, cold=cold, graph=graph)
        cut = _cut_of(name)
        turns = self._turns(spec, axes, axes if cut is None else largest, method)
        if cut is not None:
            turns = tuple(cut(one, axes) for one in turns)
        calls = [partial(spec.run, one, backend) for one in turns]
        timing, state = time_calls(calls, method)
        return TimingRow(
            kernel=name,
            backend=backend,
            axes=dict(axes),
            timing=timing,
            flops=spec.flops(axes),
            bytes=spec.bytes(axes),
            cold=cold,
            graph=graph and method.on_gpu,
            copies=len(turns),
            provenance=self._origin,
            state=state,
        )

    def _turns(
        self, spec: KernelSpec, axes: Axes, made: Axes, method: Method
    ) -> tuple[Inputs, ...]:
        key = (spec.name, tuple(made.items()), method.backend, method.cold)
        if key != self._kept[0]:
            self._kept = (None, ())  # free the last ones first
            inputs = spec.prepare(
                spec.make_inputs(made, method.seed, method.device), method.backend
            )
            if "packed" in inputs or "cpu_packed" in inputs:
                inputs = {name: value for name, value in inputs.items() if name not in UNREAD}
            copies = copies_for(spec.bytes(axes), inputs, method)
            if not method.on_gpu:
                copies = max(1, min(copies, COPIED_BYTES_MAX // max(_bytes(inputs), 1)))
            self._kept = (key, tuple(rotated(inputs, copies)))
        return self._kept[1]


def _bytes(inputs: Inputs) -> int:
    return sum(t.numel() * t.element_size() for t in inputs.values() if torch.is_tensor(t))


# --- cutting ------------------------------------------------------------------------------------


def _cut_of(name: str) -> Cut | None:
    """Return what cuts a kernel's inputs, None where every point has its own."""
    if name == "gemm_nvfp4":
        return None
    cuts = {"gemm_": _rows, "experts_": _tokens, "gqa_decode": _contexts, "mla_decode": _contexts}
    return next((cut for start, cut in cuts.items() if name.startswith(start)), None)


def _rows(inputs: Inputs, axes: Axes) -> Inputs:
    """Keep the first rows of the activations and their scales."""
    from tonnage.kernels.ops.split_counts import arrivals_for

    m = axes["m"]
    cut = {**inputs, "x": inputs["x"][:m]}
    scale = inputs.get("x_scale")
    if scale is not None and scale.dim() == 2:
        cut["x_scale"] = scale[:, :m].contiguous()
    elif scale is not None and scale.numel() > 1:
        cut["x_scale"] = scale[:m]
    if "arrivals" in inputs:
        cut["arrivals"] = arrivals_for(m, axes["n"], inputs["x"].device)
    return cut


def _tokens(inputs: Inputs, axes: Axes) -> Inputs:
    """Keep the first tokens and their experts."""
    tokens = axes["tokens"]
    return {**inputs, **{name: inputs[name][:tokens] for name in ("x", "ids", "shares")}}


def _contexts(inputs: Inputs, axes: Axes) -> Inputs:
    """Keep the first tokens of every context."""
    context = axes["context_tokens"]
    columns = -(-context // axes["page_tokens"]) + 1
    return {
        **inputs,
        "page_table": inputs["page_table"][:, :columns].contiguous(),
        "context_tokens": torch.full_like(inputs["context_tokens"], context),
        "context_tokens_max": context,
    }
