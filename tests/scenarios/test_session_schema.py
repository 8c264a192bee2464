"""Sessions and shapes of a day in a scenario: what is read, and what is refused with a mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tonnage import api
from tonnage.scenarios.load import changed, parse_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError
from tonnage.sim.traffic.build import build_load
from tonnage.sim.traffic.sessions import SessionLoad
from tonnage.sim.traffic.shapes import DIURNAL
from tonnage.sim.traffic.spec import SessionSpec, SessionTrace
from tonnage.sweep_keys import Digests


def scenario(folder: Path | None = None, **traffic: Any) -> Scenario:
    """Return a small deployment under some traffic."""
    data = {"model": "llama-3.1-8b", "pools": {"serve": {"tp": 1}}, "traffic": traffic}
    return parse_scenario(data, "mine.yaml", folder)


SHORT = {
    "count": 6,
    "turns": {"kind": "uniform", "low": 2, "high": 4},
    "first_input_tokens": 200,
    "new_input_tokens": 100,
    "output_tokens": 20,
    "think_time": {"kind": "exponential", "mean": "2s"},
    "shared_prefix_tokens": 1000,
}


def test_sessions_have_defaults_and_say_the_same_when_resolved() -> None:
    plain = scenario(kind="sessions")
    spec = plain.traffic_spec().sessions
    assert isinstance(spec, SessionSpec)
    assert spec.count == 200
    assert [point.concurrency for point in plain.traffic_spec().points()] == [1, 8, 16, 32, 64]
    assert parse_scenario(plain.resolved()).resolved() == plain.resolved()
    by_rate = scenario(kind="sessions", rate_per_s=[0.5, 2], shape="diurnal", session=SHORT)
    assert [point.rate_per_s for point in by_rate.traffic_spec().points()] == [0.5, 2.0]
    assert parse_scenario(by_rate.resolved()).resolved() == by_rate.resolved()
    shape = by_rate.traffic_spec().shape
    assert shape is not None
    assert shape.points == DIURNAL
    assert changed(by_rate, ["traffic.session.count=9"]).traffic.session is not None


@pytest.mark.parametrize("points", [{"concurrency": [3]}, {"rate_per_s": [0.5]}])
def test_sessions_are_simulated_to_their_end(points: dict[str, Any]) -> None:
    report = api.simulate(scenario(kind="sessions", session=SHORT, **points))
    figures = report.to_dict()["points"][0]
    load = build_load(
        scenario(kind="sessions", session=SHORT, **points).traffic_spec(),
        report.memory.scenario.traffic_spec().points()[0],
        0,
    )
    assert isinstance(load, SessionLoad)
    expected = [turn.input_tokens for one in load.sessions for turn in one.turns]
    assert figures["requests"]["completed"] == len(expected)
    assert sorted(report.points[0].records["input_tokens"]) == sorted(expected)
    again = api.simulate(scenario(kind="sessions", session=SHORT, **points))
    assert again.to_dict() == report.to_dict()


def test_recorded_sessions_are_found_among_the_shipped_traces() -> None:
    session = {"path": "agentic_sample.csv.gz", "count": 3}
    recorded = scenario(kind="sessions", concurrency=[2], session=session)
    source = recorded.traffic_spec().sessions
    assert isinstance(source, SessionTrace)
    assert source.count == 3
    load = build_load(recorded.traffic_spec(), recorded.traffic_spec().points()[0], 0)
    assert isinstance(load, SessionLoad)
    assert len(list(load.sessions)) == 3


def test_an_edited_file_of_think_times_makes_another_point_of_a_sweep(tmp_path: Path) -> None:
    file = tmp_path / "pauses.csv"
    session = SHORT | {"think_time": {"file": "pauses.csv"}}
    keys = []
    for text in ("seconds\n1.5\n0\n", "seconds\n1.5\n3\n"):
        file.write_text(text)
        keys.append(Digests().key(scenario(tmp_path, kind="sessions", session=session)))
    assert keys[0] != keys[1]


def test_think_times_are_read_from_a_column(tmp_path: Path) -> None:
    (tmp_path / "pauses.csv").write_text("who,seconds\na,1.5\nb,1.5\n")
    session = SHORT | {"think_time": {"file": "pauses.csv"}}
    read = scenario(tmp_path, kind="sessions", concurrency=[1], session=session)
    load = build_load(read.traffic_spec(), read.traffic_spec().points()[0], 0)
    assert isinstance(load, SessionLoad)
    assert {turn.think_s for one in load.sessions for turn in one.turns} == {1.5}
    (tmp_path / "pauses.csv").write_text("seconds\n-1\n")
    with pytest.raises(BadInputError, match=r"pauses\.csv: line 2: seconds: '-1' is not a number"):
        scenario(tmp_path, kind="sessions", session=session)


@pytest.mark.parametrize(
    ("traffic", "expected"),
    [
        ({"kind": "sessions", "input_tokens": 5}, "input_tokens: kind sessions does not read it"),
        ({"kind": "sessions", "requests": 9}, "set traffic.session.count"),
        ({"kind": "sessions", "session": None}, "session: kind sessions needs it"),
        ({"kind": "closed", "session": {}}, "session: kind closed has no sessions"),
        ({"kind": "sessions", "session": {"turnz": 3}}, "unknown field; did you mean 'turns'?"),
        ({"kind": "sessions", "rate_per_s": 1, "concurrency": [3]}, "remove it or concurrency"),
        ({"kind": "sessions", "session": {"think_time": "3x"}}, "unknown unit 'x'"),
        ({"kind": "sessions", "session": {"think_time": {"kind": "weibull"}}}, "is not one of"),
        (
            {
                "kind": "sessions",
                "session": {"think_time": {"kind": "lognormal", "median": "9s", "p95": "5s"}},
            },
            "session.think_time: p95 5 s must be above the median 9 s",
        ),
        (
            {"kind": "sessions", "session": {"turns": {"kind": "uniform", "low": 5, "high": 2}}},
            "session.turns: high 2 is below low 5",
        ),
        (
            {"kind": "sessions", "session": {"compact_at_tokens": 100}},
            "100 tokens are no more than the shared prefix",
        ),
        ({"kind": "sessions", "session": {"rewrite_share": 2}}, "rewrite_share"),
        ({"kind": "sessions", "session": {"path": "gone.json"}}, "no trace file 'gone.json'"),
        ({"kind": "closed", "shape": "diurnal"}, "shape: only a rate has a shape over the day"),
        ({"kind": "sessions", "shape": "diurnal"}, "shape: only a rate"),
        ({"kind": "poisson", "rate_per_s": 1, "shape": "weekly"}, "'weekly' is no shape of a day"),
        ({"kind": "poisson", "rate_per_s": 1, "shape": [[1, 2, 3]]}, "is no shape of a day"),
        ({"kind": "poisson", "rate_per_s": 1, "shape": [[9, 1], [3, 2]]}, "hours must rise"),
        ({"kind": "poisson", "rate_per_s": 1, "start_hour": 24}, "start_hour"),
    ],
)
def test_what_cannot_be_is_refused_by_field(traffic: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInputError) as caught:
        scenario(**traffic)
    assert str(caught.value).startswith("mine.yaml: traffic.")
    assert expected in str(caught.value)
