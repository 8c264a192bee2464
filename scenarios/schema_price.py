"""The `price` section: what a GPU costs, which tokens pay for it, and what they are sold for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tonnage.scenarios.schema_base import Number, Positive, Section, Text, field_error
from tonnage.scenarios.schema_traffic import checked_shape, shape_points
from tonnage.sim.results.cost import OwnedGpu, Price, PriceList
from tonnage.sim.traffic.shapes import DayShape

NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]


def _is_none(value: Any) -> bool:
    return value is None


# Left out of a resolved scenario where it was not asked for.
Unasked = Field(default=None, exclude_if=_is_none)


class OwnedSection(Section):
    """A GPU that was bought: its share of the server, the network and the room included.

    `interest` is a year's; 0 says that money costs nothing.
    """

    capital_usd: NotNegative
    life_years: Positive
    watts: NotNegative  # drawn on average, the server's share included
    usd_per_kwh: NotNegative
    pue: Annotated[Number, Field(ge=1)] = 1.3  # assumed: what the building draws per watt of it
    interest: NotNegative = 0.0
    residual_usd: NotNegative = 0.0
    upkeep_usd_per_year: NotNegative = 0.0

    @model_validator(mode="after")
    def _loses_value(self) -> OwnedSection:
        if self.residual_usd > self.capital_usd:
            problem = f"{self.residual_usd:g} is more than the capital, {self.capital_usd:g}"
            raise field_error("residual_usd", f"{problem}; give what it sells for at the end")
        return self

    def spec(self) -> OwnedGpu:
        """Return what the GPU costs its owner."""
        return OwnedGpu(
            capital_usd=self.capital_usd,
            life_years=self.life_years,
            watts=self.watts,
            usd_per_kwh=self.usd_per_kwh,
            pue=self.pue,
            interest=self.interest,
            residual_usd=self.residual_usd,
            upkeep_usd_per_year=self.upkeep_usd_per_year,
        )


class PriceListSection(Section):
    """What a million tokens are sold for; a cached one at its own price or at a discount."""

    input_usd_per_million: NotNegative
    output_usd_per_million: NotNegative
    cached_input_usd_per_million: NotNegative | None = None
    cached_discount: Share | None = None

    @model_validator(mode="after")
    def _one_price_for_cached_tokens(self) -> PriceListSection:
        if self.cached_discount is not None and self.cached_input_usd_per_million is not None:
            problem = "cached tokens have a price already, cached_input_usd_per_million"
            raise field_error("cached_discount", f"{problem}; remove one of the two")
        return self

    def spec(self) -> PriceList:
        """Return the list with the price of a cached token worked out."""
        cached = self.cached_input_usd_per_million
        if cached is None:
            cached = self.input_usd_per_million * (1.0 - (self.cached_discount or 0.0))
        return PriceList(self.input_usd_per_million, cached, self.output_usd_per_million)


class PriceSection(Section):
    """What a GPU costs, and which tokens pay for it; without a price no cost is reported.

    `gpu_hour_usd` or `owned` is the scenario's GPU; `table` prices the others (`prices.py` has the
    rule). `split`: outputs pay for all, or prompts for the prefill pool. `cached_input`: what a
    cached input token pays, as a share of one that is computed. `utilisation`: the mean load of the
    day over that of the point; or `day` gives its shape, as `traffic.shape` does. `list`: what
    tokens are sold for.
    """

    gpu_hour_usd: NotNegative | None = None
    owned: OwnedSection | None = Unasked
    table: Text | None = Unasked
    split: Literal["output", "pools"] = "output"
    cached_input: Share = 0.1  # assumed: price lists say 0.1 to 0.5
    utilisation: Annotated[Number, Field(gt=0, le=1)] | None = Unasked
    day: Annotated[
        tuple[tuple[float, float], ...] | None,
        BeforeValidator(shape_points),
        AfterValidator(checked_shape),
    ] = Unasked
    list: PriceListSection | None = Unasked

    @model_validator(mode="after")
    def _says_each_thing_once(self) -> PriceSection:
        if self.owned is not None and self.gpu_hour_usd is not None:
            raise field_error("owned", "gpu_hour_usd prices that GPU already; remove one of them")
        if self.day is not None and self.utilisation is not None:
            raise field_error("utilisation", "day gives it already; remove one of the two")
        return self

    @property
    def is_given(self) -> bool:
        """Whether any GPU has a price."""
        return any(one is not None for one in (self.gpu_hour_usd, self.owned, self.table))

    def own_gpu_hour_usd(self) -> float | None:
        """Return what the scenario's own GPU costs an hour, None where only a table says."""
        return self.owned.spec().gpu_hour_usd() if self.owned is not None else self.gpu_hour_usd

    def mean_load(self) -> float | None:
        """Return the mean load of the day over its peak, None where nothing is said."""
        return self.utilisation if self.day is None else DayShape(self.day).mean_over_peak()

    def rules(self, gpu_hour_usd: float, prefill_gpu_hour_usd: float | None = None) -> Price:
        """Return what tokens pay, at these prices of a GPU."""
        sold = None if self.list is None else self.list.spec()
        return Price(
            gpu_hour_usd,
            self.split,
            self.cached_input,
            prefill_gpu_hour_usd,
            self.mean_load(),
            sold,
        )
