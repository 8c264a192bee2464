"""What tokens cost: by either rule they pay for the GPUs, no more and no less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.sim.results.cost import Gpus, Price, cost

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
