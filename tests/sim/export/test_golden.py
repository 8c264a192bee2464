"""Exports against the files that were reviewed; `python -m tests.sim.export.golden` renews them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest

from tests.sim.export.golden import FOLDER, cases, exported, golden_path, golden_text
from tests.sim.export.plans import PLANS
from tonnage.sim.export.summary import number
from tonnage.sim.planning.fleet_plan import FleetPlan


@pytest.mark.parametrize(("name", "to"), list(cases()))
def test_an_export_is_the_reviewed_one(name: str, to: str) -> None:
    assert golden_text(name, to) == golden_path(name, to).read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {golden_path(*one).name for one in cases()}


def numbers_of(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a plan's JSON object with its dotted name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_of(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from numbers_of(inner, f"{name}.{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


@pytest.mark.parametrize(("name", "to"), list(cases()))
def test_every_number_of_the_plan_stands_in_the_file(name: str, to: str) -> None:
    text = golden_text(name, to)
    tokens = set(re.findall(r"[0-9.]*[0-9](?:e[+-]?[0-9]+)?", unescape(text)))
    missing = [
        (field, value)
        for field, value in numbers_of(PLANS[name].to_dict())
        if not {number(value), repr(value)} & tokens and not untold(field, value)
    ]
    assert missing == []


def untold(field: str, value: float) -> bool:
    """Tell whether a number is that of something that the plan does not use."""
    unused_check = field.endswith("integrity.every_steps")  # no plan here has a tracker
    return unused_check or (field == ".host_cache_bytes" and value == 0)


def test_the_numbers_that_are_looked_for_are_those_of_the_plan() -> None:
    found = dict(numbers_of(PLANS["kimi-agents"].to_dict()))
    assert found[".pools.1.mem_fraction"] == 0.929
    assert found[".figures.output_tokens_per_s.high"] == 2263.75
    assert len(found) > 60


def test_a_plan_read_back_from_its_json_exports_the_same() -> None:
    import tonnage

    plan = PLANS["glm-long"]
    again = FleetPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert tonnage.export(again, "kubernetes") == exported("glm-long", "kubernetes")
