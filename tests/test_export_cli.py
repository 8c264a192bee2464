"""The `export` verb: files, the plans of a report, and mistakes that end in one line."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import tonnage
from tests.sim.export.plans import PLANS
from tonnage.cli import main
from tonnage.sim.domain import BadInputError
from tonnage.sim.export.formats import FORMATS

KIMI = PLANS["kimi-agents"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left behind."""

    code: int
    output: str
    error: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command in this process."""

    def ran(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tonnage", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        seen = capsys.readouterr()
        return Outcome(code, seen.out, seen.err)

    return ran


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """Write a report with two plans, as `tonnage plan` does."""
    best = replace(KIMI, name="kimi-best", needs=("KV conversion at the handoff",))
    report = {"best": best.to_dict(), "launchable": KIMI.to_dict(), "front": [], "rejected": []}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(report))
    return path


def written(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_the_launchable_plan_is_printed(run: Run, plan_file: Path) -> None:
    done = run("export", plan_file, "--to", "sglang")
    assert done.code == 0
    assert done.output == tonnage.export(KIMI, "sglang").text
    assert done.error == f"note: {tonnage.export(KIMI, 'sglang').remarks[0]}\n"


@pytest.mark.parametrize("to", [one for one in FORMATS if one != "vllm"])
def test_every_format_is_written_to_a_file(
    run: Run, plan_file: Path, tmp_path: Path, to: Any
) -> None:
    target = tmp_path / "fleet.out"
    done = run("export", plan_file, "--to", to, "--out", target)
    assert (done.code, done.output) == (0, "")
    assert target.read_text() == tonnage.export(KIMI, to).text


def test_a_folder_is_made_and_the_file_named_after_the_plan(
    run: Run, plan_file: Path, tmp_path: Path
) -> None:
    assert run("export", plan_file, "--to", "csv", "--out", tmp_path / "new").code == 0
    assert run("export", plan_file, "--to", "markdown", "--out", tmp_path / "new").code == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "kimi-agents.csv",
        "kimi-agents.md",
    }


def test_the_best_plan_is_told_of_but_not_launched(run: Run, plan_file: Path) -> None:
    told = run("export", plan_file, "--to", "csv", "--which", "best")
    assert told.code == 0
    assert "name,kimi-best" in told.output
    refused = run("export", plan_file, "--to", "sglang", "--which", "best")
    assert refused.code == 2
    assert refused.output == ""
    assert refused.error.startswith("error: needs: KV conversion at the handoff: no stock sglang")
    assert refused.error.count("\n") == 1


def test_one_plan_alone_is_read_too(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path / "one.json", KIMI.to_dict())
    done = run("export", path, "--to", "kubernetes", "--checkpoint", "decode=/models/own")
    assert done.code == 0
    assert "/models/own" in str(list(yaml.safe_load_all(done.output)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON; write it with tonnage plan --json"),
        ([], "not a plan"),
        ({"scenario": {}}, "holds no plan"),
        (
            {"best": KIMI.to_dict(), "launchable": None},
            "there is none: no fleet that stock engines",
        ),
        (KIMI.to_dict() | {"pools": [{"role": "serve"}]}, "pools"),
        (KIMI.to_dict() | {"colour": "red"}, "colour"),
    ],
)
def test_a_file_that_is_no_plan_is_named(
    run: Run, tmp_path: Path, content: Any, words: str
) -> None:
    path = written(tmp_path / "bad.json", content)
    done = run("export", path, "--to", "csv")
    assert (done.code, done.output) == (2, "")
    assert done.error.startswith(f"error: {path}")
    assert words in done.error
    assert done.error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "csv", "--out", "missing/deep.csv"], "there is no folder missing"),
        (["--to", "csv", "--checkpoint", "decode"], "write it as POOL=PATH"),
        (["--to", "csv", "--checkpoint", "decode="], "names no path"),
        (["--to", "csv", "--checkpoint", "dec=x"], "not a pool"),
        (["--to", "pdf"], "pdf"),
    ],
)
def test_a_mistake_ends_in_a_line_and_writes_nothing(
    run: Run, plan_file: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plan_file.parent)
    done = run("export", plan_file, *arguments)
    assert done.code == 2
    assert words in done.error
    assert os.listdir(plan_file.parent) == ["plan.json"]


def test_a_plan_is_read_from_a_pipe(
    run: Run, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(plan_file.read_text()))
    done = run("export", "-", "--to", "csv")
    assert (done.code, done.output) == (0, tonnage.export(KIMI, "csv").text)


def test_a_plan_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    done = run("export", tmp_path / "no.json", "--to", "csv")
    assert done.code == 2
    assert "no.json: cannot be read: No such file" in done.error


def test_a_report_is_exported_as_it_is() -> None:
    """A PlanReport has `best`, `launchable` and `to_dict`; that is all that export asks of it."""

    @dataclass(frozen=True, slots=True)
    class Report:
        best: Any
        launchable: Any

        def to_dict(self) -> dict[str, Any]:
            return {"front": []}

    best = replace(KIMI, name="dearer")
    report: Any = Report(best, KIMI)
    assert tonnage.export(report, "csv") == tonnage.export(KIMI, "csv")
    assert "dearer" in tonnage.export(report, "csv", which="best").text
    with pytest.raises(BadInputError, match="launchable: there is none"):
        tonnage.export(Report(best, None), "csv")  # type: ignore[arg-type]


def test_a_format_that_is_none_is_named() -> None:
    with pytest.raises(BadInputError, match="--to pdf: not a format; use one of sglang"):
        tonnage.export(KIMI, "pdf")  # type: ignore[arg-type]


def test_a_model_that_lies_in_a_folder_is_loaded_from_there(tmp_path: Path) -> None:
    from tonnage.scenarios import catalogue

    source = Path(catalogue.__file__).parent / "models" / "llama-3.1-8b.json"
    (tmp_path / "config.json").write_text(source.read_text())
    plan = replace(PLANS["llama-chat"], model=str(tmp_path / "config.json"))
    text = tonnage.export(plan, "vllm").text
    assert f"local checkpoint={tmp_path}\n" in text
