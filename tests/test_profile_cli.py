"""The `profile` verbs: what they print and write, and that a mistake ends in one line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from tonnage import api
from tonnage.calibrate.build import build_profile
from tonnage.cli import main
from tonnage.scenarios.catalogue import load_gpu
from tonnage.scenarios.profiles import choose_profile, profile_paths
from tonnage.sim.cost.profile import HEADER_FILE, load_profile

needs_wheel = pytest.mark.skipif(
    util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)
SHIPPED = "h200-sxm-sglang"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left behind."""

    code: int
    output: str
    error: str


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the user's folder of profiles, empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("sys.platform", "linux")
    return tmp_path / "state" / "tonnage" / "profiles"


@pytest.fixture
def tonnage(own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command in this process as the entry point does."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tonnage", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


# --- list and show ------------------------------------------------------------------------------


def test_list_names_every_shipped_profile_with_its_source(tonnage: Any) -> None:
    done = tonnage("profile", "list", "--json", "-")
    assert done.code == 0
    rows = {row["name"]: row for row in json.loads(done.output)["profiles"]}
    assert set(rows) == set(profile_paths())
    assert rows[SHIPPED]["gpu"] == "h200-sxm"
    assert (rows[SHIPPED]["source"], rows[SHIPPED]["place"]) == ("imported", "shipped")
    table = tonnage("profile", "list").output
    assert all(name in table for name in rows)
    assert tonnage("list", "profiles").output == table


def test_show_says_where_it_is_from_and_how_far_off_it_is(tonnage: Any) -> None:
    done = tonnage("profile", "show", SHIPPED)
    assert done.code == 0
    assert "imported, kernel timings of aiconfigurator-core 0.12.0" in done.output
    assert "Apache-2.0" in done.output
    errors = load_profile(profile_paths()[SHIPPED]).header.errors
    for operator, formats in errors.items():
        for name, error in formats.items():
            shown = [" ".join(line.split()) for line in done.output.splitlines()]
            line = next(line for line in shown if line.startswith(f"{operator} {name} "))
            assert f"{error['median']:.1%}" in line


def test_show_draws_fit_against_data_in_one_file_that_needs_no_network(
    tonnage: Any, tmp_path: Path
) -> None:
    done = tonnage("profile", "show", SHIPPED, "--out", str(tmp_path / "report"))
    assert done.code == 0
    pages = list((tmp_path / "report").iterdir())
    assert [page.name for page in pages] == [f"{SHIPPED}.html"]
    assert str(pages[0]) in done.output
    text = pages[0].read_text(encoding="utf-8")
    assert "<script src=" not in text  # plotly is inside
    assert "<link" not in text
    profile = load_profile(profile_paths()[SHIPPED])
    for operator in profile.header.errors:
        assert f">{operator}<" in text
    assert profile.header.source_text.partition(";")[0].replace("&", "&amp;") in text


# --- diff ---------------------------------------------------------------------------------------


def test_a_profile_does_not_differ_from_itself(tonnage: Any) -> None:
    report = json.loads(tonnage("profile", "diff", SHIPPED, SHIPPED, "--json", "-").output)
    assert report["header"] == {}
    assert report["ratios"]
    for row in report["ratios"]:
        assert row["points"] > 0
        assert row["median"] == row["p10"] == row["p90"] == 1.0


def test_diff_compares_headers_and_times(tonnage: Any) -> None:
    done = tonnage("profile", "diff", "h100-sxm-sglang", SHIPPED, "--json", "-")
    report = json.loads(done.output)
    assert report["header"]["gpu"] == ["h100-sxm", "h200-sxm"]
    decode = [row for row in report["ratios"] if row["operator"] == "attention_decode"]
    # The H200 is an H100 with 1.43 times its bandwidth: what reads KV is quicker on it.
    assert decode
    assert all(3.35 / 4.8 * 0.8 < row["median"] < 1.02 for row in decode)
    printed = tonnage("profile", "diff", "h100-sxm-sglang", SHIPPED).output
    assert "Time of h200-sxm-sglang over h100-sxm-sglang" in printed


# --- import -------------------------------------------------------------------------------------


@needs_wheel
def test_import_lands_where_auto_looks_first(
    tonnage: Any, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The collectives alone: the whole takes minutes.
    monkeypatch.setattr(api, "import_profile", partial(build_profile, only=["comm"]))
    done = tonnage("profile", "import", "l40s", "--engine", "vllm", "--json", "-")
    assert done.code == 0, done.error
    assert json.loads(done.output)["profile"]["gpu"] == "l40s"
    place = own / "l40s-vllm.profile"
    assert load_profile(place).header.engine_version == "0.24.0"
    assert str(place) in tonnage("profile", "list").output
    choice = choose_profile("auto", load_gpu("l40s"), "vllm", Path())
    assert choice.path == place
    assert choice.why.startswith("the profile imported on this machine on ")
    shown = tonnage("profile", "import", "l40s", "--engine", "vllm")
    assert "l40s vllm: comm" in shown.error  # progress, a line per part in a pipe
    assert "Lacks: gemm, quantise, moe" in shown.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["import", "h20"], "gpu: aiconfigurator-core has no timings of 'h20'; it has a100-80g"),
        (["import", "h200-sxm", "--engine", "tgi"], "engine: 'tgi': use one of sglang, vllm"),
        (["show", "h200"], "there is no profile named 'h200'; did you mean 'h200-sxm-"),
        (["show", "./none.profile"], "./none.profile: no profile there; check the path"),
        (["diff", SHIPPED, "./none.profile"], "./none.profile: no profile there"),
    ],
)
def test_a_mistake_ends_in_one_line(tonnage: Any, arguments: list[str], told: str) -> None:
    done = tonnage("profile", *arguments)
    assert done.code == 2
    assert told in done.error
    assert done.error.count("\n") == 1
    assert done.output == ""


def test_import_replaces_nothing_but_a_profile(tonnage: Any, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    done = tonnage("profile", "import", "h200-sxm", "--out", str(tmp_path / "notes"))
    assert done.code == 2
    assert "is there and is no profile; choose another place" in done.error
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"


def test_a_truncated_profile_is_one_message(tonnage: Any, tmp_path: Path) -> None:
    place = tmp_path / "cut.profile"
    place.mkdir()
    (place / HEADER_FILE).write_text('{"schema_version": 1, "name": "cu')
    done = tonnage("profile", "show", str(place))
    assert done.code == 2
    assert done.error.startswith(f"error: {place / HEADER_FILE}: not JSON, perhaps cut off")
    assert done.error.count("\n") == 1
