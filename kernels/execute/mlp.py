"""The feed-forward block of a layer on one rank: dense, or routed experts beside a shared one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from tonnage.kernels.execute.marks import Marks
from tonnage.kernels.execute.products import ExpertProduct, Product, routed_rows
from tonnage.kernels.execute.small_ops import gated

OUTPUT_NAMES = ("down_proj", "w2")


class MlpBlock(ABC):
    """Maps normed rows to what the block adds to the residual stream."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[rows, hidden]`."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Return the bytes of its matrices."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseBlock(MlpBlock):
    """A gated feed-forward network."""

    inputs: tuple[Product, ...]
    output: Product
    marks: Marks
    label: str

    @property
    def bytes(self) -> int:
        """Return the bytes of its matrices."""
        return sum(product.weight.bytes for product in (*self.inputs, self.output))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Project, gate, project back."""
        outs = [product(x) for product in self.inputs]
        inner = gated(outs[0] if len(outs) == 1 else torch.cat(outs, -1))
        out = self.output(inner)
        self.marks.mark(self.label)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The routed experts of a layer, gate and up projection as one."""

    gate_up: ExpertProduct
    down: ExpertProduct
    top_k: int

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the sum of every row's experts, each times its share, `[rows, hidden]`."""
        routed = routed_rows(self.gate_up.weight, ids, self.gate_up.place)
        inner = gated(self.gate_up(x, ids, routed))
        # both products have as many rows an expert, so they share tiles and routing
        out = self.down(inner, ids.reshape(-1, 1), routed)
        by_choice = out.view(len(x), self.top_k, -1).float()
        return (by_choice * shares[..., None]).sum(1).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class MoeBlock(MlpBlock):
    """A router, the experts it chooses, and a shared expert that every row passes."""

    router: Product
    experts: Experts
    shared: DenseBlock | None
    shared_gate: Product | None
    marks: Marks

    @property
    def bytes(self) -> int:
        """Return the bytes of its matrices."""
        routed_bytes = self.experts.gate_up.weight.bytes + self.experts.down.weight.bytes
        routers = [self.router] if self.shared_gate is None else [self.router, self.shared_gate]
        beside = 0 if self.shared is None else self.shared.bytes
        return routed_bytes + beside + sum(router.weight.bytes for router in routers)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Route, run the experts, add the shared one."""
        ids, shares = routed(self.router(x), self.experts.top_k)
        self.marks.mark("router")
        out = self.experts(x, ids, shares)
        self.marks.mark("routed experts")
        if self.shared is None:
            return out
        beside = self.shared(x)
        if self.shared_gate is not None:
            beside = beside * self.shared_gate(x).sigmoid()
        return out + beside


def routed(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best experts int32 `[rows, top_k]` and their shares f32, which sum to one."""
    scores, ids = logits.float().sigmoid().topk(top_k, -1)
    return ids.int(), scores / scores.sum(-1, keepdim=True)
