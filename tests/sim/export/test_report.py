"""Tables and the report: nothing is lost, nothing of a name becomes markup, no network."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

import tonnage
from tests.sim.export.plans import PLANS
from tonnage.plan_export import PlanFile, export_file
from tonnage.sim.export.report import charts
from tonnage.sim.planning.fleet_plan import FleetPlan

FRONT: tuple[dict[str, Any], ...] = (
    {
        "fleet": "2 x <b>8</b> h200",
        "output_tokens_per_s_per_user": 31.5,
        "output_tokens_per_s_per_gpu": 145.25,
        "usd_per_million_output_tokens": 6.5,
        "meets_objectives": True,
    },
    {
        "fleet": "1 x 8 h200",
        "output_tokens_per_s_per_user": 12.25,
        "output_tokens_per_s_per_gpu": 210.5,
        "usd_per_million_output_tokens": 4.5,
        "meets_objectives": False,
    },
)


class Page(HTMLParser):
    """Collects a page's tags, links and text outside of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self._hidden = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "data")]
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text.append(data)


@pytest.fixture(scope="module")
def page() -> Page:
    found = export_file(PlanFile(PLANS["kimi-agents"], FRONT), "html", {})
    page = Page()
    page.feed(found.text)
    return page


def test_a_page_holds_all_it_needs(page: Page) -> None:
    assert page.links == []
    assert not {"link", "img", "iframe", "base"} & set(page.tags)
    text = export_file(PlanFile(PLANS["kimi-agents"], FRONT), "html", {}).text
    assert text.count("plotly.js v") >= 1
    assert len(text) > 3_000_000  # plotly itself
    assert "@import" not in text.split("</style>")[0]


def test_a_page_shows_the_front_where_it_is_known(page: Page) -> None:
    assert "The front" in page.text
    assert page.tags.count("script") == 5  # plotly's settings, plotly, three charts
    alone = Page()
    alone.feed(tonnage.export(PLANS["kimi-agents"], "html").text)
    assert "The front" not in alone.text


def test_charts_draw_the_figures_of_the_plan() -> None:
    plan = PLANS["kimi-agents"]
    drawn = {name: figure.to_dict()["data"] for name, _, figure in charts(plan, FRONT)}
    objectives = drawn["Objectives and their limits"][0]
    assert list(objectives["x"]) == ["ttft_p95", "tpot_p95"]
    assert list(objectives["y"]) == pytest.approx([4.125 / 5, 0.03125 / 0.04])
    assert list(objectives["error_y"]["array"]) == pytest.approx([0.05, 0.001 / 0.04])
    assert list(objectives["error_y"]["arrayminus"]) == pytest.approx([0.05, 0.00075 / 0.04])
    costs = drawn["Cost by pool"][0]
    assert sum(costs["y"]) == pytest.approx(plan.figures.usd_per_hour)
    meets, misses, star = drawn["The front"]
    assert (list(meets["x"]), list(misses["y"])) == ([31.5], [210.5])
    assert "&lt;b&gt;" in meets["text"][0]
    assert (star["x"][0], star["y"][0]) == (34.1875, 136.719)


def test_a_name_is_no_markup() -> None:
    plan = replace(PLANS["kimi-agents"], name="<script>alert(1)</script> & *bold* | a\n# b")
    found = Page()
    found.feed(tonnage.export(plan, "html").text)
    shown = next(text for text in found.text if "alert" in text)
    assert shown.startswith("<script>alert(1)</script> & *bold* | a # b: ")
    markdown = tonnage.export(plan, "markdown").text
    assert markdown.startswith("# \\<script\\>alert(1)\\</script\\> & \\*bold\\* \\| a \\# b: ")
    assert markdown.count("\n# ") == 0


def csv_rows(plan: FleetPlan) -> dict[str, list[str]]:
    text = tonnage.export(plan, "csv").text
    return {row[0]: row[1:] for row in csv.reader(io.StringIO(text))}


def test_a_csv_holds_every_field_in_full() -> None:
    rows = csv_rows(PLANS["kimi-agents"])
    assert rows["field"] == ["value", "low", "high"]
    assert rows["figures.output_tokens_per_s"] == ["2187.5", "2101.25", "2263.75"]
    assert rows["pools.1.mem_fraction"] == ["0.929", "", ""]
    assert rows["pools.1.integrity.handoff_checksum"] == ["true", "", ""]
    assert rows["pools.0.speculation"] == ["", "", ""]
    assert float(rows["figures.usd_per_hour"][0]) == PLANS["kimi-agents"].figures.usd_per_hour


def test_a_csv_is_safe_in_a_spreadsheet() -> None:
    rows = csv_rows(replace(PLANS["kimi-agents"], name='=HYPERLINK("x")', binds='a,b\n"c"'))
    assert rows["name"][0] == '\'=HYPERLINK("x")'
    assert rows["binds"][0] == 'a,b\n"c"'


def test_a_plan_without_objectives_has_no_chart_of_them() -> None:
    plan = PLANS["kimi-agents"]
    bare = replace(plan, figures=replace(plan.figures, objectives=()))
    assert [name for name, _, _ in charts(bare)] == ["Cost by pool"]
    assert "Objectives" not in tonnage.export(bare, "markdown").text
