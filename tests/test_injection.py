"""Two hundred faults of each class on random traffic: what each check finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.engine.harness import colocated, disaggregated
from tonnage.injection import (
    InjectionRow,
    fault_place,
    injection_study,
    light_deployment,
)
from tonnage.sim.domain import Coverage, IntegritySpec
from tonnage.sim.serving.data_faults import PAGE_IDENTITY, FaultClass
from tonnage.sim.serving.policy import SGLANG, VLLM
from tonnage.sim.serving.prefix_cache import CacheSpec

COUNT = 200
TAGS = IntegritySpec("batched")
DECODE_ONLY = replace(TAGS, covers=frozenset({Coverage.DECODE}))


def study(kind: FaultClass, spec: IntegritySpec, count: int = COUNT) -> InjectionRow:
    deployment = light_deployment(disaggregated(policy=SGLANG, page_tokens=64), spec)
    row = injection_study(deployment, kind, count, layers=8)
    assert row is not None
    assert row.injected == count
    return row


@pytest.mark.parametrize("kind", sorted(PAGE_IDENTITY))
def test_every_page_identity_fault_that_is_met_is_caught_before_a_read(kind: FaultClass) -> None:
    row = study(kind, TAGS)
    assert row.caught_before == row.met >= 60
    assert (row.wrong_reads, row.missed, row.caught_after, row.clean_aborted) == (0, 0, 0, 0)


def test_without_a_check_they_are_read() -> None:
    row = study(FaultClass.EARLY_REUSE, IntegritySpec())
    assert row.missed == row.met >= 60
    assert row.wrong_reads >= row.victims >= row.missed
    assert row.aborted == 0


def test_a_former_owner_is_found_by_its_generation_alone() -> None:
    missed, caught = (study(FaultClass.LATE_WRITER, spec) for spec in (DECODE_ONLY, TAGS))
    assert missed.missed == missed.met >= 100
    assert caught.refused_writes == caught.caught_before == COUNT
    assert (missed.aborted, caught.aborted, caught.wrong_reads) == (0, 0, 0)


def test_a_checksum_finds_corruption_that_tags_do_not() -> None:
    tags = study(FaultClass.CORRUPTED_TRANSFER, TAGS, 60)
    summed = study(FaultClass.CORRUPTED_TRANSFER, replace(TAGS, handoff_checksum=True), 60)
    assert (tags.missed, tags.caught_before) == (tags.met, 0)
    assert (summed.missed, summed.caught_before) == (0, summed.met)
    assert min(tags.met, summed.met) >= 40


def test_shared_prefixes_are_watched_too() -> None:
    """In one page that many read, a fault has many victims, or as many aborts."""
    shared = colocated(policy=VLLM, page_tokens=16, cache=CacheSpec(stores="scheduled"))
    unchecked, tags = (
        injection_study(light_deployment(shared, spec), FaultClass.EARLY_REUSE, COUNT)
        for spec in (IntegritySpec(), TAGS)
    )
    assert unchecked is not None
    assert tags is not None
    assert unchecked.victims > 1.5 * unchecked.missed
    assert tags.caught_before == tags.met >= 60
    assert (tags.wrong_reads, tags.clean_aborted) == (0, 0)


def test_what_cannot_happen_is_not_studied() -> None:
    serve = colocated(policy=SGLANG)
    assert fault_place(serve, FaultClass.LEASE_EXPIRY) is None
    assert injection_study(serve, FaultClass.CORRUPTED_TRANSFER, 10) is None
    assert fault_place(disaggregated(), FaultClass.READ_BEFORE_LOAD) == "decode"


def test_the_same_seed_gives_the_same_row() -> None:
    first, second = (study(FaultClass.RECYCLED_ROW, TAGS, 40) for _ in range(2))
    assert first == second
