"""Faults of data in whole deployments: pages are conserved, and checks find what they can.

The pools are small, so that pages are soon given again. Every plan is audited: no page is lost, and
none has two owners by its tag.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.sim.engine.harness import colocated, disaggregated, with_shared_prefixes
from tests.sim.serving.page_audit import audited
from tonnage.sim.domain import Coverage, IntegritySpec, Request, SpeculationSpec
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.run import RunResult
from tonnage.sim.serving.data_faults import CONTENT, PAGE_IDENTITY, FaultClass, FaultSpec
from tonnage.sim.serving.integrity import IntegrityBooks
from tonnage.sim.serving.policy import PLAIN, SGLANG, VLLM
from tonnage.sim.serving.prefix_cache import CacheSpec
from tonnage.sim.serving.tiers import HierarchySpec, TierSpec
from tonnage.sim.traffic.loads import OpenLoad

RECKLESS = replace(SGLANG, output_charge_most=8, reserved_decode_tokens=4)
TAGS = IntegritySpec("batched")
NONE = IntegritySpec()
SMALL: dict[str, Any] = {"kv_tokens": 400, "page_tokens": 4, "chunk_tokens": 32, "running": 12}


def traffic(count: int = 60, seed: int = 0, *, shared: bool = False) -> list[Request]:
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(0.02, count)).tolist()
    lengths = rng.integers([4, 2], [60, 40], size=(count, 2)).tolist()
    requests = [Request(number, arrivals_s[number], *one) for number, one in enumerate(lengths)]
    return with_shared_prefixes(requests, 8, seed, answers=False) if shared else requests


def watched(deployment: Deployment, spec: IntegritySpec, *faults: FaultSpec) -> Deployment:
    pools = {
        role: replace(plan, scheduling=replace(plan.scheduling, integrity=spec))
        for role, plan in deployment.pools.items()
    }
    return replace(deployment, pools=pools, faults=faults)


def fault(kind: FaultClass, pool: str, rate: float = 0.1, most: int | None = 40) -> FaultSpec:
    return FaultSpec(kind, pool, per_step=rate, layers=4, most=most)


def books_of(deployment: Deployment, requests: list[Request], seed: int = 0) -> IntegrityBooks:
    run = simulate(deployment, OpenLoad(requests), seed=seed)
    assert run.integrity is not None
    return run.integrity


# --- nothing changes without faults -------------------------------------------------------------


def assert_same(one: RunResult, other: RunResult) -> None:
    assert one.records.frame().equals(other.records.frame())
    assert one.busy_s == other.busy_s
    assert one.gaps.mean() == other.gaps.mean()


NEVER = FaultSpec(FaultClass.DOUBLE_FREE, "prefill", at_s=(1e5,))


@pytest.mark.parametrize("kind", ["serve", "cache", "split"])
def test_pages_with_an_identity_change_nothing(kind: str) -> None:
    """The counting pool and the other run the same, with all checks on and nothing to find.

    So does a tracker without an identity, which only counts what it compares.
    """
    cache = CacheSpec(tiers=HierarchySpec(TierSpec(300, 1e-6))) if kind == "cache" else None
    make = disaggregated if kind == "split" else colocated
    role = "prefill" if kind == "split" else "serve"
    deployment = make(**SMALL, policy=RECKLESS, cache=cache)
    requests = OpenLoad(traffic(shared=kind == "cache"))
    plain = simulate(deployment, requests)
    counted = simulate(watched(deployment, TAGS), requests)
    identified = simulate(watched(deployment, TAGS, replace(NEVER, pool=role)), requests)
    assert plain.integrity is None
    assert_same(plain, counted)
    assert_same(plain, identified)
    assert counted.integrity is not None
    assert identified.integrity is not None
    assert counted.integrity.checks == identified.integrity.checks
    assert counted.integrity.checks.entries > 1000
    assert identified.integrity.detected == identified.integrity.wrong_reads == 0


# --- whatever goes wrong ------------------------------------------------------------------------


@st.composite
def troubled(draw: st.DrawFn) -> tuple[Deployment, OpenLoad]:
    """Draw a deployment with several kinds of faults, checks of any kind, and its load."""
    shared = draw(st.booleans())
    policy = draw(st.sampled_from([PLAIN, SGLANG, RECKLESS, VLLM]))
    ranks = draw(st.sampled_from([1, 1, 2]))
    cache = CacheSpec(stores="scheduled" if policy.mixed else "computed") if shared else None
    make, pool = draw(
        st.sampled_from(
            [(colocated, "serve"), (disaggregated, "prefill"), (disaggregated, "decode")]
        )
    )
    kinds = draw(st.lists(st.sampled_from(list(FaultClass)), min_size=1, max_size=9, unique=True))
    deployment = make(
        kv_tokens=draw(st.sampled_from([160, 400])) * ranks,
        page_tokens=draw(st.sampled_from([1, 4])),
        chunk_tokens=32,
        running=12,
        policy=policy,
        ranks=ranks,
        stages=draw(st.sampled_from([1, 1, 2])),
        cache=cache,
        speculation=draw(st.sampled_from([None, None, SpeculationSpec(1, (0.5, 0.5))])),
    )
    spec = IntegritySpec(
        draw(st.sampled_from(["none", "batched", "batched", "canary"])),
        every_steps=draw(st.sampled_from([1, 3])),
        overlapped=draw(st.booleans()),
        handoff_checksum=draw(st.booleans()),
    )
    rate = draw(
        st.sampled_from([{"per_step": 0.3}, {"per_allocation": 0.05}, {"at_s": (0.2, 0.5)}])
    )
    faults = [FaultSpec(kind, pool, layers=4, **rate) for kind in kinds]
    timeout_s = draw(st.sampled_from([None, None, 0.4]))
    requests = traffic(24, draw(st.integers(0, 1000)), shared=shared)
    return watched(deployment, spec, *faults), OpenLoad(requests, timeout_s)


@settings(max_examples=20, deadline=None)
@given(troubled())
def test_no_page_is_lost_and_everybody_ends(case: tuple[Deployment, OpenLoad]) -> None:
    """After any number of faults, double frees included; tokens of those served are all there."""
    deployment, load = case
    with pytest.MonkeyPatch.context() as patch:
        audited(patch)
        run = simulate(deployment, load)
    frame = run.records.frame()
    assert run.pages_left == 0
    assert frame["id"].tolist() == [request.id for request in load.requests]
    done = frame[frame["status"] == "completed"]
    assert (done["generated_tokens"] == done["output_tokens"]).all()
    assert run.integrity is not None
    event(f"faults: {min(len(run.integrity.injections), 20)}")
    spec = next(iter(deployment.pools.values())).scheduling.integrity
    if spec.tracker == "batched":
        assert run.integrity.clean_aborted == 0


def test_single_steps_see_the_same_faults() -> None:
    """`exact` visits the same instants, faults and all."""
    faults = [fault(kind, "serve", 0.02, None) for kind in FaultClass if kind != "lease_expiry"]
    deployment = watched(colocated(**SMALL, policy=RECKLESS), TAGS, *faults)
    load = OpenLoad(traffic())
    runs = [simulate(deployment, load, exact=exact) for exact in (False, True)]
    assert_same(*runs)
    first, second = (run.integrity for run in runs)
    assert first is not None
    assert second is not None
    assert first.injected == second.injected
    assert first.detected == second.detected > 5


# --- what each check finds ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(PAGE_IDENTITY))
def test_tags_find_page_identity_faults_before_the_read(kind: FaultClass) -> None:
    """No page is read wrongly, and only requests that a fault has touched are aborted.

    Without a check, the same faults make requests read what is another's.
    """
    pool = "prefill" if kind is FaultClass.LEASE_EXPIRY else "decode"
    deployment = disaggregated(**SMALL, policy=RECKLESS, bandwidth_bytes_per_s=2e7)
    books = books_of(watched(deployment, TAGS, fault(kind, pool)), traffic(150))
    assert len(books.injections) >= 10
    assert books.wrong_reads == 0
    assert books.aborted >= 5
    assert books.clean_aborted == 0
    assert all(one.caught == "before" for one in books.injections if one.met)
    unchecked = books_of(watched(deployment, NONE, fault(kind, pool)), traffic(150))
    assert unchecked.wrong_reads >= 5
    assert unchecked.detected == unchecked.aborted == 0
    assert any(one.owner is not None for one in unchecked.reads)
    assert {one.victim for one in unchecked.reads} <= unchecked.victims


def test_what_is_not_covered_is_not_found() -> None:
    """A former owner's write leaves every tag valid: only its own generation gives it away."""
    deployment = colocated(**SMALL, policy=RECKLESS)
    late = fault(FaultClass.LATE_WRITER, "serve")
    decode_only = replace(TAGS, covers=frozenset({Coverage.DECODE}))
    read = books_of(watched(deployment, decode_only, late), traffic(150))
    assert (read.detected, read.aborted) == (0, 0)
    assert read.wrong_reads >= 20
    refused = books_of(watched(deployment, TAGS, late), traffic(150))
    assert refused.refused_writes == refused.detected == len(refused.injections) >= 20
    assert (refused.wrong_reads, refused.aborted) == (0, 0)


