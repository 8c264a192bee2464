"""Prices in a simulation: tables, owned GPUs, a day and a price list, as a user sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.test_cli import small
from tests.test_cli import tonnage as tonnage

LISTED = "price.list={input_usd_per_million: 1, output_usd_per_million: 4, cached_discount: 0.5}"
OWNED = (
    "price={owned: {capital_usd: 35040, life_years: 4, watts: 1000, usd_per_kwh: 0.1, pue: 1.5}}"
)


def simulated(tonnage: Any, *sets: str) -> dict[str, Any]:
    arguments = small("kimi-k2.6-h200", *[part for one in sets for part in ("--set", one)])
    found: dict[str, Any] = json.loads(tonnage(*arguments, "--json", "-").output)
    return found


def test_a_price_list_and_a_day_reach_the_report(tonnage: Any) -> None:
    plain = simulated(tonnage)["points"][-1]["cost"]
    sold = simulated(tonnage, LISTED, "price.day=[[0, 0], [12, 2]]")["points"][-1]["cost"]
    assert plain == {name: sold[name] for name in plain}
    per_million = sold["usd_per_million_output_tokens"]
    assert sold["over_day_usd_per_million_output_tokens"] == pytest.approx(2 * per_million)
    # Resident requests have no prompts: a dollar buys the outputs of an hour at 4 a million.
    assert sold["break_even_load"] == pytest.approx(per_million / 4)
    assert sold["margin_usd_per_hour"] < 0 < sold["revenue_usd_per_hour"]


def test_an_owned_gpu_reaches_the_report(tonnage: Any) -> None:
    found = simulated(tonnage, OWNED)
    assert found["points"][0]["cost"]["usd_per_hour"] == pytest.approx(8 * 1.15)
    assert any("is owned: 1.150 USD an hour" in one for one in found["provenance"]["assumptions"])


def test_a_table_says_its_date_and_the_columns_of_a_list_are_shown(tonnage: Any) -> None:
    sets = ("--set", "price={table: akash-2026-09}", "--set", LISTED)
    done = tonnage(*small("kimi-k2.6-h200", *sets))
    assert (
        "h200-sxm at 4.45 USD an hour (akash-2026-09, of 2026-09-20: akash.network" in done.output
    )
    assert "margin USD / h" in done.output
    assert "pays from load" in done.output


def test_a_gpu_without_a_price_is_told_before_the_work(
    tonnage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.api.built_pools", lambda scenario: pytest.fail("it began"))
    done = tonnage(*small("kimi-k2.6-h200", "--set", "price={table: lambda-2026-09}"))
    assert done.code == 2
    assert "price.table: h200-sxm has no price" in done.error
    assert done.error.count("\n") == 1
