"""`tonnage validate kv`: KV capacities that engines printed, against the memory model.

A row is predicted from its configuration where that says enough. Where it does not, but the log
printed the pool's bytes, they are taken as given and the tokens in them are predicted: that tests
bytes per token and how an engine counts, not the budget. Every row says which of the two it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.scenarios.capacity_rows import CapacityRow, UnknownRow, read_capacity_table
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.domain import BadInputError, GqaAttention, LinearAttention, MlaAttention
from tonnage.sim.model.engine_rules import (
    default_chunk_tokens,
)
from tonnage.sim.model.kv import stage_kv_shapes
from tonnage.sim.model.memory import PoolMemory
from tonnage.sim.model.vllm_groups import HybridPool, hybrid_pool, is_hybrid
from tonnage.sim.units import version_key
from tonnage.validation_summary import Figure, ValidatedRow, by_group, summary

CONFIGURATION, PRINTED_POOL, REFUSED = "configuration", "printed pool", "none"
UNKNOWN = "not known"
FIGURES = ("kv_tokens", "kv_bytes", "max_concurrency")
# SGLang 0.5.23 `--swa-full-tokens-ratio`: tokens of the sliding pool for each of the full one.
_SLIDING_SHARE = 0.8
# vLLM prints the tokens of a hybrid pool as concurrency x length: a 0.24.0 log does, 0.11 ones do
# not; in between nothing is known.
_TOKENS_OF_REQUESTS, _TOKENS_OF_GROUP = "0.24", "0.11.99"
_UNKNOWN_GPU_CHUNK = 2048  # vLLM's `max_num_batched_tokens` where the GPU is not a large one


@dataclass(frozen=True, slots=True)
class KvValidation:
    """The rows of a table, each with its headline figure under the name `kv`."""

    source: Path
    rows: tuple[ValidatedRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of `validate kv`."""
        keys = ("basis", "attention", "model", "gpu", "engine")
        told = {f"by_{key}": by_group(self.rows, ("kv",), key) for key in keys}
        return {
            "source": self.source.name,
            "rows": [row.to_dict() for row in self.rows],
            "summary": kv_summary(self.rows) | told,
        }


def kv_summary(rows: Sequence[ValidatedRow]) -> dict[str, Any]:
    """Return counts and errors of the headline figures; `median_abs_error` is theirs."""
    found = summary(rows, ("kv", *FIGURES))
    return found | {"median_abs_error": found["kv_median_abs_error"]}


def validate_kv(path: Path) -> KvValidation:
    """Compare every row of a table of KV capacities; BadInputError where it cannot be read."""
    rows = read_capacity_table(path)
    if not rows:
        raise BadInputError(f"{path}: holds no rows")
    return KvValidation(path, tuple(_validated(row) for row in rows))


def _validated(row: CapacityRow | UnknownRow) -> ValidatedRow:
    if isinstance(row, UnknownRow):
        groups = {"model": row.model, "gpu": row.gpu or UNKNOWN, "engine": row.engine}
        unknown = {"attention": UNKNOWN, "basis": REFUSED}
        return ValidatedRow(row.id, groups | unknown, refused=row.reason)
    groups = {
        "model": row.model.name,
        "gpu": row.gpu or UNKNOWN,
        "engine": row.engine.name,
        "attention": attention_kind(row),
        "basis": REFUSED,
    }
    if row.kv_tokens is None and row.kv_bytes is None and row.max_concurrency is None:
        return ValidatedRow(row.id, groups, refused="the row prints no KV capacity to compare with")
    memory, notes = None, list(_notes(row))
    try:
        memory = row.predicted()
    except BadInputError as error:  # such as a layout that the model cannot have
        return ValidatedRow(row.id, groups, refused=str(error))
    if memory is not None:
        basis = CONFIGURATION
        figures = _from_configuration(row, memory)
        remarks = [text for text in memory.assumptions if "memory rules" in text]
        notes += [text for text in remarks if row.version_is_stated]
    elif row.kv_bytes is not None:
        basis = PRINTED_POOL
        figures = _counted(row, row.kv_bytes)
        notes.append(f"{row.missing()}: the printed bytes of the pool are taken as given")
    else:
        basis, figures = REFUSED, {}
    headline = next((figures[name] for name in _headlines(row) if name in figures), None)
    if headline is None:
        return ValidatedRow(row.id, groups, refused=row.missing() or "nothing to compare")
    groups["basis"] = basis
    return ValidatedRow(row.id, groups, {"kv": headline, **figures}, notes=tuple(notes))


