"""The `pools` section: groups of identical instances, how each is laid out and what it loads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from tonnage.scenarios.schema_base import (
    AutoWhole,
    Number,
    Section,
    Text,
    Whole,
    field_error,
)
from tonnage.sim.domain import BadInputError, ParallelLayout

WeightFormat = Literal[
    "native",
    "bf16",
    "fp8",
    "fp8_block",
    "int4_g32",
    "int4_g64",
    "int4_g128",
    "mxfp4",
    "nvfp4",
]
KvFormat = Literal["bf16", "fp8_e4m3"]
Role = Literal["prefill", "decode", "serve"]


def _only_one(value: float) -> float:
    if value != 1.0:
        raise field_error("", f"{value:g} is not accepted; only 1.0 is (no speculation)")
    return value


class SpeculationSection(Section):
    """Speculative decoding; an accepted length of 1 is none."""

    accept_length: Annotated[Number, AfterValidator(_only_one)] = 1.0


class PoolSection(Section):
    """One pool; a `gpu` of its own replaces the scenario's."""

    instances: Whole = 1
    gpu: Text | None = None
    tp: Whole = 8
    pp: Whole = 1
    ep: Whole = 1
    attention_dp: Whole = 1
    dcp: Whole = 1
    weights: WeightFormat = "native"
    kv: KvFormat = "bf16"
    integrity: Literal["none"] = "none"
    speculation: SpeculationSection = SpeculationSection()
    max_running_requests: AutoWhole = None
    chunk_tokens: AutoWhole = None
    page_tokens: AutoWhole = None

    def layout(self) -> ParallelLayout:
        """Return how one instance spreads over its GPUs."""
        return ParallelLayout(self.tp, self.pp, self.ep, self.attention_dp, self.dcp)

    @model_validator(mode="after")
    def _layout_exists(self) -> PoolSection:
        try:
            self.layout()
        except BadInputError as error:
            raise field_error("", str(error)) from error
        return self


class PoolsSection(Section):
    """Either `serve` alone (colocated) or `prefill` and `decode` (disaggregated)."""

    prefill: PoolSection | None = None
    decode: PoolSection | None = None
    serve: PoolSection | None = None

    @model_validator(mode="after")
    def _colocated_or_disaggregated(self) -> PoolsSection:
        others = [role for role in ("prefill", "decode") if getattr(self, role) is not None]
        if self.serve is not None and others:
            problem = f"serve does prefill and decode itself, but {' and '.join(others)} is there"
            raise field_error("serve", f"{problem}; set one or the other to null")
        if self.serve is None and not others:
            raise field_error("", "no pool; give serve, or prefill and decode")
        return self

    def named(self) -> dict[Role, PoolSection]:
        """Return the pools that are there, by role, in the order a request meets them."""
        roles: dict[Role, PoolSection | None] = {
            "prefill": self.prefill,
            "decode": self.decode,
            "serve": self.serve,
        }
        return {role: pool for role, pool in roles.items() if pool is not None}
