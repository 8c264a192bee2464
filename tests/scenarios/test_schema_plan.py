"""The `plan` section: its defaults follow from the scenario, mistakes are named."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.scenarios.load import load_scenario, parse_scenario
from tonnage.scenarios.schema_plan import PlanSection
from tonnage.sim.domain import BadInputError


def test_a_scenario_without_it_does_not_show_it() -> None:
    assert "plan" not in parse_scenario({}).resolved()
    assert parse_scenario({"plan": {"headroom": 0.2}}).resolved()["plan"]["headroom"] == 0.2


def test_single_values_are_lists_of_one() -> None:
    plan = parse_scenario({"plan": {"gpus": "h100-sxm", "kv": "bf16", "chunk_tokens": "auto"}}).plan
    assert (plan.gpus, plan.kv, plan.chunk_tokens) == (("h100-sxm",), ("bf16",), (None,))


def test_what_is_resolved_says_the_same() -> None:
    data = {"chunk_tokens": ["auto", 4096], "mem_fraction": [0.8, "auto"], "host_cache": "1TB"}
    plan = parse_scenario({"plan": data}).plan
    again = parse_scenario({"plan": plan.model_dump(mode="json")}).plan
    assert again == plan
    assert plan.host_cache == (1e12,)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tpp": [8]}, "plan.tpp: unknown field"),
        ({"weights": ["int5"]}, "plan.weights"),
        ({"kv": "bf16, fp8_e4m3"}, "write it like"),
        ({"chunk_tokens": [0]}, "plan.chunk_tokens"),
        ({"mem_fraction": [1.5]}, "plan.mem_fraction"),
        ({"seeds": 1}, "plan.seeds"),
        ({"headroom": -0.1}, "plan.headroom"),
        ({"shapes": []}, "plan.shapes"),
        ({"tp": [16], "max_gpus": 8}, "plan.max_gpus"),
    ],
)
def test_mistakes_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        parse_scenario({"plan": data})


def test_the_shipped_agents_are_planned_on_two_gpus() -> None:
    scenario = load_scenario("kimi-agents")
    assert scenario.plan.gpus == ("h200-sxm", "b200-sxm")
    assert scenario.slo == {"ttft_p95": 5.0, "tpot_p95": 0.04}
    assert scenario.plan != PlanSection()
