"""Tables and figures of the pages: what they hold is what the reports say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tonnage import api
from tonnage.dashboard import charts, frames
from tonnage.dashboard.views.timeline import outages_of
from tonnage.dashboard.what_if import what_if_rows
from tonnage.dashboard.work import RunView, simulated
from tonnage.scenarios.load import load_scenario, parse_scenario
from tonnage.sim.domain import BadInputError

TEXT = """
name: two
model: llama-3.1-8b
gpu: h100-sxm
traffic:
  {kind: closed, concurrency: [4, 16], requests: 64, input_tokens: 500, output_tokens: 50}
pools: {serve: {instances: 2, tp: 1}}
price: {gpu_hour_usd: 3}
outages: [{kind: instance_crash, pool: serve, instance: 0, at: 100ms, restart: 1s}]
clients: {attempts: 3}
"""


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return simulated(TEXT, tmp_path_factory.mktemp("folder"), lambda _text, _share: None)


def points(view: RunView) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = view.report["points"]
    return found


def test_the_table_of_points_has_the_figures_of_the_report(view: RunView) -> None:
    frame = frames.points_frame(points(view))
    assert list(frame["load"]) == [4, 16]
    for row, point in zip(frame.to_dict("records"), points(view), strict=True):
        assert row["output tokens/s"] == point["throughput"]["output_tokens_per_s"]
        assert row["TPOT p95, ms"] == pytest.approx(1e3 * point["latency"]["tpot_s"]["p95"])
    assert "objectives met, %" not in frame  # the scenario has none


def test_a_curve_has_the_interval_of_its_figure_and_units_on_its_axes() -> None:
    path = "latency.ttft_s.mean"
    told = [
        {
            "concurrency": users,
            "rate_per_s": None,
            "latency": {"ttft_s": {"mean": 0.1 * users}},
            "intervals": {path: [0.09 * users, 0.12 * users]},
        }
        for users in (1, 8)
    ]
    curve = frames.curve_of(told, path, "TTFT", 1e3)
    assert curve is not None
    figure = charts.curve_figure([curve], "milliseconds", frames.load_title(1, told))
    line = figure.data[0]
    assert (list(line.x), list(line.y)) == ([1, 8], pytest.approx([100, 800]))
    assert list(line.error_y.array) == pytest.approx([20, 160])
    assert list(line.error_y.arrayminus) == pytest.approx([10, 80])
    titles = (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text)
    assert titles == ("concurrent requests", "milliseconds")


def test_a_bar_of_memory_is_as_long_as_the_memory() -> None:
    pools = api.memory(load_scenario("kimi-agents")).pools
    figure = charts.memory_figure({str(role): one for role, one in pools.items()})
    lengths = [sum(trace.x[index] for trace in figure.data) for index in range(2)]
    memory_gib = [one["gpu_memory_bytes"] / 2**30 for one in pools.values()]
    assert lengths == pytest.approx(memory_gib, rel=1e-6)


def test_what_if_says_what_the_change_itself_would_hold() -> None:
    scenario = load_scenario("kimi-k2.6-h200")
    rows = what_if_rows(scenario, "decode").set_index("change")
    assert rows.loc["as it is", "kv_tokens"] == 1_369_135
    bf16 = load_scenario("kimi-k2.6-h200", ["pools.decode.kv=bf16"])
    assert rows.loc["kv bf16", "kv_tokens"] == api.memory(bf16).pools["decode"]["kv_tokens"]
    assert "is short of" in str(rows.loc["tp 4", "why not"])
    assert "dcp 8" in rows.index


def test_what_if_of_sessions_counts_their_mean_request() -> None:
    scenario = load_scenario("kimi-agents")
    rows = what_if_rows(scenario, "decode").set_index("change")
    figures = api.memory(scenario).pools["decode"]
    told = ("kv_tokens", "requests", "longest")
    keys = ("kv_tokens", "max_concurrency", "longest_request_tokens")
    assert [rows.loc["as it is", one] for one in told] == [figures[key] for key in keys]


def test_the_history_is_of_every_instance_and_marks_the_crash(view: RunView) -> None:
    point = view.points[-1]
    assert set(point.history["label"]) == {"serve 0", "serve 1"}
    assert point.history["kv_share"].between(0, 1).all()
    spans = outages_of(point)
    assert spans == [(pytest.approx(0.1), pytest.approx(1.1), "serve 0 away")]
    figure = charts.history_figure(point.history, spans)
    assert len(figure.data) == 6
    assert len(figure.layout.shapes) == 3
    assert "seconds" in figure.layout.xaxis3.title.text
    assert point.retries is not None


def test_the_front_holds_what_nothing_beats(view: RunView) -> None:
    rows = frames.pareto_rows({"two": view.report})
    assert len(rows) == 2
    for one in rows.itertuples():
        beaten = ((rows.per_user > one.per_user) & (rows.per_gpu > one.per_gpu)).any()
        assert one.on_front == (not beaten)
    assert "serve 2 x tp 1" in rows["hover"][0]
    assert len(charts.pareto_figure({"two": view.report}).data) == 2


def test_changes_are_from_the_first_run(view: RunView) -> None:
    other = {**view.report, "points": [dict(one) for one in points(view)]}
    for point in other["points"]:
        rate = point["throughput"]["output_tokens_per_s"]
        point["throughput"] = {**point["throughput"], "output_tokens_per_s": 1.5 * rate}
    compared = frames.compared_frame({"a": view.report, "b": other})
    changes = frames.changes_frame(compared)
    assert list(changes["run"]) == ["b", "b"]
    assert list(changes["output tokens/s"]) == pytest.approx([50.0, 50.0])
    figure = charts.bars_figure(compared, "output tokens/s", "concurrent requests")
    assert [trace.name for trace in figure.data] == ["a", "b"]


def test_differences_name_the_fields_that_differ(tmp_path: Path) -> None:
    one, two = (parse_scenario({"name": str(seed), "seed": seed}) for seed in (1, 2))
    found = frames.differences_frame({"1": one.resolved(), "2": two.resolved()})
    assert found.to_dict("records") == [{"field": "seed", "1": "1", "2": "2"}]


def test_published_points_stand_beside_their_scenario_alone() -> None:
    curve = frames.published_curve("kimi-k2.6-h200")
    assert curve is not None
    assert dict(zip(curve.x, curve.y, strict=True))[64] == 2192
    assert frames.published_curve("laptop") is None


def test_executed_points_stand_beside_what_is_predicted(view: RunView) -> None:
    text = json.dumps({"executed": points(view)}, default=str)
    path = "throughput.output_tokens_per_s"
    curve = frames.executed_curve(frames.executed_points(text), path)
    assert curve is not None
    assert curve.points_only
    assert curve.y == [point["throughput"]["output_tokens_per_s"] for point in points(view)]


@pytest.mark.parametrize("text", ["{", "[]", '{"executed": 5}', '{"points": []}'])
def test_another_report_has_no_executed_points(text: str) -> None:
    with pytest.raises(BadInputError, match="tonnage execute --json"):
        frames.executed_points(text)


@pytest.mark.parametrize(("count", "told"), [(999, "999"), (12_345, "12.3 k"), (1.369e6, "1.37 M")])
def test_a_count_in_a_narrow_place(count: float, told: str) -> None:
    assert frames.short(count) == told
