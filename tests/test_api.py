"""The verbs as functions: the shipped scenarios, end to end."""

from __future__ import annotations

import json

import pytest

import tonnage
from tonnage import api
from tonnage.handoff import wire_bytes_per_gpu
from tonnage.scenarios.catalogue import load_model, scenario_names
from tonnage.scenarios.load import load_scenario, load_variants, parse_scenario
from tonnage.sim.domain import BadInputError, InfeasibleError, ParallelLayout
from tonnage.sim.model.kv import stage_kv_shapes


def small(**traffic: object) -> dict[str, object]:
    """Return a quick disaggregated scenario as a mapping."""
    load = {"kind": "closed", "concurrency": [2, 4], "input_tokens": 300, "output_tokens": 20}
    return {
        "model": "qwen3-8b",
        "gpu": "h100-sxm",
        "traffic": {**load, "requests": 40, **traffic},
        "pools": {"prefill": {"tp": 1}, "decode": {"tp": 1, "kv": "fp8_e4m3"}},
        "price": {"gpu_hour_usd": 2.0},
        "slo": {"ttft_p95": "1s", "itl_p90": "50ms"},
    }


def test_the_whole_mooncake_trace_is_accounted_for_and_repeats_to_the_byte() -> None:
    scenario = load_scenario("mooncake-trace")
    reports = [api.simulate(scenario) for _ in range(2)]
    texts = [json.dumps(report.to_dict(), sort_keys=True) for report in reports]
    assert texts[0] == texts[1]
    counts = reports[0].points[0].figures["requests"]
    assert counts["completed"] + counts["rejected"] == 12_031
    frame = reports[0].points[0].records
    assert frame["id"].tolist() == list(range(12_031))
    assert frame["input_tokens"].mean() == pytest.approx(12_035, abs=1)
    assert frame["output_tokens"].mean() == pytest.approx(343, abs=1)


@pytest.mark.parametrize("name", scenario_names())
def test_every_shipped_scenario_fits(name: str) -> None:
    for scenario in (load_scenario(name), *load_variants(name).values()):
        for pool in api.memory(scenario).pools.values():
            assert pool["max_concurrency"] > 0


def test_the_report_has_the_fields_of_the_design() -> None:
    report = api.simulate(parse_scenario(small())).to_dict()
    assert set(report) == {"scenario", "provenance", "memory", "ceilings", "points"}
    assert report["provenance"]["source"] == "imported"
    point = report["points"][0]
    assert {"output_tokens_per_s", "input_tokens_per_s", "decode_output_tokens_per_s"} <= set(
        point["throughput"]
    )
    for metric in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        spread = point["latency"][metric]
        assert set(spread) == {"mean", "p50", "p90", "p95", "p99"}
        assert spread["p50"] <= spread["p90"] <= spread["p99"]
    assert point["requests"] == {
        "completed": 40,
        "rejected": 0,
        "timed_out": 0,
        "aborted": 0,
        "retractions": 0,
    }
    assert point["wasted_tokens"] == {"prompt_tokens": 0, "output_tokens": 0}
    assert point["slo"]["attainment"] == 1.0
    assert point["cost"]["usd_per_hour"] == 4.0
    assert point["intervals"] == {}  # forty requests are too few for one
    json.dumps(report, allow_nan=False)


def test_cost_per_token_is_the_price_over_the_rate() -> None:
    point = api.simulate(parse_scenario(small())).points[0].figures
    expected_usd = 4.0 / 3600 / point["throughput"]["output_tokens_per_s"] * 1e6
    assert point["cost"]["usd_per_million_output_tokens"] == pytest.approx(expected_usd)
    decode_usd = 2.0 / 3600 / point["throughput"]["decode_output_tokens_per_s"] * 1e6
    assert point["cost"]["decode_pool_usd_per_million_output_tokens"] == pytest.approx(decode_usd)


@pytest.mark.parametrize("kind", ["closed", "poisson"])
def test_exact_gives_the_same_report(kind: str) -> None:
    traffic = {"kind": kind} | ({"rate_per_s": [5.0]} if kind == "poisson" else {})
    data = small(**traffic)
    if kind == "poisson":
        assert isinstance(data["traffic"], dict)
        del data["traffic"]["concurrency"]
    scenario = parse_scenario(data)
    fast, exact = api.simulate(scenario), api.simulate(scenario, exact=True)
    for one, other in zip(fast.points, exact.points, strict=True):
        assert one.records.equals(other.records)
        one.figures["latency"].pop("itl_s"), other.figures["latency"].pop("itl_s")
        assert one.figures == other.figures


def test_a_model_that_does_not_fit_says_what_would() -> None:
    data = small() | {"model": "kimi-k2.6", "gpu": "h100-sxm"}
    with pytest.raises(InfeasibleError, match=r"GiB"):
        api.memory(parse_scenario(data))


def test_a_layout_the_model_cannot_have_names_the_field() -> None:
    data = small()
    data["pools"] = {"prefill": {"tp": 7}, "decode": {"tp": 1}}
    with pytest.raises(BadInputError, match=r"pools\.prefill\.tp: 7"):
        api.memory(parse_scenario(data))


def test_progress_is_told_what_is_under_way() -> None:
    told: list[tuple[str, float]] = []
    scenario = parse_scenario(small(requests=600))
    api.simulate(scenario, progress=lambda label, share: told.append((label, share)))
    assert told[:2] == [("concurrency 2", 0.0), ("concurrency 2", 256 / 600)]
    assert told[-1][0] == "concurrency 4"


def test_sliding_windows_and_states_take_memory_of_every_request() -> None:
    data = small() | {"model": "gpt-oss-20b"}
    report = api.simulate(parse_scenario(data)).to_dict()
    assert report["points"][0]["requests"]["completed"] == 40


def test_the_package_shows_its_verbs() -> None:
    assert tonnage.simulate is api.simulate
    assert tonnage.memory is api.memory
    assert tonnage.load_scenario is load_scenario
    assert all(callable(getattr(tonnage, name)) for name in tonnage.__all__)
    with pytest.raises(AttributeError):
        _ = tonnage.plans


def test_a_request_longer_than_one_attention_rank_holds_is_rejected() -> None:
    """Eight ranks hold eight times the tokens, but each request lives on one of them."""
    pool = {"tp": 8, "attention_dp": 8, "kv": "bf16"}
    traffic = {"kind": "closed", "concurrency": 1, "requests": 2, "output_tokens": 2}
    data = {
        "model": "qwen3-coder-480b",
        "gpu": "h20-141g",
        "engine": {"name": "vllm", "version": "0.19.0"},
        "traffic": traffic | {"input_tokens": 250_000},
        "pools": {"serve": pool | {"ep": 8, "weights": "fp8_block"}},
    }
    report = api.simulate(parse_scenario(data)).to_dict()
    memory = report["memory"]["serve"]
    assert memory["kv_tokens_per_rank"] < 250_000 < memory["kv_tokens"]
    counts = report["points"][0]["requests"]
    assert (counts["completed"], counts["rejected"]) == (0, 2)


@pytest.mark.parametrize("name", ["kimi-k2.6", "gpt-oss-20b", "glm-5.2"])
def test_the_bytes_on_the_wire_are_those_of_the_cache(name: str) -> None:
    shapes = stage_kv_shapes(load_model(name), ParallelLayout(tp=4), "bf16")
    for tokens in (1, 127, 128, 129, 5000):
        expected = max(float(shape.request_bytes(tokens)) for shape in shapes)
        assert wire_bytes_per_gpu(shapes)(tokens) == pytest.approx(expected, rel=1e-12)
