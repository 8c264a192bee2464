"""The `plan` section: what `tonnage plan` may choose from, and how sure it must be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from tonnage.scenarios.schema_base import (
    Bytes,
    Number,
    Positive,
    Section,
    Text,
    Whole,
    WholeList,
    field_error,
    shown,
)
from tonnage.scenarios.schema_pools import KvFormat, WeightFormat
from tonnage.sim.serving.router import PolicyName

Shape = Literal["colocated", "disaggregated"]


def _as_list(value: object) -> object:
    if isinstance(value, str) and "," in value:
        raise field_error("", f"{value!r} is not a list; write it like [a, b]")
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _autos(value: object) -> object:
    """Let `auto` be None: the engine's own rule."""
    items = _as_list(value)
    assert isinstance(items, tuple)
    for one in items:
        if isinstance(one, bool) or not isinstance(one, int | float | type(None) | str):
            raise field_error("", f"{shown(one)} is neither a number nor auto")
        if isinstance(one, str) and one != "auto":
            raise field_error("", f"{shown(one)} is neither a number nor auto")
    return tuple(None if one == "auto" else one for one in items)


_AUTO_ITEMS = PlainSerializer(lambda items: ["auto" if one is None else one for one in items])
AutoChunks = Annotated[
    tuple[Annotated[int, Field(ge=1)] | None, ...], BeforeValidator(_autos), _AUTO_ITEMS
]
AutoFractions = Annotated[
    tuple[Annotated[float, Field(gt=0, lt=1)] | None, ...], BeforeValidator(_autos), _AUTO_ITEMS
]
Shapes = Annotated[tuple[Shape, ...], BeforeValidator(_as_list), Field(min_length=1)]
Weights = Annotated[tuple[WeightFormat, ...], BeforeValidator(_as_list), Field(min_length=1)]
KvFormats = Annotated[tuple[KvFormat, ...], BeforeValidator(_as_list), Field(min_length=1)]
Names = Annotated[tuple[Text, ...], BeforeValidator(_as_list), Field(min_length=1)]
Routers = Annotated[tuple[PolicyName, ...], BeforeValidator(_as_list), Field(min_length=1)]
Sizes = Annotated[tuple[Bytes, ...], BeforeValidator(_as_list), Field(min_length=1)]


class PlanSection(Section):
    """The search space of `tonnage plan`; what is null follows from the scenario.

    `load`: users or requests per second to plan for; null: the last point of the traffic. The fleet
    must carry `headroom` more than that. `gpus`: null is the scenario's own, and every GPU of its
    class that has a price. `weights`: null is the native format and those with fewer bytes that
    the GPU computes in. `tp`: null is the powers of two up to a node. `chunk_tokens`,
    `mem_fraction`: auto is the engine's rule; a fraction beyond what the engine leaves room for is
    not tried. `routers`: null is the scenario's own, and one that a stock engine has. `host_cache`:
    null is the scenario's. `requests`: how many a simulated run measures, about. `verify`: fleets
    that are simulated at most; `seeds`: runs of each that is to pass, twice as many where its means
    do and their intervals are too wide to tell. `quality_budget`: points of a score that a format
    may cost; null: anything. What scores show to cost more is not tried; what they do not show to
    cost less is flagged, or with `unproven: refuse` not tried either. `scores`: a file of one's own
    beside the published ones, as `tonnage quality` reads it. `growth_per_month`: by which share the
    load grows, for the month in which the fleet is full.
    """

    load: Positive | None = None
    headroom: Annotated[Number, Field(ge=0, le=3)] = 0.1
    gpus: Names | None = None
    max_gpus: Whole = 256
    shapes: Shapes = ("disaggregated", "colocated")
    tp: WholeList | None = None
    pp: WholeList = (1, 2)
    expert_parallel: Literal["never", "always", "both"] = "both"
    attention_dp: Literal["never", "always", "both"] = "both"
    weights: Weights | None = None
    kv: KvFormats = ("bf16", "fp8_e4m3")
    mem_fraction: AutoFractions = (None,)
    chunk_tokens: AutoChunks = (None, 4096, 16384)
    routers: Routers | None = None
    host_cache: Sizes | None = None
    requests: Annotated[Whole, Field(ge=100)] = 400
    seeds: Annotated[Whole, Field(ge=2)] = 3
    verify: Whole = 12
    quality_budget: Annotated[Number, Field(ge=0, lt=100)] | None = None
    unproven: Literal["flag", "refuse"] = "flag"
    scores: Text | None = None
    growth_per_month: Annotated[Number, Field(gt=0, le=10)] = 0.1

    @model_validator(mode="after")
    def _has_room(self) -> PlanSection:
        if self.tp is not None and min(self.tp) > self.max_gpus:
            problem = f"{self.max_gpus} GPUs do not hold an instance of tp {min(self.tp)}"
            raise field_error("max_gpus", problem)
        if self.unproven == "refuse" and self.quality_budget is None:
            raise field_error("unproven", "there is no budget to be proven; set quality_budget")
        return self
