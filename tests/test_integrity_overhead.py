"""What watching the KV costs a scenario: nothing where nothing watches it, a little elsewhere."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from tonnage import api
from tonnage.cli import app
from tonnage.explain import StepShape
from tonnage.integrity_costs import ALTERNATIVES, integrity_costs
from tonnage.pools import built_pools, deployment_of, times_of
from tonnage.scenarios import profiles
from tonnage.scenarios.load import load_variants, parse_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.sim.cost.handoff_checks import SideChecks
from tonnage.sim.cost.profile import load_profile, write_profile
from tonnage.sim.cost.watched import WatchedExecutor


def _tool() -> ModuleType:
    place = Path(__file__).resolve().parents[1] / "benchmarks" / "integrity_overhead.py"
    spec = importlib.util.spec_from_file_location("integrity_overhead", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there for their types
    spec.loader.exec_module(module)
    return module


bench = _tool()
NODE_S, LAUNCH_S = 2.5e-6, 15e-6  # of one more small kernel: in a graph, launched by the host


def scenario(integrity: object = None, **changes: Any) -> Scenario:
    """Return a small disaggregated run; `integrity` is that of both pools."""
    pool: dict[str, Any] = {"instances": 1, "tp": 4}
    if integrity is not None:
        pool["integrity"] = integrity
    traffic = {"kind": "closed", "concurrency": 4, "input_tokens": 3000, "output_tokens": 40}
    return parse_scenario(
        {
            "model": "llama-3.1-70b",
            "traffic": {**traffic, "requests": 12},
            "pools": {"prefill": pool, "decode": dict(pool)},
            "link": {"kind": "rdma", "bandwidth": "400Gb/s", "per": "gpu"},
            **changes,
        }
    )


def outcome(one: Scenario) -> dict[str, Any]:
    report = api.simulate(one)
    found = report.to_dict()
    records = [point.records.to_json() for point in report.points]
    return {"points": found["points"], "provenance": found["provenance"], "records": records}


def test_no_tracker_is_nothing_at_all() -> None:
    pools = built_pools(scenario("none"))
    times = times_of(scenario("none"), pools)
    assert not any(isinstance(one.executor, WatchedExecutor) for one in times.values())
    handoff = deployment_of(scenario("none"), pools, times).handoff
    assert handoff is not None
    assert not isinstance(handoff.sender_check_s, SideChecks)
    assert not isinstance(handoff.receiver_check_s, SideChecks)
    assert json.dumps(outcome(scenario("none"))) == json.dumps(outcome(scenario()))
    explained = api.explain(scenario("none"))
    assert "checks" not in explained["handoff"]
    assert explained == api.explain(scenario())


@pytest.mark.parametrize(
    "integrity",
    [
        "batched",
        {"tracker": "batched", "in_graph": False, "every_steps": 3},
        {"tracker": "batched", "overlapped": True},
        {"tracker": "canary", "handoff_checksum": True},
    ],
)
def test_segments_and_single_steps_agree_to_the_bit(integrity: object) -> None:
    watched = scenario(integrity)
    records = [api.simulate(watched, exact=exact).points[0].records for exact in (False, True)]
    assert records[0].equals(records[1])


def test_a_colocated_pool_is_checked_in_its_mixed_steps_too() -> None:
    pool = {"instances": 1, "tp": 4}
    found = {
        name: api.simulate(scenario(pools={"serve": {**pool, "integrity": name}}, link={})).points[
            0
        ]
        for name in ("none", "batched")
    }
    for metric in ("ttft_s", "tpot_s"):
        plain, watched = (found[name].figures["latency"][metric] for name in ("none", "batched"))
        assert plain["mean"] < watched["mean"] < 1.02 * plain["mean"]


def test_losses_of_the_scenario_lie_where_arithmetic_puts_them() -> None:
    """The step reads 141 GB of weights over four GPUs: 7.3 ms or more, under twice that in all.

    In a graph a check is at least kernel, mask and copy; launched, at most what four launches, an
    all-reduce, a copy and the ledger take at their slowest: 0.4 ms.
    """
    variants = bench.variants_of()
    without = variants["none"]
    step_s = (141e9 / 4 / 4.8e12, 2 * 141e9 / 4 / 4.8e12)
    point = next(one for one in without.points() if one.concurrency == 8)
    base = without.figures(point)
    found = {
        name: bench.overheads(base, variant.figures(point)) for name, variant in variants.items()
    }
    for metric in ("throughput loss", "TPOT p95"):
        losses = {name: one[metric] for name, one in found.items()}
        assert losses["none"] == 0
        assert 0 < losses["batched-overlapped"] < losses["batched"] < losses["batched-launched"]
        assert losses["batched"] > 3 * NODE_S / step_s[1]
        assert losses["batched-launched"] > 4 * LAUNCH_S / step_s[1]
        assert losses["batched-launched"] < 0.4e-3 / step_s[0]
        assert 0 < losses["canary"] < losses["batched-launched"]
    assert found["checksum"]["TTFT p95"] > 0


def test_ends_of_the_intervals_lie_around_the_likely_overhead() -> None:
    variants = bench.variants_of()
    point = variants["none"].points()[0]
    for name in ("batched", "batched-launched", "batched-overlapped", "canary"):
        found = bench.fixed_overheads(variants["none"], variants[name], point)
        for metric in ("throughput loss", "TPOT p95", "e2e p95"):
            one = found[metric]
            assert 0 < one.low < one.likely < one.high < 0.05


def test_explain_shows_every_item_and_where_it_comes_from() -> None:
    watched = scenario({"tracker": "batched", "handoff_checksum": True})
    report = api.explain(watched, requests=8, context_tokens=4096)
    rows = {row["operator"]: row for row in report["steps"]["decode"]["operators"]}
    names = ("tag_check", "launch", "agreement", "readback", "bookkeeping")
    found = [rows[f"integrity.{name}"] for name in names]
    assert [row["source"] for row in found] == ["datasheet"] * 2 + ["imported"] + ["datasheet"] * 2
    assert all(row["interval_s"][0] <= row["seconds"] <= row["interval_s"][1] for row in found)
    checks = {(row["side"], row["operator"]) for row in report["handoff"]["checks"]}
    for side in ("sender", "receiver"):
        assert {(side, "handoff.tag_check"), (side, "handoff.checksum")} <= checks
    assert any("own copy of the page table" in one for one in report["provenance"]["assumptions"])


def test_explain_prints_the_checks_of_a_handoff(tmp_path: Path) -> None:
    path = tmp_path / "watched.yaml"
    path.write_text(yaml.safe_dump(scenario("batched").resolved()))
    ran = CliRunner().invoke(app, ["explain", str(path)], env={"COLUMNS": "200"})
    assert ran.exit_code == 0
    assert "integrity.tag_check" in ran.output
    assert "+ receiver, handoff.bookkeeping" in ran.output


def test_rows_that_a_profile_measured_take_the_place_of_the_estimate(tmp_path: Path) -> None:
    """32 requests of 4,096 pages of one token, measured at 5 us; launches in a graph at 1 us."""
    shipped = load_profile(Path(profiles.__file__).parent / "profiles/h200-sxm-sglang.profile")
    tags = {"requests": [1, 32, 256], "pages": [128, 4096, 16384], "seconds": [3e-6, 5e-6, 6e-5]}
    launch = {"in_graph": [True, False], "seconds": [1e-6, 8e-6]}
    tables = {"page_tags": pd.DataFrame(tags), "launch": pd.DataFrame(launch)}
    place = tmp_path / "own.profile"
    write_profile(replace(shipped, tables={**shipped.tables, **tables}), place)
    watched = scenario("batched", profile=str(place))
    report = api.explain(watched, requests=32, context_tokens=4095)
    rows = {row["operator"]: row for row in report["steps"]["decode"]["operators"]}
    check = rows["integrity.tag_check"]
    assert check["seconds"] == pytest.approx(5e-6)  # one page of each is being written
    assert (check["source"], check["inside_measured_range"]) == ("measured", True)
    assert rows["integrity.launch"]["seconds"] == pytest.approx(1e-6)  # the mask alone
    assert rows["integrity.launch"]["source"] == "measured"


def test_ways_of_watching_stand_side_by_side() -> None:
    one = scenario()
    pools = built_pools(one)
    shape = StepShape(requests=8, context_tokens=4096, prompt_tokens=3000)
    costs = integrity_costs(one, pools, shape)
    assert list(costs) == list(ALTERNATIVES)
    assert costs["none"]["steps"]["decode"] == {
        "seconds": 0,
        "interval_s": [0, 0],
        "share": 0,
        "items": [],
    }
    assert costs["none"]["handoff"]["items"] == []
    seconds = {name: found["steps"]["decode"]["seconds"] for name, found in costs.items()}
    assert seconds["page tags, overlapped"] < seconds["page tags, in the graph"]
    assert seconds["page tags, in the graph"] < seconds["page tags, launched"]
    assert seconds["handoff checksum"] == 0 < costs["handoff checksum"]["handoff"]["seconds"]
    graph = costs["page tags, in the graph"]["steps"]["decode"]
    low_s, high_s = graph["interval_s"]
    assert low_s < graph["seconds"] < high_s
    watched = api.explain(scenario("batched"), requests=8, context_tokens=4096)
    plain = api.explain(one, requests=8, context_tokens=4096)
    added_s = watched["steps"]["decode"]["seconds"] - plain["steps"]["decode"]["seconds"]
    assert graph["seconds"] == pytest.approx(added_s)


def test_a_load_from_a_tier_waits_for_its_check() -> None:
    def host_latency_s(name: str) -> float:
        pool = {"instances": 1, "tp": 4, "integrity": name}
        one = scenario(
            pools={"serve": pool}, link={}, cache={"gpu": True, "host": "100GB"}, traffic=SESSIONS
        )
        pools = built_pools(one)
        cache = deployment_of(one, pools, times_of(one, pools)).pools["serve"].scheduling.cache
        assert cache is not None
        assert cache.tiers is not None
        assert cache.tiers.host is not None
        return float(cache.tiers.host.latency_s)

    added_s = host_latency_s("batched") - host_latency_s("none")
    assert added_s == pytest.approx(2.5e-6 + 1.2e-6 + 15e-6 + 29e-6 + 25e-6, rel=1e-3)


SESSIONS = {"kind": "sessions", "session": {"count": 8}}


def test_every_variant_of_the_scenario_is_another_check() -> None:
    variants = load_variants("integrity-overhead", [])
    specs = {
        str(one.pools.decode.integrity.spec()) for one in variants.values() if one.pools.decode
    }
    assert len(specs) == len(variants) == 6


# --- the document ---------------------------------------------------------------------------------


def test_the_published_ranges_are_those_of_the_facts() -> None:
    for folder in (bench.ROOT.parent / "shared", bench.ROOT / "shared"):
        path = folder / "facts" / "published.yaml"
        if path.is_file():
            facts = yaml.safe_load(path.read_text())["kv_integrity_check"]
            assert tuple(facts["throughput_loss"]) == bench.PUBLISHED_LOSS
            assert tuple(facts["p95_latency_increase"]) == bench.PUBLISHED_P95_INCREASE
            return
    pytest.skip("no shared/facts/published.yaml")


def test_the_document_holds_the_items_as_they_are_predicted_now() -> None:
    text = bench.DOCUMENT.read_text()
    variants = bench.variants_of()
    assert bench.item_table(variants) in text
    assert bench.handoff_table(variants) in text
    assert bench.growth_table(variants["batched"]) in text
    assert bench.risk_table() in text


def test_drawn_lengths_are_paired_by_seed() -> None:
    """The spread between seeds is far below the spread of the throughput itself."""
    variants = bench.variants_of((*bench.DRAWN, "traffic.requests=16", "traffic.concurrency=[8]"))
    point = variants["none"].points()[0]
    found = bench.drawn_overheads(variants["none"], variants["batched-launched"], point, range(3))
    loss = found["throughput loss"]
    assert 0 < loss.low < loss.likely < loss.high
    rates = [variants["none"].figures(point, seed)["throughput loss"] for seed in range(3)]
    assert loss.high - loss.low < float(np.std(rates) / np.mean(rates))
