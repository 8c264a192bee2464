"""A rank of a tiny model, run step by step on pages, against plain attention over the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.kernels.plain_model import plain_logits, tiny
from tonnage.kernels.execute.batch import make_batch
from tonnage.kernels.execute.pages import OutOfPagesError
from tonnage.kernels.execute.plan import layer_groups, layer_products, left_out, refuse_unrunnable
from tonnage.kernels.execute.products import Product
from tonnage.kernels.execute.rank import rank_bytes
from tonnage.kernels.executor import (
    RankModel,
    RankSpec,
    Repeats,
    StepRunner,
    place_on,
)
from tonnage.scenarios.catalogue import load_model
from tonnage.sim.cost.fused import fused_products
from tonnage.sim.domain import (
    BadInputError,
    InfeasibleError,
    ModelSpec,
    ParallelLayout,
    PromptChunk,
    Step,
)
from tonnage.sim.model.requantise import with_weights

PAGE_TOKENS = 16
ONE_THREAD = Repeats(samples=3)
# Relative RMS error of logits after two layers. BF16 rounds some twenty times by 2^-9 on the way;
# e4m3 rounds keys and values, or the activations of every product, by up to 2^-4.
BF16_ERROR = 0.012
FP8_CACHE_ERROR = 0.03
FP8_PRODUCTS_ERROR = 0.07


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rank_of(
    model: ModelSpec, kv: str = "bf16", backend: str = "cpu", layers: int | None = None
) -> RankModel:
    spec = RankSpec(model, ParallelLayout(), kv, layers, keep_values=True)
    return RankModel(spec, place_on("cpu", backend, seed=3))


def runner_of(rank: RankModel, pages: int = 24) -> StepRunner:
    return StepRunner.of(rank, pages, PAGE_TOKENS, requests_max=8)


def decode_step(*contexts: int) -> Step:
    return Step(np.array(contexts), float(sum(contexts)), ())


def generated(runner: StepRunner, tokens: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
    """Prefill all tokens but the last in chunks, decode the last; return its logits `[1, n]`."""
    model, memory = runner.model, runner.memory
    held = memory.open(len(tokens))
    past = 0
    for new in chunks:
        part = [(held, PromptChunk(new, past))]
        batch = make_batch(memory, [], [], part, tokens[past : past + new])
        model.forward(batch, memory)
        past += new
    assert past == len(tokens) - 1
    batch = make_batch(memory, [held], [len(tokens)], [], tokens[-1:])
    logits = model.forward(batch, memory, check_tags=True)
    memory.close(held)
    return logits


def rms_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = found.double() - wanted
    return float((difference.square().mean() / wanted.square().mean()).sqrt())


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_decode_after_prefill_is_full_attention(kind: str, kv: str, backend: str) -> None:
    rank = rank_of(tiny(kind), kv, backend)
    tokens = rank.random_tokens(38)
    found = generated(runner_of(rank), tokens, (20, 17))
    bound = BF16_ERROR if kv == "bf16" else FP8_CACHE_ERROR
    assert rms_error(found, plain_logits(rank, tokens)[-1:]) < bound


@pytest.mark.parametrize(
    ("kind", "weights", "backend"),
    [
        *(("mla", weights, "cpu") for weights in ("int4_g128", "fp8", "fp8_channel", "fp8_block")),
        *(("gqa", weights, "cpu") for weights in ("int4_g32", "int4_g64", "fp8_block")),
        *(("mla", weights, "triton") for weights in ("int4_g128", "fp8_block")),
    ],
)
def test_quantised_weights_stand_for_their_values(kind: str, weights: str, backend: str) -> None:
    rank = rank_of(with_weights(tiny(kind), weights), backend=backend)
    tokens = rank.random_tokens(12)
    found = generated(runner_of(rank), tokens, (11,))
    bound = BF16_ERROR if weights.startswith("int4") else FP8_PRODUCTS_ERROR
    assert rms_error(found, plain_logits(rank, tokens)[-1:]) < bound


def test_a_mixed_step_gives_each_request_what_it_gets_alone() -> None:
    rank = rank_of(tiny("mla"))
    runner = runner_of(rank)
    memory = runner.memory
    tokens = rank.random_tokens(30)
    first, second = memory.open(20), memory.open(9)
    rank.forward(make_batch(memory, [], [], [(first, PromptChunk(19, 0))], tokens[:19]), memory)
    chunk = [(second, PromptChunk(9, 0))]
    together = torch.cat((tokens[19:20], tokens[20:29]))
    logits = rank.forward(make_batch(memory, [first], [20], chunk, together), memory)
    assert rms_error(logits[:1], plain_logits(rank, tokens[:20])[-1:]) < BF16_ERROR
    assert rms_error(logits[1:], plain_logits(rank, tokens[20:29])[-1:]) < BF16_ERROR


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_tokens_in_another_order_are_told_apart(kind: str) -> None:
    rank = rank_of(tiny(kind), "fp8_e4m3")
    tokens = rank.random_tokens(38)
    found = generated(runner_of(rank), tokens, (20, 17))
    moved = torch.cat((tokens[1:-1], tokens[:1], tokens[-1:]))
    assert rms_error(found, plain_logits(rank, moved)[-1:]) > 2 * FP8_CACHE_ERROR


@pytest.mark.parametrize(
    ("kind", "tp", "absorbed"),
    [("mla", 2, {"kv_b_proj"}), ("gqa", 2, set()), ("gqa", 4, set())],  # the last: KV heads twice
)
def test_decode_runs_the_products_of_the_cost_model(
    monkeypatch: pytest.MonkeyPatch, kind: str, tp: int, absorbed: set[str]
) -> None:
    model, layout = tiny(kind), ParallelLayout(tp=tp)
    runner = runner_of(RankModel(RankSpec(model, layout, "bf16"), place_on("cpu")))
    ran: Counter[tuple[str, int, int]] = Counter()
    run = Product.__call__

    def counted(self: Product, x: torch.Tensor) -> torch.Tensor:
        ran[(self.name, *self.weight.shape)] += 1  # type: ignore[index]
        return run(self, x)

    monkeypatch.setattr(Product, "__call__", counted)
    with runner.batch(decode_step(5, 9)) as batch:
        runner.model.forward(batch, runner.memory)
    wanted = {
        (product.name, product.out_features, product.in_features): count
        for product, count in fused_products(model, layout, "sglang")
        if product.name not in absorbed
    }
    assert dict(ran) == wanted


def test_a_step_is_measured_and_its_pages_are_given_back() -> None:
    runner = runner_of(rank_of(tiny("mla"), "fp8_e4m3"))
    step = Step(np.array([40, 7]), 47.0, (PromptChunk(5, 12),))
    timing = runner.measure(step, check_tags=True, repeats=Repeats(samples=3, shares=True))
    assert 0 < timing.seconds_p20 <= timing.seconds_median <= timing.seconds_p80 < 5
    assert list(timing.segments) == ["tag check", "embedding", "mla, dense", "mla, moe", "head"]
    assert sum(timing.shares.values()) == pytest.approx(1)
    assert {"attention", "routed experts", "tag check"} <= set(timing.shares)
    assert runner.memory.free_pages == 24


def test_time_is_scaled_to_all_layers_of_a_kind() -> None:
    model = tiny("mla", num_hidden_layers=8)
    groups = layer_groups(model, 4)
    assert [(group.count, group.run) for group in groups] == [(1, 1), (7, 3)]
    assert [group.scale for group in groups] == [1.0, pytest.approx(7 / 3)]
    runner = runner_of(rank_of(model, layers=2))
    with runner.batch(decode_step(3)) as batch:
        segments = runner.model.segments(batch, runner.memory)
    assert [segment.scale for segment in segments] == [1.0, 1.0, 7.0, 1.0]
    assert [group.run for group in layer_groups(model)] == [1, 7]
    with pytest.raises(BadInputError, match="layers: 1 are fewer than the 2 kinds"):
        layer_groups(model, 1)


def test_the_time_of_a_slow_kind_counts_as_often_as_the_model_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("tonnage.kernels.executor.time.process_time", lambda: next(ticks))
    runner = runner_of(rank_of(tiny("mla", num_hidden_layers=8), layers=2))
    timing = runner.measure(decode_step(3), repeats=ONE_THREAD)
    assert timing.seconds_median == 1 + 1 + 7 + 1  # every segment takes one tick


def test_what_is_not_executed_is_refused() -> None:
    runner = runner_of(rank_of(tiny("gqa")))
    single = decode_step(3)
    refused = {
        "attention-DP ranks": Step(single.decode_context_tokens, 3.0, (), ranks=(single,)),
        "verify 2 tokens": Step(single.decode_context_tokens, 3.0, (), query_tokens=2),
        "nothing to execute": decode_step(),
    }
    for message, step in refused.items():
        with pytest.raises(BadInputError, match=message):
            runner.measure(step, repeats=ONE_THREAD)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ParallelLayout(tp=2, ep=2), "layout.ep: 2 is not executed.*use ep 1"),
        (ParallelLayout(tp=2, attention_dp=2), "layout.attention_dp: 2"),
        (ParallelLayout(pp=2), "layout.pp: 2"),
        (ParallelLayout(tp=3), "tp: 3 does not divide"),
    ],
)
def test_a_layout_that_is_not_executed_is_refused(layout: ParallelLayout, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        refuse_unrunnable(tiny("mla"), layout)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("mla", r"latents of 512 \+ 64, not of 256 \+ 64"),
        ("gpt-oss-20b", "sliding windows are not executed"),
        ("nvfp4", "weights: nvfp4 of mlp.experts.gate_proj is not executed; use one of bf16"),
    ],
)
def test_a_model_that_is_not_executed_is_refused(model: str, message: str) -> None:
    spec = {
        "mla": lambda: tiny("mla", kv_lora_rank=256),
        "gpt-oss-20b": lambda: with_weights(load_model("gpt-oss-20b"), "bf16"),
        "nvfp4": lambda: with_weights(tiny("mla"), "nvfp4"),
    }[model]()
    with pytest.raises(BadInputError, match=message):
        refuse_unrunnable(spec, ParallelLayout())


@pytest.mark.parametrize("name", ["kimi-k2.6", "glm-5.2", "qwen3-235b-a22b"])
def test_large_models_can_be_executed_as_one_of_eight_ranks(name: str) -> None:
    model, layout = load_model(name), ParallelLayout(tp=8)
    refuse_unrunnable(model, layout)
    remarks = left_out(model, layout)
    assert remarks[0] == "collectives among the 8 ranks"
    assert any("sparse attention" in remark for remark in remarks) == (name == "glm-5.2")
    groups = layer_groups(model, 6)
    assert sum(group.run for group in groups) == 6
    assert sum(group.count for group in groups) == len(model.layers)


def test_weights_and_pages_that_do_not_fit_are_refused_before_they_are_made() -> None:
    spec = RankSpec(load_model("kimi-k2.6"), ParallelLayout(tp=8), "fp8_e4m3")
    with pytest.raises(InfeasibleError, match=r"one rank of kimi-k2\.6 take .* run fewer layers"):
        RankModel(spec, place_on("cpu"), free_bytes=60e9)
    rank = rank_of(tiny("gqa"))
    with pytest.raises(InfeasibleError, match="use at most"):
        StepRunner.of(rank, 10**9, PAGE_TOKENS, free_bytes=1e9)


def test_a_step_beyond_the_pages_is_refused_and_leaves_nothing_held() -> None:
    runner = runner_of(rank_of(tiny("gqa")), pages=8)
    with pytest.raises(OutOfPagesError, match="KV pages are needed and 2 of 8 are free"):
        runner.measure(decode_step(90, 90), repeats=ONE_THREAD)
    assert runner.memory.free_pages == 8


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4_g128"])
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_the_estimate_of_weights_is_what_they_take(kind: str, weights: str) -> None:
    model = with_weights(tiny(kind), weights)
    spec = RankSpec(model, ParallelLayout(), "bf16")
    rank = RankModel(spec, place_on("cpu"))
    estimated = rank_bytes(spec, rank.place)
    assert estimated == pytest.approx(rank.held_bytes, rel=0.1)


@pytest.mark.parametrize("name", ["laptop", "laptop-gqa"])
def test_the_laptop_models_are_executable_in_the_formats_of_their_scenarios(name: str) -> None:
    for weights in ("bf16", "int4_g128"):
        model = with_weights(load_model(name), weights)
        refuse_unrunnable(model, ParallelLayout())
        for group in layer_groups(model):
            for product in layer_products(model, group.spec, ParallelLayout()):
                assert product.in_features % 128 == 0
