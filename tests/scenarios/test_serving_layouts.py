"""The layout columns of serving results, against what the runs' names say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.scenarios.serving_layouts import StatedLayout, short_layout
from tonnage.sim.domain import BadInputError, ParallelLayout

EIGHT = ParallelLayout(8, 1, 8, 1)
DEP8 = ParallelLayout(8, 1, 8, 8)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (StatedLayout(8, attention_dp=1, moe_tp=8, moe_ep=1), ParallelLayout(8)),
        (StatedLayout(8, attention_dp=1, moe_tp=1, moe_ep=8), EIGHT),
        (StatedLayout(64, attention_dp=1, moe_tp=8, moe_ep=8), EIGHT),
        (StatedLayout(16, attention_dp=1, moe_tp=4, moe_ep=4), ParallelLayout(4, 1, 4)),
        (StatedLayout(1, attention_dp=64, moe_tp=8, moe_ep=8), DEP8),
        (StatedLayout(1, attention_dp=8, moe_tp=1, moe_ep=8), DEP8),
        (StatedLayout(1, attention_dp=8, moe_tp=8, moe_ep=1), ParallelLayout(8, 1, 1, 8)),
        (StatedLayout(2, attention_dp=2, moe_tp=1, moe_ep=4), ParallelLayout(2, 1, 2, 2)),
        (StatedLayout(4, attention_dp=4, moe_tp=1, moe_ep=16), ParallelLayout(4, 1, 4, 4)),
        (StatedLayout(4, attention_dp=1, moe_tp=2, moe_ep=2), ParallelLayout(2, 1, 2)),
        (StatedLayout(1, attention_dp=1, moe_tp=1, moe_ep=1), ParallelLayout()),
    ],
)
def test_doubled_columns_say_what_ran(stated: StatedLayout, expected: ParallelLayout) -> None:
    assert stated.layout() == expected


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (StatedLayout(4, moe_tp=2, moe_ep=2), ParallelLayout(4, 1, 2)),
        (StatedLayout(8, moe_tp=1, moe_ep=8), ParallelLayout(8, 1, 8)),
        (StatedLayout(2, moe_tp=4), ParallelLayout(4, 1, 1, 2)),
        (StatedLayout(1, moe_tp=2), ParallelLayout(2, 1, 1, 2)),
        (StatedLayout(8), ParallelLayout(8)),
    ],
)
def test_without_an_attention_dp_column_they_are_taken_literally(
    stated: StatedLayout, expected: ParallelLayout
) -> None:
    assert stated.layout() == expected


def test_gpus_of_experts_that_are_no_multiple_are_refused() -> None:
    with pytest.raises(BadInputError, match="3 x 1 GPUs of experts are no multiple of tp 2"):
        StatedLayout(2, moe_tp=3).layout()


@given(st.sampled_from([2, 4, 8, 16]), st.booleans(), st.booleans())
def test_every_way_of_doubling_leads_back(gpus: int, attention_dp: bool, experts: bool) -> None:
    """Write a layout down as files do, with the product in one column, and read it."""
    ranks, whole = (gpus if attention_dp else 1), (gpus if experts else 1)
    expected = ParallelLayout(gpus, 1, whole, ranks)
    tp = 1 if attention_dp else gpus
    plain = StatedLayout(tp, 1, ranks, gpus // whole, whole)
    assert plain.layout() == expected
    if experts:
        doubled = StatedLayout(
            tp if attention_dp else gpus * gpus,
            1,
            gpus * gpus if attention_dp else 1,
            gpus,
            gpus,
        )
        assert doubled.layout() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp4", ParallelLayout(4)),
        ("tep8", EIGHT),
        ("dp4", ParallelLayout(4, 1, 1, 4)),
        ("dep8", DEP8),
    ],
)
def test_short_names(text: str, expected: ParallelLayout) -> None:
    assert short_layout(text) == expected


def test_another_short_name_is_refused() -> None:
    with pytest.raises(BadInputError, match="'pp8' is not one of tp8"):
        short_layout("pp8")
