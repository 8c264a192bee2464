"""`tonnage quality` as a command: tables, JSON, a user's own scores and tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.test_cli import tonnage as tonnage
from tonnage import quality_errors
from tonnage.quality_report import known_risk, quality
from tonnage.quality_table import verdict_text
from tonnage.scenarios.catalogue import load_model
from tonnage.scenarios.quality import read_evidence
from tonnage.sim.domain import BadInputError
from tonnage.sim.planning.score_pairs import ScorePair, Standards, compare

SCORES = """
date: 2026-11-01
source: our own run
comparisons:
  - model: our-model
    changes: weights
    baseline: bf16
    variant: nvfp4
    tests:
      tickets: {both: 880, only_baseline: 20, only_variant: 5, neither: 95}
      summaries: {questions: 50000, baseline: 90.0, variant: 89.9}
"""


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    file = tmp_path / "scores.yaml"
    file.write_text(SCORES, encoding="utf-8")
    return file


def test_all_that_ships_is_judged(tonnage: Any) -> None:
    done = tonnage("quality")
    assert done.code == 0
    assert "kimi-k2.6: kv fp8_e4m3 against bf16" in done.output
    assert "glm-5.2: weights int4_g32 against fp8_block" in done.output
    assert "no difference found; a loss of 2.01 is not ruled out" in done.output  # Kimi, MMLU-Pro
    assert "11 tests compared at 95%: about 0.6 would be told apart by chance alone" in done.output


@pytest.mark.parametrize("arguments", [(), ("kimi-k2.6",), ("--margin", "20"), ("llama-3.1-8b",)])
def test_nothing_is_ever_called_equal(tonnage: Any, arguments: tuple[str, ...]) -> None:
    said = tonnage("quality", *arguments).output
    assert said
    assert not re.search(
        r"\b(equal|same quality|identical|lossless|no loss)\b", said, re.IGNORECASE
    )


def test_no_difference_is_never_said_without_what_is_not_ruled_out() -> None:
    for right, questions in ((61, 63), (1200, 1319), (90_000, 100_000)):
        share = right / questions
        found = compare(ScorePair("t", share, share, questions), Standards())
        text = verdict_text(found, Standards())
        assert "no difference found; " in text
        assert "is not ruled out" in text or "within 1 either way" in text


def test_a_model_without_scores_has_no_evidence(tonnage: Any) -> None:
    assert "is without evidence" in tonnage("quality", "llama-3.1-8b").output
    found = json.loads(tonnage("quality", "llama-3.1-8b", "--json", "-").output)
    assert found["comparisons"] == []


def test_own_scores_and_answers_question_by_question(tonnage: Any, scores: Path) -> None:
    done = tonnage("quality", str(scores), "--margin", "0.5")
    assert "1,000 paired, p 0.0041" in done.output
    assert "worse by " in done.output
    found = json.loads(tonnage("quality", str(scores), "--margin", "0.5", "--json", "-").output)
    tickets, summaries = found["comparisons"][0]["tests"]
    assert tickets["paired"]
    assert tickets["verdict"] == "worse"
    assert tickets["mcnemar_p"] == pytest.approx(0.0041, abs=1e-4)
    assert summaries["verdict"] == "within"
    assert found["standards"] == {"margin": 0.005, "confidence": 0.95, "power": 0.8}


def test_a_wider_margin_needs_fewer_questions() -> None:
    strict, loose = (
        quality("kimi-k2.6", Standards(margin=margin)).judged[0].comparisons[0].questions_needed
        for margin in (0.01, 0.02)
    )
    assert strict is not None
    assert loose is not None
    assert strict == pytest.approx(4 * loose, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kimi",), "there is no model named 'kimi'"),
        (("nowhere.yaml",), "nowhere.yaml: no such file"),
        (("--margin", "0"), "--margin 0: write points"),
        (("--confidence", "95"), "--confidence 95: write a share"),
        (("--power", "0.3"), "--power 0.3: write a share"),
        (("--synthetic", "--tensors", "x.safetensors"), "give one of the two"),
        (("--tensors", "x.safetensors"), "x.safetensors: cannot be read as safetensors"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    tonnage: Any, arguments: tuple[str, ...], message: str
) -> None:
    done = tonnage("quality", *arguments)
    assert done.code == 2
    assert message in done.error
    assert done.error.count("\n") == 1


@pytest.mark.parametrize("name", ["kimi-k2.6", "glm-5.2", "llama-3.1-8b"])
def test_the_release_of_any_model_is_not_flagged(name: str) -> None:
    model = load_model(name)
    for weights in ("native", model.native_weight_format):
        assert known_risk(model, weights, "bf16").flags() == ()
    assert known_risk(model, "mxfp4", "bf16").verdict(0.5) == "no_evidence"


def test_own_scores_are_evidence_for_a_plan(scores: Path) -> None:
    model = replace(load_model("llama-3.1-8b"), name="our-model")
    assert not known_risk(model, "nvfp4", "bf16").has_evidence
    found = known_risk(model, "nvfp4", "bf16", read_evidence(scores))
    assert found.weights.told_apart == ("tickets",)
    assert found.verdict(0.01) == "met"  # of all 51,000 questions together


def test_standards_are_checked_in_python_too() -> None:
    with pytest.raises(BadInputError, match="--margin"):
        quality(None, Standards(margin=2.0))


# --- tensors --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors are slower on several threads, and much slower where others compute too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    outliers = torch.randn(32, 256, generator=generator)
    outliers[:, 7] *= 50
    save_file(
        {
            "plain": torch.randn(600, 256, generator=generator).to(torch.bfloat16),
            "outliers": outliers,
            "experts": torch.randn(4, 100, 128, generator=generator).half(),
            "norm": torch.ones(256),
            "packed": torch.zeros(16, 256, dtype=torch.uint8),
            "broken": torch.full((16, 128), torch.nan),
        },
        tmp_path / "model.safetensors",
    )
    return tmp_path / "model.safetensors"


def test_errors_of_a_users_own_tensors(tonnage: Any, tensors: Path) -> None:
    found = json.loads(tonnage("quality", "--tensors", str(tensors), "--json", "-").output)
    report = found["numeric_errors"]
    assert "comparisons" not in found
    by_name = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert set(by_name) == {"plain", "outliers", "experts"}
    assert by_name["plain"]["shape"] == [600, 256]
    assert by_name["plain"]["rows_read"] == 256
    assert by_name["experts"]["rows_read"] == 200  # two experts of a hundred rows
    for label in ("int4_g32", "int4_g128"):
        plain, bad = (by_name[name]["errors"][label] for name in ("plain", "outliers"))
        assert bad["ordinary_rms"] > plain["ordinary_rms"]
    assert set(report["skipped"]) == {"norm", "packed", "broken"}
    assert "not finite" in report["skipped"]["broken"]
    assert "U8 is stored" in report["skipped"]["packed"]


def test_the_table_says_what_was_left_out(tonnage: Any, tensors: Path) -> None:
    done = tonnage("quality", "--tensors", str(tensors), "--as", "kv")
    assert done.code == 0
    assert "fp8_e4m3, scale per tensor" in done.output
    assert "3 tensors were left out" in done.output
    assert "An error of numbers is not one of answers" in done.output


def test_a_file_without_tensors_to_measure_is_refused(tonnage: Any, tmp_path: Path) -> None:
    save_file({"norm": torch.ones(8)}, tmp_path / "norms.safetensors")
    done = tonnage("quality", "--tensors", str(tmp_path / "norms.safetensors"))
    assert done.code == 2
    assert "no tensor to measure (norm: it has no rows)" in done.error


def test_synthetic_tensors_have_more_error_with_more_outliers(
    tonnage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_errors, "_SYNTHETIC", (32, 1024))
    found = json.loads(tonnage("quality", "--synthetic", "--json", "-").output)
    rows = found["numeric_errors"]["tensors"]
    assert [row["errors"]["int4_g128"]["relative_rms"] for row in rows] == sorted(
        row["errors"]["int4_g128"]["relative_rms"] for row in rows
    )
