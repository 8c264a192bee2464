"""The matrix products of a rank: activations by one weight, or by each row's experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tonnage.kernels.execute.place import Place
from tonnage.kernels.execute.weights import Weight, random_weight
from tonnage.kernels.spec import Inputs
from tonnage.sim.cost.fused import FusedProduct


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product with one matrix `[n, k]`."""

    name: str
    weight: Weight
    place: Place

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply BF16 `[m, k]`: BF16 `[m, n]`."""
        activations = quantised_rows(x, self.weight, self.place)
        inputs = {**self.weight.inputs, **activations, "arrivals": self.place.arrivals}
        out: torch.Tensor = self.place.run(self.weight.kernel, inputs)["out"]
        return out


def product_of(shape: FusedProduct, place: Place, keep_values: bool = False) -> Product:
    """Return a product with random weights."""
    size = (shape.out_features, shape.in_features)
    return Product(shape.name, random_weight(size, shape.format, place, keep_values), place)


def quantised_rows(x: torch.Tensor, weight: Weight, place: Place) -> Inputs:
    """Return activations as the weight's kernel reads them."""
    if not weight.kernel.startswith("gemm_fp8"):
        return {"x": x}
    codes = place.run(f"quantise_fp8_{weight.kernel.removeprefix('gemm_fp8_')}", {"x": x})
    return {"x": codes["codes"], "x_scale": codes["scales"]}


@dataclass(frozen=True, slots=True, eq=False)
class ExpertProduct:
    """A product of every routed row with its own expert's matrix `[n, k]`."""

    weight: Weight
    place: Place

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, routed: Inputs) -> torch.Tensor:
        """Multiply `[tokens, k]` by the experts `[tokens, top_k]`: BF16 `[tokens * top_k, n]`."""
        if not self.place.rows_alone:
            return self._product(x, expert_ids, routed)
        alone = zip(x.split(1), expert_ids.split(1), strict=True)
        return torch.cat([self._alone(row, ids) for row, ids in alone])

    def _alone(self, row: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        return self._product(row, expert_ids, routed_rows(self.weight, expert_ids, self.place))

    def _product(self, x: torch.Tensor, expert_ids: torch.Tensor, routed: Inputs) -> torch.Tensor:
        activations = quantised_rows(x, self.weight, self.place)
        inputs = {**routed, **self.weight.inputs, **activations, "expert_ids": expert_ids}
        out: torch.Tensor = self.place.run(f"moe_{self.weight.kernel}", inputs)["out"]
        return out


def routed_rows(weight: Weight, expert_ids: torch.Tensor, place: Place) -> Inputs:
    """Sort a batch's rows by expert, which both products of a layer share."""
    if place.backend == "cpu":
        return {}  # its kernels sort by themselves
    experts = weight.shape[0]
    if weight.kernel == "gemm_bf16":
        return _sorted_for_torch(expert_ids, experts)
    from tonnage.kernels.ops.moe_routing import with_routing

    block_m = _block_rows(weight, expert_ids.numel())
    return with_routing({"expert_ids": expert_ids}, experts, block_m)


def _block_rows(weight: Weight, rows: int) -> int:
    experts = weight.shape[0]
    if weight.kernel.startswith("gemm_fp8"):
        from tonnage.kernels.ops import moe_gemm_fp8

        return int(moe_gemm_fp8.tile_for(rows, experts).block_m)
    from tonnage.kernels.ops import moe_gemm_int4

    group = int(weight.kernel.removeprefix("gemm_int4_g"))
    return int(moe_gemm_int4.tile_for(rows, experts, group).block_m)


def _sorted_for_torch(expert_ids: torch.Tensor, experts: int) -> Inputs:
    """Sort as `dense.prepare_moe` does, without a count that a GPU would wait for."""
    ids = expert_ids.flatten().long()
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    return {"order": ids.argsort(stable=True), "ends": counts.cumsum(0).int()}
