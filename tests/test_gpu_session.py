"""`make gpu`: parts that are done stay done, whatever ends the run."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no torch: pip install 'tonnage[kernels]'")

PATH = Path(__file__).parents[1] / "benchmarks" / "gpu_session.py"
ORDER = ["calibrate", "laptop_gqa", "laptop_bf16", "laptop_int4", "tags"]


@pytest.fixture
def program() -> ModuleType:
    found = spec_from_file_location("gpu_session", PATH)
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    sys.modules["gpu_session"] = module
    found.loader.exec_module(module)
    return module


class Parts:
    """Stand-ins for the parts: they note that they ran, and raise what they are told to."""

    def __init__(self, program: ModuleType, patch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.raises: dict[str, BaseException] = {}
        patch.setattr(program.Session, "_calibration", lambda session, s: self._run("calibrate"))
        patch.setattr(program.Session, "_execution", lambda session, part, s: self._run(part.name))
        patch.setattr(program, "report_of", lambda whole, titles, compared: "a report\n")

    def _run(self, name: str) -> dict[str, Any]:
        self.ran.append(name)
        if name in self.raises:
            raise self.raises[name]
        return {"name": name}


@pytest.fixture
def parts(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(program, monkeypatch)


def run(program: ModuleType, folder: Path, *more: str) -> int:
    return int(program.main(["--device", "cpu", "--out", str(folder), *more]))


def test_parts_run_in_their_order_and_a_second_run_does_none_again(
    program: ModuleType, parts: Parts, tmp_path: Path
) -> None:
    assert run(program, tmp_path) == 0
    assert parts.ran == ORDER
    assert run(program, tmp_path) == 0
    assert parts.ran == ORDER
    whole = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert list(whole["parts"]) == ORDER
    assert (whole["missing"], whole["failed"]) == ([], {})
    assert whole["parts"]["tags"]["result"] == {"name": "tags"}


def test_a_run_that_is_killed_goes_on_with_the_part_that_was_under_way(
    program: ModuleType, parts: Parts, tmp_path: Path
) -> None:
    parts.raises["laptop_bf16"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(program, tmp_path)
    assert parts.ran == ORDER[:3]
    whole = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert list(whole["parts"]) == ORDER[:2]
    parts.raises.clear()
    assert run(program, tmp_path) == 0
    assert parts.ran == [*ORDER[:3], *ORDER[2:]]


def test_a_part_that_fails_is_told_the_others_run_and_it_is_tried_again(
    program: ModuleType, parts: Parts, tmp_path: Path
) -> None:
    parts.raises["laptop_gqa"] = RuntimeError("no kernel image")
    assert run(program, tmp_path) == 1
    assert parts.ran == ORDER
    whole = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert whole["failed"] == {"laptop_gqa": "RuntimeError: no kernel image"}
    assert whole["missing"] == ["laptop_gqa"]
    parts.raises.clear()
    assert run(program, tmp_path) == 0
    assert parts.ran == [*ORDER, "laptop_gqa"]
    whole = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert whole["failed"] == {}


def test_no_part_is_begun_without_time_and_time_spent_before_counts(
    program: ModuleType, parts: Parts, tmp_path: Path
) -> None:
    assert run(program, tmp_path, "--minutes", "0.1") == 1
    assert parts.ran == []
    assert run(program, tmp_path, "--minutes", "5") == 0
    result = json.loads((tmp_path / "calibrate.json").read_text(encoding="utf-8"))
    (tmp_path / "calibrate.json").write_text(json.dumps({**result, "wall_s": 299.0}))
    (tmp_path / "tags.json").unlink()
    assert run(program, tmp_path, "--minutes", "5") == 1
    assert parts.ran == ORDER


def test_results_of_another_machine_are_refused(
    program: ModuleType, parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(program, tmp_path) == 0
    result = json.loads((tmp_path / "tags.json").read_text(encoding="utf-8"))
    other = {**result, "machine": {**result["machine"], "device": "another"}}
    (tmp_path / "tags.json").write_text(json.dumps(other))
    assert run(program, tmp_path) == 2
    told = capsys.readouterr().err
    assert "measured with device another" in told
    assert told.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_message(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "finds no CUDA GPU" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_visit_to_a_gpu_fits_into_its_minutes(program: ModuleType) -> None:
    for visit in program.VISITS.values():
        assert sum(part.budget_s for part in visit.parts) < 0.8 * 60 * visit.minutes
        names = [part.name for part in visit.parts]
        assert len(set(names)) == len(names)
        assert set(visit.compared) <= set(names)
        assert names.index(visit.compared[0]) > names.index(visit.compared[1])
    assert program.VISITS["cuda"].minutes <= 12