def attention_kind(row: CapacityRow) -> str:
    """Return what its layers keep of a context, and whether ranks keep requests of their own."""
    attentions = [layer.attention for layer in row.model.layers]
    latents = [one for one in attentions if isinstance(one, MlaAttention)]
    kind = "gqa"
    if any(isinstance(one, LinearAttention) for one in attentions):
        kind = "linear"
    elif any(isinstance(one, GqaAttention) and one.window_tokens for one in attentions):
        kind = "sliding"
    elif latents:
        kind = "dsa" if any(one.sparse_top_k for one in latents) else "mla"
    return f"{kind}, attention-dp" if row.layout.attention_dp > 1 else kind


def _headlines(row: CapacityRow) -> tuple[str, ...]:
    """Return the figures that may speak for a row, best first.

    How many tokens a hybrid pool of vLLM holds is a convention; how many requests, is not.
    """
    if row.engine.name == "vllm" and is_hybrid(row.model):
        return ("max_concurrency", "kv_tokens", "kv_bytes")
    return FIGURES


def _from_configuration(row: CapacityRow, memory: PoolMemory) -> dict[str, Figure]:
    figures = _counted(row, memory.kv_bytes_per_gpu)
    if row.kv_bytes is not None:
        figures["kv_bytes"] = Figure(row.kv_bytes, memory.kv_bytes_per_gpu)
    if row.weights_bytes is not None:
        figures["weights_bytes"] = Figure(row.weights_bytes, memory.weights_bytes_per_gpu)
    return figures


def _counted(row: CapacityRow, pool_bytes: float) -> dict[str, Figure]:
    """Return the figures that follow from the bytes of a pool per GPU."""
    if row.engine.name == "vllm" and is_hybrid(row.model):
        return _counted_in_groups(row, pool_bytes)
    tokens = min(_tokens_of(row, pool_bytes))
    figures = {}
    if row.kv_tokens is not None:
        figures["kv_tokens"] = Figure(row.kv_tokens, tokens)
    if row.max_concurrency is not None and row.longest_tokens is not None:
        figures["max_concurrency"] = Figure(row.max_concurrency, tokens / row.longest_tokens)
    return figures


def _tokens_of(row: CapacityRow, pool_bytes: float) -> list[float]:
    """Return the tokens of one rank that every stage's share of the pool holds."""
    tokens = []
    for shape in stage_kv_shapes(row.model, row.layout, row.kv_format, row.engine.name):
        token_bytes = shape.growing_bytes_per_token
        if row.engine.name == "sglang":  # a pool for sliding layers, in proportion to the other
            token_bytes += _SLIDING_SHARE * sum(size for _, size in shape.windows)
        if token_bytes:
            tokens.append(pool_bytes / token_bytes)
    return tokens or [0.0]


def _counted_in_groups(row: CapacityRow, pool_bytes: float) -> dict[str, Figure]:
    pool = _hybrid_pool(row, pool_bytes)
    figures = {}
    if row.max_concurrency is not None and row.longest_tokens is not None:
        figures["max_concurrency"] = Figure(row.max_concurrency, pool.max_concurrency)
    tokens = _printed_tokens(row, pool)
    if row.kv_tokens is not None and tokens is not None:
        figures["kv_tokens"] = Figure(row.kv_tokens, tokens)
    return figures


def _hybrid_pool(row: CapacityRow, pool_bytes: float) -> HybridPool:
    chunk_tokens = row.chunk_tokens
    if chunk_tokens is None and row.gpu is not None:
        chunk_tokens = default_chunk_tokens(row.engine, load_gpu(row.gpu))
    return hybrid_pool(
        row.model,
        row.layout,
        row.kv_format,
        pool_bytes,
        longest_tokens=row.longest_tokens or row.model.max_context_tokens,
        chunk_tokens=chunk_tokens or _UNKNOWN_GPU_CHUNK,
    )


def _printed_tokens(row: CapacityRow, pool: HybridPool) -> float | None:
    """Return what the version prints as the tokens of a pool; None where that is not known."""
    if not row.version_is_stated:
        # The newest convention, unless the row has requests to compare, which need none.
        return None if row.max_concurrency is not None else pool.tokens
    version = version_key(row.engine.version)
    if version >= version_key(_TOKENS_OF_REQUESTS):
        return pool.tokens
    return float(pool.tokens_per_group) if version <= version_key(_TOKENS_OF_GROUP) else None


def _notes(row: CapacityRow) -> list[str]:
    notes = []
    if not row.version_is_stated:
        notes.append(f"version not stated: taken as {row.engine.name} {row.engine.version}")
    if row.chunk_tokens or row.running_requests:
        notes.append("settings from the remark")
    return notes
