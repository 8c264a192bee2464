"""Faults on real pages: what the real check kernel catches, and what neighbours see of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.plain_model import tiny
from tonnage.kernels.execute.batch import make_batch
from tonnage.kernels.execute.faults import FAULTS, faults_named
from tonnage.kernels.execute.guard import masked, returned, verdict_on
from tonnage.kernels.execute.handoff import hand_over, kv_sum
from tonnage.kernels.execute.injection import ClassReport, inject, injected, play
from tonnage.kernels.execute.pages import PagedMemory
from tonnage.kernels.execute.products import ExpertProduct
from tonnage.kernels.execute.scene import Scene, SceneSize
from tonnage.kernels.execute.weights import random_weight
from tonnage.kernels.executor import RankModel, RankSpec, StepRunner, place_on
from tonnage.sim.domain import BadInputError, ParallelLayout, PromptChunk
from tonnage.sim.model.requantise import with_weights
from tonnage.sim.serving.data_faults import FaultClass

SIZE = SceneSize()
READERS = ("stale_page_table", "early_reuse", "double_free", "recycled_row")
UNSEEN = ("read_before_load", "wrong_scale")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rank(kind: str, kv: str, weights: str = "native", backend: str = "cpu") -> RankModel:
    spec = RankSpec(with_weights(tiny(kind), weights), ParallelLayout(), kv)
    return RankModel(spec, place_on("cpu", backend, seed=3, rows_alone=backend == "cpu"))


def check_matrix(report: ClassReport, count: int) -> None:
    """Compare a class with what its kind of fault can be caught by."""
    name = report.name
    assert report.injected == count
    assert report.caught_by_tags == (count if name in (*READERS, "lease_expiry") else 0)
    assert report.caught_by_checksum == (count if name == "corrupted_transfer" else 0)
    if name == "late_writer":
        assert report.caught_by_writer == count
    elif name not in READERS:
        assert report.caught_by_writer == 0
    assert report.wrong_returned == (report.changed_output if name in UNSEEN else 0)
    assert report.changed_output > 0
    assert report.false_alarms == report.books_unsound == 0
    assert report.neighbours_equal == count


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(
    ("kind", "kv", "count"),
    [("mla", "fp8_e4m3", 3), ("gqa", "bf16", 2), ("mla", "bf16", 1), ("gqa", "fp8_e4m3", 1)],
)
def test_each_class_is_caught_by_what_can_catch_it(
    kind: str, kv: str, count: int, name: str
) -> None:
    report = injected(rank(kind, kv), FAULTS[name], count, SIZE)
    if name == "wrong_scale" and kv == "bf16":
        assert report.injected == 0  # its pages have no scale
        return
    check_matrix(report, count)


@pytest.mark.parametrize("weights", ["int4_g128", "fp8_block"])
def test_neighbours_do_not_see_it_in_experts_of_other_formats(weights: str) -> None:
    check_matrix(injected(rank("mla", "fp8_e4m3", weights), FAULTS["early_reuse"], 3, SIZE), 3)


def test_a_victim_that_writes_into_anothers_pages_harms_it_unless_it_is_masked() -> None:
    report = injected(rank("gqa", "bf16"), FAULTS["recycled_row"], 8, SIZE)
    assert report.neighbours_harmed_unchecked > 0
    assert report.neighbours_equal == 8


def test_triton_kernels_catch_the_same_and_need_no_rows_alone() -> None:
    model = rank("mla", "fp8_e4m3", backend="triton")
    small = SceneSize(requests=3, tokens_min=17, tokens_max=24)
    outcome = inject(model, FAULTS["double_free"], 1, small)
    assert outcome.by_tags
    assert outcome.changed_output
    assert outcome.neighbours_equal
    assert not outcome.wrong_returned
    assert not outcome.false_alarm


def test_a_play_is_the_same_again() -> None:
    model = rank("mla", "fp8_e4m3")
    first, second = play(model, SIZE, 5), play(model, SIZE, 5)
    assert all(first.same(second, row) for row in range(SIZE.requests))
    assert first.read == second.read
    other = play(model, SIZE, 6)
    assert first.stored != other.stored


def test_a_masked_request_is_not_among_what_is_returned() -> None:
    model = rank("gqa", "bf16")
    seen = play(model, SIZE, 2, FAULTS["stale_page_table"], acts=True)
    assert [row for row, masked in enumerate(seen.masked) if masked] == [seen.victim]
    answers = returned(seen.logits, torch.tensor(seen.masked))
    assert sorted(answers) == seen.neighbours


def test_the_step_itself_masks_what_its_check_finds() -> None:
    model = rank("mla", "fp8_e4m3")
    clean, faulty = (Scene(model, SIZE, 4) for _ in range(2))
    logits = []
    for scene in (clean, faulty):
        scene.begin()
        scene.fill_source()
        scene.hand_over()
        scene.admit_newcomer()
        if scene is faulty:
            FAULTS["stale_page_table"].act(scene)
        with torch.no_grad():
            logits.append(model.forward(scene.batch(), scene.memory, check_tags=True))
    differs = [not torch.equal(one, other) for one, other in zip(*logits, strict=True)]
    assert [row for row, one in enumerate(differs) if one] == [clean.victim_row]


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_a_masked_prompt_chunk_leaves_the_decoding_request_its_bits(kind: str) -> None:
    model = rank(kind, "bf16")
    results = []
    for is_faulty in (False, True):
        model.place.random.manual_seed(1)
        memory = StepRunner.of(model, 24, 16, requests_max=4).memory
        decoding, prompted, other = memory.open(40), memory.open(50), memory.open(30)
        if is_faulty:
            memory.page_table[prompted.row, 0] = other.pages[1]
        chunks = [(prompted, PromptChunk(20, 30))]
        batch = make_batch(memory, [decoding], [40], chunks, torch.arange(21))
        bad = verdict_on(batch, memory, writes=True).bad
        assert bad.tolist() == [False, is_faulty]
        untouched = kv_sum(memory, other, 30)
        with torch.no_grad():
            logits = model.forward(masked(batch, bad, memory), memory)
        assert kv_sum(memory, other, 30) == untouched
        results.append((logits, kv_sum(memory, decoding, 40)))
        for one in (decoding, prompted, other):
            memory.close(one)
    (clean, clean_kv), (faulty, faulty_kv) = results
    assert clean_kv == faulty_kv
    assert torch.equal(clean[0], faulty[0])
    assert not torch.equal(clean[1], faulty[1])


def test_a_writer_whose_pages_were_given_on_writes_to_nobodys_page() -> None:
    model = rank("gqa", "fp8_e4m3")
    runner = StepRunner.of(model, 8, 16, requests_max=4)
    memory = runner.memory
    ended = memory.open(40)
    late = make_batch(memory, [], [], [(ended, PromptChunk(40, 0))], torch.arange(40))
    assert not verdict_on(late, memory, reads=False, writes=True).bad.any()
    pages = list(ended.pages)
    memory.close(ended)
    memory.offer_next(pages[1:])
    successor = memory.open(32)
    assert successor.pages == pages[1:]
    before = kv_sum(memory, successor, 32)
    verdict = verdict_on(late, memory, reads=False, writes=True)
    assert verdict.writes is not None
    assert verdict.writes.tolist() == [2]  # the first page was given to nobody yet
    with torch.no_grad():
        model.forward(masked(late, verdict.bad, memory), memory)
        assert kv_sum(memory, successor, 32) == before
        model.forward(late, memory)
    assert kv_sum(memory, successor, 32) != before


@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "fp8_block", "int4_g128"])
def test_a_routed_row_alone_has_the_same_bits_in_any_company(weight_format: str) -> None:
    place = place_on("cpu", seed=1, rows_alone=True)
    product = ExpertProduct(random_weight((2, 256, 384), weight_format, place), place)
    x = place.normal(12, 384)
    one_expert = torch.zeros((12, 1), dtype=torch.int32)
    whole = product(x, one_expert, {})
    for rows in range(1, 12):
        assert torch.equal(product(x[:rows], one_expert[:rows], {}), whole[:rows])
    place_with_all = place_on("cpu", seed=1)
    together = ExpertProduct(product.weight, place_with_all)(x, one_expert, {})
    assert torch.allclose(whole.float(), together.float(), rtol=2**-7, atol=2**-7)


def filled(place_seed: int, page_tokens: int) -> PagedMemory:
    model = rank("mla", "fp8_e4m3")
    memory = StepRunner.of(model, 24, page_tokens, requests_max=4).memory
    for seed in range(place_seed):
        memory.close(memory.open(page_tokens * (seed + 1)))
    return memory


def test_a_sum_does_not_depend_on_where_pages_lie_but_on_every_byte() -> None:
    source, target = filled(1, 16), filled(3, 8)
    sent, taken = source.open(37), target.open(37)
    hand_over(source, [sent], target, [taken])
    wanted = kv_sum(source, sent, 37)
    assert kv_sum(target, taken, 37) == wanted
    rows = target.layers[1].parts[0].flatten(2).flatten(0, 1).view(torch.uint8)
    slots = target.slots(taken, 0, 37)
    for token, byte, flip in ((0, 0, 1), (36, 575, 128), (20, 301, 64)):
        rows[slots[token], byte] ^= flip
        assert kv_sum(target, taken, 37) != wanted
        rows[slots[token], byte] ^= flip
    rows[slots[[3, 4]]] = rows[slots[[4, 3]]]
    assert kv_sum(target, taken, 37) != wanted
    rows[slots[[3, 4]]] = rows[slots[[4, 3]]]
    assert kv_sum(target, taken, 37) == wanted
    assert kv_sum(target, taken, 36) != wanted


def test_the_classes_are_those_of_a_scenario() -> None:
    assert list(FAULTS) == [str(one) for one in FaultClass]


def test_classes_are_named_and_an_unknown_one_is_refused() -> None:
    found = faults_named("late_writer, early_reuse,late_writer")
    assert [fault.name for fault in found] == ["late_writer", "early_reuse"]
    assert len(faults_named("all")) == len(FAULTS)
    with pytest.raises(BadInputError, match="'stale': no such class of faults; use all, or"):
        faults_named("stale")
