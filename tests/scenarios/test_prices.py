"""Price tables: which price a GPU has, and what is said of one without."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tonnage.scenarios.catalogue import gpu_names, scenario_names
from tonnage.scenarios.load import load_scenario, parse_scenario
from tonnage.scenarios.prices import (
    gpu_hour_usd,
    load_table,
    price_of,
    price_sources,
    table_names,
)
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError

ROOT = Path(__file__).resolve().parents[2]
TABLE = """
date: 2026-10-01
source: "our contract"
gpu_hour_usd: {h200-sxm: 2.50, b200-sxm: 4.00, my-gpu: 1.25}
owned:
  h100-sxm: {capital_usd: 35040, life_years: 4, watts: 0, usd_per_kwh: 0, pue: 1}
"""
OWNED = {"capital_usd": 35040, "life_years": 4, "watts": 1000, "usd_per_kwh": 0.1, "pue": 1.5}
MIXED = {
    "prefill": {"tp": 8, "gpu": "h100-sxm"},
    "decode": {"tp": 8},
}


def scenario(price: dict[str, Any], folder: Path | None = None, **more: Any) -> Scenario:
    return parse_scenario({"gpu": "h200-sxm", "price": price, **more}, "my.yaml", folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prices.yaml").write_text(TABLE, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", table_names())
def test_a_shipped_table_names_its_date_its_source_and_known_gpus(name: str) -> None:
    table = load_table(name)
    assert table.names()
    assert set(table.names()) <= set(gpu_names())
    assert table.date <= datetime.date(2026, 12, 31)
    assert "example, not a quote" in table.source or "2026-09-20" in table.source


def test_the_scenarios_own_gpu_has_the_price_that_was_given(folder: Path) -> None:
    asked = scenario({"gpu_hour_usd": 3.5, "table": "prices.yaml"}, folder)
    assert gpu_hour_usd(asked, "h200-sxm") == 3.5  # not the table's 2.50
    assert gpu_hour_usd(asked, "b200-sxm") == 4.0
    assert gpu_hour_usd(asked, "h100-sxm") == pytest.approx(1.0)  # 8,760 USD a year


def test_an_owned_gpu_is_priced_by_what_it_costs_its_owner() -> None:
    assert gpu_hour_usd(scenario({"owned": OWNED}), "h200-sxm") == pytest.approx(1.15)


def test_one_price_without_a_table_is_for_the_gpus_of_the_pools_too() -> None:
    asked = scenario({"gpu_hour_usd": 3.5}, pools=MIXED)
    assert gpu_hour_usd(asked, "h100-sxm") == 3.5
    price = price_of(asked)
    assert price is not None
    assert price.prefill_gpu_hour_usd is None


def test_with_a_table_every_pool_has_the_price_of_its_gpu(folder: Path) -> None:
    price = price_of(scenario({"table": "prices.yaml", "split": "pools"}, folder, pools=MIXED))
    assert price is not None
    assert price.gpu_hour_usd == 2.5
    assert price.prefill_gpu_hour_usd == pytest.approx(1.0)


def test_a_gpu_of_ones_own_is_found_by_the_name_in_its_file(folder: Path) -> None:
    shipped = ROOT / "scenarios" / "gpus" / "h200-sxm.yaml"
    text = shipped.read_text(encoding="utf-8").replace("name: h200-sxm", "name: my-gpu")
    (folder / "my-gpu.yaml").write_text(text, encoding="utf-8")
    asked = parse_scenario(
        {"gpu": "my-gpu.yaml", "price": {"table": "prices.yaml"}}, "my.yaml", folder
    )
    assert gpu_hour_usd(asked, "my-gpu.yaml") == gpu_hour_usd(asked, "my-gpu") == 1.25


def test_a_table_that_changes_is_read_again(folder: Path) -> None:
    asked = scenario({"table": "prices.yaml"}, folder)
    assert gpu_hour_usd(asked, "b200-sxm") == 4.0
    file = folder / "prices.yaml"
    file.write_text(TABLE.replace("4.00", "5.25"), encoding="utf-8")
    assert gpu_hour_usd(asked, "b200-sxm") == 5.25


@pytest.mark.parametrize(
    ("price", "gpu", "message"),
    [
        (
            {},
            "h200-sxm",
            "my.yaml: price: h200-sxm has no price; give price.gpu_hour_usd, or price",
        ),
        (
            {"gpu_hour_usd": 3},
            "b200-sxm",
            "my.yaml: price: b200-sxm has no price; give price.table",
        ),
        ({"table": "prices.yaml"}, "gb200", "my.yaml: price.table: gb200 has no price; add it"),
        ({"table": "nowhere.yaml"}, "gb200", "my.yaml: price.table: nowhere.yaml: no such file"),
        ({"table": "akash"}, "gb200", "did you mean 'akash-2026-09'?"),
    ],
)
def test_a_gpu_without_a_price_names_file_and_mend(
    price: dict[str, Any], gpu: str, message: str, folder: Path
) -> None:
    with pytest.raises(BadInputError) as error:
        gpu_hour_usd(scenario(price, folder), gpu)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "has the fields date, source and gpu_hour_usd"),
        ("date: 2026-10-01", "source: is missing"),
        ("date: yesterday\nsource: x", "date: "),
        ("date: 2026-10-01\nsource: x\ngpu_hour_usd: {h200-sxm: -1}", "gpu_hour_usd.h200-sxm: "),
        ("date: 2026-10-01\nsource: x\nprices: {}", "prices: unknown field"),
        ("date: 2026-10-01\nsource: [", "prices.yaml: "),
        (
            "date: 2026-10-01\nsource: x\nowned: {h100-sxm: {capital_usd: 1}}",
            "owned.h100-sxm.life_years: is missing",
        ),
    ],
)
def test_a_mistake_in_a_table_names_the_field(text: str, message: str, folder: Path) -> None:
    (folder / "prices.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError, match=r"prices\.yaml: ") as error:
        gpu_hour_usd(scenario({"table": "prices.yaml"}, folder), "h200-sxm")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("price", "message"),
    [
        ({"gpu_hour_usd": 1, "owned": OWNED}, "price.owned: gpu_hour_usd prices that GPU already"),
        ({"owned": {**OWNED, "residual_usd": 1e6}}, "price.owned.residual_usd: 1e+06 is more"),
        ({"owned": {**OWNED, "pue": 0.9}}, "price.owned.pue"),
        ({"utilisation": 0.5, "day": "diurnal"}, "price.utilisation: day gives it already"),
        ({"utilisation": 0}, "price.utilisation"),
        ({"day": [[25, 1]]}, "price.day: hours must rise"),
        (
            {
                "list": {
                    "input_usd_per_million": 1,
                    "output_usd_per_million": 1,
                    "cached_discount": 0.5,
                    "cached_input_usd_per_million": 0.5,
                }
            },
            "price.list.cached_discount: cached tokens have a price already",
        ),
    ],
)
def test_a_price_that_contradicts_itself_is_refused(price: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError) as error:
        scenario(price)
    assert message in str(error.value)


def test_a_day_is_not_counted_twice() -> None:
    traffic = {"kind": "poisson", "rate_per_s": 1, "shape": "diurnal"}
    with pytest.raises(BadInputError, match=r"price\.day: the offered rate follows traffic\.shape"):
        scenario({"gpu_hour_usd": 1, "day": "diurnal"}, traffic=traffic)


def test_mean_load_is_that_of_the_day() -> None:
    assert scenario({"day": "diurnal"}).price.mean_load() == pytest.approx(1 / 1.5)
    # Up from 0 to 2 in twelve hours and down again: half its peak on average.
    assert scenario({"day": [[0, 0], [12, 2]]}).price.mean_load() == pytest.approx(0.5)
    assert scenario({"day": [[6, 3]]}).price.mean_load() == 1.0
    assert scenario({"utilisation": 0.3}).price.mean_load() == 0.3
    assert scenario({}).price.mean_load() is None


@pytest.mark.parametrize(("cached", "usd"), [({}, 0.6), ({"cached_discount": 0.75}, 0.15)])
def test_a_cached_token_is_sold_at_a_discount(cached: dict[str, Any], usd: float) -> None:
    listed = {"input_usd_per_million": 0.6, "output_usd_per_million": 2.5, **cached}
    price = price_of(scenario({"gpu_hour_usd": 1, "list": listed}))
    assert price is not None
    assert price.sold is not None
    assert price.sold.cached_input_usd == pytest.approx(usd)


def test_what_was_not_asked_for_is_not_in_the_resolved_scenario() -> None:
    plain = scenario({"gpu_hour_usd": 3.5}).resolved()["price"]
    assert plain == {"gpu_hour_usd": 3.5, "split": "output", "cached_input": 0.1}
    full = scenario({"owned": OWNED, "table": "example", "day": [[0, 1], [12, 2]]})
    assert parse_scenario(full.resolved()).price == full.price


def test_a_report_says_whose_prices_they_are() -> None:
    (line,) = price_sources(scenario({"table": "akash-2026-09"}))
    assert line.startswith(
        "cost: h200-sxm at 4.45 USD an hour (akash-2026-09, of 2026-09-20: akash"
    )
    (line,) = price_sources(scenario({"owned": OWNED}))
    assert "1.150 USD an hour" in line
    assert "no interest" in line
    assert not list(price_sources(scenario({"gpu_hour_usd": 3.5})))


@pytest.mark.parametrize("name", scenario_names())
def test_shipped_scenarios_have_a_price_for_all_their_gpus_or_none(name: str) -> None:
    asked = load_scenario(name)
    assert (price_of(asked) is not None) == asked.price.is_given


# --- the document ---------------------------------------------------------------------------------

BLOCKS = re.findall(r"(?s)```yaml\n(.*?)```", (ROOT / "docs" / "cost.md").read_text("utf-8"))


@pytest.mark.parametrize("text", [block for block in BLOCKS if block.startswith("price:")])
def test_examples_of_the_document_are_scenarios(text: str) -> None:
    pools = {"prefill": {"tp": 8}, "decode": {"tp": 8}}
    asked = parse_scenario({**yaml.safe_load(text), "pools": pools}, folder=ROOT)
    assert price_of(asked) is not None
    if asked.price.owned is not None:
        assert f"{gpu_hour_usd(asked, 'h200-sxm'):.2f}" == "1.70"  # as the text says


def test_the_table_of_the_document_is_one(folder: Path) -> None:
    (text,) = (block for block in BLOCKS if block.startswith("date:"))
    (folder / "prices.yaml").write_text(text, encoding="utf-8")
    assert load_table("prices.yaml", folder).names() == ("b200-sxm", "h100-sxm", "h200-sxm")
