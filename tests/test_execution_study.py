"""What `execute` says beside its figures: intervals, and errors with the drift divided out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.calibrate.measured_rows import ORIGIN, TINY, measured_rows
from tonnage.calibrate.grid import grid
from tonnage.calibrate.own_profile import profile_of
from tonnage.calibrate.reference_points import Reference
from tonnage.calibrate.wanted import wanted_of
from tonnage.drift import FamilyDrift, why_no_comparison
from tonnage.execution import StepDevice, execute
from tonnage.execution_study import studied
from tonnage.execution_table import error_without_drift, print_execution
from tonnage.pools import BuiltPool, built_pools, times_of
from tonnage.scenarios.catalogue import load_gpu
from tonnage.scenarios.load import load_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.session_report import report_of
from tonnage.sim.cost.profile import Profile, write_profile
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import Step
from tonnage.watched_devices import Watch

MACHINE = {name: ORIGIN[name] for name in ("device", "threads", "torch", "triton")}


@pytest.fixture(scope="module")
def profile() -> Profile:
    wanted = wanted_of(("laptop", "laptop-gqa"), "cpu")
    planned = grid(wanted, TINY, load_gpu("cpu"), on_gpu=False).points
    return profile_of(measured_rows(planned), "cpu", day=date(2026, 11, 30))


@pytest.fixture(scope="module")
def place(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles") / "cpu-tonnage.profile"
    write_profile(profile, folder)
    return folder


def scenario(place: Path | str, name: str = "laptop") -> Scenario:
    few = ["traffic.concurrency=1", "traffic.requests=4", "traffic.output_tokens=12"]
    return load_scenario(name, [*few, f"profile={place}"])


@dataclass
class Device:
    """Takes a factor of the predicted seconds, samples apart by a fixed spread."""

    predictor: StepPredictor
    factor: float
    apart: tuple[float, float]

    def measure(self, step: Step) -> float:
        return self.factor * float(self.predictor.run(step, 1)[0])

    def spread(self) -> tuple[float, float]:
        return self.apart

    def facts(self) -> dict[str, Any]:
        return {"device": "test"}


def study(
    one: Scenario,
    factor: float = 1.0,
    apart: tuple[float, float] = (1.0, 1.0),
    machine_factor: float = 1.0,
) -> dict[str, Any]:
    """Execute on a device that is slower by one factor, its references by another."""
    times = times_of(one, built_pools(one))

    @contextmanager
    def make(role: Role, pool: BuiltPool, steps: Sequence[Step]) -> Iterator[StepDevice]:
        yield Device(times[role].executor, factor, apart)

    def seconds(reference: Reference) -> list[float]:
        return [machine_factor * call.seconds for call in reference.calls]

    watch = Watch(one, MACHINE, seconds, every_s=0.0)
    return studied(one, execute(one, watch.devices(make)), watch).to_dict()


# --- intervals ----------------------------------------------------------------------------------


def test_exact_steps_lie_inside_the_predicted_interval(place: Path) -> None:
    found = study(scenario(place))
    for pair in found["points"][0]["figures"].values():
        low, high = pair["predicted_interval"]
        assert low < pair["predicted"] == pair["executed"] < high
        assert pair["executed_interval"] == [pair["executed"]] * 2
        assert pair["inside"] is True


def test_much_slower_steps_lie_outside_and_raw_errors_stay_as_they_were(place: Path) -> None:
    figures = study(scenario(place), factor=20.0)["points"][0]["figures"]
    assert not any(pair["inside"] for pair in figures.values())
    pair = figures["tpot_s.mean"]
    assert pair["error"] == pytest.approx(1 / 20 - 1, rel=0.01)


def test_samples_that_lie_apart_widen_the_executed_interval(place: Path) -> None:
    figures = study(scenario(place), apart=(0.8, 1.5))["points"][0]["figures"]
    pair = figures["tpot_s.mean"]  # one request at a time: nothing but its steps
    low, high = pair["executed_interval"]
    assert low == pytest.approx(0.8 * pair["executed"], rel=1e-3)
    assert high == pytest.approx(1.5 * pair["executed"], rel=1e-3)
    rate = figures["output_tokens_per_s"]
    assert rate["executed_interval"][0] < rate["executed"] < rate["executed_interval"][1]


def test_the_datasheet_has_no_interval() -> None:
    found = study(scenario("datasheet"))
    for pair in found["points"][0]["figures"].values():
        assert pair["predicted_interval"] is None
        assert pair["inside"] is None
    assert found["drift"]["profile"] is None
    assert "datasheet" in found["drift"]["why_not"]
    assert error_without_drift(found, 0, "tpot_s.mean") is None


# --- drift --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["laptop", "laptop-gqa"])
def test_a_machine_that_is_slower_as_a_whole_is_told_from_a_wrong_prediction(
    place: Path, name: str
) -> None:
    found = study(scenario(place, name), factor=1.4, machine_factor=1.4)
    figures = found["points"][0]["figures"]
    assert figures["tpot_s.mean"]["error"] == pytest.approx(1 / 1.4 - 1, rel=1e-3)
    assert error_without_drift(found, 0, "tpot_s.mean") == pytest.approx(0.0, abs=1e-6)
    for pool in found["drift"]["pools"].values():
        for family in pool["families"].values():
            assert family == pytest.approx({"ratio": 1.4, "lowest": 1.4, "highest": 1.4})
        for phase in pool["phases"].values():
            assert phase["ratio"] == pytest.approx(1.4)
            assert 0.9 < phase["share_of_time_compared"] <= 1.0
    wrong = study(scenario(place, name), factor=1.4)
    assert error_without_drift(wrong, 0, "tpot_s.mean") == pytest.approx(1 / 1.4 - 1, rel=1e-3)


def test_references_are_timed_before_in_the_middle_of_and_after_every_pool(place: Path) -> None:
    one = scenario(place)
    seen: list[str] = []
    times = times_of(one, built_pools(one))

    class Noted(Device):
        def measure(self, step: Step) -> float:
            seen.append("step")
            return super().measure(step)

    @contextmanager
    def make(role: Role, pool: BuiltPool, steps: Sequence[Step]) -> Iterator[StepDevice]:
        seen.append(f"open {role}")
        yield Noted(times[role].executor, 1.0, (1.0, 1.0))
        seen.append("close")

    def seconds(reference: Reference) -> list[float]:
        if seen[-1:] != ["references"]:
            seen.append("references")
        return [call.seconds for call in reference.calls]

    execute(one, Watch(one, MACHINE, seconds, every_s=0.0).devices(make))
    text = " ".join(seen)
    for role in ("prefill", "decode"):
        assert f"references open {role}" in text
    assert "references step references step" in text
    assert text.endswith("close references")


def test_a_family_keeps_the_median_and_the_ends_of_its_rounds() -> None:
    found = FamilyDrift((1.2, 0.9, 1.0)).to_dict()
    assert found == {"ratio": 1.0, "lowest": 0.9, "highest": 1.2}


@pytest.mark.parametrize(
    ("here", "told"),
    [
        ({**MACHINE, "device": "another"}, "measured with device a processor, and this is another"),
        ({**MACHINE, "threads": 2}, "measured with threads 1, and this is 2"),
        ({**MACHINE, "torch": "2.14.0"}, "measured with torch 2.13.0, and this is 2.14.0"),
        (MACHINE, None),
    ],
)
def test_a_profile_of_another_machine_is_nothing_to_compare_with(
    profile: Profile, here: dict[str, Any], told: str | None
) -> None:
    found = why_no_comparison(profile, here)
    assert found is None if told is None else found is not None and told in found


def test_an_imported_profile_is_nothing_to_compare_with(profile: Profile) -> None:
    header = profile.header.model_copy(update={"source": "imported"})
    assert "was not measured on this machine" in str(
        why_no_comparison(Profile(header, profile.tables), MACHINE)
    )


def test_references_of_a_small_share_of_a_step_are_shown_and_not_divided_out(
    profile: Profile, tmp_path: Path
) -> None:
    only = {name: table for name, table in profile.tables.items() if name == "small_ops"}
    folder = tmp_path / "small.profile"
    write_profile(Profile(profile.header, only), folder)
    found = study(scenario(folder), machine_factor=1.4)["drift"]
    assert "stand for" in found["why_not"]
    assert found["points"] == []
    assert found["pools"]["decode"]["families"]["small operators"]["ratio"] == pytest.approx(1.4)


# --- how it is shown ----------------------------------------------------------------------------


def printed(report: dict[str, Any]) -> str:
    console = Console(file=StringIO(), width=220)
    print_execution(console, {"": report})
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def shown_facts(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report whose devices say what real ones do."""
    facts = {"device": "cpu", "backend": "cpu", "layers_run": 2, "layers": 4}
    facts |= {"weight_bytes": 1e6, "kv_bytes": 1e6}
    for pool in report["pools"].values():
        pool["device"] = facts | {"tag_check": False, "tag_check_s": None} | pool["device"]
    return report


