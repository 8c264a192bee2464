"""Dated tables of what a GPU costs an hour, and which price a scenario's GPUs have."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationError

from tonnage.scenarios.catalogue import gpu_names, load_gpu, unknown_name
from tonnage.scenarios.load import parse_yaml
from tonnage.scenarios.messages import first_problem
from tonnage.scenarios.schema_base import Section, Text
from tonnage.scenarios.schema_price import NotNegative, OwnedSection
from tonnage.sim.domain import BadInputError
from tonnage.sim.results.cost import Price

if TYPE_CHECKING:
    from tonnage.scenarios.schema import Scenario

_HERE = Path(__file__).parent / "prices"
_SUFFIXES = (".yaml", ".yml")


class PriceTable(Section):
    """The contents of one price table: rented GPUs and owned ones, by the names of the catalogue.

    `date` is the day of which the prices are; `source` says whose they are.
    """

    date: datetime.date
    source: Annotated[Text, Field(min_length=1)]
    gpu_hour_usd: dict[str, NotNegative] = Field(default={})
    owned: dict[str, OwnedSection] = Field(default={})

    def price(self, gpu_name: str) -> float | None:
        """Return what that GPU costs an hour, None where the table has it not."""
        if gpu_name in self.owned:
            return self.owned[gpu_name].spec().gpu_hour_usd()
        return self.gpu_hour_usd.get(gpu_name)

    def names(self) -> tuple[str, ...]:
        """Return the GPUs that have a price."""
        return tuple(sorted({*self.gpu_hour_usd, *self.owned}))


@cache
def table_names() -> tuple[str, ...]:
    """Return the names of the shipped tables."""
    return tuple(sorted(path.stem for path in _HERE.glob("*.yaml")))


def load_table(name_or_path: str, folder: Path | None = None) -> PriceTable:
    """Return a shipped table, or the one of a file; a relative path starts from `folder`."""
    path = _table_path(name_or_path, folder or Path())
    return _read_table(path, path.stat().st_mtime_ns)


def gpu_hour_usd(scenario: Scenario, gpu_name: str) -> float:
    """Return what one GPU of that name costs an hour under the scenario's `price` section.

    `price.gpu_hour_usd`, or `price.owned`, prices the scenario's own `gpu`, whatever a table says;
    the row of `price.table` prices every other GPU. Without a table the scenario's one price also
    holds for GPUs that its pools name. Raises BadInputError for a GPU that has no price.
    """
    source, folder = scenario.origin()
    section, name = scenario.price, _plain_name(gpu_name, folder)
    own_usd = section.own_gpu_hour_usd()
    if own_usd is not None and name in _own_names(scenario, folder):
        return own_usd
    if section.table is None:
        tables = ", ".join(table_names())
        mend = f"give price.table: a file of yours, or a shipped one ({tables})"
        if name == _plain_name(scenario.gpu, folder):
            mend = f"give price.gpu_hour_usd, or {mend.removeprefix('give ')}"
        raise BadInputError(f"{source}: price: {name} has no price; {mend}")
    try:
        table = load_table(section.table, folder)
    except BadInputError as error:
        raise BadInputError(f"{source}: price.table: {error}") from error
    found = table.price(name)
    if found is None:
        where = f"{section.table} ({', '.join(table.names()) or 'it has none'})"
        mend = f"add it under gpu_hour_usd in a table of yours; {where} has it not"
        raise BadInputError(f"{source}: price.table: {name} has no price; {mend}")
    return found


def price_of(scenario: Scenario) -> Price | None:
    """Return what tokens pay under the scenario, by the GPUs of its pools; None without a price.

    Raises BadInputError for a pool whose GPU has no price.
    """
    if not scenario.price.is_given:
        return None
    by_role = {
        role: gpu_hour_usd(scenario, pool.gpu or scenario.gpu)
        for role, pool in scenario.pools.named().items()
    }
    generating = by_role.get("decode", by_role.get("serve"))
    prefill = by_role.get("prefill")
    if generating is None:  # a prefill pool alone
        generating = by_role["prefill"]
    return scenario.price.rules(generating, None if prefill == generating else prefill)


def price_sources(scenario: Scenario) -> Iterator[str]:
    """Yield whose prices the scenario's GPUs have; nothing for one that was simply given."""
    owned, folder = scenario.price.owned, scenario.origin()[1]
    own = _own_names(scenario, folder)
    if owned is not None:
        yield f"cost: {_owned_line(_plain_name(scenario.gpu, folder), owned)}"
    if scenario.price.table is None:
        return
    table = load_table(scenario.price.table, folder)
    for gpu in dict.fromkeys(pool.gpu or scenario.gpu for pool in scenario.pools.named().values()):
        name = _plain_name(gpu, folder)
        usd = table.price(name)
        if usd is None or (name in own and scenario.price.own_gpu_hour_usd() is not None):
            continue
        if name in table.owned:
            yield f"cost: {_owned_line(name, table.owned[name])} ({scenario.price.table})"
        else:
            place = f"{scenario.price.table}, of {table.date.isoformat()}"
            yield f"cost: {name} at {usd:g} USD an hour ({place}: {' '.join(table.source.split())})"


def _owned_line(name: str, owned: OwnedSection) -> str:
    interest = f"interest {owned.interest:.1%} a year" if owned.interest else "no interest"
    spec = owned.spec()
    return (
        f"{name} is owned: {spec.gpu_hour_usd():.3f} USD an hour, used or not, from "
        f"{owned.capital_usd:,.0f} USD over {owned.life_years:g} years ({interest}), "
        f"{owned.watts:g} W x PUE {owned.pue:g} at {owned.usd_per_kwh:g} USD per kWh"
    )


def _own_names(scenario: Scenario, folder: Path) -> set[str]:
    """Return the GPUs that the scenario's one price is for."""
    texts = [scenario.gpu]
    if scenario.price.table is None:
        texts += [pool.gpu for pool in scenario.pools.named().values() if pool.gpu is not None]
    return {_plain_name(text, folder) for text in texts}


def _plain_name(text: str, folder: Path) -> str:
    """Return the name of a GPU that may be given by its file."""
    if not text.endswith(_SUFFIXES) or text in gpu_names():
        return text
    beside = folder / text
    return load_gpu(str(beside if beside.is_file() else text)).name


def _table_path(name: str, folder: Path) -> Path:
    if name in table_names():
        return _HERE / f"{name}.yaml"
    for path in (folder / name, Path(name)):
        if path.is_file():
            return path
    if Path(name).suffix in _SUFFIXES:
        raise BadInputError(f"{name}: no such file; check the path")
    raise BadInputError(f"{unknown_name('price table', name, table_names())}; or give a file")


@cache
def _read_table(path: Path, _changed_ns: int) -> PriceTable:
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: a price table has the fields date, source and gpu_hour_usd")
    try:
        return PriceTable.model_validate(data)
    except ValidationError as error:
        raise BadInputError(f"{path}: {first_problem(error, data)}") from error
