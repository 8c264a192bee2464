"""Builds the layers of a rank: blocks with random weights, from the model's geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tonnage.kernels.execute.attention import AttentionBlock, GqaBlock, Parts
from tonnage.kernels.execute.latent_attention import MlaBlock
from tonnage.kernels.execute.marks import Marks
from tonnage.kernels.execute.mlp import OUTPUT_NAMES, DenseBlock, Experts, MlpBlock, MoeBlock
from tonnage.kernels.execute.place import Place
from tonnage.kernels.execute.plan import layer_products, local_heads, row_shape
from tonnage.kernels.execute.products import ExpertProduct, Product, product_of
from tonnage.kernels.execute.weights import random_weight
from tonnage.sim.domain import (
    BadInputError,
    GqaAttention,
    LayerSpec,
    MlaAttention,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
    Role,
)

ByRole = dict[Role, list[Product]]


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What is run: a model in the pool's weight format, and how one rank of it is cut.

    `layers`: how many of the model's layers to run, None for all (`plan.layer_groups`).
    `keep_values`: also hold what every weight stands for, in f32, to compare with.
    """

    model: ModelSpec
    layout: ParallelLayout
    kv_format: str
    layers: int | None = None
    keep_values: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer's blocks and norms."""

    attention: AttentionBlock
    mlp: MlpBlock
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    rope_dim: int

    @property
    def bytes(self) -> int:
        """Return the bytes of its matrices."""
        return self.attention.bytes + self.mlp.bytes


def _rope_dim(attention: GqaAttention | MlaAttention) -> int:
    return attention.rope_dim if isinstance(attention, MlaAttention) else attention.head_dim


@dataclass(frozen=True, slots=True, eq=False)
class LayerBuilder:
    """Draws the weights of layers."""

    rank: RankSpec
    place: Place
    marks: Marks

    def layer(self, spec: LayerSpec) -> Layer:
        """Return a layer of that kind."""
        model, attention = self.rank.model, spec.attention
        assert isinstance(attention, GqaAttention | MlaAttention)
        products = self._products(spec)
        ones = torch.ones(model.hidden_size, dtype=torch.bfloat16, device=self.place.device)
        return Layer(
            attention=self._attention(spec, products),
            mlp=self._mlp(spec, products),
            input_norm=ones,
            mlp_norm=ones,
            rope_dim=_rope_dim(attention),
        )

    def _products(self, spec: LayerSpec) -> ByRole:
        found: ByRole = {role: [] for role in Role}
        for shape in layer_products(self.rank.model, spec, self.rank.layout):
            keep_values = self.rank.keep_values or shape.name == "kv_b_proj"
            found[shape.role].append(product_of(shape, self.place, keep_values))
        return found

    def _attention(self, spec: LayerSpec, products: ByRole) -> AttentionBlock:
        attention, layout = spec.attention, self.rank.layout
        assert isinstance(attention, GqaAttention | MlaAttention)
        parts = Parts(
            place=self.place,
            marks=self.marks,
            kv_format=self.rank.kv_format,
            heads=local_heads(attention, layout),
            kv_heads=row_shape(spec, layout).kv_heads or 1,
            products={product.name: product for product in products[Role.ATTENTION]},
            indexer=tuple(products[Role.INDEXER]),
        )
        if isinstance(attention, MlaAttention):
            block = MlaBlock(parts, attention)
            if not self.rank.keep_values:
                parts.drop_values("kv_b_proj")
            return block
        norms = [one for one in spec.weights if one.name == "input_layernorm"]
        has_head_norms = sum(one.out_features for one in norms) > self.rank.model.hidden_size
        return GqaBlock(parts, attention, has_head_norms)

    def _mlp(self, spec: LayerSpec, products: ByRole) -> MlpBlock:
        if not isinstance(spec.mlp, MoeMlp):
            return self._dense(products[Role.DENSE_MLP], "dense MLP")
        shared, routers = products[Role.SHARED_EXPERT], products[Role.ROUTER]
        gates = [router for router in routers if router.weight.shape[0] == 1]
        return MoeBlock(
            router=next(router for router in routers if router not in gates),
            experts=self._experts(spec, spec.mlp),
            shared=self._dense(shared, "shared expert") if shared else None,
            shared_gate=gates[0] if gates else None,
            marks=self.marks,
        )

    def _dense(self, products: Sequence[Product], label: str) -> DenseBlock:
        inputs = tuple(one for one in products if one.name not in OUTPUT_NAMES)
        (output,) = (one for one in products if one.name in OUTPUT_NAMES)
        return DenseBlock(inputs, output, self.marks, label)

    def _experts(self, spec: LayerSpec, mlp: MoeMlp) -> Experts:
        """Draw the experts' matrices, each cut over all ranks."""
        matrices = [one for one in spec.weights if one.role is Role.ROUTED_EXPERT]
        formats = {one.format for one in matrices}
        if len(formats) != 1:
            raise BadInputError(f"experts in several formats are not executed: {sorted(formats)}")
        outputs = [one for one in matrices if one.name.rpartition(".")[2] in OUTPUT_NAMES]
        inputs = [one for one in matrices if one not in outputs]
        (output,), ways = outputs, self.rank.layout.tp
        rows = sum(one.out_features for one in inputs) // ways
        sizes = (
            (mlp.experts, rows, inputs[0].in_features),
            (mlp.experts, output.out_features, output.in_features // ways),
        )
        gate_up, down = (
            ExpertProduct(
                random_weight(size, output.format, self.place, self.rank.keep_values), self.place
            )
            for size in sizes
        )
        return Experts(gate_up, down, mlp.top_k)
