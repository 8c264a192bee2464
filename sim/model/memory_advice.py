"""What to say when a pool does not fit: the deficit, and the smallest change that mends it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from tonnage.sim.domain import EngineSpec, GpuSpec, ModelSpec, PoolSpec
from tonnage.sim.model.formats import checkpoint_bytes
from tonnage.sim.model.layout import layout_problem
from tonnage.sim.model.memory_estimate import PoolMemory, estimate_pool_memory
from tonnage.sim.model.requantise import with_weights
from tonnage.sim.units import format_bytes

# From the largest to the smallest checkpoint; one is advised only if it is smaller and fits.
_WEIGHT_FORMATS = ("fp8_block", "fp8", "int4_g128", "int4_g32", "nvfp4")


def infeasible_message(
    memory: PoolMemory, model: ModelSpec, gpu: GpuSpec, engine: EngineSpec, pool: PoolSpec
) -> str:
    """Return one sentence on what is missing and one on what would fit."""
    problem = infeasible_problem(memory, model, gpu, pool)
    mends = list(_mends(memory, model, gpu, engine, pool))
    if not mends:
        return f"{problem}. No format or layout tried on one node fits; use GPUs with more memory"
    return f"{problem}. Smallest change that fits: {'; or '.join(mends[:3])}"


def infeasible_problem(memory: PoolMemory, model: ModelSpec, gpu: GpuSpec, pool: PoolSpec) -> str:
    """Return the sentence on what is missing."""
    return (
        f"pools.{pool.role}: {model.name} in {model.native_weight_format} does not fit "
        f"{pool.layout.gpus} x {gpu.name}: each loads {format_bytes(memory.weights_bytes_per_gpu)} "
        f"of weights and is short of {format_bytes(memory.deficit_bytes_per_gpu)} for the first "
        "page of KV"
    )


def _mends(
    memory: PoolMemory, model: ModelSpec, gpu: GpuSpec, engine: EngineSpec, pool: PoolSpec
) -> Iterator[str]:
    fraction = _fraction_mend(memory, model, gpu, engine, pool)
    if fraction is not None:
        yield f"engine.mem_fraction {fraction:g}"
    layout = _layout_mend(model, gpu, engine, pool)
    if layout is not None:
        yield f"pools.{pool.role}.{layout}"
    weights = _weights_mend(model, gpu, engine, pool)
    if weights is not None:
        yield f"pools.{pool.role}.weights {weights}"


def _fraction_mend(
    memory: PoolMemory, model: ModelSpec, gpu: GpuSpec, engine: EngineSpec, pool: PoolSpec
) -> float | None:
    """Return the smallest fraction that fits, if the engine's own reserve still remains."""
    estimate = memory.mem_fraction + memory.deficit_bytes_per_gpu / gpu.memory_bytes
    for thousandths in range(ceil(estimate * 1000), int(memory.mem_fraction_most * 1000) + 1):
        fraction = thousandths / 1000
        asked = replace(engine, mem_fraction=fraction, mem_fraction_source="given")
        if estimate_pool_memory(model, gpu, asked, pool).fits:
            return fraction
    return None


def _layout_mend(model: ModelSpec, gpu: GpuSpec, engine: EngineSpec, pool: PoolSpec) -> str | None:
    """Return the next tp that fits on a node, else the fewest nodes chained by pp."""
    first = pool.layout
    larger = range(first.tp + 1, gpu.gpus_per_node // first.pp + 1)
    # What the layout names must still divide tp: attention_dp and dcp together, and ep.
    tries = [
        (f"tp {tp}", replace(first, tp=tp))
        for tp in larger
        if tp % (first.attention_dp * first.dcp) == 0 and tp % first.ep == 0
    ]
    ways = first.attention_dp * first.dcp
    full = max(first.tp, gpu.gpus_per_node // ways * ways)
    if full % first.ep == 0:
        tries += [
            (f"tp {full} with pp {pp}", replace(first, tp=full, pp=pp))
            for pp in range(first.pp + 1, 9)
        ]
    for text, layout in tries:
        if layout_problem(model, layout, engine.name) is not None:
            continue
        if estimate_pool_memory(model, gpu, engine, replace(pool, layout=layout)).fits:
            return text
    return None


def _weights_mend(model: ModelSpec, gpu: GpuSpec, engine: EngineSpec, pool: PoolSpec) -> str | None:
    for weights in _WEIGHT_FORMATS:
        smaller = with_weights(model, weights)
        if checkpoint_bytes(smaller) >= checkpoint_bytes(model):
            continue
        if layout_problem(smaller, pool.layout, engine.name) is not None:
            continue
        if estimate_pool_memory(smaller, gpu, engine, pool).fits:
            return weights
    return None
