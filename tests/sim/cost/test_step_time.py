"""The datasheet roofline against arithmetic done by hand and against slow obvious versions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.scenarios.catalogue import load_gpu, load_model, model_names
from tonnage.sim.cost.attention import AttentionTimes, limited_reads
from tonnage.sim.cost.operators import causal_pairs, experts_touched
from tonnage.sim.cost.roofline import RooflineExecutor
from tonnage.sim.domain import MoeMlp, ParallelLayout, PromptChunk, Step

NONE = np.zeros(0, dtype=np.int64)


def decode(contexts: list[int]) -> Step:
    return Step(np.array(contexts, dtype=np.int64), sum(contexts), ())


def prefill(new: list[int], past: list[int]) -> Step:
    return Step(NONE, 0, tuple(map(PromptChunk, new, past)))


def test_one_token_of_llama_8b_reads_the_weights_once() -> None:
    """7.5 B multiplied weights x 2 B + 1,000 tokens x 131,072 B over 4.8 TB/s, little else."""
    executor = RooflineExecutor(
        load_model("llama-3.1-8b"), ParallelLayout(), load_gpu("h200-sxm"), "bf16"
    )
    weights = 8.03e9 - 128256 * 4096  # the embedding is looked up, not multiplied
    expected_s = (weights * 2 + 1000 * 131_072) / 4.8e12
    assert executor.run(decode([1000]), 1)[0] == pytest.approx(expected_s, rel=0.005)


def test_a_long_prompt_of_llama_8b_is_bound_by_compute() -> None:
    """2 FLOP per weight and token plus 4 x pairs x width, over 989 TFLOP/s."""
    executor = RooflineExecutor(
        load_model("llama-3.1-8b"), ParallelLayout(), load_gpu("h200-sxm"), "bf16"
    )
    tokens = 8192
    linear = 2 * tokens * (8.03e9 - 2 * 128256 * 4096)
    attention = 32 * 4 * (tokens * (tokens + 1) / 2) * 4096
    seconds = executor.run(prefill([tokens], [0]), 1)[0]
    assert seconds == pytest.approx((linear + attention) / 989e12, rel=0.02)


@pytest.mark.parametrize("name", model_names())
def test_steps_of_every_model_take_time_and_more_work_takes_no_less(name: str) -> None:
    model, gpu = load_model(name), load_gpu("b200-sxm")
    for layout in (ParallelLayout(tp=8), ParallelLayout(tp=8, attention_dp=8, ep=1)):
        executor = RooflineExecutor(model, layout, gpu, "fp8_e4m3")
        short = executor.run(decode([100] * 8), 50)
        long = executor.run(decode([20_000] * 8), 50)
        wide = executor.run(decode([100] * 64), 50)
        assert (np.diff(short) >= 0).all()
        assert short[0] > 0
        assert (long >= short).all()
        assert (wide >= short).all()
        assert executor.run(prefill([4096], [4096]), 1)[0] > executor.run(prefill([512], [0]), 1)[0]


def test_attention_dp_does_not_make_the_mlp_cheaper() -> None:
    """The MLP is split over all ranks either way and works on the tokens of all of them."""
    model, gpu = load_model("llama-3.1-70b"), load_gpu("h200-sxm")
    prompts = prefill([256] * 64, [0] * 64)
    apart = RooflineExecutor(model, ParallelLayout(tp=8, attention_dp=8), gpu, "bf16")
    mlp_flops = 2 * 64 * 256 * 80 * 3 * 8192 * 28672 / 8
    assert apart.run(prompts, 1)[0] >= mlp_flops / gpu.dense_flops_per_s["bf16"]


def test_a_segment_is_its_steps_one_by_one() -> None:
    executor = RooflineExecutor(
        load_model("gpt-oss-20b"), ParallelLayout(), load_gpu("h100-sxm"), "bf16"
    )
    contexts = [5, 100, 127, 128, 500]
    whole = executor.run(decode(contexts), 40)
    single = [executor.run(decode([c + k for c in contexts]), 1)[0] for k in range(40)]
    assert whole == pytest.approx(single, rel=1e-12)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b"])
def test_contexts_grow_as_told(name: str) -> None:
    """Every context grows by 2.5 tokens a step, below and beyond the window of 128."""
    executor = RooflineExecutor(load_model(name), ParallelLayout(), load_gpu("h100-sxm"), "bf16")
    contexts = [20, 100, 120, 500]
    step = replace(decode(contexts), decode_context_growth=2.5 * len(contexts))
    even = [executor.run(decode([c + 5 * k for c in contexts]), 1)[0] for k in range(20)]
    assert executor.run(step, 40)[::2] == pytest.approx(even, rel=1e-12)


# --- several tokens per request -----------------------------------------------------------------


def test_more_query_tokens_read_weights_and_kv_once() -> None:
    executor = RooflineExecutor(
        load_model("llama-3.1-8b"), ParallelLayout(), load_gpu("h200-sxm"), "bf16"
    )
    weights = 8.03e9 - 128256 * 4096
    expected_s = (weights * 2 + 1000 * 131_072) / 4.8e12
    verify = replace(decode([1000]), query_tokens=4)
    assert executor.run(verify, 1)[0] == pytest.approx(expected_s, rel=0.005)


def test_many_query_tokens_are_bound_by_the_flops_of_attention() -> None:
    """2 FLOP x 32 layers x 32 heads x (128 + 128) per query token and token of context."""
    executor = RooflineExecutor(
        load_model("llama-3.1-8b"), ParallelLayout(), load_gpu("h200-sxm"), "bf16"
    )
    short, long = (replace(decode([tokens]), query_tokens=128) for tokens in (100_000, 200_000))
    expected_s = 128 * 100_000 * 2 * 32 * 32 * 256 / 989e12
    difference_s = executor.run(long, 1)[0] - executor.run(short, 1)[0]
    assert difference_s == pytest.approx(expected_s, rel=1e-6)


def test_verification_multiplies_as_many_rows_as_one_token_of_more_requests() -> None:
    """Four requests of four tokens are sixteen rows everywhere, in the head too."""
    executor = RooflineExecutor(
        load_model("kimi-k2.6"), ParallelLayout(tp=8), load_gpu("h200-sxm"), "bf16"
    )
    four = replace(decode([8000] * 4), query_tokens=4)
    sixteen = decode([2000] * 16)
    assert executor.run(four, 1)[0] == pytest.approx(executor.run(sixteen, 1)[0], rel=1e-12)


def test_sparse_queries_share_no_reads_but_the_indexer_does() -> None:
    attention = AttentionTimes(
        load_model("glm-5.2"), ParallelLayout(tp=8), load_gpu("h200-sxm"), "fp8_e4m3"
    )
    one, two = attention.decode_terms(1), attention.decode_terms(2)
    assert two.limited == (pytest.approx((2 * one.limited[0][0], 2048)),)
    assert two.context_token_s == one.context_token_s


# --- captured sizes -----------------------------------------------------------------------------

CAPTURED = (1, 2, 4, 8)


def executors(name: str, layout: ParallelLayout) -> tuple[RooflineExecutor, RooflineExecutor]:
    """Return an executor without captured sizes and one with them."""
    model, gpu = load_model(name), load_gpu("h200-sxm")
    plain = RooflineExecutor(model, layout, gpu, "bf16")
    return plain, RooflineExecutor(model, layout, gpu, "bf16", captured_sizes=CAPTURED)


def test_a_batch_is_padded_to_the_next_captured_size() -> None:
    """Padding has rows and no context: five requests cost eight with the KV of five."""
    plain, captured = executors("llama-3.1-70b", ParallelLayout(tp=8))
    padded = Step(np.array([1000] * 5 + [0] * 3), 5000, ())
    expected = plain.run(replace(padded, decode_context_growth=5.0), 10)
    assert captured.run(decode([1000] * 5), 10) == pytest.approx(expected, rel=1e-12)
    assert captured.run(decode([1000] * 5), 1)[0] > plain.run(decode([1000] * 5), 1)[0]


def test_beyond_the_largest_size_and_with_prompts_nothing_is_padded() -> None:
    plain, captured = executors("llama-3.1-70b", ParallelLayout(tp=8))
    mixed = Step(np.array([100] * 3), 300, (PromptChunk(7, 0),))
    for step in (decode([100] * 8), decode([100] * 9), prefill([3], [0]), mixed):
        assert captured.run(step, 1).tolist() == plain.run(step, 1).tolist()


def test_padding_reaches_no_experts() -> None:
    plain, captured = executors("kimi-k2.6", ParallelLayout(tp=8))
    five, eight = decode([0] * 5), decode([0] * 8)
    padding_s = captured.run(five, 1)[0] - plain.run(five, 1)[0]
    assert 0 < padding_s < 0.05 * (plain.run(eight, 1)[0] - plain.run(five, 1)[0])


# --- counting -----------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
    st.integers(1, 50),
    st.integers(1, 40),
    st.sampled_from([0.0, 1.0, 2.5]),
)
def test_limited_reads_match_counting(
    contexts: list[int], limit: int, steps: int, growth: float
) -> None:
    counted = [sum(min(c + growth * k, limit) for c in contexts) for k in range(steps)]
    reads = limited_reads(np.array(contexts), limit, growth, np.arange(float(steps)))
    assert np.broadcast_to(reads, steps).tolist() == counted


@given(st.integers(1, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_causal_pairs_match_counting(new: int, past: int, limit: int | None) -> None:
    counted = sum(min(past + k + 1, limit or 10**9) for k in range(new))
    assert causal_pairs(new, past, limit) == counted


def test_experts_touched_matches_throwing_dice() -> None:
    mlp = MoeMlp(64, 4, 128)
    rng = np.random.default_rng(0)
    drawn = [
        len({e for _ in range(10) for e in rng.choice(64, 4, replace=False).tolist()})
        for _ in range(2000)
    ]
    assert experts_touched(mlp, 10) == pytest.approx(np.mean(drawn), rel=0.01)