@pytest.mark.parametrize("kind", sorted(CONTENT))
def test_tags_find_nothing_in_what_pages_hold(kind: FaultClass) -> None:
    deployment = disaggregated(**SMALL, policy=RECKLESS)
    books = books_of(watched(deployment, TAGS, fault(kind, "decode")), traffic(150))
    assert books.wrong_reads >= 20
    assert (books.detected, books.aborted) == (0, 0)


def test_a_checksum_finds_what_was_changed_on_the_way() -> None:
    """A page that was corrupted; and sender's pages that were given to others while they left.

    What was wrong before it was summed stays wrong.
    """
    deployment = disaggregated(**SMALL, policy=RECKLESS, bandwidth_bytes_per_s=2e7)
    summed = IntegritySpec(handoff_checksum=True)
    corrupted = watched(deployment, summed, fault(FaultClass.CORRUPTED_TRANSFER, "decode"))
    books = books_of(corrupted, traffic(150))
    assert books.detected == books.aborted >= 20
    assert books.wrong_reads == 0
    leased = books_of(
        watched(deployment, summed, fault(FaultClass.LEASE_EXPIRY, "prefill")), traffic(150)
    )
    assert leased.detected >= 5
    scaled = books_of(
        watched(deployment, summed, fault(FaultClass.WRONG_SCALE, "decode")), traffic()
    )
    assert scaled.detected == 0
    assert scaled.wrong_reads > 5


