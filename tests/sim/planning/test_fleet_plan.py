"""A plan as JSON: it comes back as it was, and what it cannot be is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tonnage.sim.domain import BadInputError, IntegritySpec, ParallelLayout
from tonnage.sim.planning.fleet_plan import (
    Estimate,
    FleetPlan,
    PlanFigures,
    PlannedObjective,
    PlannedPool,
    PlannedRouter,
    PlannedSpeculation,
    PlanProvenance,
)
from tonnage.sim.planning.stock_engines import lacks


def pool(role: Any = "decode", **changes: Any) -> PlannedPool:
    values: dict[str, Any] = {
        "role": role,
        "gpu": "h200-sxm",
        "instances": 2,
        "layout": ParallelLayout(8, ep=8),
        "weights": "int4_g32",
        "kv": "fp8_e4m3",
        "mem_fraction": 0.85,
        "max_running_requests": 64,
        "max_model_tokens": 262_144,
        "page_tokens": 1,
        "chunk_tokens": 8192,
        "kv_tokens": 1_000_000,
        "gpu_hour_usd": 3.5,
    }
    return PlannedPool(**{**values, **changes})


def fleet(*pools: PlannedPool) -> FleetPlan:
    one = Estimate(1.0, 0.9, 1.1)
    figures = PlanFigures(
        True, 3, one, one, one, 7.0, one, objectives=(PlannedObjective("ttft_p95", 5.0, one, True),)
    )
    provenance = PlanProvenance("p", "imported", "0.1.0", 0, ("a",))
    router = PlannedRouter("cache_aware")
    return FleetPlan(
        "a", "kimi-k2.6", "sglang", "0.5.23", pools, router, figures, "ttft_p95", 0, provenance
    )


def test_a_plan_comes_back_from_its_json() -> None:
    speculation = PlannedSpeculation("eagle3", 3, 2.6, (0.2, 0.3, 0.2, 0.3))
    watched = IntegritySpec("batched", every_steps=2, handoff_checksum=True)
    plan = fleet(pool("prefill"), pool(speculation=speculation, integrity=watched))
    assert FleetPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_the_same_plan_is_the_same_text() -> None:
    first, second = fleet(pool()), fleet(pool())
    assert json.dumps(first.to_dict()) == json.dumps(second.to_dict())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda data: data.pop("model"), "model"),
        (lambda data: data["pools"][0].update(tpp=8), "pools.0.tpp"),
        (lambda data: data["pools"][0]["layout"].update(tp="eight"), "pools.0.layout.tp"),
        (lambda data: data["figures"].update(usd_per_hour=None), "figures.usd_per_hour"),
    ],
)
def test_what_is_no_plan_is_refused_by_field(change: Any, named: str) -> None:
    data = fleet(pool()).to_dict()
    change(data)
    with pytest.raises(BadInputError, match=f"^plan.json: {named}"):
        FleetPlan.from_dict(data, "plan.json")


def test_a_layout_that_cannot_be_is_refused() -> None:
    data = fleet(pool()).to_dict()
    data["pools"][0]["layout"]["ep"] = 3
    with pytest.raises(BadInputError, match="ep 3 does not divide tp 8"):
        FleetPlan.from_dict(data)


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (Estimate(1.0, 0.9, 1.1), Estimate(1.15, 1.05, 1.25), True),
        (Estimate(1.0, 0.9, 1.1), Estimate(1.3, 1.2, 1.4), False),
        (Estimate(1.0), Estimate(1.0), True),
        (Estimate(1.0), Estimate(1.01), False),
    ],
)
def test_a_tie_is_where_intervals_meet(one: Estimate, other: Estimate, meet: bool) -> None:
    assert one.overlaps(other) is meet
    assert other.overlaps(one) is meet


def test_stock_engines_do_not_convert_kv() -> None:
    router = PlannedRouter("cache_aware")
    mixed = (pool("prefill", kv="bf16"), pool("decode"))
    assert any("KV conversion" in text for text in lacks("sglang", mixed, router))
    assert list(lacks("sglang", (pool("prefill"), pool("decode")), router)) == []


def test_stock_engines_have_no_tags_no_free_draft_and_not_every_router() -> None:
    free = PlannedSpeculation("free", 3, 2.0)
    odd = (pool("serve", integrity=IntegritySpec("batched"), speculation=free),)
    texts = list(lacks("sglang", odd, PlannedRouter("token_aware")))
    assert len(texts) == 3
    lone = (pool("serve", instances=1),)
    assert list(lacks("sglang", lone, PlannedRouter("token_aware"))) == []
