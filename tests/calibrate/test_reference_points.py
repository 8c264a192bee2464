"""Rows of a profile become the points that were measured for them, nearest to what a step runs."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from importlib import util

import numpy as np
import pytest

from tests.calibrate.measured_rows import TINY, measured_rows, usual_seconds
from tonnage.calibrate.grid import grid
from tonnage.calibrate.own_profile import profile_of
from tonnage.calibrate.points import Point
from tonnage.calibrate.reference_points import Reference, references_of, times_now
from tonnage.calibrate.wanted import Wanted, wanted_of
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.profile import Profile
from tonnage.sim.domain import PromptChunk, Step

DECODING = Step(np.array([90, 110, 130, 120]), 450, ())
PROMPTING = Step(np.zeros(0, dtype=np.int64), 0, (PromptChunk(60, 0),))
BOTH = Step(np.array([64]), 64, (PromptChunk(15, 0), PromptChunk(17, 0)))


@pytest.fixture(scope="module")
def points() -> dict[object, Point]:
    wanted = wanted_of(("laptop", "laptop-gqa", "laptop:tp2"), "cpu")
    sizes = replace(TINY, generic_formats=("bf16", "fp8", "int4_g128"))
    planned = grid(wanted, sizes, load_gpu("cpu"), on_gpu=False).points
    return {one.identity: one for one in planned}


@pytest.fixture(scope="module")
def profile(points: dict[object, Point]) -> Profile:
    return profile_of(measured_rows(points.values()), "cpu", day=date(2026, 11, 30))


def references(profile: Profile, wanted: Wanted, step: Step) -> dict[str, Reference]:
    found = references_of(profile, wanted, step, on_gpu=False)
    assert len({one.family for one in found}) == len(found)
    return {one.family: one for one in found}


@pytest.mark.parametrize("step", [DECODING, PROMPTING, BOTH])
@pytest.mark.parametrize("name", ["laptop", "laptop-gqa", "laptop:tp2"])
def test_every_reference_is_a_point_that_was_measured_and_its_seconds_are_its_row_s(
    profile: Profile, points: dict[object, Point], name: str, step: Step
) -> None:
    for one in wanted_of((name,), "cpu"):
        wanted = replace(one, kv_formats=one.kv_formats[:1])
        for reference in references(profile, wanted, step).values():
            for call in reference.calls:
                then = sum(usual_seconds(points[point.identity]) for point in call.points)
                assert call.seconds == pytest.approx(then, rel=1e-3), reference.family


def test_a_step_has_references_for_all_that_it_runs(profile: Profile) -> None:
    prefill, decode = wanted_of(("laptop",), "cpu")
    always = {"products, bf16", "routed experts", "small operators", "KV copies"}
    assert references(profile, decode, DECODING).keys() == always | {"decode attention"}
    assert references(profile, prefill, PROMPTING).keys() == always | {"prefill attention"}
    found = references(profile, decode, DECODING)
    assert {point.kernel for call in found["routed experts"].calls for point in call.points} == {
        "experts_int4_g128"
    }
    (four, *_) = sorted(call.points[0].axes["m"] for call in found["products, bf16"].calls)
    assert four <= 4
    attended = found["decode attention"].calls[0].points[0]
    assert (attended.kernel, attended.axes["batch"]) == ("mla_decode_fp8", 4)
    assert attended.axes["heads"] == 4  # the model's, not the generic ones


def test_a_product_of_fp8_is_timed_with_what_quantises_for_it(
    profile: Profile, points: dict[object, Point]
) -> None:
    (wanted,) = wanted_of(("laptop-gqa",), "cpu")
    products = [replace(one, format="fp8") for one in wanted.model.layers[0].weights]
    layers = tuple(replace(one, weights=tuple(products)) for one in wanted.model.layers)
    as_fp8 = replace(wanted, model=replace(wanted.model, layers=layers))
    found = references(profile, as_fp8, DECODING)["products, fp8_row"]
    for call in found.calls:
        assert [point.kernel for point in call.points] == ["gemm_fp8_row", "quantise_fp8_row"]
        assert all(point.identity in points for point in call.points)


def test_a_profile_that_lacks_a_table_has_no_reference_for_it(profile: Profile) -> None:
    (wanted,) = wanted_of(("laptop-gqa",), "cpu")
    tables = {name: one for name, one in profile.tables.items() if name != "gemm"}
    found = references(Profile(profile.header, tables), wanted, DECODING)
    assert "products, bf16" not in found
    assert "decode attention" in found


@pytest.mark.skipif(util.find_spec("torch") is None, reason="torch is not installed")
def test_references_are_timed_on_this_machine(profile: Profile) -> None:
    seconds = times_now("cpu", 1)
    (wanted,) = wanted_of(("laptop-gqa",), "cpu")
    for reference in references(profile, wanted, DECODING).values():
        found = seconds(reference)
        assert found is not None
        assert len(found) == len(reference.calls)
        assert all(0.0 < one < 0.1 for one in found)