def test_a_canary_stops_the_instance_one_step_late() -> None:
    """It has been read by then; of spoiled layers it sees the first of four, and no scale."""
    deployment = disaggregated(**SMALL, policy=RECKLESS)
    canary = IntegritySpec("canary")
    stale = watched(deployment, canary, fault(FaultClass.STALE_PAGE_TABLE, "decode"))
    books = books_of(stale, traffic(150))
    assert books.stops >= 10
    assert books.lost >= books.stops
    assert all(one.caught == "after" for one in books.injections if one.wrong_reads)
    corrupted = watched(deployment, canary, fault(FaultClass.CORRUPTED_TRANSFER, "decode"))
    found = [one.caught is not None for one in books_of(corrupted, traffic(150)).injections]
    assert 0.05 < np.mean(found) < 0.55  # a quarter of forty
    scaled = watched(deployment, canary, fault(FaultClass.WRONG_SCALE, "decode"))
    assert books_of(scaled, traffic(150)).stops == 0


def test_a_check_beside_the_step_lets_one_bad_step_through() -> None:
    """Where writers are not checked, what it writes through a stale table is another's to read."""
    deployment = colocated(**SMALL, policy=RECKLESS)
    stale = fault(FaultClass.STALE_PAGE_TABLE, "serve")
    beside = replace(TAGS, overlapped=True)
    books = books_of(watched(deployment, beside, stale), traffic(150))
    assert books.seen_before_abort == books.wrong_by_place["decode"] >= 20
    assert books.detected >= books.aborted >= 20
    assert books.clean_aborted == 0
    unwatched = replace(beside, covers=frozenset({Coverage.DECODE}))
    astray = books_of(watched(deployment, unwatched, replace(stale, most=150)), traffic(300))
    assert astray.wrong_by_place["decode"] > astray.seen_before_abort


def test_a_step_that_is_not_checked_is_read() -> None:
    deployment = colocated(**SMALL, policy=RECKLESS)
    stale = fault(FaultClass.STALE_PAGE_TABLE, "serve")
    books = books_of(watched(deployment, replace(TAGS, every_steps=4), stale), traffic(150))
    late = sum(one.caught == "after" for one in books.injections)
    early = sum(one.caught == "before" for one in books.injections)
    assert min(late, early) >= 5
    assert books.checks.unchecked_steps > 100


def test_a_cached_prefix_that_is_not_its_own_any_more_is_computed_again() -> None:
    """Blocks that nobody holds lose a page; the next prompt that would take it over computes it.

    With all coverage nothing is read wrongly; without that of prefixes, prompts read on.
    """
    deployment = colocated(
        **{**SMALL, "kv_tokens": 1600}, policy=VLLM, cache=CacheSpec("lru", "scheduled")
    )
    reuse = FaultSpec(FaultClass.EARLY_REUSE, "serve", per_step=0.5)
    requests = traffic(300, shared=True)
    books = books_of(watched(deployment, TAGS, reuse), requests)
    assert books.recomputed >= 5
    assert books.wrong_reads == 0
    assert books.clean_aborted == 0
    decode_only = replace(TAGS, covers=frozenset({Coverage.DECODE}))
    assert books_of(watched(deployment, decode_only, reuse), requests).wrong_by_place["prompt"] > 0


def test_faults_happen_at_their_times_at_one_instance() -> None:
    times_s = (0.3, 0.3, 0.61)
    scale = FaultSpec(FaultClass.WRONG_SCALE, "serve", at_s=times_s, instance=1)
    books = books_of(watched(colocated(2, **SMALL), NONE, scale), traffic(80))
    assert books.injected == {"wrong_scale": 3}
