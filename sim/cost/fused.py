"""The matrix products that an engine really launches: projections that share an input are one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tonnage.sim.domain import LayerSpec, ModelSpec, ParallelLayout, Role, WeightTensor
from tonnage.sim.model.weights import tensor_ways

# What SGLang and vLLM merge: (names in the checkpoint, name of the merged product).
_MERGED = (
    (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    (("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
    (("gate_proj", "up_proj"), "gate_up_proj"),
)
_SPLIT_BY_INPUT = ("o_proj", "down_proj", "out_proj")
_NO_PRODUCT = (Role.EMBEDDING, Role.NORM, Role.VISION, Role.ROUTED_EXPERT)


@dataclass(frozen=True, slots=True)
class FusedProduct:
    """A product of one rank, `[rows, in_features] x [in_features, out_features]`.

    `gathered`: it is split over more ranks than attention, and works on the rows of all of them.
    """

    name: str
    role: Role
    format: str
    out_features: int
    in_features: int
    gathered: bool


def fused_products(
    model: ModelSpec, layout: ParallelLayout, engine: str
) -> list[tuple[FusedProduct, int]]:
    """Return every product outside the routed experts and how often a pass runs it."""
    counts: Counter[FusedProduct] = Counter()
    for layer, times in Counter(model.layers).items():
        for product in _of_layer(layer, layout, engine):
            counts[product] += times
    counts.update(_head(model, layout, engine))
    return list(counts.items())


def _of_layer(layer: LayerSpec, layout: ParallelLayout, engine: str) -> Iterator[FusedProduct]:
    left = [tensor for tensor in layer.weights if tensor.role not in _NO_PRODUCT]
    while left:
        group, name = _group(left)
        left = [tensor for tensor in left if tensor not in group]
        parts = [_product(tensor, layout, engine) for tensor in group]
        yield FusedProduct(
            name,
            parts[0].role,
            parts[0].format,
            sum(part.out_features for part in parts),
            parts[0].in_features,
            parts[0].gathered,
        )


def _group(left: list[WeightTensor]) -> tuple[list[WeightTensor], str]:
    """Return the first tensor with those that are merged with it, and the product's name."""
    first = left[0]
    prefix, _, last = first.name.rpartition(".")
    for names, merged in _MERGED:
        if last in names:
            wanted = {f"{prefix}.{name}" for name in names}
            group = [one for one in left if one.name in wanted and one.format == first.format]
            return group, merged if len(group) > 1 else last
    return [first], last


def _product(tensor: WeightTensor, layout: ParallelLayout, engine: str) -> FusedProduct:
    ways = tensor_ways(tensor, layout, engine)
    name = tensor.name.rpartition(".")[2]
    by_input = name in _SPLIT_BY_INPUT
    out_features = tensor.copies * tensor.out_features
    return FusedProduct(
        name,
        tensor.role,
        tensor.format,
        out_features if by_input else -(-out_features // ways),
        -(-tensor.in_features // ways) if by_input else tensor.in_features,
        ways > layout.attention_tp,
    )


def _head(model: ModelSpec, layout: ParallelLayout, engine: str) -> Iterator[FusedProduct]:
    heads = [tensor for tensor in model.outer_weights if tensor.role is Role.HEAD]
    tied = [tensor for tensor in model.outer_weights if tensor.role is Role.EMBEDDING]
    for tensor in heads or tied:
        yield _product(tensor, layout, engine)
