"""`tonnage plan`: tables, JSON, files that other verbs read, exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tonnage as package
from tests.test_planner import TINY
from tonnage.cli import main
from tonnage.sim.planning.fleet_plan import FleetPlan


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    return path


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["tonnage", *arguments])
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_it_writes_what_other_verbs_read(
    scenario_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "out"
    arguments = ["plan", str(scenario_file), "--workers", "1", "--out", str(folder), "--rank", "4"]
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0, err
    for text in ("best: ", "launchable: ", "why others lost", "front", "Spearman", "ttft_p95"):
        assert text in out
    plan = FleetPlan.from_dict(json.loads((folder / "best.json").read_text()), "best.json")
    assert plan.feasible
    report = json.loads((folder / "plan.json").read_text())
    assert FleetPlan.from_dict(report["best"]) == plan
    assert {"spearman", "screened", "simulated"} <= set(report["ranks"])
    assert len(report["ranks"]["fleets"]) == 4
    page = (folder / "front.html").read_text()
    assert "plotly" in page
    assert "meets the objectives" in page
    code, out, err = run(monkeypatch, capsys, "simulate", str(folder / "best.yaml"), "--json", "-")
    assert code == 0, err
    simulated = json.loads(out)["points"][0]
    assert simulated["cost"]["usd_per_hour"] == plan.figures.usd_per_hour
    assert simulated["rate_per_s"] == pytest.approx(12.0 * 1.1)


def test_json_alone_is_one_object(
    scenario_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(scenario_file), "--workers", "1", "--json", "-"]
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, err) == (0, "")
    assert {"best", "launchable", "front", "rejected", "margins"} <= set(json.loads(out))


@pytest.mark.parametrize(
    ("override", "code", "text"),
    [
        ("slo.tpot_p95=2ms", 3, "tpot_p95 binds"),
        ("slo={}", 2, "slo: a plan needs an objective"),
        ("plan.tp=[16]", 2, "plan.max_gpus"),
        ("plan.tpp=[8]", 2, "did you mean 'tp'"),
        ("plan.chunk_tokens=[big]", 2, "neither a number nor auto"),
        ("traffic.kind=trace", 2, "traffic.path"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_a_code(
    override: str,
    code: int,
    text: str,
    scenario_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["plan", str(scenario_file), "--workers", "1", "--json", "-", "--set", override]
    found, out, err = run(monkeypatch, capsys, *arguments)
    assert found == code
    assert out == ""
    assert text in err
    assert len(err.strip().splitlines()) == 1


def test_nothing_is_written_when_it_is_stopped(
    scenario_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tonnage import planner

    def stop(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "screened_tables", stop)
    folder = tmp_path / "out"
    arguments = ["plan", str(scenario_file), "--workers", "1", "--out", str(folder)]
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 130
    assert "stopped; nothing was written" in err
    assert not folder.exists()


def test_the_package_has_the_verb() -> None:
    from tonnage import api

    assert package.plan is api.plan
