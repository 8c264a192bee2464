"""Feed-forward blocks as Hugging Face configs describe them: geometry and weight tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tonnage.sim.domain import DenseMlp, MoeMlp, Role, Shard, WeightTensor
from tonnage.sim.model.hf_attention import Weights, vector

GATED = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")
FUSED = ("gate_up_proj", "down_proj")
PLAIN = ("up_proj", "down_proj")  # without a gate: Nemotron-H's squared ReLU


@dataclass(frozen=True, slots=True)
class Feedforward:
    """One feed-forward network, or `copies` experts of the same size.

    `names` are the input projections followed by the output projection; a fused
    `gate_up_proj` has twice the rows.
    """

    prefix: str
    role: Role
    shard: Shard
    hidden_size: int
    intermediate_size: int
    names: tuple[str, ...] = GATED
    copies: int = 1

    def weights(self) -> Weights:
        """Return its matrices: inputs `[intermediate, hidden]`, output `[hidden, intermediate]`."""
        *inputs, output = self.names
        rows = self.intermediate_size * (2 if self.names == FUSED else 1)
        return (
            *(self._matrix(name, rows, self.hidden_size) for name in inputs),
            self._matrix(output, self.hidden_size, self.intermediate_size),
        )

    def _matrix(self, name: str, out_features: int, in_features: int) -> WeightTensor:
        return WeightTensor(
            f"{self.prefix}.{name}",
            self.role,
            out_features,
            in_features,
            "bf16",
            self.shard,
            self.copies,
        )


def dense_block(
    hidden_size: int,
    intermediate_size: int,
    prefix: str = "mlp",
    names: tuple[str, ...] = GATED,
) -> tuple[DenseMlp, Weights]:
    """Return a dense feed-forward block with the norm before it."""
    network = Feedforward(prefix, Role.DENSE_MLP, Shard.MLP, hidden_size, intermediate_size, names)
    norm = vector("post_attention_layernorm", hidden_size)
    return DenseMlp(intermediate_size), (norm, *network.weights())


@dataclass(frozen=True, slots=True)
class MoeShape:
    """A mixture-of-experts block.

    `shared_size` is the width of what every token passes (shared experts, or a dense block that
    runs beside the routed ones). `expert_hidden_size` differs from `hidden_size` where tokens are
    projected to a latent before the experts. `shared_gate`: a scalar gate on the shared expert.
    """

    hidden_size: int
    experts: int
    top_k: int
    expert_size: int
    shared_size: int = 0
    prefix: str = "mlp"
    names: tuple[str, ...] = GATED
    shared_names: tuple[str, ...] = GATED
    router: str = "gate"
    router_format: str = "bf16"
    shared: str = "shared_experts"
    shared_gate: bool = False
    expert_bias: bool = False
    expert_hidden_size: int | None = None

    def path(self, name: str) -> str:
        """Return the module path of a part of the block."""
        return f"{self.prefix}.{name}" if self.prefix else name


def moe_block(shape: MoeShape) -> tuple[MoeMlp, Weights]:
    """Return a mixture-of-experts block with the norm before it."""
    shared_experts = ceil(shape.shared_size / shape.expert_size)
    mlp = MoeMlp(shape.experts, shape.top_k, shape.expert_size, shared_experts)
    return mlp, (
        vector("post_attention_layernorm", shape.hidden_size + shape.experts),
        *_router_weights(shape),
        *_routed_weights(shape),
        *_shared_weights(shape),
    )


def _router_weights(shape: MoeShape) -> Weights:
    def router(name: str, out_features: int) -> WeightTensor:
        shard, width = Shard.REPLICATED, shape.hidden_size
        return WeightTensor(name, Role.ROUTER, out_features, width, shape.router_format, shard)

    routers = [router(shape.path(shape.router), shape.experts)]
    if shape.shared_gate:
        routers.append(router(shape.path(f"{shape.shared}_gate"), 1))
    return tuple(routers)


def _routed_weights(shape: MoeShape) -> Weights:
    prefix, width = shape.path("experts"), shape.expert_hidden_size or shape.hidden_size
    experts = Feedforward(
        prefix,
        Role.ROUTED_EXPERT,
        Shard.EXPERT,
        width,
        shape.expert_size,
        shape.names,
        shape.experts,
    )
    weights = experts.weights()
    if shape.expert_bias:
        elements = sum(tensor.out_features for tensor in weights)
        weights += (vector(f"{prefix}.bias", elements, Shard.EXPERT, shape.experts),)
    if width != shape.hidden_size:
        sizes = {"fc1_latent_proj": (width, shape.hidden_size)}
        sizes["fc2_latent_proj"] = (shape.hidden_size, width)
        weights += tuple(
            WeightTensor(shape.path(name), Role.SHARED_EXPERT, *size, "bf16", Shard.REPLICATED)
            for name, size in sizes.items()
        )
    return weights


def _shared_weights(shape: MoeShape) -> Weights:
    if not shape.shared_size:
        return ()
    return Feedforward(
        shape.path(shape.shared),
        Role.SHARED_EXPERT,
        Shard.MLP,
        shape.hidden_size,
        shape.shared_size,
        shape.shared_names,
    ).weights()
