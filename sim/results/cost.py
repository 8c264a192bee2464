"""What tokens cost: the price of the GPUs over the tokens that are charged for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_S_PER_HOUR = 3600
_MILLION = 1e6
Rates = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Price:
    """What a GPU costs, and which tokens pay for it.

    `split`: outputs pay for all GPUs; or prompts for the prefill pool and outputs for the others.
    `cached_input`: what a cached input token pays, as a share of one that is computed.
    """

    gpu_hour_usd: float
    split: Literal["output", "pools"] = "output"
    cached_input: float = 0.1


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
    """
    usd_per_s = price.gpu_hour_usd / _S_PER_HOUR
    by_pools = price.split == "pools"
    paid_by_outputs = gpus.fleet - gpus.prefill if by_pools else gpus.fleet
    found = {
        "usd_per_million_output_tokens": _per_million(
            usd_per_s * paid_by_outputs, rates.get("output_tokens_per_s")
        ),
        "decode_pool_usd_per_million_output_tokens": _per_million(
            usd_per_s * gpus.decode, rates.get("decode_output_tokens_per_s")
        ),
    }
    inputs = rates.get("input_tokens_per_s")
    if by_pools and inputs is not None:
        cached = rates.get("cached_input_tokens_per_s")
        charged = inputs - (1.0 - price.cached_input) * (cached or 0.0)
        usd = _per_million(usd_per_s * gpus.prefill, charged)
        found["usd_per_million_input_tokens"] = usd
        if usd is not None and cached is not None:
            found["usd_per_million_cached_input_tokens"] = price.cached_input * usd
    known = {name: usd for name, usd in found.items() if usd is not None}
    return {"usd_per_hour": price.gpu_hour_usd * gpus.fleet, **known}


def _per_million(usd_per_s: float, tokens_per_s: float | None) -> float | None:
    return usd_per_s / tokens_per_s * _MILLION if tokens_per_s else None
