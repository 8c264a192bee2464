"""Real pages: who holds them, their tags on the device, the check of both, and handoffs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.plain_model import plain_logits, tiny
from tests.kernels.test_executor import (
    FP8_CACHE_ERROR,
    PAGE_TOKENS,
    decode_step,
    rank_of,
    rms_error,
    runner_of,
)
from tonnage.kernels.execute.batch import make_batch
from tonnage.kernels.execute.handoff import hand_over
from tonnage.kernels.execute.pages import (
    HeldPages,
    OutOfPagesError,
    PagedMemory,
    PageShape,
    _next_tag,
)
from tonnage.kernels.execute.plan import RowShape
from tonnage.kernels.executor import Repeats, StepRunner, place_on
from tonnage.kernels.paged_inputs import E4M3, UNUSED_PAGE, quantised
from tonnage.sim.domain import BadInputError, InfeasibleError, PromptChunk

LAYERS = (RowShape(None, 576), RowShape(2, 64))


def memory_of(
    kv: str = "bf16", pages: int = 12, page_tokens: int = 16, seed: int = 1
) -> PagedMemory:
    shape = PageShape(LAYERS, kv, pages, page_tokens, requests_max=4, request_tokens_max=128)
    return PagedMemory(shape, place_on("cpu", seed=seed))


def check_device(memory: PagedMemory, held: list[HeldPages]) -> None:
    """Compare everything on the device with the allocator's own books."""
    tags = [memory.tag(page) for page in range(memory.shape.pages)]
    assert memory.live_tags.tolist() == tags
    pages = [page for one in held for page in one.pages]
    assert len(pages) == len(set(pages)) == memory.shape.pages - memory.free_pages
    for one in held:
        count = len(one.pages)
        assert count == -(-one.tokens // memory.shape.page_tokens)
        assert one.tags == [memory.tag(page) for page in one.pages]
        assert int(memory.page_counts[one.ledger]) == count
        row = memory.page_table[one.row]
        assert row[:count].tolist() == memory.ledger_pages[one.ledger, :count].tolist() == one.pages
        assert memory.ledger_tags[one.ledger, :count].tolist() == one.tags
        assert bool((row[count:] == UNUSED_PAGE).all())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tags_on_the_device_are_the_allocators_through_frees_and_steps(seed: int) -> None:
    runner = runner_of(rank_of(tiny("gqa"), "fp8_e4m3"), pages=20)
    memory, draw = runner.memory, random.Random(seed)
    held: list[HeldPages] = []
    given: dict[int, list[int]] = {page: [] for page in range(20)}
    for turn in range(60):
        seen = {(page, tag) for one in held for page, tag in zip(one.pages, one.tags, strict=True)}
        choice = draw.random()
        try:
            if choice < 0.4:
                held.append(memory.open(draw.randint(1, 90)))
            elif choice < 0.7 and held:
                one = draw.choice(held)
                memory.extend(one, min(one.tokens + draw.randint(1, 40), 250))
            elif held:
                memory.close(held.pop(draw.randrange(len(held))))
        except OutOfPagesError:
            pass
        for one in held:
            for page, tag in zip(one.pages, one.tags, strict=True):
                if (page, tag) not in seen:
                    assert tag not in given[page], "a page was given twice under one tag"
                    given[page].append(tag)
        if turn % 10 == 9 and memory.free_pages:
            runner.measure(decode_step(PAGE_TOKENS), True, Repeats(samples=3))
            for page in range(20):
                given[page].append(memory.tag(page))
        check_device(memory, held)
        if held:
            assert not runner.mismatches(held).any()


def test_attention_reads_the_very_rows_that_are_checked() -> None:
    runner = runner_of(rank_of(tiny("gqa")))
    memory = runner.memory
    decoding, prompted = memory.open(20), memory.open(30)
    chunk = PromptChunk(10, 20)
    batch = make_batch(memory, [decoding], [20], [(prompted, chunk)], torch.arange(11))
    assert batch.decode is not None
    assert batch.prefill is not None
    batch.decode.page_table[0, 0] = prompted.pages[0]
    batch.prefill.page_table[0, 1] = decoding.pages[0]
    found = memory.place.run("tag_check", batch.tags)
    assert (found["mismatches"].tolist(), found["first_bad"].tolist()) == ([1, 1], [0, 1])


def test_a_page_table_that_names_another_page_is_found() -> None:
    runner = runner_of(rank_of(tiny("gqa")))
    memory = runner.memory
    first, second = memory.open(60), memory.open(40)
    memory.page_table[first.row, 2] = second.pages[0]
    assert runner.mismatches([first, second]).tolist() == [1, 0]
    found = memory.place.run("tag_check", memory.checked([second, first]))
    assert found["first_bad"].tolist()[1] == 2


def test_a_page_taken_from_a_request_that_still_reads_it_is_found() -> None:
    runner = runner_of(rank_of(tiny("gqa")), pages=8)
    memory = runner.memory
    reading, other = memory.open(3 * PAGE_TOKENS), memory.open(PAGE_TOKENS)
    memory.free_unchecked(reading.pages[1:])  # an early free, by whoever thought it had ended
    assert not runner.mismatches([reading, other]).any()  # nobody was given them yet
    memory.open(2 * PAGE_TOKENS)
    assert runner.mismatches([reading, other]).tolist() == [2, 0]


def test_an_abort_does_not_free_a_page_that_was_given_on() -> None:
    memory = memory_of(pages=4)
    first = memory.open(2 * 16)
    twin = replace(first, pages=list(first.pages), tags=list(first.tags))
    memory.close(first)
    second = memory.open(4 * 16)
    memory.close(twin)  # a double free of the same pages
    assert memory.free_pages == 0
    assert [memory.tag(page) for page in second.pages] == second.tags
    check_device(memory, [second])


def test_a_second_close_gives_neither_row_nor_pages_back_twice() -> None:
    memory = memory_of()
    first = memory.open(2 * 16)
    twin = replace(first, pages=list(first.pages), tags=list(first.tags))
    memory.close(first)
    memory.close(twin)
    assert memory.free_pages == 12
    held = [memory.open(16) for _ in range(4)]
    assert len({one.row for one in held}) == len({one.ledger for one in held}) == 4


def test_a_page_given_twice_to_one_request_is_seen_in_its_first_place() -> None:
    runner = runner_of(rank_of(tiny("gqa")))
    memory = runner.memory
    ended = memory.open(PAGE_TOKENS)
    (page,) = ended.pages
    memory.close(ended)
    memory.offer_next([page])
    memory.free_unchecked([page])  # now it is among the free ones twice
    held = memory.open(3 * PAGE_TOKENS)
    assert held.pages[:2] == [page, page]
    found = memory.place.run("tag_check", memory.checked([held]))
    assert (found["mismatches"].tolist(), found["first_bad"].tolist()) == ([1], [0])
    memory.close(held)
    assert memory.free_pages == 24
    assert {memory.times_listed(page) for page in range(24)} == {1}


def test_who_is_given_the_row_of_a_running_request_does_not_overwrite_its_ledger() -> None:
    runner = runner_of(rank_of(tiny("gqa")))
    memory = runner.memory
    reading = memory.open(3 * PAGE_TOKENS)
    memory.recycle_row(reading)
    other = memory.open(2 * PAGE_TOKENS)
    assert other.row == reading.row
    assert runner.mismatches([reading, other]).tolist() == [2, 0]
    memory.close(reading)  # the row stays with the other
    assert not runner.mismatches([other]).any()
    assert memory.open(PAGE_TOKENS).row != other.row


def test_tags_go_on_after_the_largest() -> None:
    assert _next_tag(2**31 - 1) == -(2**31)
    assert _next_tag(-1) == 0
    assert torch.tensor(_next_tag(2**31 - 1), dtype=torch.int32).item() == -(2**31)


def test_more_than_there_is_is_refused_in_one_line_and_changes_nothing() -> None:
    memory = memory_of()
    held = [memory.open(16) for _ in range(3)]
    with pytest.raises(OutOfPagesError, match="a request of 129 tokens is longer than the 128"):
        memory.extend(held[0], 129)
    memory.extend(held[0], 128)
    with pytest.raises(OutOfPagesError, match="5 KV pages are needed and 2 of 12 are free"):
        memory.open(80)
    held.append(memory.open(1))
    with pytest.raises(OutOfPagesError, match="all 4 rows of the page table are taken"):
        memory.open(1)
    check_device(memory, held)


def test_pages_that_do_not_fit_are_refused_and_the_message_says_how_many_do() -> None:
    shape = PageShape(LAYERS, "bf16", 1000, 16, 4, 128)
    with pytest.raises(InfeasibleError, match=r"1,000 KV pages take .* use at most 499 pages"):
        PagedMemory(shape, place_on("cpu"), free_bytes=shape.bytes / 2)
    memory = PagedMemory(shape, place_on("cpu"), free_bytes=shape.bytes)
    tensors = [part for layer in memory.layers for part in layer.parts]
    tensors += [memory.live_tags, memory.page_table, memory.ledger_pages, memory.ledger_tags]
    assert shape.bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3"])
def test_a_filled_memory_holds_numbers_everywhere(kv: str) -> None:
    memory = memory_of(kv)
    memory.fill_randomly()
    for layer in memory.layers:
        for part in layer.parts:
            values = part.float() * layer.scale
            assert bool(values.isfinite().all())
            assert 0.9 < float(values.std()) < 1.1


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_handoff_turns_bf16_pages_into_the_codes_a_write_would_make(backend: str) -> None:
    source, target = memory_of(page_tokens=16), memory_of("fp8_e4m3", page_tokens=8, seed=2)
    source.place = target.place = place_on("cpu", backend)
    source.fill_randomly()
    given = [source.open(tokens) for tokens in (37, 16)]
    taken = [target.open(tokens) for tokens in (37, 20)]
    hand_over(source, given, target, taken)
    for before, after in zip(source.layers, target.layers, strict=True):
        for part, its_target in zip(before.parts, after.parts, strict=True):
            for one, other in zip(given, taken, strict=True):
                rows = part.flatten(0, 1)[source.slots(one, 0, one.tokens)]
                codes = its_target.view(torch.uint8).flatten(0, 1)
                codes = codes[target.slots(other, 0, one.tokens)]
                assert torch.equal(codes, quantised(rows, after.scale).view(torch.uint8))


@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3"])
def test_a_handoff_in_one_format_copies_bytes(kv: str) -> None:
    source, target = memory_of(kv), memory_of(kv, seed=2)
    source.fill_randomly()
    given, taken = source.open(33), target.open(33)
    hand_over(source, [given], target, [taken])
    for before, after in zip(source.layers, target.layers, strict=True):
        for part, its_target in zip(before.parts, after.parts, strict=True):
            rows = part.view(torch.uint8).flatten(0, 1)[source.slots(given, 0, 33)]
            assert torch.equal(
                rows, its_target.view(torch.uint8).flatten(0, 1)[target.slots(taken, 0, 33)]
            )


def test_a_handoff_that_cannot_be_is_refused() -> None:
    fp8, bf16 = memory_of("fp8_e4m3"), memory_of()
    with pytest.raises(BadInputError, match="pages of fp8_e4m3 cannot become bf16"):
        hand_over(fp8, [fp8.open(4)], bf16, [bf16.open(4)])
    with pytest.raises(BadInputError, match="20 tokens do not fit pages given for 4"):
        hand_over(bf16, [bf16.open(20)], fp8, [fp8.open(4)])
    other = PagedMemory(PageShape(LAYERS[:1], "bf16", 4, 16, 2, 64), place_on("cpu"))
    with pytest.raises(BadInputError, match="do not store the same layers"):
        hand_over(other, [other.open(4)], bf16, [bf16.open(4)])


def test_a_decode_instance_goes_on_from_pages_it_was_handed() -> None:
    """Prefill on BF16 pages, hand over to FP8 pages, decode there: as on FP8 pages throughout."""
    prefilling, decoding = rank_of(tiny("mla")), rank_of(tiny("mla"), "fp8_e4m3")
    source, target = runner_of(prefilling).memory, runner_of(decoding).memory
    tokens = prefilling.random_tokens(30)
    given = source.open(29)
    batch = make_batch(source, [], [], [(given, PromptChunk(29, 0))], tokens[:29])
    prefilling.forward(batch, source)
    taken = target.open(30)
    hand_over(source, [given], target, [taken])
    logits = decoding.forward(make_batch(target, [taken], [30], [], tokens[29:]), target)
    assert rms_error(logits, plain_logits(prefilling, tokens)[-1:]) < FP8_CACHE_ERROR


def test_caches_hold_what_their_format_says() -> None:
    assert {part.dtype for layer in memory_of("fp8_e4m3").layers for part in layer.parts} == {E4M3}
    assert memory_of("fp8_e4m3").shape.token_bytes == 576 + 2 * 2 * 64
    assert memory_of("bf16").shape.token_bytes == 2 * (576 + 2 * 2 * 64)


def test_a_batch_has_a_row_and_a_table_row_for_every_request() -> None:
    runner = StepRunner.of(rank_of(tiny("gqa")), 40, PAGE_TOKENS, requests_max=20)
    with runner.batch(decode_step(*np.full(20, 30))) as batch:
        assert batch.rows == 20
        assert batch.decode is not None
        assert batch.decode.page_table.shape == (20, 16)
