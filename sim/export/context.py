"""What an exporter has to know beside the plan: checkpoints, the model's attention, the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tonnage.sim.domain import BadInputError, GqaAttention, MlaAttention, ModelSpec
from tonnage.sim.planning.fleet_plan import FleetPlan, PlannedPool

_GPUS_PER_NODE = 8  # of a GPU that nothing says more of


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What flags depend on: the checkpoint's own format, positions, what its attention keeps."""

    native_weights: str
    max_context_tokens: int
    latent_attention: bool
    kv_heads: int | None  # None where no layer keeps K and V by head

    @classmethod
    def of(cls, model: ModelSpec) -> ModelFacts:
        """Read them off a model."""
        kinds = [layer.attention for layer in model.layers]
        heads = [one.kv_heads for one in kinds if isinstance(one, GqaAttention)]
        latent = any(isinstance(one, MlaAttention) for one in kinds)
        most_heads = max(heads, default=None)
        return cls(model.native_weight_format, model.max_context_tokens, latent, most_heads)


@dataclass(frozen=True, slots=True)
class ExportContext:
    """What the plan does not say.

    `native_checkpoint`: the model as published, a path or a repository. `checkpoints`: the user's
    own, by pool role, and by `role.draft` for a draft model; what is in neither the user has to
    fill in. `model`: None where it is not at hand. `gpus_per_node` by GPU name.
    """

    native_checkpoint: str | None = None
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    model: ModelFacts | None = None
    gpus_per_node: Mapping[str, int] = field(default_factory=dict)

    def node_gpus(self, pool: PlannedPool) -> int:
        """Return the GPUs of a node of the pool's kind."""
        return self.gpus_per_node.get(pool.gpu, _GPUS_PER_NODE)

    def nodes(self, pool: PlannedPool) -> int:
        """Return the nodes of one instance; BadInputError where it does not split evenly."""
        gpus, most = pool.layout.gpus, self.node_gpus(pool)
        nodes = -(-gpus // most)
        if gpus % nodes:
            raise BadInputError(
                f"pools.{pool.role}.layout: {gpus} GPUs do not spread evenly over nodes of {most}; "
                f"plan with tp and pp whose product is a multiple of {most}"
            )
        return nodes

    def per_node(self, pool: PlannedPool) -> int:
        """Return how many instances share a node; 1 where an instance takes one or more."""
        return max(1, self.node_gpus(pool) // pool.layout.gpus)


def slug(plan: FleetPlan) -> str:
    """Return the plan's name as Kubernetes and file systems take it: lower case, dashes."""
    letters = "".join(one if one.isascii() and one.isalnum() else "-" for one in plan.name.lower())
    name = "-".join(part for part in letters.split("-") if part)
    if not name[:1].isalpha():  # what a Service's name must begin with
        name = f"fleet-{name}"
    return name[:40].strip("-")
