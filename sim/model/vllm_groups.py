"""How vLLM counts the KV pool of a hybrid model: groups of layers that share blocks of one size.

`vllm/v1/core/kv_cache_utils.py` (0.24): layers of one kind are cut into groups of equally many
layers, and a block holds that many layers of one group. Kinds whose layers take fewer bytes per
token hold more tokens in a block, so that all blocks are equally large. What a request may hold is
charged for the longest one: a window and a chunk in sliding layers, two blocks of state in others
(the one in use, and the one that the prefix cache keeps).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tonnage.sim.domain import (
    GqaAttention,
    LayerSpec,
    LinearAttention,
    ModelSpec,
    ParallelLayout,
)
from tonnage.sim.model.kv import (
    indexer_bytes_per_token,
    layer_bytes_per_token,
    stage_layers,
    state_bytes,
)

_ATTENTION_BLOCK_TOKENS = 16
_STATE_BLOCKS = 2
# Kinds of almost equal size make groups as large as the largest kind, else as the smallest.
_ALMOST_EQUAL = 1.25


@dataclass(frozen=True, slots=True)
class HybridPool:
    """A pool of blocks: how many there are, and how many the longest request needs.

    `block_tokens`: the fewest that a block holds of any kind; `groups`: of layers, all kinds.
    """

    blocks: int
    request_blocks: int
    block_tokens: int
    groups: int
    longest_tokens: int

    @property
    def max_concurrency(self) -> float:
        """Return how many of the longest requests the pool holds, as vLLM prints it."""
        return self.blocks / self.request_blocks

    @property
    def tokens(self) -> float:
        """Return the tokens that vLLM prints since 0.24: of so many longest requests."""
        return self.max_concurrency * self.longest_tokens

    @property
    def tokens_per_group(self) -> int:
        """Return the tokens that vLLM printed until then: those of the blocks of one group."""
        return self.blocks // self.groups * self.block_tokens


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers alike: `token_bytes` of one layer, or `state_bytes`; `window`: None keeps all."""

    layers: int
    token_bytes: float
    window: int | None = None
    state_bytes: float = 0.0


def is_hybrid(model: ModelSpec) -> bool:
    """Tell whether some layers keep every token and some do not."""
    return len({_keeps(layer) for layer in model.layers if layer.attention is not None}) > 1


def _keeps(layer: LayerSpec) -> tuple[str, int | None]:
    attention = layer.attention
    if isinstance(attention, LinearAttention):
        return "state", None
    window = attention.window_tokens if isinstance(attention, GqaAttention) else None
    return "tokens", window


def hybrid_pool(
    model: ModelSpec,
    layout: ParallelLayout,
    kv_format: str,
    pool_bytes: float,
    *,
    longest_tokens: int,
    chunk_tokens: int,
) -> HybridPool:
    """Return the blocks of a pool of `pool_bytes` per GPU, on the stage that holds fewest."""
    pools = [
        _stage_pool(
            _kinds([model.layers[index] for index in stage], layout, kv_format),
            pool_bytes,
            longest_tokens,
            chunk_tokens,
        )
        for stage in stage_layers(len(model.layers), layout, "vllm")
    ]
    return min(pools, key=lambda pool: pool.max_concurrency)


def _kinds(layers: Sequence[LayerSpec], layout: ParallelLayout, kv_format: str) -> list[_Kind]:
    kinds = []
    for attention, count in Counter(layer.attention for layer in layers).items():
        if isinstance(attention, LinearAttention):
            kinds.append(_Kind(count, 0.0, state_bytes=state_bytes(attention, layout)))
        elif attention is not None:
            token_bytes = layer_bytes_per_token(attention, layout, kv_format)
            token_bytes += indexer_bytes_per_token(attention)
            window = attention.window_tokens if isinstance(attention, GqaAttention) else None
            kinds.append(_Kind(count, token_bytes, window))
    return kinds


def _stage_pool(
    kinds: Sequence[_Kind], pool_bytes: float, longest_tokens: int, chunk_tokens: int
) -> HybridPool:
    counts = [kind.layers for kind in kinds]
    size = min(counts) if max(counts) >= _ALMOST_EQUAL * min(counts) else max(counts)
    page_bytes = _page_bytes(kinds)
    groups = request_blocks = 0
    block_tokens: list[int] = []
    for kind in kinds:
        kind_groups = ceil(kind.layers / size)
        groups += kind_groups
        held_tokens = int(page_bytes / kind.token_bytes) if kind.token_bytes else 0
        request_blocks += kind_groups * _blocks(kind, held_tokens, longest_tokens, chunk_tokens)
        if held_tokens:
            block_tokens.append(held_tokens)
    return HybridPool(
        blocks=int(pool_bytes / (size * page_bytes)),
        request_blocks=request_blocks,
        block_tokens=min(block_tokens, default=_ATTENTION_BLOCK_TOKENS),
        groups=groups,
        longest_tokens=longest_tokens,
    )


def _page_bytes(kinds: Sequence[_Kind]) -> float:
    """Return the bytes of one layer in a block: 16 tokens of the largest kind, or a state.

    Where there are states, a block of attention holds as many tokens, in sixteens, as it takes to
    be as large as a state.
    """
    most = max(kind.token_bytes for kind in kinds)
    state = max(kind.state_bytes for kind in kinds)
    sixteens = ceil(state / (_ATTENTION_BLOCK_TOKENS * most)) if state and most else 1
    return max(1, sixteens) * _ATTENTION_BLOCK_TOKENS * most or state


def _blocks(kind: _Kind, block_tokens: int, longest_tokens: int, chunk_tokens: int) -> int:
    """Return the blocks of one group that the longest request holds at most."""
    if not kind.token_bytes:
        return _STATE_BLOCKS
    if kind.window is None:
        return ceil(longest_tokens / block_tokens)
    held = min(kind.window - 1 + chunk_tokens, longest_tokens)
    return ceil(held / block_tokens) + 1
