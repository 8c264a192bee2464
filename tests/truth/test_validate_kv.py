"""Every KV capacity of the truth file through `tonnage validate kv`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.validate_kv import CONFIGURATION, PRINTED_POOL, KvValidation, validate_kv
from tonnage.validation_summary import ValidatedRow

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT.parent / "shared" / "truth" / "kv_capacity.csv"
pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason="shared/truth is not beside the checkout"
)


@pytest.fixture(scope="module")
def found() -> KvValidation:
    return validate_kv(FILE)


def _of(found: KvValidation, basis: str) -> list[ValidatedRow]:
    return [row for row in found.rows if row.groups["basis"] == basis]


def test_median_error_of_what_can_be_predicted(found: KvValidation) -> None:
    told = found.to_dict()["summary"]
    assert told["rows"] == 54
    assert told["predicted"] >= 34
    assert told["median_abs_error"] < 0.01
    assert told["by_basis"][CONFIGURATION]["kv_median_abs_error"] < 0.05
    assert told["by_basis"][PRINTED_POOL]["kv_median_abs_error"] < 0.001


def test_every_kind_of_cache_is_among_them(found: KvValidation) -> None:
    predicted = {row.groups["attention"] for row in found.rows if row.refused is None}
    kinds = {"mla", "dsa", "dsa, attention-dp", "gqa, attention-dp", "sliding", "linear"}
    assert kinds <= predicted


@pytest.mark.parametrize(
    "name", ["K001", "K002", "K005", "K038", "K051", "K053", "K057", "K058", "K062", "K106"]
)
def test_tokens_and_requests_in_a_printed_pool(found: KvValidation, name: str) -> None:
    (row,) = (row for row in found.rows if row.id == name)
    assert abs(row.figures["kv"].error) < 0.001


def test_most_configurations_alone_are_close(found: KvValidation) -> None:
    errors = [abs(row.figures["kv"].error) for row in _of(found, CONFIGURATION)]
    assert sum(error < 0.05 for error in errors) >= 11
    # The others: an engine older than the rules (K096, K098), a log that contradicts itself
    # (K067), one that left the indexer out (K006), and gigabytes that may be gibibytes (K025).
    far = {row.id for row in _of(found, CONFIGURATION) if abs(row.figures["kv"].error) > 0.05}
    assert far <= {"K006", "K025", "K067", "K096", "K098"}


def test_every_refusal_says_why(found: KvValidation) -> None:
    reasons = {
        row.refused
        for row in found.rows
        if row.groups["basis"] not in (CONFIGURATION, PRINTED_POOL)
    }
    assert None not in reasons
    assert "the model is not in the catalogue" in reasons
