"""Route tokens to experts for grouped GEMMs: rows sorted by expert, in blocks of one expert each.

A routed row is `token * top_k + choice`. Everything is computed on the device with shapes that do
not depend on the routing, so it can be captured in a graph; what the routing leaves unused is
skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tonnage.kernels.quantise.checks import require

TENSORS = ("sorted_rows", "block_experts", "used_blocks")


@dataclass(frozen=True, slots=True)
class Routing:
    """Which rows each block of `block_m` multiplies, and by which expert.

    sorted_rows: int32 `[blocks * block_m]`, the number of rows where a block is padded.
    block_experts: int32 `[blocks]`. used_blocks: int32 `[1]`, the blocks that hold a row.
    rows: how many there are. top_k: rows of x are divided by it; 1 once x has a row per choice.
    """

    sorted_rows: torch.Tensor
    block_experts: torch.Tensor
    used_blocks: torch.Tensor
    block_m: int
    rows: int
    top_k: int

    @property
    def blocks(self) -> int:
        """Return how many blocks the routing could need at most."""
        return self.block_experts.shape[0]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the routing's tensors by name."""
        return {name: getattr(self, name) for name in TENSORS}

    def arguments(self, tokens: int) -> dict[str, Any]:
        """Return the kernels' arguments for an x of so many rows."""
        pointers = {f"{name}_ptr": tensor for name, tensor in self.tensors.items()}
        return {**pointers, "tokens": tokens, "top_k": self.top_k, "blocks": self.blocks}

    def check(self, tokens: int, row_weights: torch.Tensor | None) -> None:
        """Refuse an x or row weights that were not routed."""
        require(
            tokens * self.top_k == self.rows,
            f"x has {tokens} rows, the routing {self.rows} rows of {self.top_k} choices",
        )
        if row_weights is not None:
            require(
                row_weights.shape == (self.rows,) and row_weights.dtype == torch.float32,
                f"row_weights must be float32 [{self.rows}], not {list(row_weights.shape)}",
            )

    @property
    def by_choice(self) -> Routing:
        """Return the same routing of an x that has a row per choice, such as the first GEMM's."""
        return replace(self, top_k=1)


def routing_of(inputs: Mapping[str, Any]) -> Routing:
    """Return the routing that is among a kernel's inputs, with the `expert_ids` it was made of."""
    ids = inputs["expert_ids"]
    tensors = {name: inputs[name] for name in TENSORS}
    return Routing(**tensors, block_m=inputs["block_m"], rows=ids.numel(), top_k=ids.shape[1])


def with_routing(inputs: Mapping[str, Any], experts: int, block_m: int) -> dict[str, Any]:
    """Return a kernel's inputs and the routing of their `expert_ids`."""
    routing = route(inputs["expert_ids"], experts, block_m)
    return {**inputs, **routing.tensors, "block_m": block_m}


def blocks_max(rows: int, experts: int, block_m: int) -> int:
    """Return the most blocks that so many rows can fill: each expert's last one may hold one."""
    return (rows + min(rows, experts) * (block_m - 1)) // block_m


def route(expert_ids: torch.Tensor, experts: int, block_m: int) -> Routing:
    """Sort the rows of `[tokens, top_k]` expert ids, in order of tokens within an expert."""
    require(expert_ids.dim() == 2, "expert_ids must be [tokens, top_k]")
    ids = expert_ids.flatten().long()
    rows, device = ids.numel(), ids.device
    blocks = blocks_max(rows, experts, block_m)
    counts = torch.zeros(experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    last_block = ((counts + block_m - 1) // block_m).cumsum(0)
    first_slot = torch.cat((last_block.new_zeros(1), last_block[:-1])) * block_m
    order = ids.argsort(stable=True)
    sorted_ids = ids[order]
    within = torch.arange(rows, device=device) - (counts.cumsum(0) - counts)[sorted_ids]
    sorted_rows = torch.full((blocks * block_m,), rows, dtype=torch.int32, device=device)
    sorted_rows[first_slot[sorted_ids] + within] = order.to(torch.int32)
    at = torch.arange(blocks, device=device)
    block_experts = torch.searchsorted(last_block, at, right=True).clamp(max=experts - 1)
    return Routing(
        sorted_rows,
        block_experts.to(torch.int32),
        last_block[-1:].to(torch.int32),
        block_m,
        rows,
        expert_ids.shape[1],
    )


def combine(out: torch.Tensor, top_k: int) -> torch.Tensor:
    """Sum each token's weighted expert outputs `[tokens * top_k, n]` in f32: `[tokens, n]`."""
    return out.reshape(-1, top_k, out.shape[-1]).sum(1, dtype=torch.float32).to(out.dtype)


def skewed_expert_ids(
    tokens: int, experts: int, top_k: int, skew: float, generator: torch.Generator
) -> torch.Tensor:
    """Draw top_k different experts per token, an expert's popularity being `rank ** -skew`.

    Adding Gumbel noise to log popularity and taking the largest draws without replacement. Which
    expert has which rank is random. int32 `[tokens, top_k]`.
    """
    require(top_k <= experts, f"top_k = {top_k} of {experts} experts")
    device = generator.device
    ranks = torch.randperm(experts, generator=generator, device=device) + 1
    uniform = torch.rand((tokens, experts), generator=generator, device=device).clamp(min=1e-20)
    noise = -torch.log(-torch.log(uniform))
    return (noise - skew * ranks.log()).topk(top_k, dim=1).indices.to(torch.int32)
