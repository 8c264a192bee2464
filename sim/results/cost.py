"""What tokens cost: the price of the GPUs over the tokens that are charged for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_S_PER_HOUR = 3600
_HOURS_PER_YEAR = 8760
_MILLION = 1e6
Rates = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class OwnedGpu:
    """A GPU that was bought, with its share of the server, the network and the room.

    `interest` is a year's, paid on what is still owed; 0 is a loan without interest.
    """

    capital_usd: float
    life_years: float
    watts: float
    usd_per_kwh: float
    pue: float = 1.0
    interest: float = 0.0
    residual_usd: float = 0.0
    upkeep_usd_per_year: float = 0.0

    def gpu_hour_usd(self) -> float:
        """Return what an hour of it costs, used or not.

        Capital is paid back in equal yearly payments at the end of each year (an annuity), less
        what it sells for at the end; power is drawn all year, ``watts x pue``.
        """
        power_usd = self.watts / 1000 * self.pue * self.usd_per_kwh
        yearly_usd = self.yearly_capital_usd() + self.upkeep_usd_per_year
        return yearly_usd / _HOURS_PER_YEAR + power_usd

    def yearly_capital_usd(self) -> float:
        """Return the yearly payment that leaves the residual value owed at the end of life."""
        if self.interest == 0:
            return (self.capital_usd - self.residual_usd) / self.life_years
        growth = float((1.0 + self.interest) ** self.life_years)
        return (self.capital_usd * growth - self.residual_usd) * self.interest / (growth - 1.0)


@dataclass(frozen=True, slots=True)
class PriceList:
    """What a million tokens of each kind are sold for."""

    input_usd: float
    cached_input_usd: float
    output_usd: float


@dataclass(frozen=True, slots=True)
class Price:
    """What a GPU costs, and which tokens pay for it.

    `split`: outputs pay for all GPUs; or prompts for the prefill pool and outputs for the others.
    `cached_input`: what a cached input token pays, as a share of one that is computed.
    `prefill_gpu_hour_usd`: of the prefill pool's GPUs where they cost something else.
    `mean_load`: the mean load of the day over that of the point; None where nothing is said.
    `sold`: what tokens are sold for.
    """

    gpu_hour_usd: float
    split: Literal["output", "pools"] = "output"
    cached_input: float = 0.1
    prefill_gpu_hour_usd: float | None = None
    mean_load: float | None = None
    sold: PriceList | None = None


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of the fleet, and of the pools that compute prompts alone and that generate."""

    fleet: int
    prefill: int
    decode: int


def cost(price: Price, gpus: Gpus, rates: Rates) -> dict[str, float]:
    """Return the fleet's price per hour and the cost of a million tokens of each kind.

    By `pools`, with P the price of the prefill pool per second, u tokens computed and c cached per
    second, and the share d of `cached_input`: an input token costs ``P / (u + d c)``, a cached one
    d times as much. What all tokens cost is then the fleet's price. The decode pool's own figure
    divides its GPUs alone by its steady rate.

    With a mean load m the fleet, which is paid all day, makes m of the point's tokens: `over_day`
    figures are the point's over m. With a price list: what the tokens of an hour bring at the
    point, or at the mean load where there is one, and what is left of it.
    """
    by_pools = price.split == "pools"
    prefill_usd, other_usd, fleet_usd = _usd_per_s(price, gpus)
    found = {
        "usd_per_million_output_tokens": _per_million(
            other_usd if by_pools else fleet_usd, rates.get("output_tokens_per_s")
        ),
        "decode_pool_usd_per_million_output_tokens": _per_million(
            price.gpu_hour_usd / _S_PER_HOUR * gpus.decode, rates.get("decode_output_tokens_per_s")
        ),
    }
    inputs = rates.get("input_tokens_per_s")
    if by_pools and inputs is not None:
        cached = rates.get("cached_input_tokens_per_s")
        charged = inputs - (1.0 - price.cached_input) * (cached or 0.0)
        usd = _per_million(prefill_usd, charged)
        found["usd_per_million_input_tokens"] = usd
        if usd is not None and cached is not None:
            found["usd_per_million_cached_input_tokens"] = price.cached_input * usd
    known = {name: usd for name, usd in found.items() if usd is not None}
    usd_per_hour = _usd_per_hour(price, gpus)
    return {
        "usd_per_hour": usd_per_hour,
        **known,
        **_over_day(price.mean_load, known),
        **_margin(price, usd_per_hour, rates),
    }


def _usd_per_hour(price: Price, gpus: Gpus) -> float:
    if price.prefill_gpu_hour_usd is None:
        return price.gpu_hour_usd * gpus.fleet
    others = gpus.fleet - gpus.prefill
    return price.prefill_gpu_hour_usd * gpus.prefill + price.gpu_hour_usd * others


def _usd_per_s(price: Price, gpus: Gpus) -> tuple[float, float, float]:
    """Return what the prefill pool, the other GPUs and the fleet cost per second."""
    others = gpus.fleet - gpus.prefill
    usd_per_s = price.gpu_hour_usd / _S_PER_HOUR
    if price.prefill_gpu_hour_usd is None:
        return usd_per_s * gpus.prefill, usd_per_s * others, usd_per_s * gpus.fleet
    prefill_usd = price.prefill_gpu_hour_usd / _S_PER_HOUR * gpus.prefill
    return prefill_usd, usd_per_s * others, prefill_usd + usd_per_s * others


def _over_day(mean_load: float | None, known: dict[str, float]) -> dict[str, float]:
    if mean_load is None:
        return {}
    return {"mean_load": mean_load} | {
        f"over_day_{name}": usd / mean_load for name, usd in known.items()
    }


def _margin(price: Price, usd_per_hour: float, rates: Rates) -> dict[str, float]:
    """Return revenue and margin per hour, and the load at which one pays for the other."""
    sold, outputs = price.sold, rates.get("output_tokens_per_s")
    if sold is None or outputs is None:
        return {}
    inputs = rates.get("input_tokens_per_s") or 0.0
    cached = rates.get("cached_input_tokens_per_s") or 0.0
    usd_per_s = (inputs - cached) * sold.input_usd + cached * sold.cached_input_usd
    usd_per_s = (usd_per_s + outputs * sold.output_usd) / _MILLION
    at_point_usd = usd_per_s * _S_PER_HOUR
    revenue_usd = at_point_usd * (1.0 if price.mean_load is None else price.mean_load)
    found = {
        "revenue_usd_per_hour": revenue_usd,
        "margin_usd_per_hour": revenue_usd - usd_per_hour,
    }
    if revenue_usd > 0:
        found["margin_share"] = (revenue_usd - usd_per_hour) / revenue_usd
        found["break_even_load"] = usd_per_hour / at_point_usd
    return found


def _per_million(usd_per_s: float, tokens_per_s: float | None) -> float | None:
    return usd_per_s / tokens_per_s * _MILLION if tokens_per_s else None
