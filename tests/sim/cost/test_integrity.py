"""What a check adds to a step: by hand, what it rises with, and one way against another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.cost.integrity_samples import (
    BATCHED,
    H200,
    LLAMA,
    check,
    decode,
    decoding,
    prefill,
    prompting,
)

from tonnage.sim.cost.check_prices import check_prices
from tonnage.sim.cost.handoff_checks import SideChecks, load_check_s
from tonnage.sim.cost.integrity import TagCheck, Watched, step_check
from tonnage.sim.cost.operator_times import OperatorTime, total_s
from tonnage.sim.cost.roofline import RooflineExecutor
from tonnage.sim.cost.watched import WatchedExecutor
from tonnage.sim.domain import Coverage, IntegritySpec, ParallelLayout, Step

NODE, LAUNCH, READBACK, READ = 2.5e-6, 15e-6, 25e-6, 2e-6
ENTRY_S = 44 / (0.6 * 4.8e12)
LEDGER, LEDGER_PAGE = 2.5e-6, 6e-9
VARIANTS = [
    BATCHED,
    replace(BATCHED, in_graph=False),
    replace(BATCHED, overlapped=True),
    replace(BATCHED, every_steps=4),
    IntegritySpec("canary"),
]


def executor(spec: IntegritySpec, layout: ParallelLayout | None = None) -> WatchedExecutor:
    """Return watched steps of Llama 8B by the datasheet, captured up to 64 requests."""
    layout = layout or ParallelLayout()
    steps = RooflineExecutor(LLAMA, layout, H200, "bf16", captured_sizes=tuple(range(1, 65)))
    return WatchedExecutor(steps, check(spec, layout=layout, page_tokens=16), layout, 64)


def by_name(items: list[OperatorTime]) -> dict[str, OperatorTime]:
    return {one.name.removeprefix("integrity."): one for one in items}


# --- by hand --------------------------------------------------------------------------------------


def test_a_check_in_a_graph_by_hand() -> None:
    """Eight requests of 8,192 tokens in pages of 64: 128 each, one being written."""
    spec = replace(BATCHED, covers=frozenset([Coverage.DECODE, Coverage.WRITER]))
    items = by_name(check(spec).items(decoding(8, 8192)))
    entries = 8 * 128 + 8 * 63 / 128 + 8
    kernel_s = NODE + 1.2e-6 + entries * ENTRY_S  # one block of up to 1,024 pages
    assert items["tag_check"].seconds == pytest.approx(kernel_s)
    assert items["tag_check"].roofline_s == pytest.approx(16 * entries / 4.8e12)
    assert items["launch"].seconds == pytest.approx(NODE)  # the mask: 131,072 / 64 pages are narrow
    assert items["readback"].seconds == pytest.approx(NODE)
    any_page = 1 - (1 - 1 / 64) ** 8
    assert items["bookkeeping"].seconds == pytest.approx(any_page * NODE)
    assert items["bookkeeping"].hidden_s == pytest.approx(any_page * LEDGER + 8 / 64 * LEDGER_PAGE)
    assert "agreement" not in items  # one rank
    assert "host_read" not in items


def test_a_launched_check_by_hand() -> None:
    """The host launches check and step, waits for the verdict, and keeps the ledger meanwhile."""
    items = by_name(check(replace(BATCHED, in_graph=False)).items(decoding(8, 8192)))
    any_page = 1 - (1 - 1 / 64) ** 8
    assert items["launch"].seconds == pytest.approx(2 * LAUNCH)
    assert items["readback"].seconds == pytest.approx(READBACK)
    kept_s = any_page * (LEDGER + LAUNCH) + 8 / 64 * LEDGER_PAGE
    assert items["bookkeeping"].seconds == pytest.approx(kept_s)
    assert items["bookkeeping"].hidden_s == 0


def test_rows_of_single_tokens_are_wide_and_their_results_are_zeroed() -> None:
    items = by_name(check(page_tokens=1).items(decoding(1, 8192)))
    assert items["launch"].seconds == pytest.approx(3 * NODE)
    kernel_s = NODE + 4 * 1.2e-6 + (8192 + 1) * ENTRY_S
    assert items["tag_check"].seconds == pytest.approx(kernel_s)
    assert items["bookkeeping"].seconds == pytest.approx(NODE)  # a page in every step


def test_an_overlapped_check_leaves_a_look_its_bandwidth_and_the_ledger() -> None:
    items = by_name(check(replace(BATCHED, overlapped=True)).items(decoding(8, 8192)))
    entries = 8 * 128 + 8 * 63 / 128 + 8
    assert items["host_read"].seconds == pytest.approx(READ)
    assert items["bandwidth_taken"].seconds == pytest.approx(16 * entries / (0.6 * 4.8e12))
    for name in ("tag_check", "readback"):
        assert items[name].seconds == 0
        assert items[name].hidden_s > 0
    left = {name for name, one in items.items() if one.seconds}
    assert left == {"host_read", "bandwidth_taken", "bookkeeping"}


def test_ranks_agree_on_the_verdict() -> None:
    items = by_name(check(layout=ParallelLayout(tp=8)).items(decoding(8, 8192)))
    assert items["agreement"].seconds == pytest.approx(4.2e-6)
    launched = check(replace(BATCHED, in_graph=False), layout=ParallelLayout(tp=8))
    assert by_name(launched.items(decoding(8, 8192)))["agreement"].seconds == pytest.approx(29e-6)
    # a rank of attention-DP holds its own requests, and nobody else has to agree
    alone = check(layout=ParallelLayout(tp=8, attention_dp=8))
    assert "agreement" not in by_name(alone.items(decoding(8, 8192)))


def test_pipeline_stages_check_one_after_the_other() -> None:
    one = by_name(check().items(decoding(8, 8192)))
    two = by_name(check(layout=ParallelLayout(pp=2)).items(decoding(8, 8192)))
    assert two["tag_check"].seconds == pytest.approx(2 * one["tag_check"].seconds)
    assert two["readback"].seconds == one["readback"].seconds


def test_what_prompts_read_and_write_is_checked_by_the_places_that_are_covered() -> None:
    found = {}
    for places in ([], [Coverage.DECODE], [Coverage.PREFIX], [Coverage.WRITER]):
        one = check(replace(BATCHED, covers=frozenset(places)))
        assert isinstance(one, TagCheck)
        found[tuple(places)] = float(one.entries(prompting(2048, 4096))[0])
    assert list(found.values()) == [0, 0, 64, 32]
    nowhere = check(replace(BATCHED, covers=frozenset()))
    kept_s = LEDGER + 32 * LEDGER_PAGE + LAUNCH
    assert nowhere.seconds(prompting(2048, 4096)) == pytest.approx([kept_s])
    assert set(by_name(nowhere.items(prompting(2048)))) == {"bookkeeping"}


def test_the_mean_of_n_steps_is_charged_but_the_ledger_in_each() -> None:
    every, fourth = check(), check(replace(BATCHED, every_steps=4))
    kept_s = by_name(every.items(decoding(8, 8192)))["bookkeeping"].seconds
    whole_s = float(every.seconds(decoding(8, 8192))[0])
    charged_s = fourth.seconds(decoding(8, 8192))
    assert charged_s == pytest.approx([kept_s + (whole_s - kept_s) / 4])
    # prompts are always checked
    assert fourth.seconds(prompting(512, 512)) == every.seconds(prompting(512, 512))


def test_a_canary_by_hand() -> None:
    """128 bytes of records a token, and slot and token twice; six kernels."""
    canary = check(IntegritySpec("canary"))
    moved = (128 + 24) * (8 * 8192 + 8)
    expected_s = 6 * NODE + moved / (0.6 * 4.8e12)
    assert canary.seconds(decoding(8, 8192)) == pytest.approx([expected_s])
    latent = check(IntegritySpec("canary"), model="kimi-k2.6")
    moved = (64 + 24) * (8 * 8192 + 8)
    assert latent.seconds(decoding(8, 8192)) == pytest.approx([6 * NODE + moved / (0.6 * 4.8e12)])


def test_mean_pages_of_a_context_that_ends_anywhere_in_a_page() -> None:
    one = check(replace(BATCHED, covers=frozenset([Coverage.DECODE])), page_tokens=16)
    assert isinstance(one, TagCheck)
    exact = np.mean([np.ceil(context / 16) for context in range(1600, 1616)])
    mean = np.mean([float(one.entries(decoding(1, context))[0]) for context in range(1600, 1616)])
    assert mean == pytest.approx(exact)


def test_no_tracker_no_check() -> None:
    prices = check_prices(H200)
    for spec in (IntegritySpec(), IntegritySpec(handoff_checksum=True)):
        assert step_check(spec, LLAMA, ParallelLayout(), 64, prices) is None


# --- properties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", VARIANTS)
@settings(max_examples=25, deadline=None)
@given(
    requests=st.integers(1, 100),
    context=st.integers(1, 100_000),
    page_tokens=st.sampled_from([1, 16, 64]),
    captured=st.booleans(),
)
def test_items_add_up_and_more_to_look_at_takes_no_less(
    spec: IntegritySpec, requests: int, context: int, page_tokens: int, captured: bool
) -> None:
    one = check(spec, page_tokens=page_tokens)
    watched = decoding(requests, context, captured=captured)
    seconds = float(one.seconds(watched)[0])
    items = one.items(watched)
    assert seconds == pytest.approx(total_s(items))
    for item in items:
        assert 0 <= item.low_s <= item.seconds <= item.high_s
    for more in (
        decoding(requests + 1, context, captured=captured),
        decoding(requests, 2 * context, captured=captured),
    ):
        assert float(one.seconds(more)[0]) >= seconds


@settings(max_examples=40, deadline=None)
@given(
    requests=st.integers(1, 100),
    context=st.integers(1, 100_000),
    page_tokens=st.sampled_from([1, 16, 64]),
    tp=st.sampled_from([1, 8]),
    in_graph=st.booleans(),
    prompt=st.integers(0, 4096),
)
def test_an_overlapped_check_takes_no_more_than_one_that_the_step_waits_for(
    requests: int, context: int, page_tokens: int, tp: int, in_graph: bool, prompt: int
) -> None:
    spec, layout = replace(BATCHED, in_graph=in_graph), ParallelLayout(tp=tp)
    watched = Watched(
        float(requests), np.array([float(requests * context)]), requests, 1, 0, prompt, not prompt
    )
    waited, beside = (
        check(one, layout=layout, page_tokens=page_tokens).seconds(watched)[0]
        for one in (spec, replace(spec, overlapped=True))
    )
    assert beside <= waited


@pytest.mark.parametrize("spec", VARIANTS)
@settings(max_examples=15, deadline=None)
@given(contexts=st.lists(st.integers(1, 50_000), min_size=1, max_size=80))
def test_a_segment_is_its_steps_one_by_one(spec: IntegritySpec, contexts: list[int]) -> None:
    one = executor(spec)
    together = one.run(decode(contexts), 40)
    alone = [one.run(decode([context + n for context in contexts]), 1)[0] for n in range(40)]
    assert together == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("spec", VARIANTS)
def test_operators_of_a_watched_step_add_up_to_it(spec: IntegritySpec) -> None:
    one = executor(spec)
    for step in (decode([3000] * 8), decode([3000] * 80), prefill(512), prefill(512, 4096)):
        assert total_s(one.times(step)) == pytest.approx(one.run(step, 1)[0])


def test_the_rank_with_most_to_look_at_sets_the_time() -> None:
    layout = ParallelLayout(tp=2, attention_dp=2)
    one = executor(BATCHED, layout)
    light, heavy = decode([100]), decode([9000] * 5)

    def together(*ranks: Step) -> Step:
        contexts = np.concatenate([rank.decode_context_tokens for rank in ranks])
        return Step(contexts, int(contexts.sum()), (), ranks=ranks)

    plain = RooflineExecutor(LLAMA, layout, H200, "bf16", captured_sizes=tuple(range(1, 65)))
    added = [
        one.run(step, 1)[0] - plain.run(step, 1)[0]
        for step in (together(light, heavy), together(heavy, light), together(heavy, heavy))
    ]
    assert added[0] == pytest.approx(added[1]) == pytest.approx(added[2])
    less = together(light, light)
    assert one.run(less, 1)[0] - plain.run(less, 1)[0] < added[0]


# --- handoffs and loads ---------------------------------------------------------------------------


def side(spec: IntegritySpec, *, receives: bool, summed: bool = False) -> SideChecks:
    return SideChecks(spec, 64, lambda tokens: 1e5 * tokens, check_prices(H200), receives, summed)


def test_the_checks_of_a_handoff_by_hand() -> None:
    pages = 128
    tags_s = NODE + 1.2e-6 + pages * ENTRY_S + LAUNCH + READBACK
    assert side(BATCHED, receives=False)(8192) == pytest.approx(tags_s)
    given_s = LEDGER + pages * LEDGER_PAGE + LAUNCH
    assert side(BATCHED, receives=True)(8192) == pytest.approx(tags_s + given_s)
    assert side(BATCHED, receives=True)(0) == 0
    elsewhere = replace(BATCHED, covers=frozenset([Coverage.DECODE]))
    assert side(elsewhere, receives=False)(8192) == 0


def test_a_checksum_reads_all_bytes_on_both_sides() -> None:
    """819.2 MB at 60 % of 4.8 TB/s; the sender sums one prompt, the receiver one of a batch."""
    read_s = 1e5 * 8192 / (0.6 * 4.8e12)
    sender, receiver = (
        side(IntegritySpec(), receives=receives, summed=True) for receives in (False, True)
    )
    assert sender(8192) == pytest.approx(81e-6 + read_s)
    assert receiver(8192) == pytest.approx(9e-6 + read_s)
    slowest_s = sender.items(8192)[0].high_s
    assert slowest_s == pytest.approx(162e-6 + 1e5 * 8192 / 650e9)
    assert side(IntegritySpec(), receives=True).is_nothing
    assert not sender.is_nothing


def test_a_load_from_a_tier_is_checked_where_tiers_are_covered() -> None:
    prices = check_prices(H200)
    assert load_check_s(BATCHED, prices) == pytest.approx(
        NODE + 1.2e-6 + LAUNCH + READBACK, rel=1e-3
    )
    for spec in (IntegritySpec(), replace(BATCHED, covers=frozenset([Coverage.DECODE]))):
        assert load_check_s(spec, prices) == 0
