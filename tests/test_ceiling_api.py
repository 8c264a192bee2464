"""Ceilings, replications and intervals of whole scenarios, through the package and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import yaml
from typer.testing import CliRunner

from tonnage import api
from tonnage.cli import app
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError

LENGTHS = {"input_tokens": {"kind": "uniform", "low": 100, "high": 300}, "output_tokens": 20}


def data(slo: dict[str, float] | None = None, **traffic: Any) -> dict[str, Any]:
    """Return a quick disaggregated scenario as a mapping."""
    load = {"kind": "closed", "concurrency": [2, 64], "requests": 300} | LENGTHS
    if traffic.get("kind", "closed") not in ("closed", "resident"):
        del load["concurrency"]
    return {
        "model": "qwen3-8b",
        "gpu": "h100-sxm",
        "traffic": {**load, **traffic},
        "pools": {"prefill": {"tp": 1}, "decode": {"tp": 1, "kv": "fp8_e4m3"}},
        "slo": slo or {},
    }


def scenario(slo: dict[str, float] | None = None, **traffic: Any) -> Scenario:
    return parse_scenario(data(slo, **traffic))


@pytest.fixture(scope="module")
def token_limit() -> dict[str, float]:
    """Return an objective that 16 users meet by a hair, as their own run says."""
    point = api.simulate(scenario(concurrency=[16])).points[0].figures
    return {"tpot_p95": point["latency"]["tpot_s"]["p95"] * 1.0001}


def holds(found: api.SimulationReport) -> dict[int, bool]:
    return {
        point.figures["concurrency"]: all(point.figures["slo"]["holds"].values())
        for point in found.points
    }


# --- ceilings -----------------------------------------------------------------------------------


def test_the_ceiling_is_where_the_objectives_stop_holding(token_limit: dict[str, float]) -> None:
    slo = token_limit | {"ttft_p90": 1.0}
    found = api.ceiling(scenario(slo))
    users = found["slo_concurrency"]
    assert 8 <= users <= 32
    assert found["slo_rate_per_s"] is None
    assert found["monotone"]
    around = api.simulate(scenario(slo, concurrency=[users, users + 1]))
    assert holds(around) == {users: True, users + 1: False}
    failed = next(probe["failed"] for probe in found["probes"] if probe["load"] == users + 1)
    assert failed == ["tpot"] == [found["binds"]]


def test_without_a_search_the_points_of_the_scenario_tell(token_limit: dict[str, float]) -> None:
    ceilings = api.simulate(scenario(token_limit)).ceilings
    assert ceilings["slo_concurrency"] == 2
    assert ceilings["binds"] == "tpot"
    assert "probes" not in ceilings


def test_without_objectives_memory_binds() -> None:
    ceilings = api.ceiling(scenario())
    assert ceilings["slo_concurrency"] is None
    assert ceilings["binds"] in ("memory", "max_running_requests")
    assert ceilings["memory_concurrency"] > 64


def test_a_rate_is_found_by_the_queue_that_grows_or_the_objective() -> None:
    open_load = scenario({"ttft_p95": 5.0}, kind="poisson", rate_per_s=[5.0])
    found = api.ceiling(open_load)
    assert found["slo_rate_per_s"] > 5.0
    assert found["slo_concurrency"] is None
    assert found["binds"] == "prefill"
    loads = [probe["load"] for probe in found["probes"]]
    assert loads == sorted(loads)


def test_a_trace_is_scaled(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 200 * number, "input_length": 400, "output_length": 20, "hash_ids": [number]}
        for number in range(200)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    traffic = {"kind": "trace", "path": str(trace), "format": "mooncake"}
    found = api.ceiling(parse_scenario(data({"ttft_p95": 0.3}) | {"traffic": traffic}))
    known = [probe["load"] for probe in found["probes"]]
    assert min(abs(load - 200 / 39.8) for load in known) < 1e-6  # the trace as it is
    assert found["slo_rate_per_s"] > 5.1


def test_resident_requests_are_held_to_their_token_times() -> None:
    alone = api.simulate(scenario(kind="resident", concurrency=[32])).points[0].figures
    limit_s = alone["latency"]["tpot_s"]["p95"] * 1.0001
    found = api.ceiling(scenario({"tpot_p95": limit_s, "ttft_p95": 1e-9}, kind="resident"))
    assert found["binds"] == "tpot"
    assert 32 <= found["slo_concurrency"] <= 40


def test_probes_are_told_as_they_begin(token_limit: dict[str, float]) -> None:
    told: list[str] = []
    api.simulate(
        scenario(token_limit), ceiling=True, progress=lambda label, share: told.append(label)
    )
    labels = list(dict.fromkeys(told))
    assert labels[:2] == ["concurrency 2", "concurrency 64"]
    assert labels[2] == "ceiling, concurrency 11"  # the geometric middle
    assert len(labels) > 4


# --- replications and intervals -----------------------------------------------------------------


def test_one_run_has_intervals_from_its_requests() -> None:
    point = api.simulate(scenario(concurrency=[8])).points[0].figures
    low, high = point["intervals"]["throughput.output_tokens_per_s"]
    assert low < point["throughput"]["output_tokens_per_s"] < high
    assert {"latency.ttft_s.mean", "latency.tpot_s.mean", "latency.e2e_s.p90"} <= set(
        point["intervals"]
    )
    assert "latency.ttft_s.p95" not in point["intervals"]  # needs 400 requests
    assert set(point["warm_up_requests"]) == {"latency.ttft_s", "latency.tpot_s", "latency.e2e_s"}


def test_replications_are_runs_with_the_seeds_that_follow() -> None:
    slo = {"ttft_p95": 1.0}
    found = api.simulate(scenario(slo, concurrency=[8]), replications=3).points[0]
    alone = [
        api.simulate(parse_scenario(data(slo, concurrency=[8]) | {"seed": seed})).points[0]
        for seed in range(3)
    ]
    rates = [one.figures["throughput"]["output_tokens_per_s"] for one in alone]
    assert len(set(rates)) == 3
    figures = found.figures
    assert figures["throughput"]["output_tokens_per_s"] == pytest.approx(sum(rates) / 3)
    low, high = figures["intervals"]["throughput.output_tokens_per_s"]
    assert (low + high) / 2 == pytest.approx(sum(rates) / 3)
    assert low < min(rates) < max(rates) < high
    assert "latency.itl_s.p95" in figures["intervals"]
    assert figures["replications"] == 3
    assert figures["slo"]["holds"] == {"ttft_p95": True}
    assert found.records["seed"].tolist() == [seed for seed in range(3) for _ in range(300)]
    for seed, one in enumerate(alone):
        rows = found.records[found.records["seed"] == seed].drop(columns="seed")
        assert rows.reset_index(drop=True).equals(one.records)


def test_one_replication_is_the_run_itself() -> None:
    small = scenario(concurrency=[4])
    assert api.simulate(small, replications=1).to_dict() == api.simulate(small).to_dict()
    assert "seed" not in api.simulate(small).points[0].records


def test_there_is_at_least_one_replication() -> None:
    with pytest.raises(BadInputError, match="replications: 0; write 1 or more"):
        api.simulate(scenario(), replications=0)


# --- the command --------------------------------------------------------------------------------


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_searches_and_repeats(tmp_path: Path, token_limit: dict[str, float]) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(data(token_limit)), encoding="utf-8")
    out = tmp_path / "out"
    options = ["--ceiling", "--replications", "2", "--json", "-", "--out", str(out)]
    report = json.loads(run("simulate", str(file), *options))
    assert report["ceilings"]["binds"] == "tpot"
    assert report["points"][0]["replications"] == 2
    rows = parquet.read_table(out / "requests_concurrency_2.parquet").to_pandas()
    assert sorted(set(rows["seed"])) == [0, 1]
    assert len(rows) == 600


def test_the_table_says_what_the_objectives_allow(
    tmp_path: Path, token_limit: dict[str, float]
) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(data(token_limit)), encoding="utf-8")
    text = run("simulate", str(file))
    line = "objectives allow 2 concurrent requests, of the loads above; tpot stops more"
    assert line in text
    assert "; tpot stops more" in run("simulate", str(file), "--ceiling")
    assert "objectives" not in run("simulate", str(file), "--set", "slo={}")