def test_the_table_shows_intervals_what_is_outside_and_the_drift(place: Path) -> None:
    text = printed(shown_facts(study(scenario(place), factor=20.0, machine_factor=2.0)))
    assert "error without drift" in text
    assert "outside: the executed figure lies outside the predicted interval" in text
    assert "time now over time when cpu-tonnage was measured" in text
    assert "decode attention 2.00 (2.00-2.00)" in text
    plain = printed(shown_facts(study(scenario("datasheet"))))
    assert "error without drift" not in plain
    assert "nothing to compare with: predicted from the datasheet" in plain


def test_a_session_s_report_has_every_part_and_what_is_missing(place: Path) -> None:
    report = shown_facts(study(scenario(place), factor=1.5, machine_factor=1.5))
    parts = {
        name: {"title": name.upper(), "date": "2026-11-30", "wall_s": 3.0, "result": report}
        for name in ("one", "two")
    }
    whole = {
        "machine": {**MACHINE, "driver": None},
        "gpu": "cpu",
        "parts": parts,
        "failed": {"four": "OutOfMemoryError: too large"},
        "missing": ["three", "four"],
    }
    titles = {"one": "ONE", "two": "TWO", "three": "THREE", "four": "FOUR"}
    lines = report_of(whole, titles, ("two", "one")).splitlines()
    assert "# Measured on a processor" in lines
    assert [line for line in lines if line.startswith("## ")] == ["## ONE", "## TWO"]
    assert "### TWO over ONE, output rate" in lines
    assert "| 1 concurrent | 1.000 | 1.000 |" in lines
    assert "**FOUR failed**: OutOfMemoryError: too large" in lines
    assert "Not there yet: THREE, FOUR. Run it again." in lines
    (row,) = {line for line in lines if line.startswith("| 1 concurrent | TPOT mean")}
    assert "| -33.3% |" in row
    assert row.endswith(("| +0.0% |", "| -0.0% |"))
