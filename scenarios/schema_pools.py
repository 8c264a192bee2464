"""The `pools` section: groups of identical instances, how each is laid out and what it loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from tonnage.scenarios.catalogue import load_model, model_names
from tonnage.scenarios.schema_base import (
    AutoWhole,
    Number,
    Section,
    Text,
    Whole,
    WholeOrZero,
    field_error,
    shown,
)
from tonnage.scenarios.schema_integrity import IntegritySection, tracker_alone
from tonnage.sim.domain import BadInputError, ModelSpec, ParallelLayout, SpeculationSpec
from tonnage.sim.model.draft import DRAFT_KINDS
from tonnage.sim.serving.speculation import accept_probabilities

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


def _a_list(value: object) -> object:
    if value is not None and not isinstance(value, list | tuple):
        raise field_error("", f"{shown(value)} is not a list; write it like [0.3, 0.7]")
    return value


Probabilities = Annotated[
    tuple[Annotated[Number, Field(ge=0, le=1)], ...], BeforeValidator(_a_list)
]
_MEAN_TOLERANCE = 0.005  # an accept_length rounded to two decimals agrees with its distribution


class SpeculationSection(Section):
    """Speculative decoding; without draft tokens there is none.

    `draft`: mtp (the checkpoint's own layers), eagle3, free (it costs nothing), or a model by name
    or path. `accept_distribution`: probabilities of committing 1 ... draft_tokens + 1 tokens in
    a step; its mean takes the place of `accept_length`.
    """

    accept_length: Number = 1.0
    draft_tokens: WholeOrZero = 0
    draft: Text | None = None
    accept_distribution: Probabilities | None = None

    @model_validator(mode="after")
    def _can_be_accepted(self) -> SpeculationSection:
        if self.draft_tokens and self.draft is None:
            guesses = ", ".join(DRAFT_KINDS)
            problem = f"missing; say what guesses the tokens: {guesses}, or a draft model"
            raise field_error("draft", problem)
        if self.accept_distribution is not None:
            # A frozen model has no other place for a value that another field sets.
            object.__setattr__(self, "accept_length", self._distribution_mean())
        try:
            accept_probabilities(self.accept_length, self.draft_tokens)
        except BadInputError as error:
            text = str(error).removeprefix("accept_length: ")
            raise field_error("accept_length", text) from error
        return self

    def _distribution_mean(self) -> float:
        given, field = self.accept_distribution or (), "accept_distribution"
        if len(given) != self.draft_tokens + 1:
            need = f"draft_tokens {self.draft_tokens} needs {self.draft_tokens + 1}"
            raise field_error(field, f"has {len(given)} probabilities; {need}")
        if abs(sum(given) - 1) > 1e-6:
            raise field_error(field, f"sums to {sum(given):g}; probabilities sum to 1")
        # Rounded, so that the resolved scenario reads 1.8 and not 1.7999999999999998.
        mean = round(sum(tokens * one for tokens, one in enumerate(given, start=1)), 12)
        mean = min(max(mean, 1.0), float(len(given)))  # what a sum within its tolerance may miss
        told = "accept_length" in self.model_fields_set
        if told and abs(mean - self.accept_length) > _MEAN_TOLERANCE:
            problem = f"{self.accept_length:g} is not the mean of accept_distribution, {mean:g}"
            raise field_error("accept_length", f"{problem}; remove one of the two")
        return mean

    def spec(
        self, model: ModelSpec, load_draft: Callable[[str], ModelSpec] = load_model
    ) -> SpeculationSpec | None:
        """Return how a pool that serves `model` speculates, None where it does not.

        `load_draft` turns the name or path of a draft model into it. Raises BadInputError when the
        model has no MTP layers to draft with, or the draft model does not exist.
        """
        if self.draft_tokens == 0 or self.draft is None:
            return None
        if self.draft == "mtp" and not model.mtp_layers:
            able = ", ".join(name for name in model_names() if load_model(name).mtp_layers)
            raise BadInputError(
                f"draft: {model.name} carries no MTP layers to draft with ({able} do); use eagle3, "
                "free or a draft model's name"
            )
        own = None if self.draft in DRAFT_KINDS else _load(self.draft, load_draft)
        return SpeculationSpec(
            self.draft_tokens,
            self.accept_distribution or accept_probabilities(self.accept_length, self.draft_tokens),
            self.draft if own is None else "model",
            own,
        )


def _load(draft: str, load: Callable[[str], ModelSpec]) -> ModelSpec:
    try:
        return load(draft)
    except BadInputError as error:
        kinds = ", ".join(DRAFT_KINDS)
        text = f"draft: {str(error).removeprefix('model: ')}; or use one of {kinds}"
        raise BadInputError(text) from error


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
    integrity: Annotated[IntegritySection, BeforeValidator(tracker_alone)] = IntegritySection()
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

    @model_validator(mode="after")
    def _prefill_does_not_speculate(self) -> PoolsSection:
        if self.prefill is not None and self.prefill.speculation.draft_tokens:
            problem = "a prefill pool makes no tokens to guess; speculate in the decode pool"
            raise field_error("prefill.speculation.draft_tokens", problem)
        return self

    def named(self) -> dict[Role, PoolSection]:
        """Return the pools that are there, by role, in the order a request meets them."""
        roles: dict[Role, PoolSection | None] = {
            "prefill": self.prefill,
            "decode": self.decode,
            "serve": self.serve,
        }
        return {role: pool for role, pool in roles.items() if pool is not None}
