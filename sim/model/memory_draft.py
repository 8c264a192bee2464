"""What a draft takes of a GPU: its weights, and its KV by the rule of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from tonnage.sim.domain import BadInputError, LinearAttention, ModelSpec, ParallelLayout
from tonnage.sim.model.draft import DraftSpec, draft_layout
from tonnage.sim.model.kv import KvShape, kv_shape, stage_layers
from tonnage.sim.model.layout import layout_problem
from tonnage.sim.model.weights import StageWeights, stage_weights

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class Stages:
    """Weights and KV of one GPU of each pipeline stage, draft included."""

    weights: list[StageWeights]
    shapes: list[KvShape]
    draft_bytes: list[float]  # of the weights


def check_draft_layout(draft: DraftSpec, layout: ParallelLayout, field: str, engine: str) -> None:
    """Raise BadInputError when the draft cannot be split as its target is."""
    problem = layout_problem(draft.held, draft_layout(draft.held, layout), engine)
    if problem is not None:
        raise BadInputError(f"{field}: {problem}")


def stages_with_draft(
    stages: Stages,
    model: ModelSpec,
    draft: DraftSpec,
    layout: ParallelLayout,
    kv_format: str,
    engine: str,
) -> Stages:
    """Return the stages with the weights of the draft on the last and its KV where it is charged.

    SGLang 0.5.23 (`pool_configurator.py`) charges ``draft layers / layers of the stage`` of a
    token's KV on every stage, whatever the draft's own geometry. vLLM and TensorRT-LLM count the
    draft's layers as further layers of the last stage.
    """
    alone = draft_layout(draft.held, layout)
    (loaded,) = stage_weights(draft.held, alone, engine)
    weights = [*stages.weights[:-1], _joined(stages.weights[-1], loaded)]
    draft_bytes = [*stages.draft_bytes[:-1], loaded.total_bytes]
    if engine in ("vllm", "trtllm"):
        last = _with_layers(stages.shapes[-1], kv_shape(draft.held.layers, alone, kv_format))
        return Stages(weights, [*stages.shapes[:-1], last], draft_bytes)
    draft_layers = _kv_layers(draft.held, range(len(draft.held.layers)))
    shapes = [
        _scaled(shape, 1 + draft_layers / max(_kv_layers(model, stage), 1))
        for shape, stage in zip(
            stages.shapes, stage_layers(len(model.layers), layout, engine), strict=True
        )
    ]
    return Stages(weights, shapes, draft_bytes)


def _kv_layers(model: ModelSpec, indices: range) -> int:
    """Return how many of these layers store KV per token."""
    attentions = (model.layers[index].attention for index in indices)
    return sum(
        attention is not None and not isinstance(attention, LinearAttention)
        for attention in attentions
    )


def _joined(target: StageWeights, draft: StageWeights) -> StageWeights:
    return StageWeights(
        _sums(target.by_role, draft.by_role), _sums(target.replicated, draft.replicated)
    )


def _sums(first: Mapping[_Key, float], second: Mapping[_Key, float]) -> dict[_Key, float]:
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in {**first, **second}}


def _scaled(shape: KvShape, factor: float) -> KvShape:
    return replace(
        shape,
        shared_bytes_per_token=shape.shared_bytes_per_token * factor,
        whole_bytes_per_token=shape.whole_bytes_per_token * factor,
        windows=tuple((tokens, size * factor) for tokens, size in shape.windows),
    )


def _with_layers(shape: KvShape, draft: KvShape) -> KvShape:
    """Return what both store; the draft's part is not shared by context parallelism."""
    windows = _sums(dict(shape.windows), dict(draft.windows))
    return replace(
        shape,
        whole_bytes_per_token=shape.whole_bytes_per_token + draft.growing_bytes_per_token,
        windows=tuple(sorted(windows.items())),
        state_bytes=shape.state_bytes + draft.state_bytes,
    )
