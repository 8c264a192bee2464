"""`tonnage integrity`: the matrix by injection, its cost, a year, and the files of all that."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy.stats import poisson

import tonnage as package
from tests.test_cli import tonnage as tonnage
from tonnage import integrity_report
from tonnage.explain import StepShape
from tonnage.integrity_costs import integrity_costs
from tonnage.integrity_page import MATRIX, PAGE, heat_map
from tonnage.integrity_report import IntegrityReport, IntegritySettings, integrity_reports
from tonnage.integrity_study import CHECKS, classes_named
from tonnage.integrity_table import caught_text
from tonnage.pools import built_pools
from tonnage.scenarios.load import load_scenario, parse_scenario
from tonnage.sim.domain import BadInputError, Coverage
from tonnage.sim.serving.data_faults import CONTENT, PAGE_IDENTITY, FaultClass

COUNT = 100
FLEET = {"requests_per_day": 1e9, "fault_rate": 1e-9}
SPLIT: dict[str, Any] = {
    "name": "split",
    "model": "llama-3.1-8b",
    "gpu": "h100-sxm",
    "engine": {"name": "sglang", "version": "0.5.23"},
    "traffic": {"kind": "closed", "concurrency": 8, "input_tokens": 600, "output_tokens": 200},
    "pools": {
        "prefill": {"tp": 1, "page_tokens": 64},
        "decode": {"tp": 1, "page_tokens": 64, "integrity": {"tracker": "batched"}},
    },
}
DECODE_ONLY = {"tracker": "batched", "covers": ["decode"]}


@pytest.fixture(scope="module")
def report() -> IntegrityReport:
    checks = ("none", "batched", "decode-tags", "canary", "checksum")
    settings = IntegritySettings(COUNT, checks=checks, workers=1, **FLEET)
    return package.integrity(parse_scenario(SPLIT), settings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "split.yaml"
    path.write_text(yaml.safe_dump(SPLIT), encoding="utf-8")
    return path


def few(path: Path | str, *more: str) -> list[str]:
    """Return the arguments of a command that takes no time."""
    options = ["--injections", "5", "--workers", "1", "--classes", "early_reuse,late_writer"]
    return ["integrity", str(path), *options, *more]


def rows(report: IntegrityReport, check: str, kinds: Any) -> list[Mapping[str, Any]]:
    return [row for row in report.rows if row["check"] == check and row["class"] in kinds]


# --- what the matrix must show ------------------------------------------------------------------


def test_every_class_is_injected_as_often_as_asked(report: IntegrityReport) -> None:
    assert len(report.rows) == len(FaultClass) * 5
    assert {row["injected"] for row in report.rows} == {COUNT}
    assert min(row["met"] for row in report.rows) >= 10
    assert report.impossible == ()


def test_tags_catch_page_identity_before_the_read_and_hurt_nobody_clean(
    report: IntegrityReport,
) -> None:
    for row in rows(report, "batched", PAGE_IDENTITY):
        assert row["caught_before"] == row["met"]
        assert (row["wrong_reads"], row["missed"], row["caught_after"]) == (0, 0, 0)
        assert row["clean_aborted"] == 0
        assert row["aborted"] > 0
        assert row["before_share"] == row["before_interval"][1] == 1.0


def test_a_former_owner_is_caught_by_its_generation_and_not_at_decode(
    report: IntegrityReport,
) -> None:
    (at_decode,) = rows(report, "decode-tags", ["late_writer"])
    (everywhere,) = rows(report, "batched", ["late_writer"])
    assert at_decode["missed"] == at_decode["met"] > 20
    assert (at_decode["before_share"], at_decode["aborted"]) == (0.0, 0)
    assert everywhere["refused_writes"] == everywhere["caught_before"] == COUNT
    assert (everywhere["wrong_reads"], everywhere["aborted"]) == (0, 0)


@pytest.mark.parametrize("check", ["batched", "decode-tags"])
def test_tags_catch_nothing_of_content(report: IntegrityReport, check: str) -> None:
    for row in rows(report, check, CONTENT):
        assert row["missed"] == row["met"] > 50
        assert (row["caught_before"], row["caught_after"], row["aborted"]) == (0, 0, 0)


def test_without_a_check_wrong_reads_are_counted_and_nothing_else_happens(
    report: IntegrityReport,
) -> None:
    for row in rows(report, "none", tuple(FaultClass)):
        assert row["wrong_reads"] >= row["victims"] > 0
        assert row["wrong_reads"] >= row["missed"] > 0
        assert (row["aborted"], row["caught_before"], row["stops"]) == (0, 0, 0)


def test_a_canary_stops_the_process_with_requests_that_did_nothing(report: IntegrityReport) -> None:
    for row in rows(report, "canary", PAGE_IDENTITY):
        assert row["late_share"] == 1.0
        assert row["lost"] > row["stops"] > 5
        assert row["aborted"] == 0


def test_a_checksum_catches_what_changed_on_the_way(report: IntegrityReport) -> None:
    (row,) = rows(report, "checksum", ["corrupted_transfer"])
    assert row["caught_before"] == row["met"]
    (scale,) = rows(report, "checksum", ["wrong_scale"])
    assert scale["missed"] == scale["met"]


# --- what stands beside it ----------------------------------------------------------------------


def test_costs_are_those_of_the_cost_model_item_by_item(report: IntegrityReport) -> None:
    scenario = parse_scenario(SPLIT)
    shape = StepShape(8, 700, 600)
    assert report.shape == shape
    expected = integrity_costs(scenario, built_pools(scenario), shape, CHECKS)
    for name, cost in report.costs.items():
        assert cost["handoff"] == expected[name]["handoff"]
        for step, one in cost["steps"].items():
            assert one["items"] == expected[name]["steps"][step]["items"]
            assert one["throughput_loss"] == pytest.approx(one["share"] / (1 + one["share"]))
            low, high = one["throughput_loss_interval"]
            assert low <= one["throughput_loss"] <= high
    assert report.costs["batched"]["steps"]["decode"]["throughput_loss"] > 0
    assert report.costs["none"]["steps"]["decode"]["throughput_loss"] == 0
    own = expected["scenario"]["steps"]  # the decode pool is watched, the other is not
    assert own["decode"] == expected["batched"]["steps"]["decode"]
    assert own["prefill"]["seconds"] == 0


def test_coverage_says_what_is_on_and_what_is_not(report: IntegrityReport) -> None:
    assert report.coverage["prefill"]["tracker"] == "none"
    assert report.coverage["decode"]["covers"] == [str(place) for place in Coverage]
    assert report.coverage["decode"]["not_covered"] == {}
    some = {**SPLIT, "pools": {"serve": {"tp": 1, "integrity": DECODE_ONLY}}}
    found = package.integrity(
        parse_scenario(some), IntegritySettings(3, (FaultClass.LATE_WRITER,), workers=1)
    )
    assert found.coverage["serve"]["covers"] == ["decode"]
    assert "former owner" in found.coverage["serve"]["not_covered"]["writer"]
    assert found.checks == ("none", "batched", "canary", "checksum", "scenario")
    (own,) = rows(found, "scenario", ["late_writer"])
    assert own["caught_before"] == 0


def test_a_year_is_poisson_and_takes_its_coverage_from_the_injections(
    report: IntegrityReport,
) -> None:
    year = report.year
    assert year["faults"]["expected"] == pytest.approx(365.25)
    assert year["faults"]["low"] == poisson.ppf(0.025, 365.25)
    assert year["faults"]["high"] == poisson.isf(0.025, 365.25)
    by_place = {(row["check"], row["family"]): row for row in year["rows"]}
    assert len(by_place) == 5 * 3
    unchecked = by_place["none", "page identity"]
    assert unchecked["wrong_reads"] == year["faults"]
    assert unchecked["fires"]["expected"] == 0
    tags = by_place["batched", "page identity"]
    assert tags["wrong_reads"]["expected"] == 0
    assert 0 < tags["wrong_reads_at_worst"]["expected"] < 10
    assert tags["fires"]["expected"] == pytest.approx(365.25)
    assert 0.9 < tags["aborted_per_fire"] < 1.5
    writer = by_place["batched", "writer"]
    assert (writer["fires"]["expected"], writer["aborted_per_fire"]) == (pytest.approx(365.25), 0)
    content = by_place["batched", "content"]
    assert content["wrong_reads"]["expected"] == pytest.approx(365.25)
    canary = by_place["canary", "page identity"]
    assert canary["wrong_reads"]["expected"] == canary["fires"]["expected"]
    assert canary["lost_per_fire"] > 1


def test_requests_of_a_day_come_from_the_load_where_it_has_a_rate() -> None:
    traffic = {"kind": "poisson", "rate_per_s": 2, "input_tokens": 600, "output_tokens": 200}
    settings = IntegritySettings(1, (FaultClass.LATE_WRITER,), ("none",), workers=1)
    rated = package.integrity(parse_scenario({**SPLIT, "traffic": traffic}), settings)
    assert rated.year["requests_per_day"] == pytest.approx(2 * 86_400)
    served = package.integrity(parse_scenario(SPLIT), settings).year["requests_per_day"]
    assert 8 * 86_400 / 60 < served < 8 * 86_400 / 0.2  # eight at once, each for 200 steps


def test_tags_last_longer_than_anybody_waits(report: IntegrityReport) -> None:
    wrap = report.tag_wrap
    assert wrap["seconds_to_wrap"] == pytest.approx(
        2**32 * wrap["pages"] / wrap["allocations_per_s"]
    )
    assert wrap["log10_chance"]["request"] < wrap["log10_chance"]["hour"] < -1e6


# --- other deployments --------------------------------------------------------------------------


def test_one_pool_has_no_handoff_to_go_wrong() -> None:
    one = {**SPLIT, "pools": {"serve": {"tp": 1}}}
    found = package.integrity(parse_scenario(one), IntegritySettings(3, workers=1))
    assert found.impossible == ("lease_expiry", "read_before_load", "corrupted_transfer")
    assert found.checks == ("none", "batched", "canary", "checksum")
    assert "handoff" not in found.costs["checksum"]


def test_a_pool_without_prompts_holds_requests_from_their_first_token() -> None:
    kinds = FaultClass.STALE_PAGE_TABLE, FaultClass.LEASE_EXPIRY
    settings = IntegritySettings(30, kinds, ("none", "batched"), workers=1)
    found = package.integrity(load_scenario("kimi-k2.6-h200"), settings)
    assert {row["pool"] for row in found.rows} == {"decode"}
    assert found.impossible == ("lease_expiry",)
    (tags,) = rows(found, "batched", ["stale_page_table"])
    assert tags["caught_before"] == tags["met"] > 10


# --- the command --------------------------------------------------------------------------------


def test_it_prints_the_matrix_the_costs_and_a_year(tonnage: Any, file: Path) -> None:
    done = tonnage(*few(file, "--requests-per-day", "1e9", "--checks", "none,batched"))
    assert done.code == 0
    for text in (
        "prefill: no tracker",
        "decode: page tags at decode, prefix, tier, handoff, writer",
        "Faults caught before the first wrong read",
        "late_writer",
        "What each check adds: 8 requests of 700 tokens, a prompt of 600",
        "tag check",
        "A year of 1,000,000,000 requests a day (given), a fault in 1e-09 of them: 365 (328 to",
        "Tags of 32 bits",
        "clients try once",
        "tonnage execute SCENARIO --inject all",
        "docs/retries.md",
    ):
        assert text in done.output
    assert "early_reuse, check none" in done.error


GOLDEN = {
    "": "client_attempts costs coverage impossible matrix notes provenance scenario settings step "
    "tag_wrap year",
    "settings": "checks classes confidence fault_rate injections",
    "step": "context_tokens prompt_tokens requests",
    "tag_wrap": "allocations_per_s chance log10_chance pages seconds_to_wrap stale_s tag_bits",
    "year": "fault_rate_per_request faults requests_from requests_per_day rows",
}
ROW = (
    "aborted before_interval before_share caught_after caught_before check class clean_aborted "
    "family in_decode injected late_share lost met missed pool recomputed refused_writes stops "
    "victims wrong_reads"
)
YEAR_ROW = (
    "aborted_per_fire before_interval before_share check family fires lost_per_fire wrong_reads "
    "wrong_reads_at_worst"
)


def test_the_json_has_its_keys(report: IntegrityReport) -> None:
    data = report.to_dict()
    for name, keys in GOLDEN.items():
        assert sorted(data[name] if name else data) == keys.split()
    assert {" ".join(sorted(row)) for row in data["matrix"]} == {ROW}
    assert {" ".join(sorted(row)) for row in data["year"]["rows"]} == {YEAR_ROW}


def test_the_same_seed_gives_the_same_bytes_on_any_number_of_processes(
    tonnage: Any, file: Path
) -> None:
    command = few(file, "--json", "-", "--checks", "none")
    first = tonnage(*command)
    again = tonnage(*command, "--workers", "2")
    other = tonnage(*command, "--set", "seed=1")
    assert first.code == again.code == 0
    assert first.output == again.output != other.output
    assert (first.error, again.error) == ("", "")


def test_out_has_json_csv_and_a_page_that_needs_nothing_else(
    tonnage: Any, file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "out"
    done = tonnage(*few(file, "--out", str(out), "--json", str(tmp_path / "one.json")))
    assert done.code == 0
    assert sorted(path.name for path in out.iterdir()) == [PAGE, MATRIX, "summary.json"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary == json.loads((tmp_path / "one.json").read_text())
    with (out / MATRIX).open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert [line["caught_before"] for line in lines] == [
        str(row["caught_before"]) for row in summary["matrix"]
    ]
    assert len(lines) == 2 * 5
    page = (out / PAGE).read_text()
    assert "Plotly.newPlot" in page
    assert "src=" not in page.split("</style>")[0]
    assert "throughput lost" in page


def test_the_heat_map_is_red_where_pages_were_read_wrongly(report: IntegrityReport) -> None:
    data = report.to_dict()
    (drawn,) = heat_map(data).to_dict()["data"]
    scores = {
        (name.split(" ")[0], check): score
        for name, line in zip(drawn["y"], drawn["z"], strict=True)
        for check, score in zip(drawn["x"], line, strict=True)
    }
    assert scores["early_reuse", "none"] == 0.0
    assert scores["early_reuse", "batched"] == 1.0
    assert scores["early_reuse", "canary"] == 0.5
    assert scores["wrong_scale", "batched"] == 0.0


def test_a_cell_says_how_much_was_caught_and_when() -> None:
    shares = (None, 1.0, 0.0, 0.0, 0.75), (None, 0.0, 1.0, 0.0, 0.125)
    said = [
        caught_text({"before_share": before, "late_share": late})
        for before, late in zip(*shares, strict=True)
    ]
    assert said == ["-", "100%", "100% late", "0%", "75%, 12% late"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--classes", "early_resue"], "--classes early_resue: did you mean 'early_reuse'?"),
        (["--classes", ","], "--classes: names nothing"),
        (["--checks", "tags"], "--checks tags: "),
        (["--fault-rate", "0"], "--fault-rate 0: a probability per request, above 0, at most 1"),
        (["--fault-rate", "2"], "--fault-rate 2"),
        (["--requests-per-day", "-1"], "--requests-per-day -1: write a number above 0"),
        (["--requests-per-day", "inf"], "--requests-per-day inf"),
        (["--set", "pools.decode.tp=3"], "pools.decode"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    tonnage: Any, file: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    done = tonnage(*few(file, *options, "--out", str(tmp_path / "out")))
    assert done.code == 2
    assert message in done.error
    assert done.error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_told_before_anything_is_injected(tonnage: Any, file: Path) -> None:
    done = tonnage(*few(file, "--set", "model=llama-3.1-70b"))
    assert done.code == 3
    assert done.error.count("\n") == 1


def test_an_interruption_leaves_nothing_behind(
    tonnage: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(integrity_report, "study", interrupted)
    done = tonnage(*few(file, "--out", str(tmp_path / "out")))
    assert done.code == 130
    assert not (tmp_path / "out").exists()


def test_progress_can_stop_the_work() -> None:
    told: list[float] = []

    def tell(_: str, share: float) -> None:
        told.append(share)
        if len(told) == 2:
            raise KeyboardInterrupt

    settings = IntegritySettings(2, classes_named("early_reuse,late_writer"), workers=1)
    with pytest.raises(KeyboardInterrupt):
        integrity_reports({"": parse_scenario(SPLIT)}, settings, tell)
    assert told == [1 / 10, 2 / 10]


def test_settings_are_checked_for_callers_too() -> None:
    with pytest.raises(BadInputError, match="checks: 'tags'"):
        IntegritySettings(checks=("tags",))
    with pytest.raises(BadInputError, match="--injections 0"):
        IntegritySettings(0)
    with pytest.raises(BadInputError, match="--workers 0"):
        package.integrity(parse_scenario(SPLIT), IntegritySettings(1, workers=0))
