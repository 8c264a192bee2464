"""The shipped storm: it outlives its cause where clients insist, and not where they hold back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from tonnage import api
from tonnage.cli import app
from tonnage.retry_plots import retries_figure, retry_series
from tonnage.scenarios.load import load_scenario, load_variants
from tonnage.sim.domain import BadInputError

BACK_S = 150.0  # when the instance that crashed is there again
END_S = 260.0
SETS = ["traffic.requests=4160"]  # 260 s


def simulated(variant: str) -> api.PointReport:
    return api.simulate(load_variants("retry-storm", SETS)[variant]).points[0]


@pytest.fixture(scope="module")
def at_once() -> api.PointReport:
    return simulated("at once")


@pytest.fixture(scope="module")
def holding_back() -> api.PointReport:
    return simulated("back-off and breaker")


def served_share(point: api.PointReport, from_s: float, to_s: float) -> float:
    """Return the requests served in a span over those that came in it."""
    finish_s, arrival_s = point.records["finish_s"], point.records["arrival_s"]
    served = finish_s.between(from_s, to_s).sum()
    return float(served / arrival_s.between(from_s, to_s).sum())


def test_without_a_crash_the_same_clients_are_served() -> None:
    """So the storm is not one of too much load: nobody ever needs a second attempt."""
    scenario = load_variants("retry-storm", ["traffic.requests=1500"])["at once, no crash"]
    point = api.simulate(scenario).points[0]
    assert point.figures["attempts"]["made"] == point.figures["requests"]["completed"] == 1500


def test_clients_that_try_at_once_keep_the_fleet_busy_for_nothing(
    at_once: api.PointReport,
) -> None:
    """A minute after the instance is back nearly nobody is served, at four times the attempts."""
    assert served_share(at_once, 20.0, 60.0) > 0.9
    assert served_share(at_once, BACK_S + 60, END_S) < 0.02
    assert at_once.attempts is not None
    sent = np.histogram(at_once.attempts.start_s(), [BACK_S + 60, END_S])[0][0]
    assert sent > 4 * 16 * (END_S - BACK_S - 60)
    assert at_once.figures["wasted_tokens"]["prompt_tokens"] > 10**6


def test_clients_that_hold_back_are_served_again(holding_back: api.PointReport) -> None:
    assert served_share(holding_back, BACK_S + 60, END_S) > 0.97
    assert holding_back.figures["outages"]["breakers_opened"] >= 1
    last = holding_back.records[holding_back.records["arrival_s"].between(BACK_S + 80, END_S)]
    assert (last["status"] == "completed").mean() > 0.99
    assert (last["attempts"] == 1).mean() > 0.95


def test_the_series_count_every_attempt_and_answer(at_once: api.PointReport) -> None:
    assert at_once.attempts is not None
    assert at_once.outages is not None
    series = retry_series(at_once.attempts, at_once.records)
    step_s = series.time_s[0]
    assert np.diff(series.time_s) == pytest.approx(step_s)
    attempts, requests = at_once.figures["attempts"], at_once.figures["requests"]
    assert (series.sent_per_s * step_s).sum() == attempts["made"] - attempts["refused"]
    assert (series.asked_per_s * step_s).sum() == len(at_once.records)
    assert (series.served_per_s * step_s).sum() == requests["completed"]
    drawn = retries_figure(series, at_once.outages).to_dict()
    assert [line["name"] for line in drawn["data"]] == [
        "attempts sent",
        "requests (first attempts)",
        "requests served",
    ]
    (shade,) = drawn["layout"]["shapes"]
    assert (shade["x0"], shade["x1"]) == (60.0, BACK_S)


# --- the command line ---------------------------------------------------------------------------

SMALL = [
    *("--set", "traffic.requests=60"),
    *("--set", "traffic.rate_per_s=[6, 9]"),
    *("--set", "outages=[{kind: instance_crash, at: 2s, restart: 3s}]"),
]


def test_out_writes_the_attempts_and_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", "retry-storm", *SMALL, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "retries.html").read_text(encoding="utf-8")
    assert page.count('class="plotly-graph-div"') == 10  # five variants, two rates
    assert "<script src=" not in page
    assert "<link" not in page
    rows = pd.read_parquet(tmp_path / "attempts_at-once_rate_6.parquet")
    assert rows.columns.tolist() == ["id", "attempt", "start_s", "end_s", "outcome"]
    requests = pd.read_parquet(tmp_path / "requests_at-once_rate_6.parquet")
    assert rows.groupby("id").size().tolist() == requests["attempts"].tolist()
    assert f"Attempts over time: {tmp_path / 'retries.html'}" in done.output.replace("\n", "")


def test_nothing_of_it_is_written_where_clients_try_once(tmp_path: Path) -> None:
    quiet = [part for one in ("outages=[]", "variants={}", "clients={}") for part in ("--set", one)]
    arguments = ["simulate", "retry-storm", *SMALL[:4], *quiet]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path), "--json", "-"])
    assert done.exit_code == 0, done.output
    assert not list(tmp_path.glob("*retries*")) + list(tmp_path.glob("attempts*"))
    report = json.loads(done.output)
    assert not {"clients", "outages"} & set(report["scenario"])
    assert not {"attempts", "outages"} & set(report["points"][0])
    assert "attempts" not in pd.read_parquet(tmp_path / "requests_rate_6.parquet").columns


# --- with one instance down ---------------------------------------------------------------------

FLEET = ["traffic.requests=200", "outages=[]", "clients={}", "traffic.timeout=null"]


def test_n_plus_one_tells_for_every_pool_whether_the_objectives_hold() -> None:
    """Two instances serve 5 per s with ease and one alone, too; at 30 per s one is too few."""
    sets = [*FLEET, "traffic.rate_per_s=[5]", "slo={ttft_p95: 2s}"]
    easy = api.n_plus_one(load_scenario("retry-storm", sets))
    assert easy["holds"] is True
    assert easy["pools"]["serve"]["up"] == 1
    hard = api.n_plus_one(load_scenario("retry-storm", [*sets, "traffic.rate_per_s=[5, 30]"]))
    assert hard["holds"] is False
    points = hard["pools"]["serve"]["points"]
    assert [point["objectives"] for point in points] == [{"ttft_p95": True}, {"ttft_p95": False}]


def test_a_pool_of_one_instance_has_none_to_spare() -> None:
    sets = [*FLEET, "pools.serve.instances=1", "slo={ttft_p95: 2s}"]
    found = api.n_plus_one(load_scenario("retry-storm", sets))
    assert found["pools"]["serve"]["why"] == "no instance is left"
    assert found["holds"] is False


def test_it_is_the_run_with_that_instance_down() -> None:
    sets = [*FLEET, "traffic.rate_per_s=[12]", "slo={ttft_p95: 2s}"]
    found = api.n_plus_one(load_scenario("retry-storm", sets))
    down = api.simulate(load_scenario("retry-storm", [*sets, "router.down={serve: [0]}"]))
    slo = down.points[0].figures["slo"]
    assert found["pools"]["serve"]["points"][0]["attainment"] == slo["attainment"]


def test_without_objectives_there_is_nothing_to_hold() -> None:
    with pytest.raises(BadInputError, match="slo: no objective to hold; give one"):
        api.n_plus_one(load_scenario("retry-storm", FLEET))


def test_the_flag_prints_a_line_per_pool() -> None:
    sets = ["variants={}", *FLEET, "traffic.rate_per_s=[5, 30]", "slo={ttft_p95: 2s}"]
    arguments = [part for one in sets for part in ("--set", one)]
    done = CliRunner().invoke(app, ["simulate", "retry-storm", *arguments, "--n-plus-one"])
    assert done.exit_code == 0, done.output
    assert "one serve instance of 2 down: ttft_p95 not met at 30 per s" in done.output
