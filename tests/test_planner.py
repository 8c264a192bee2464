"""The plan: against all fleets simulated, what must be monotone, what it says and how it fails."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from tonnage import api
from tonnage.plan_fleets import fleet_scenario
from tonnage.plan_runs import RunFigures, planned_load, simulate_fleet
from tonnage.plan_search import Search, screened_tables
from tonnage.plan_space import Space, configs_of, plan_gpus, settings_of
from tonnage.planner import NoFleetError, PlanReport, plan
from tonnage.pools import built_pools
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError
from tonnage.sim.planning.fleet_plan import FleetPlan
from tonnage.sim.planning.stock_engines import STOCK_ROUTERS
from tonnage.sim.planning.workers import ThisProcess
from tonnage.sim.planning.workload import workload_of

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": "llama-3.1-8b",
    "gpu": "h100-sxm",
    "traffic": {
        "kind": "poisson",
        "rate_per_s": [12.0],
        "input_tokens": 2000,
        "output_tokens": 100,
    },
    "slo": {"ttft_p95": "300ms", "tpot_p95": "12ms"},
    "price": {"gpu_hour_usd": 3.0},
    "plan": {
        "tp": [1, 2],
        "pp": [1],
        "attention_dp": "never",
        "weights": ["native"],
        "kv": ["bf16"],
        "chunk_tokens": ["auto"],
        "routers": ["round_robin"],
        "max_gpus": 4,
        "requests": 150,
        "seeds": 2,
        "verify": 40,
    },
}


def tiny(slo: dict[str, str] | None = None, **changes: Any) -> Scenario:
    """Return the tiny scenario; `changes` are of its section `plan`."""
    data = {**TINY, "plan": {**TINY["plan"], **changes}}
    return parse_scenario(data if slo is None else {**data, "slo": slo})


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return plan(tiny(), workers=1)


def search_of(scenario: Scenario) -> Search:
    load = planned_load(scenario, scenario.plan.requests)
    workload = workload_of(load.traffic, load.point, scenario.seed)
    space = Space(scenario, workload)
    tables = screened_tables(space, scenario, lambda _text, _share: None)
    return Search(scenario, space, tables, load, ThisProcess(), lambda _text, _share: None)


def test_it_is_the_cheapest_of_all_fleets_simulated(report: PlanReport) -> None:
    """Every fleet of the space is simulated with every seed, whatever the screening says of it."""
    search = search_of(tiny())
    keys = [
        (index, row)
        for index, table in enumerate(search.tables)
        for row in range(len(table.screened.fleets))
    ]
    trials = [search.completed(one) for one in search.simulated(keys, search.seeds[:1])]
    passing = [trial.usd_per_hour for trial in trials if trial.passes]
    assert len(keys) > 10
    assert 0 < len(passing) < len(keys)
    assert report.best.figures.usd_per_hour == min(passing)


def test_looser_objectives_never_cost_more(report: PlanReport) -> None:
    usd = [report.best.figures.usd_per_hour]
    for slo in ({"ttft_p95": "1s", "tpot_p95": "12ms"}, {"ttft_p95": "1s", "tpot_p95": "50ms"}):
        usd.append(plan(tiny(slo), workers=1).best.figures.usd_per_hour)
    assert usd == sorted(usd, reverse=True)
    assert usd[-1] < usd[0]


def test_a_plan_passes_by_its_bounds(report: PlanReport) -> None:
    for one in report.best.figures.objectives:
        assert one.reached.high is not None
        assert one.reached.low is not None
        assert one.reached.low <= one.reached.value <= one.reached.high <= one.limit_s
        assert one.met
    assert report.best.figures.replications in (2, 4)


def test_two_processes_and_one_say_the_same_bytes(report: PlanReport) -> None:
    again = plan(tiny(), workers=2)
    assert json.dumps(again.to_dict()) == json.dumps(report.to_dict())


def test_the_json_has_what_is_promised(report: PlanReport) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert {"scenario", "provenance", "best", "launchable", "front", "rejected"} <= set(data)
    assert {"profile", "source", "version", "seed", "assumptions"} <= set(data["provenance"])
    assert FleetPlan.from_dict(data["best"]) == report.best
    assert FleetPlan.from_dict(data["launchable"]) == report.launchable


def test_cost_and_rates_agree(report: PlanReport) -> None:
    best = report.best.figures
    gpus = report.best.gpus
    assert best.usd_per_hour == pytest.approx(3.0 * gpus)
    tokens = best.output_tokens_per_s.value
    assert tokens == pytest.approx(12.0 * 1.1 * 100, rel=0.2)  # the rate with its headroom
    assert best.output_tokens_per_s_per_gpu.value * gpus == pytest.approx(tokens)
    usd = best.usd_per_million_output_tokens.value
    assert usd == pytest.approx(best.usd_per_hour / 3600 / tokens * 1e6)


def test_what_it_says_fits_is_what_memory_says(report: PlanReport) -> None:
    scenario = parse_scenario(report.files["best"])
    for pool in built_pools(scenario).values():
        planned = report.best.pool(pool.spec.role)
        assert planned is not None
        assert pool.memory.fits
        assert planned.mem_fraction == pool.memory.mem_fraction <= pool.memory.mem_fraction_most
        assert planned.kv_tokens == pool.memory.kv_tokens
        assert planned.max_model_tokens <= pool.memory.longest_request_tokens
        assert planned.instances == pool.spec.instances


def test_its_scenario_is_simulated_to_the_same_answer(report: PlanReport) -> None:
    found = api.simulate(parse_scenario(report.files["best"])).points[0].figures
    reached = report.best.figures.tpot_p95_s
    assert reached is not None
    assert found["latency"]["tpot_s"]["p95"] == pytest.approx(reached.value, rel=0.15)
    assert found["cost"]["usd_per_hour"] == report.best.figures.usd_per_hour


def test_the_losers_have_reasons(report: PlanReport) -> None:
    assert report.rejected
    best = report.best.figures.usd_per_hour
    for one in report.rejected:
        if "limit" in one.reason:
            assert "p95" in one.reason
        if one.reason.startswith("dearer"):
            assert one.usd_per_hour is not None
            assert one.usd_per_hour > best
    assert report.best.binds in ("ttft_p95", "tpot_p95")


def test_the_front_falls_in_speed_and_rises_in_tokens_per_gpu(report: PlanReport) -> None:
    speeds = [one.output_tokens_per_s_per_user for one in report.front]
    assert speeds == sorted(speeds, reverse=True)
    for index, one in enumerate(report.front):
        for other in report.front[:index]:
            better = other.output_tokens_per_s_per_gpu >= one.output_tokens_per_s_per_gpu
            cheaper = other.usd_per_million_output_tokens <= one.usd_per_million_output_tokens
            assert not (better and cheaper)


# --- how it fails -------------------------------------------------------------------------------


def test_what_nothing_meets_names_the_nearest_and_what_binds() -> None:
    with pytest.raises(NoFleetError, match="tpot_p95 binds") as caught:
        plan(tiny({"ttft_p95": "1s", "tpot_p95": "3ms"}), workers=1)
    assert caught.value.exit_code == 3
    nearest = caught.value.nearest
    assert nearest is not None
    assert nearest.binds == "tpot_p95"
    assert not nearest.feasible
    assert FleetPlan.from_dict(nearest.to_dict()) == nearest


def test_a_model_that_no_pool_holds_is_infeasible() -> None:
    scenario = tiny(max_gpus=1, tp=[1]).model_copy(update={"model": "llama-3.1-405b"})
    with pytest.raises(NoFleetError, match="GiB of weights per GPU"):
        plan(scenario, workers=1)


def test_a_load_beyond_all_fleets_is_infeasible() -> None:
    with pytest.raises(NoFleetError, match=r"asks for \d+ or more; raise plan\.max_gpus"):
        plan(tiny(load=5000.0), workers=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slo": {}}, "slo: a plan needs an objective"),
        ({"price": {}}, "h100-sxm has no price"),
        ({"engine": {"name": "trtllm"}}, "nothing here starts trtllm"),
        ({"router": {"regions": 2}, "pools": {"serve": {"instances": 2, "tp": 1}}}, "one region"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        plan(parse_scenario({**TINY, **change}), workers=1)


# --- the space ----------------------------------------------------------------------------------


def test_gpus_without_a_price_are_not_tried() -> None:
    assert plan_gpus(tiny()) == ("h100-sxm",)
    table = parse_scenario({**TINY, "price": {"table": "example", "gpu_hour_usd": 3.0}})
    assert plan_gpus(table) == ("h100-sxm", "b200-sxm", "h200-sxm")


def test_weights_are_made_smaller_never_larger() -> None:
    def formats(model: str, gpu: str) -> set[str]:
        data = {**TINY, "model": model, "gpu": gpu, "plan": {"tp": [8]}}
        return {one.weights for one in configs_of(parse_scenario(data), "decode")}

    assert formats("glm-5.2", "h200-sxm") == {"native", "int4_g32"}  # FP8 by itself
    assert formats("glm-5.2", "b200-sxm") == {"native", "int4_g32", "nvfp4"}
    assert formats("llama-3.1-8b", "a100-80g") == {"native", "int4_g32"}  # computes no FP8
    assert formats("kimi-k2.6", "h200-sxm") == {"native"}  # INT4 already


def test_fractions_beyond_the_engines_room_are_not_tried() -> None:
    scenario = tiny(mem_fraction=[0.8, 0.999])
    load = planned_load(scenario, 150)
    space = Space(scenario, workload_of(load.traffic, load.point, 0))
    low, high = settings_of(scenario)
    for config in configs_of(scenario, "serve"):
        space.add(low, config)
        space.add(high, config)
    assert space.options[low, "serve"]
    assert (high, "serve") not in space.options
    assert any("mem_fraction" in reason for reason in space.refused.values())


def test_a_fleet_is_planned_with_headroom() -> None:
    scenario = tiny(headroom=0.5)
    assert planned_load(scenario, 150).point.rate_per_s == 18.0
    closed = parse_scenario({**TINY, "traffic": {"kind": "closed", "concurrency": [4, 10]}})
    assert planned_load(closed, 150).point.concurrency == 11


def test_requests_that_are_not_served_are_never_in_time() -> None:
    """A client that gives up counts as one that waits for ever."""
    data = {**TINY, "traffic": {**TINY["traffic"], "timeout": "100ms"}}
    scenario = parse_scenario(data)
    load = planned_load(scenario, 150)
    search = search_of(scenario)
    fleet = search.tables[0].fleet(0)
    load = replace(load, answer_s=1.0)
    found: RunFigures = simulate_fleet(
        fleet_scenario(scenario, fleet, load), load, scenario.objectives(), 0
    )
    assert found.quantiles_s["ttft_p95"] == float("inf")


def test_sessions_at_a_rate_are_said_to_be_users() -> None:
    traffic = {"kind": "sessions", "rate_per_s": 0.05, "session": {"turns": 4, "count": 20}}
    slo = {"ttft_p95": "60s", "tpot_p95": "500ms"}
    space = {**TINY["plan"], "tp": [1], "shapes": ["colocated"], "requests": 100}
    scenario = parse_scenario({**TINY, "traffic": traffic, "slo": slo, "plan": space})
    assumptions = plan(scenario, workers=1).best.provenance.assumptions
    assert any("0.055 sessions/s are taken for the users" in one for one in assumptions)


def test_the_routers_of_stock_engines_are_those_of_their_argument_lists() -> None:
    """What is called stock is what the pinned versions take."""
    folder = resources.files("tonnage.sim.export") / "arguments"
    for engine, name in (("sglang", "sglang-router-0.3.2"), ("vllm", "vllm-router-0.1.17")):
        text = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        assert set(STOCK_ROUTERS[engine]) <= set(text["arguments"]["--policy"]["choices"])
