"""What layouts cost: ranks in lockstep, expert ranks, pipeline hops, shared contexts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.sim.cost.attention import AttentionTimes
from tonnage.sim.cost.collectives import collective_times, context_parallel_bytes
from tonnage.sim.cost.operators import decode_reads
from tonnage.sim.cost.roofline import RooflineExecutor
from tonnage.sim.domain import GqaAttention, MlaAttention, ParallelLayout, PromptChunk, Step

H200 = load_gpu("h200-sxm")
NONE = np.zeros(0, dtype=np.int64)
ROW_BYTES = 7168 * 2  # of Kimi's hidden state


def rank(contexts: list[int], chunks: tuple[PromptChunk, ...] = ()) -> Step:
    return Step(np.array(contexts, dtype=np.int64), sum(contexts), chunks)


def joint(*ranks: Step) -> Step:
    """Return the step of an instance whose attention-DP ranks run these."""
    contexts = np.concatenate([one.decode_context_tokens for one in ranks])
    chunks = tuple(chunk for one in ranks for chunk in one.prefill_chunks)
    return Step(contexts, sum(one.decode_context_sum for one in ranks), chunks, ranks=ranks)


def executor(name: str, layout: ParallelLayout, captured: tuple[int, ...] = ()) -> RooflineExecutor:
    return RooflineExecutor(load_model(name), layout, H200, "fp8_e4m3", captured_sizes=captured)


# --- attention-DP -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kimi-k2.6", "glm-5.2", "gpt-oss-120b"])
def test_equal_ranks_take_the_time_of_an_even_split(name: str) -> None:
    times = executor(name, ParallelLayout(tp=8, attention_dp=8, ep=8))
    ranks = [rank([100, 1500, 30_000]) for _ in range(8)]
    step = joint(*ranks)
    even = times.run(replace(step, ranks=()), 100)
    assert times.run(step, 100) == pytest.approx(even, rel=1e-12)
    prompts = joint(*[rank([], (PromptChunk(512, 100),)) for _ in range(8)])
    even = times.run(replace(prompts, ranks=()), 1)
    assert times.run(prompts, 1) == pytest.approx(even, rel=1e-12)


contexts = st.lists(st.integers(1, 50_000), max_size=6)


@settings(max_examples=60)
@given(st.lists(contexts, min_size=4, max_size=4).filter(any), st.booleans())
def test_uneven_ranks_never_take_less_than_an_even_split(
    loads: list[list[int]], prompts: bool
) -> None:
    times = executor("gpt-oss-20b", ParallelLayout(tp=4, attention_dp=4, ep=4))
    chunks = (PromptChunk(300, 0),) if prompts else ()
    step = joint(rank(loads[0], chunks), *[rank(load) for load in loads[1:]])
    even = times.run(replace(step, ranks=()), 20)
    assert (times.run(step, 20) >= even * (1 - 1e-12)).all()


def test_the_slowest_rank_is_looked_for_in_every_step() -> None:
    """Two long contexts wait for nobody at first; fifty short ones grow past them."""
    layout = ParallelLayout(tp=2, attention_dp=2)
    times = executor("llama-3.1-8b", layout)
    step = joint(rank([10_000] * 2), rank([100] * 50))
    terms = AttentionTimes(load_model("llama-3.1-8b"), layout, H200, "fp8_e4m3").decode_terms(1)
    seconds = times.run(step, 1000)
    read = np.maximum(20_000 + 2 * np.arange(1000), 5_000 + 50 * np.arange(1000))
    expected = (read - 20_000) * terms.context_token_s
    assert seconds - seconds[0] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert read[0] == 20_000
    assert read[-1] == 5_000 + 50 * 999


def test_ranks_step_as_one_segment_or_one_by_one() -> None:
    times = executor("glm-5.2", ParallelLayout(tp=8, attention_dp=4))
    loads = [[100, 2000, 2040], [5], [], [40_000]]
    whole = times.run(joint(*[rank(load) for load in loads]), 60)
    single = [
        times.run(joint(*[rank([c + k for c in load]) for load in loads]), 1)[0] for k in range(60)
    ]
    assert whole == pytest.approx(single, rel=1e-12)


def test_ranks_are_padded_to_the_captured_size_of_the_fullest() -> None:
    """Three and one requests on two ranks work as four and four: the head sees eight rows."""
    layout = ParallelLayout(tp=2, attention_dp=2)
    captured, plain = executor("llama-3.1-8b", layout, (2, 4, 8)), executor("llama-3.1-8b", layout)
    uneven = joint(rank([0] * 3), rank([0]))
    full = joint(rank([0] * 4), rank([0] * 4))
    assert captured.run(uneven, 1)[0] == pytest.approx(plain.run(full, 1)[0], rel=1e-12)
    # Without captured sizes the ranks are padded to the fullest all the same.
    three = joint(rank([0] * 3), rank([0] * 3))
    assert plain.run(uneven, 1)[0] == pytest.approx(plain.run(three, 1)[0], rel=1e-12)


def test_a_prompt_on_one_rank_is_computed_by_that_rank_alone() -> None:
    """Its attention and projections are the rank's own; the MLPs are split over all eight ranks.

    With prompts the gathered rows are not padded: seven idle ranks add none.
    """
    layout, tokens = ParallelLayout(tp=8, attention_dp=8), 8192
    prompt = (PromptChunk(tokens, 0),)
    step = joint(rank([], prompt), *[rank([]) for _ in range(7)])
    seconds = executor("llama-3.1-70b", layout).run(step, 1)[0]
    attention = AttentionTimes(load_model("llama-3.1-70b"), layout, H200, "fp8_e4m3")
    projections = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024)
    mlps = 80 * 3 * 8192 * 28672 / 8
    sent_s = tokens * 80 * 2 * 7 / 8 * 8192 * 2 / 450e9
    expected_s = attention.prefill_s(prompt) + 2 * tokens * (projections + mlps) / 989e12 + sent_s
    assert seconds == pytest.approx(expected_s, rel=0.01)


def test_ranks_multiply_their_query_tokens() -> None:
    times = executor("kimi-k2.6", ParallelLayout(tp=8, attention_dp=8, ep=8))
    step = joint(*[rank([4000, 4000]) for _ in range(8)])
    verify = replace(step, query_tokens=4)
    even = times.run(replace(verify, ranks=()), 5)
    assert times.run(verify, 5) == pytest.approx(even, rel=1e-12)
    assert times.run(verify, 5)[0] > times.run(step, 5)[0]


def test_mlp_collectives_carry_the_rows_of_all_ranks() -> None:
    model = load_model("kimi-k2.6")
    whole = collective_times(model, ParallelLayout(tp=8), H200, "sglang")
    apart = collective_times(model, ParallelLayout(tp=8, attention_dp=8), H200, "sglang")
    one_s = 2 * 7 / 8 * ROW_BYTES / 450e9
    assert whole.rank_row_s == pytest.approx(2 * 61 * one_s)
    assert (apart.rank_row_s, whole.gathered_row_s) == (0, 0)
    assert apart.gathered_row_s == pytest.approx(61 * one_s)


# --- expert parallelism -------------------------------------------------------------------------


def test_the_busiest_expert_rank_sets_the_step() -> None:
    """32 tokens reach 190 of 384 experts, 24 a rank on average and 28 on the busiest."""
    step = rank([2000] * 32)
    cut = executor("kimi-k2.6", ParallelLayout(tp=8)).run(step, 1)[0]
    whole = executor("kimi-k2.6", ParallelLayout(tp=8, ep=8)).run(step, 1)[0]
    assert 1.1 < whole / cut < 28.5 / 23.7


# --- pipeline stages ----------------------------------------------------------------------------


def test_stages_hand_over_hidden_state_and_residual() -> None:
    """Each of eight GPUs sends an eighth to the next node, whose GPUs gather the rest."""
    model = load_model("kimi-k2.6")
    one = collective_times(model, ParallelLayout(tp=8), H200, "sglang")
    three = collective_times(model, ParallelLayout(tp=8, pp=3), H200, "sglang")
    hop_s = 2 * ROW_BYTES / 8 / H200.network_bytes_per_s + 7 / 8 * 2 * ROW_BYTES / 450e9
    assert three.rank_row_s - one.rank_row_s == pytest.approx(2 * hop_s)


def test_stages_of_one_node_hand_over_by_nvlink() -> None:
    model = load_model("llama-3.1-8b")
    one = collective_times(model, ParallelLayout(), H200, "sglang")
    four = collective_times(model, ParallelLayout(pp=4), H200, "sglang")
    assert four.rank_row_s - one.rank_row_s == pytest.approx(3 * 2 * 4096 * 2 / 450e9)


# --- decode context parallelism -----------------------------------------------------------------


def test_a_shared_context_is_read_in_parts_and_computed_as_before() -> None:
    """Each rank reads an eighth of the context for the heads of all eight."""
    attention = next(
        layer.attention
        for layer in load_model("kimi-k2.6").layers
        if isinstance(layer.attention, MlaAttention)
    )
    (whole,) = decode_reads(attention, ParallelLayout(tp=8), "bf16")
    (shared,) = decode_reads(attention, ParallelLayout(tp=8, dcp=8), "bf16")
    assert shared.bytes_per_token == whole.bytes_per_token / 8
    assert shared.flops_per_token == whole.flops_per_token


def test_a_shared_context_gathers_queries_and_reduces_outputs() -> None:
    """Kimi: 7 x 8 heads x (576 query + 512 output, BF16; 8 log-sums, FP32) = 123,648 bytes."""
    layout = ParallelLayout(tp=8, dcp=8)
    mla = load_model("kimi-k2.6").layers[0].attention
    assert isinstance(mla, MlaAttention)
    assert context_parallel_bytes(mla, layout) == 123_648
    times = collective_times(load_model("kimi-k2.6"), layout, H200, "sglang")
    assert times.decode_token_s == pytest.approx(61 * 123_648 / 450e9)
    gqa = GqaAttention(64, 1, 128, 128)
    assert context_parallel_bytes(gqa, ParallelLayout(tp=2, dcp=2)) == 32 * (256 * 2 + 2 * 4)
    assert context_parallel_bytes(gqa, ParallelLayout(tp=2)) == 0


def test_a_shared_context_is_faster_when_it_is_long_and_slower_when_it_is_short() -> None:
    whole = executor("kimi-k2.6", ParallelLayout(tp=8))
    shared = executor("kimi-k2.6", ParallelLayout(tp=8, dcp=8))
    assert shared.run(rank([200_000] * 8), 1)[0] < whole.run(rank([200_000] * 8), 1)[0]
    assert shared.run(rank([10] * 8), 1)[0] > whole.run(rank([10] * 8), 1)[0]
