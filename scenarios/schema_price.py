"""The `price` section: what a GPU costs, and which tokens pay for it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tonnage.scenarios.schema_base import Number, Section
from tonnage.sim.results.cost import Price


class PriceSection(Section):
    """What a GPU costs, and which tokens pay for it; without a price no cost is reported.

    `split`: outputs pay for all, or prompts for the prefill pool. `cached_input`: what a cached
    input token pays, as a share of one that is computed.
    """

    gpu_hour_usd: Annotated[Number, Field(ge=0)] | None = None
    split: Literal["output", "pools"] = "output"
    cached_input: Annotated[Number, Field(ge=0, le=1)] = 0.1  # assumed: price lists say 0.1 to 0.5

    def spec(self) -> Price | None:
        """Return the price, None where there is none."""
        usd = self.gpu_hour_usd
        return None if usd is None else Price(usd, self.split, self.cached_input)
