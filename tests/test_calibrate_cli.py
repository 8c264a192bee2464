"""The `calibrate` verb: a profile that predictions take, and mistakes that end in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from tests.calibrate.measured_rows import TINY
from tonnage.calibrate import own
from tonnage.cli import main
from tonnage.scenarios.catalogue import load_gpu
from tonnage.scenarios.profiles import choose_profile
from tonnage.sim.cost.profile import load_profile

needs_torch = pytest.mark.skipif(util.find_spec("torch") is None, reason="torch is not installed")
QUICK = ("calibrate", "--device", "cpu", "--quick")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left behind."""

    code: int
    output: str
    error: str


Command = Callable[..., Outcome]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the user's state folder, empty, and a grid that takes seconds."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("sys.platform", "linux")
    tiny = replace(
        TINY, repeats=0, generic_experts=(), small_widths=(64,), generic_latent_heads=(16,)
    )
    monkeypatch.setattr(own, "sizes_for", lambda device, quick: tiny)
    return tmp_path / "state" / "tonnage"


@pytest.fixture
def tonnage(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
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


@needs_torch
def test_a_calibration_is_what_a_scenario_is_predicted_from(tonnage: Command, state: Path) -> None:
    done = tonnage(*QUICK, "--json", "-")
    assert done.code == 0, done.error
    report = json.loads(done.output)
    assert report["profile"]["name"] == "cpu-tonnage"
    assert report["profile"]["source"] == "measured"
    assert report["calibration"]["points"] == report["calibration"]["measured_now"] > 100
    assert report["calibration"]["unserved"] == []

    place = state / "profiles" / "cpu-tonnage.profile"
    assert report["place"] == str(place)
    choice = choose_profile("auto", load_gpu("cpu"), "sglang", Path())
    assert (choice.path, choice.source) == (place, "measured")
    loaded = load_profile(place)
    assert loaded.header.fitted["machine"]["threads"] == 1
    # int4 rows of small batches are there to be compared with bf16 ones
    assert {"bf16", "int4_g128"} <= set(loaded.tables["gemm"]["format"])
    assert not (state / "calibration" / "cpu-quick.jsonl").exists()
    assert (state / "calibration" / "cpu-quick.finished.jsonl").exists()

    shown = tonnage("profile", "show", "cpu-tonnage", "--out", str(state / "report"))
    assert shown.code == 0
    assert (state / "report" / "cpu-tonnage.html").stat().st_size > 10_000
    predicted = tonnage("simulate", "laptop", "--json", "-")
    provenance = json.loads(predicted.output)["provenance"]
    assert (provenance["profile"], provenance["source"]) == ("cpu-tonnage", "measured")


@needs_torch
def test_fresh_leaves_what_an_interrupted_run_measured(tonnage: Command, state: Path) -> None:
    log = state / "calibration" / "cpu-quick.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("no row\n")
    out = state / "mine.profile"
    stopped = tonnage(*QUICK, "--models", "laptop-gqa", "--out", str(out))
    assert stopped.code == 2
    assert "line 1: no JSON" in stopped.error
    done = tonnage(*QUICK, "--models", "laptop-gqa", "--out", str(out), "--fresh")
    assert done.code == 0, done.error
    assert "cpu-tonnage: cpu, kernels of tonnage" in done.output
    assert "points, of which measured now:" in done.output
    assert "Error on" in done.output or "held out" in done.output
    assert load_profile(out).header.gpu == "cpu"


@needs_torch
def test_a_budget_ends_it_early_and_the_rows_are_kept(tonnage: Command, state: Path) -> None:
    log = state / "calibration" / "cpu-quick.jsonl"
    done = tonnage(*QUICK, "--models", "laptop-gqa", "--budget", "0.3s", "--ranks", "1")
    assert done.code == 0, done.error
    assert "Not reached in the budget: " in done.output
    kept = log.read_text().splitlines()
    assert 0 < len(kept) < 400
    place = state / "profiles" / "cpu-tonnage.profile"
    assert "launch" in load_profile(place).tables
    soon = tonnage(*QUICK, "--budget", "soon")
    assert soon.code == 2
    assert "is not a duration" in soon.error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--device", "tpu"), "device: 'tpu': use cpu, cuda, or cuda:1 for the second GPU"),
        (("--device", "cpu", "--gpu", "h20O"), "gpu: there is no gpu named 'h20O'; did you mean"),
        (("--device", "cpu", "--models", "lptop"), "did you mean 'laptop'?"),
        (("--device", "cpu", "--models", "laptop-gqa:tp7"), "layout.tp: 7"),
    ],
)
def test_a_mistake_ends_in_one_line(tonnage: Command, arguments: Any, told: str) -> None:
    if util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    done = tonnage("calibrate", *arguments)
    assert done.code == 2
    assert told in done.error
    assert done.error.count("\n") == 1


def test_without_torch_the_mend_is_named(tonnage: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "find_spec", lambda name: None)
    done = tonnage(*QUICK)
    assert done.code == 2
    assert done.error == "error: calibrate needs torch: pip install 'tonnage[kernels]'\n"


def test_the_help_has_examples(tonnage: Command) -> None:
    done = tonnage("calibrate", "--help")
    assert done.code == 0
    assert "tonnage calibrate --device cpu --quick" in done.output
    assert "--resume / --fresh" in done.output
