"""`execute`: one engine with two sources of step times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tonnage import api
from tonnage.execution import StepDevice, execute
from tonnage.pools import BuiltPool, built_pools, times_of
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import BadInputError, Step


def scenario(rate_per_s: float = 6.0, **more: Any) -> Scenario:
    traffic = {
        "kind": "poisson",
        "rate_per_s": rate_per_s,
        "input_tokens": {"kind": "lognormal", "median": 800, "p95": 4000},
        "output_tokens": {"kind": "lognormal", "median": 60, "p95": 200},
        "requests": 40,
    }
    pools = {"prefill": {"kv": "bf16"}, "decode": {"kv": "fp8_e4m3"}}
    return parse_scenario({"traffic": traffic, "pools": pools, "seed": 3, **more})


class Slower:
    """Runs steps as predicted, times a factor of their phase, and counts them."""

    def __init__(self, predictor: StepPredictor, prefill: float, decode: float) -> None:
        self.predictor, self.prefill, self.decode = predictor, prefill, decode
        self.measured = 0

    def measure(self, step: Step) -> float:
        self.measured += 1
        factor = self.prefill if step.prefill_chunks else self.decode
        between = ("all_reduce", "collectives")
        own_s = sum(one.seconds for one in self.predictor.times(step) if one.name not in between)
        whole_s = float(self.predictor.run(step, 1)[0])
        return factor * whole_s - (whole_s - own_s)  # what goes between ranks is added to it

    def facts(self) -> dict[str, Any]:
        return {"device": "test"}


class Devices:
    """Makes one device per pool, and keeps them."""

    def __init__(self, one: Scenario, prefill: float = 1.0, decode: float = 1.0) -> None:
        self.factors = prefill, decode
        self.times = times_of(one, built_pools(one))
        self.made: dict[Role, Slower] = {}
        self.open = 0

    @contextmanager
    def __call__(self, role: Role, pool: BuiltPool, steps: Sequence[Step]) -> Iterator[StepDevice]:
        assert steps
        assert not self.open, "two pools would share the device's memory"
        self.open += 1
        self.made[role] = Slower(self.times[role].executor, *self.factors)
        yield self.made[role]
        self.open -= 1


class Exact:
    """Returns the very seconds that were predicted."""

    def __init__(self, predictor: StepPredictor) -> None:
        self.predictor = predictor

    def measure(self, step: Step) -> float:
        return float(self.predictor.run(step, 1)[0])

    def facts(self) -> dict[str, Any]:
        return {}


def test_with_the_cost_models_own_times_the_result_is_simulates_to_the_byte() -> None:
    one = scenario(pools={"serve": {"kv": "bf16", "tp": 1}}, model="qwen3-8b")
    times = times_of(one, built_pools(one))

    @contextmanager
    def device(role: Role, pool: BuiltPool, steps: Sequence[Step]) -> Iterator[StepDevice]:
        yield Exact(times[role].executor)

    report = execute(one, device)
    simulated = json.dumps(api.simulate(one).to_dict(), sort_keys=True)
    assert json.dumps(report.executed.to_dict(), sort_keys=True) == simulated
    assert report.executed.points[0].records.equals(report.predicted.points[0].records)


@pytest.mark.parametrize("profile", ["auto", "datasheet"])
def test_a_slower_device_is_found_out_by_phase(profile: str) -> None:
    # so few that a slower step does not also mean more requests in it
    one = scenario(rate_per_s=0.1, profile=profile)
    devices = Devices(one, prefill=1.5, decode=1.25)
    found = execute(one, devices).to_dict()
    assert found["pools"]["prefill"]["measured_over_predicted"] == pytest.approx({"prefill": 1.5})
    assert found["pools"]["decode"]["measured_over_predicted"] == pytest.approx({"decode": 1.25})
    figures = found["points"][0]["figures"]
    assert figures["tpot_s.p50"]["error"] == pytest.approx(1 / 1.25 - 1, rel=0.05)
    assert figures["ttft_s.p50"]["executed"] > 1.3 * figures["ttft_s.p50"]["predicted"]
    for pool in found["pools"].values():
        assert pool["share_of_time_measured"] == pytest.approx(1.0)
        assert pool["strata_measured"] == pool["strata_visited"] <= pool["steps_measured"]


def test_a_short_budget_measures_what_takes_most_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("tonnage.execution.monotonic", lambda: float(next(clock)))
    one = scenario()
    devices = Devices(one)
    found = execute(one, devices, budget_s=8.0).to_dict()["pools"]
    for role, pool in found.items():
        assert 0 < pool["strata_measured"] < pool["strata_visited"]
        share = pool["share_of_time_measured"]
        assert pool["strata_measured"] / pool["strata_visited"] < share < 1.0
        assert devices.made[role].measured == pool["steps_measured"]  # type: ignore[index]


def test_no_budget_is_refused() -> None:
    with pytest.raises(BadInputError, match="budget"):
        execute(scenario(), Devices(scenario()), budget_s=0.0)
