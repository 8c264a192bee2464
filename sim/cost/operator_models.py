"""The operator models of one profile, ready to be asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.sim.cost.check_prices import NOT_MEASURED, CheckRows
from tonnage.sim.cost.models.attention_table import SHAPE_COLUMNS
from tonnage.sim.cost.models.comm import CommModel
from tonnage.sim.cost.models.decode_attention import DecodeAttentionModel
from tonnage.sim.cost.models.gemm import GemmModel
from tonnage.sim.cost.models.linear_attention import LinearAttentionModel
from tonnage.sim.cost.models.mla_bmm import MlaBmmModel
from tonnage.sim.cost.models.moe import MoeModel
from tonnage.sim.cost.models.prefill_attention import PrefillAttentionModel
from tonnage.sim.cost.profile import Parameters, Profile
from tonnage.sim.cost.small_ops import SmallOps
from tonnage.sim.domain import GpuSpec

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, eq=False)
class OperatorModels:
    """Dense products, routed experts, collectives and attention of one GPU under one engine.

    `small`: the small operators between them, where the profile measured those too; `checks`: what
    it measured of a check of KV.
    """

    gemm: GemmModel
    moe: MoeModel
    comm: CommModel
    decode: DecodeAttentionModel
    prefill: PrefillAttentionModel
    mla_bmm: MlaBmmModel
    linear: LinearAttentionModel
    small: SmallOps | None = None
    checks: CheckRows = NOT_MEASURED


def operator_models(profile: Profile, gpu: GpuSpec) -> OperatorModels:
    """Build the models; what the profile lacks they take from elsewhere and say so."""
    tables, fitted = profile.tables, profile.header.fitted

    def attention(name: str) -> tuple[pd.DataFrame, Parameters, GpuSpec]:
        return tables.get(name, _no_rows()), fitted.get(name, {}), gpu

    return OperatorModels(
        GemmModel.from_tables(tables, fitted, gpu),
        MoeModel.from_tables(tables, fitted, gpu),
        CommModel.from_tables(tables, fitted, gpu),
        DecodeAttentionModel(*attention("attention_decode")),
        PrefillAttentionModel(*attention("attention_prefill")),
        MlaBmmModel(*attention("mla_bmm")),
        LinearAttentionModel(*attention("linear_attention")),
        SmallOps.from_tables(tables),
        CheckRows.from_tables(tables),
    )


def _no_rows() -> pd.DataFrame:
    """Return the attention table of a profile that has none."""
    import pandas as pd

    measured = ("batch", "context_tokens", "new_tokens", "past_tokens", "seconds", "content")
    names = (*SHAPE_COLUMNS, *measured, "source_framework", "format", "tokens")
    return pd.DataFrame({name: [] for name in names})
