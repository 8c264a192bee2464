"""What tokens cost: by either rule they pay for the GPUs, no more and no less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.sim.results.cost import Gpus, OwnedGpu, Price, PriceList, cost

GPUS = Gpus(fleet=48, prefill=32, decode=16)
RATES: dict[str, float | None] = {
    "output_tokens_per_s": 1000.0,
    "input_tokens_per_s": 50_000.0,
    "cached_input_tokens_per_s": 40_000.0,
    "decode_output_tokens_per_s": 1200.0,
}


def test_outputs_pay_for_everything_by_default() -> None:
    found = cost(Price(3.6), GPUS, RATES)
    assert found["usd_per_hour"] == 48 * 3.6
    assert found["usd_per_million_output_tokens"] == pytest.approx(48.0)  # 0.048 USD a second
    assert found["decode_pool_usd_per_million_output_tokens"] == pytest.approx(0.016 / 1200 * 1e6)
    assert not any("input" in name for name in found)


def test_prompts_pay_for_the_pool_that_computes_them() -> None:
    """0.032 USD a second over 10,000 computed tokens and a tenth of 40,000 cached ones."""
    found = cost(Price(3.6, "pools", 0.1), GPUS, RATES)
    assert found["usd_per_million_output_tokens"] == pytest.approx(16.0)
    assert found["usd_per_million_input_tokens"] == pytest.approx(0.032 / 14_000 * 1e6)
    assert found["usd_per_million_cached_input_tokens"] == pytest.approx(0.0032 / 14_000 * 1e6)


@given(
    cached_share=st.floats(0, 1),
    cached_input=st.floats(0.01, 1),
    outputs=st.floats(1, 1e6),
    inputs=st.floats(1, 1e6),
)
def test_what_all_tokens_cost_is_the_price_of_the_fleet(
    cached_share: float, cached_input: float, outputs: float, inputs: float
) -> None:
    rates: dict[str, float | None] = {
        "output_tokens_per_s": outputs,
        "input_tokens_per_s": inputs,
        "cached_input_tokens_per_s": cached_share * inputs,
    }
    found = cost(Price(3.6, "pools", cached_input), GPUS, rates)
    paid = found["usd_per_million_output_tokens"] * outputs
    paid += found["usd_per_million_input_tokens"] * (1 - cached_share) * inputs
    paid += found["usd_per_million_cached_input_tokens"] * cached_share * inputs
    assert paid / 1e6 * 3600 == pytest.approx(found["usd_per_hour"])


def test_without_a_cache_all_input_tokens_cost_the_same() -> None:
    rates = {name: rate for name, rate in RATES.items() if not name.startswith("cached")}
    found = cost(Price(3.6, "pools"), GPUS, rates)
    assert found["usd_per_million_input_tokens"] == pytest.approx(0.032 / 50_000 * 1e6)
    assert "usd_per_million_cached_input_tokens" not in found


def test_nobody_pays_where_no_token_is_charged() -> None:
    nothing: dict[str, float | None] = {**RATES, "cached_input_tokens_per_s": 50_000.0}
    found = cost(Price(3.6, "pools", 0.0), GPUS, nothing)
    assert not any("input" in name for name in found)
    assert cost(Price(3.6), GPUS, {}) == {"usd_per_hour": pytest.approx(172.8)}


# --- pools of different GPUs, the day, a price list -----------------------------------------------


def test_pools_of_different_gpus_cost_what_each_costs() -> None:
    """32 GPUs at 1.8 and 16 at 3.6 USD an hour: 0.016 USD a second for each pool."""
    found = cost(Price(3.6, "pools", 0.1, prefill_gpu_hour_usd=1.8), GPUS, RATES)
    assert found["usd_per_hour"] == pytest.approx(32 * 1.8 + 16 * 3.6)
    assert found["usd_per_million_output_tokens"] == pytest.approx(16.0)
    assert found["usd_per_million_input_tokens"] == pytest.approx(0.016 / 14_000 * 1e6)
    together = cost(Price(3.6, prefill_gpu_hour_usd=1.8), GPUS, RATES)
    assert together["usd_per_million_output_tokens"] == pytest.approx(32.0)


def test_equal_prices_given_twice_change_nothing() -> None:
    once, twice = cost(Price(3.6), GPUS, RATES), cost(Price(3.6, "output", 0.1, 3.6), GPUS, RATES)
    assert twice == pytest.approx(once)


def test_a_fleet_that_is_half_idle_costs_twice_per_token() -> None:
    found = cost(Price(3.6, "pools", 0.1, mean_load=0.5), GPUS, RATES)
    for name in (
        "usd_per_million_output_tokens",
        "usd_per_million_input_tokens",
        "usd_per_million_cached_input_tokens",
        "decode_pool_usd_per_million_output_tokens",
    ):
        assert found[f"over_day_{name}"] == pytest.approx(2 * found[name])
    assert found["usd_per_hour"] == cost(Price(3.6), GPUS, RATES)["usd_per_hour"]


def test_a_day_of_tokens_pays_for_a_day_of_gpus() -> None:
    """Hour by hour: 24 hours of the fleet over the tokens of loads 0.2, 0.4 ... 1.0 of the peak."""
    loads = [0.2, 0.4, 0.6, 0.8, 1.0, 0.6] * 4
    found = cost(Price(3.6, mean_load=sum(loads) / 24), GPUS, RATES)
    tokens = sum(load * 1000.0 * 3600 for load in loads)
    by_hand = 24 * 48 * 3.6 / tokens * 1e6
    assert found["over_day_usd_per_million_output_tokens"] == pytest.approx(by_hand)


SOLD = PriceList(input_usd=2.0, cached_input_usd=0.5, output_usd=10.0)
# A second: 10,000 x 2 + 40,000 x 0.5 + 1,000 x 10 USD of a million tokens are 0.05 USD.


def test_margin_against_a_price_list() -> None:
    found = cost(Price(3.6, sold=SOLD), GPUS, RATES)
    assert found["revenue_usd_per_hour"] == pytest.approx(0.05 * 3600)
    assert found["margin_usd_per_hour"] == pytest.approx(180.0 - 172.8)
    assert found["margin_share"] == pytest.approx(7.2 / 180.0)
    assert found["break_even_load"] == pytest.approx(172.8 / 180.0)


def test_at_the_break_even_load_nothing_is_left() -> None:
    load = cost(Price(3.6, sold=SOLD), GPUS, RATES)["break_even_load"]
    found = cost(Price(3.6, sold=SOLD, mean_load=load), GPUS, RATES)
    assert found["margin_usd_per_hour"] == pytest.approx(0.0, abs=1e-9)
    assert found["break_even_load"] == pytest.approx(load)


def test_nothing_sold_for_nothing_has_no_share() -> None:
    found = cost(Price(3.6, sold=PriceList(0.0, 0.0, 0.0)), GPUS, RATES)
    assert found["margin_usd_per_hour"] == -found["usd_per_hour"]
    assert "margin_share" not in found


# --- owned hardware -------------------------------------------------------------------------------


def test_an_owned_gpu_without_interest_by_hand() -> None:
    """(35,040 - 5,040) over 4 years is 7,500 a year; with 1,260 of upkeep 8,760: 1 USD an hour.

    1 kW x 1.5 at 0.10 USD per kWh is 0.15 more.
    """
    gpu = OwnedGpu(35_040, 4, 1000, 0.10, pue=1.5, residual_usd=5_040, upkeep_usd_per_year=1_260)
    assert gpu.gpu_hour_usd() == pytest.approx(1.15)


@given(
    capital=st.floats(1, 1e5),
    years=st.integers(1, 10),
    interest=st.floats(0.001, 0.5),
    residual_share=st.floats(0, 1),
)
def test_the_yearly_payment_pays_the_loan_back(
    capital: float, years: int, interest: float, residual_share: float
) -> None:
    """Year by year: interest on what is owed, less the payment, ends at the residual value."""
    residual = residual_share * capital
    gpu = OwnedGpu(capital, years, 0, 0, interest=interest, residual_usd=residual)
    owed = capital
    for _ in range(years):
        owed = owed * (1 + interest) - gpu.yearly_capital_usd()
    assert owed == pytest.approx(residual, abs=1e-6 * capital * (1 + interest) ** years)


def test_little_interest_is_nearly_none() -> None:
    free = OwnedGpu(30_000, 5, 0, 0)
    cheap = OwnedGpu(30_000, 5, 0, 0, interest=1e-6)
    assert cheap.gpu_hour_usd() == pytest.approx(free.gpu_hour_usd(), rel=1e-5)
    assert OwnedGpu(30_000, 5, 0, 0, interest=0.1).gpu_hour_usd() > free.gpu_hour_usd()
