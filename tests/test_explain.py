"""`tonnage explain`: the operators of a step add up to what the engine is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tonnage import api
from tonnage.cli import app
from tonnage.pools import built_pools, times_of
from tonnage.scenarios.load import load_scenario, parse_scenario
from tonnage.sim.cost.estimate import Estimate
from tonnage.sim.cost.operator_times import (
    OperatorTime,
    interval_factors,
    total_s,
    worst_source,
)
from tonnage.sim.domain import BadInputError, PromptChunk, Step

SCENARIOS = {
    "kimi": {"model": "kimi-k2.6", "pools": {"serve": {"kv": "fp8_e4m3"}}},
    "ranks": {
        "model": "deepseek-v3",
        "pools": {"serve": {"tp": 16, "ep": 16, "attention_dp": 16, "kv": "bf16"}},
    },
    "speculation": {
        "model": "glm-5.2",
        "pools": {
            "serve": {
                "kv": "fp8_e4m3",
                "weights": "int4_g128",
                "speculation": {"draft": "mtp", "draft_tokens": 3, "accept_length": 2.5},
            }
        },
    },
    "windows": {"model": "gpt-oss-20b", "pools": {"serve": {"tp": 1, "kv": "bf16"}}},
}


def steps(query_tokens: int) -> list[Step]:
    import numpy as np

    contexts = np.full(32, 3000, dtype=np.int64)
    none = np.zeros(0, dtype=np.int64)
    return [
        Step(contexts, int(contexts.sum()), (), query_tokens=query_tokens),
        Step(none, 0, (PromptChunk(2048, 0),), query_tokens=query_tokens),
        Step(none, 0, (PromptChunk(7, 9000), PromptChunk(900, 0)), query_tokens=query_tokens),
        Step(contexts, int(contexts.sum()), (PromptChunk(512, 512),), query_tokens=query_tokens),
    ]


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_operators_add_up_to_the_step(name: str) -> None:
    scenario = parse_scenario({"traffic": {"requests": 64}, **SCENARIOS[name]})
    pool = built_pools(scenario)["serve"]
    executor = times_of(scenario, built_pools(scenario))["serve"].executor
    speculation = pool.spec.speculation
    for step in steps(1 if speculation is None else speculation.query_tokens):
        assert total_s(executor.times(step)) == pytest.approx(executor.run(step, 1)[0], rel=1e-9)


def test_the_report_names_every_step_of_every_pool() -> None:
    report = api.explain(load_scenario("colocated-vs-disaggregated"))
    assert set(report["steps"]) == {"prefill", "decode"}
    for step in report["steps"].values():
        shares = [row["share"] for row in step["operators"]]
        assert sum(shares) == pytest.approx(1.0)
        assert shares == sorted(shares, reverse=True)
        low_s, high_s = step["interval_s"]
        assert low_s <= step["seconds"] <= high_s


def test_requests_and_context_can_be_given_and_must_be_there() -> None:
    scenario = load_scenario("kimi-k2.6-h200")
    small = api.explain(scenario, requests=1, context_tokens=100)["steps"]["decode"]
    large = api.explain(scenario, requests=64, context_tokens=8192)["steps"]["decode"]
    assert small["requests"] == 1
    assert large["context_tokens"] == 8192
    assert small["seconds"] < large["seconds"]
    with pytest.raises(BadInputError, match="requests must be at least 1"):
        api.explain(scenario, requests=0)


def test_the_command_prints_tables_and_one_json_object() -> None:
    shown = CliRunner().invoke(app, ["explain", "kimi-k2.6-h200", "--requests", "8"])
    assert shown.exit_code == 0
    assert "decode step of 8 requests" in shown.output
    plain = CliRunner().invoke(app, ["explain", "kimi-k2.6-h200", "--json", "-"])
    report: dict[str, Any] = json.loads(plain.stdout)
    assert {"scenario", "provenance", "memory", "steps"} <= set(report)


# --- sums of operator times ---------------------------------------------------------------------


def time(seconds: float, source: str = "imported") -> OperatorTime:
    estimate = Estimate(seconds, 0.9, 1.2, source, True, seconds / 2)  # type: ignore[arg-type]
    return OperatorTime.of("x", estimate, 2)


def test_calls_and_intervals_add_up() -> None:
    times = [time(1.0), time(3.0)]
    assert total_s(times) == 8.0
    assert interval_factors(times) == pytest.approx((0.9, 1.2))
    assert interval_factors([]) == (1.0, 1.0)


def test_what_runs_beside_is_hidden_up_to_the_other() -> None:
    shorter, longer = time(1.0).beside(5.0), time(4.0).beside(5.0)
    assert (shorter.seconds, shorter.hidden_s) == (0.0, 2.0)
    assert (longer.seconds, longer.hidden_s) == (3.0, 5.0)
    assert longer.high_s == pytest.approx(3.0 * 1.2)


def test_the_weakest_source_that_counts_is_named() -> None:
    assert worst_source([time(1.0), time(1.0, "scaled")]) == "scaled"
    assert worst_source([time(1.0), time(0.0, "datasheet")]) == "imported"
