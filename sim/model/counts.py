"""Parameter counts: total, in the MTP layers, and those that one token passes through."""

from __future__ import annotations

from tonnage.sim.domain import LayerSpec, ModelSpec, MoeMlp, Role


def mtp_parameters(model: ModelSpec) -> int:
    """Return the number of weights in the multi-token-prediction layers."""
    return sum(tensor.parameters for layer in model.mtp_layers for tensor in layer.weights)


def active_parameters(model: ModelSpec) -> int:
    """Return the weights that one text token is multiplied with.

    The head counts and the input embedding does not, being looked up; of the routed experts
    `top_k` count. MTP layers and vision towers are left out. A tied head is the embedding.
    """
    roles = {tensor.role for tensor in model.outer_weights}
    head = Role.HEAD if Role.HEAD in roles else Role.EMBEDDING
    outer = sum(
        tensor.parameters for tensor in model.outer_weights if tensor.role in (head, Role.NORM)
    )
    return outer + sum(_active_in_layer(layer) for layer in model.layers)


def _active_in_layer(layer: LayerSpec) -> int:
    total = 0
    for tensor in layer.weights:
        parameters = tensor.parameters
        if isinstance(layer.mlp, MoeMlp) and tensor.role is Role.ROUTED_EXPERT:
            parameters = parameters * layer.mlp.top_k // layer.mlp.experts
        total += parameters
    return total
