"""Files of scores: three ways to give a test, and what is said of a file that is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from tonnage.scenarios.catalogue import model_names
from tonnage.scenarios.quality import read_evidence, shipped_evidence
from tonnage.scenarios.schema_pools import KvFormat, WeightFormat
from tonnage.sim.domain import BadInputError
from tonnage.sim.planning.proportions import Paired
from tonnage.sim.planning.score_pairs import Standards, compare, pool

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT.parent / "shared" / "facts" / "published.yaml"
HEAD = "date: 2026-11-01\nsource: ours\ncomparisons:\n  - model: m\n    changes: kv\n"
HEAD += "    baseline: bf16\n    variant: fp8_e4m3\n    tests:\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "scores.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_test_is_given_in_one_of_three_ways(tmp_path: Path) -> None:
    text = HEAD + (
        "      a: {questions: 200, baseline: 50, variant: 49.5}\n"
        "      b: {questions: 63, baseline_correct: 61, variant_correct: 60}\n"
        "      c: {both: 80, only_baseline: 5, only_variant: 3, neither: 12}\n"
        "      d: {baseline: 50, variant: 51}\n"
    )
    (found,) = read_evidence(written(tmp_path, text))
    by_name = {pair.test: pair for pair in found.pairs}
    assert (by_name["a"].baseline, by_name["a"].questions) == (0.5, 200)
    assert by_name["b"].variant == pytest.approx(60 / 63)
    assert by_name["c"].pairs == Paired(80, 5, 3, 12)
    assert (by_name["c"].baseline, by_name["c"].variant) == (0.85, 0.83)
    assert by_name["d"].counts() is None
    assert found.source == "ours (2026-11-01)"


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("{baseline: 50}", "tests.a: a test needs baseline, variant; or questions"),
        ("{questions: 9, baseline: 50, variant: 50, both: 3}", "a test needs"),
        ("{questions: 9, baseline_correct: 10, variant_correct: 3}", "10 right answers are more"),
        ("{both: 0, only_baseline: 0, only_variant: 0, neither: 0}", "no question at all"),
        ("{baseline: 101, variant: 50}", "tests.a.baseline: "),
        ("{baseline: 50, variant: 50, score: 3}", "tests.a.score: unknown field"),
        ("{questions: 2.5, baseline: 50, variant: 50}", "tests.a.questions: 2.5 is not a whole"),
    ],
)
def test_a_wrong_test_names_file_and_field(tmp_path: Path, test: str, message: str) -> None:
    with pytest.raises(BadInputError, match=r"scores\.yaml: comparisons\.0\.") as error:
        read_evidence(written(tmp_path, f"{HEAD}      a: {test}\n"))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "scores have the fields"),
        ("date: 2026-11-01\nsource: x\n", "comparisons: is missing"),
        ("date: 2026-11-01\nsource: x\ncomparisons: []\n", "comparisons: "),
        (HEAD.replace("changes: kv", "changes: speed") + "      a: {}\n", "changes: 'speed'"),
        ("date: [", "scores.yaml: "),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInputError) as error:
        read_evidence(written(tmp_path, text))
    assert message in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        read_evidence(tmp_path / "nothing.yaml")


def test_what_ships_speaks_of_models_and_formats_that_there_are() -> None:
    for found in shipped_evidence():
        assert found.model in model_names()
        known = get_args(WeightFormat if found.changes == "weights" else KvFormat)
        assert {found.baseline, found.variant} <= set(known)


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="shared/facts is not beside the checkout")
def test_what_ships_is_what_was_published() -> None:
    published = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))["quality"]
    sizes = published["test_set_sizes"]
    names = {
        "kimi_kv": ("kimi-k2.6", "bf16", "fp8_e4m3"),
        "glm_weights": ("glm-5.2", "fp8", "int4"),
    }
    for key, (model, baseline, variant) in names.items():
        (found,) = (one for one in shipped_evidence() if one.model == model)
        assert {pair.test for pair in found.pairs} == set(published[key])
        for pair in found.pairs:
            before, after = published[key][pair.test][baseline], published[key][pair.test][variant]
            if isinstance(before, str):
                right, questions = map(int, before.split("/"))
                assert pair.questions == questions
                assert pair.baseline == right / questions
                continue
            assert (100 * pair.baseline, 100 * pair.variant) == pytest.approx((before, after))
            assert pair.questions == sizes.get(
                pair.test.removesuffix("_exact").removesuffix("_flexible")
            )


# --- the document ---------------------------------------------------------------------------------

DOCUMENT = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")


def test_the_example_of_the_document_is_a_file_of_scores(tmp_path: Path) -> None:
    (text,) = re.findall(r"(?s)```yaml\n(.*?)```", DOCUMENT)
    (found,) = read_evidence(written(tmp_path, text))
    assert [pair.questions for pair in found.pairs] == [1319, 63, 1000]


def test_the_document_says_what_the_scores_say() -> None:
    for found in shipped_evidence():
        together = pool(found.pairs, 0.95)
        assert together is not None
        low, high = (100 * limit for limit in (together.interval.low, together.interval.high))
        row = f"{together.questions:,} questions | {100 * together.difference:.2f} | "
        assert f"{row}{low:+.2f} to {high:+.2f} | MMLU alone |" in DOCUMENT
        judged = [compare(pair, Standards()) for pair in found.pairs]
        within = [one.pair.test for one in judged if one.verdict == "within"]
        assert within == ["mmlu"]
        assert not [one for one in judged if one.verdict in ("worse", "better")]
        worst = min(one.interval.low for one in judged if one.interval is not None)
        assert f"of 63 questions: {-100 * worst:.2f}" in DOCUMENT
