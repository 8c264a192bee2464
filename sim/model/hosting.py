"""Which GPUs, and how many of them, can host a model at all: every layout tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tonnage.sim.domain import EngineSpec, GpuSpec, ModelSpec, ParallelLayout, PoolSpec
from tonnage.sim.model.engine_rules import (
    default_chunk_tokens,
    default_max_running_requests,
    default_page_tokens,
)
from tonnage.sim.model.layout import layout_problem
from tonnage.sim.model.memory import max_concurrency
from tonnage.sim.model.memory_estimate import LoadedLayout, estimate_pool_memory, loaded_layout
from tonnage.sim.model.requantise import is_moe

GPU_COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Guest:
    """A model in the weights it is to be served with, and the request it must hold."""

    model: ModelSpec
    weights: str
    kv_format: str
    context_tokens: int
    engine: EngineSpec


@dataclass(frozen=True, slots=True)
class Fit:
    """What one layout on one GPU type holds; figures per instance unless they say per GPU.

    `hosts`: a request of the context asked for fits. `deficit_bytes_per_gpu` is what is missing for
    the first page of KV.
    """

    gpu: str
    gpus: int
    layout: ParallelLayout
    hosts: bool
    weights_bytes_per_gpu: float
    kv_bytes_per_gpu: float
    kv_tokens: int
    longest_request_tokens: int
    max_concurrency: int
    mem_fraction: float
    deficit_bytes_per_gpu: float

    @property
    def loads(self) -> bool:
        """Whether the weights leave room for any KV."""
        return self.deficit_bytes_per_gpu == 0


def fits(guest: Guest, gpus: Sequence[GpuSpec]) -> list[Fit]:
    """Return what every layout of 1 to 16 GPUs holds, on each of these GPU types."""
    loaded: dict[ParallelLayout, LoadedLayout] = {}
    found = []
    for gpu in gpus:
        for count in GPU_COUNTS:
            for layout in layouts(guest, gpu, count):
                found.append(_fit(guest, gpu, layout, loaded))
    return found


def layouts(guest: Guest, gpu: GpuSpec, count: int) -> Iterator[ParallelLayout]:
    """Yield the layouts that the model can have on so many GPUs, fewest stages first.

    Tensor ranks stay within a node and stages chain what is left. Attention-DP is tried for
    mixtures of experts; for a dense model it is nothing but replicas. Context parallelism is as
    wide as the model allows, or none. Of `ep`, which hardly moves memory, the smallest allowed.
    """
    for tp in sorted(_divisors(count), reverse=True):
        if tp > gpu.gpus_per_node:
            continue
        for attention_dp in _divisors(tp) if is_moe(guest.model) else (1,):
            plain = ParallelLayout(tp, count // tp, 1, attention_dp)
            yield from _first_allowed(guest, [replace(plain, ep=ep) for ep in _divisors(tp)])
        wide = [
            ParallelLayout(tp, count // tp, ep, 1, dcp)
            for dcp in reversed(_divisors(tp))
            for ep in _divisors(tp)
            if dcp > 1
        ]
        yield from _first_allowed(guest, wide)


def best(rows: Sequence[Fit]) -> Fit | None:
    """Return the hosting row that one would start with.

    Fewest GPUs, then no context parallelism, then the fewest stages, then the most requests.
    """
    hosting = [row for row in rows if row.hosts]
    return min(hosting, key=_first_choice, default=None)


def _first_choice(row: Fit) -> tuple[int, ...]:
    layout = row.layout
    return row.gpus, layout.dcp, layout.pp, -row.max_concurrency, layout.attention_dp


def nearest(rows: Sequence[Fit]) -> Fit | None:
    """Return the row that lacks least: the longest context, else the fewest missing bytes."""
    loading = [row for row in rows if row.loads]
    if loading:
        return max(loading, key=lambda row: (row.longest_request_tokens, -row.gpus))
    return min(rows, key=lambda row: row.deficit_bytes_per_gpu * row.gpus, default=None)


def _fit(
    guest: Guest, gpu: GpuSpec, layout: ParallelLayout, loaded: dict[ParallelLayout, LoadedLayout]
) -> Fit:
    engine, model = guest.engine, guest.model
    running = default_max_running_requests(engine, gpu, model)
    pool = PoolSpec(
        role="serve",
        instances=1,
        layout=layout,
        weights=guest.weights,
        kv_format=guest.kv_format,
        page_tokens=default_page_tokens(engine, model, gpu, guest.kv_format),
        chunk_tokens=default_chunk_tokens(engine, gpu),
        max_running_requests=running * layout.attention_dp,
    )
    if layout not in loaded:
        loaded[layout] = loaded_layout(model, engine, pool)
    memory = estimate_pool_memory(model, gpu, engine, pool, loaded[layout])
    running = default_max_running_requests(engine, gpu, model, memory.kv_tokens_per_rank)
    held = max_concurrency(memory, guest.context_tokens)
    return Fit(
        gpu=gpu.name,
        gpus=layout.gpus,
        layout=layout,
        hosts=memory.fits and held > 0,
        weights_bytes_per_gpu=memory.weights_bytes_per_gpu,
        kv_bytes_per_gpu=memory.kv_bytes_per_gpu,
        kv_tokens=memory.kv_tokens,
        longest_request_tokens=memory.longest_request_tokens,
        max_concurrency=min(held, running * layout.attention_dp),
        mem_fraction=memory.mem_fraction,
        deficit_bytes_per_gpu=memory.deficit_bytes_per_gpu,
    )


def _first_allowed(guest: Guest, tries: Sequence[ParallelLayout]) -> Iterator[ParallelLayout]:
    """Yield the first layout that the model can have, if there is one."""
    for layout in tries:
        if layout_problem(guest.model, layout, guest.engine.name) is None:
            yield layout
            return


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
