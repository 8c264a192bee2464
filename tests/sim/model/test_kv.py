"""KV bytes per token and per request, against published figures and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.scenarios.catalogue import load_model
from tonnage.sim.domain import (
    BadInputError,
    GqaAttention,
    LayerSpec,
    LinearAttention,
    ModelSpec,
    ParallelLayout,
)
from tonnage.sim.model.kv import (
    kv_bytes_per_token,
    kv_shape,
    request_kv_bytes,
    stage_kv_shapes,
    stage_layers,
)

WHOLE = ParallelLayout()
GIB = 2**30


def model_of(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("made-up", "MadeUp", 64, 100, 4096, tuple(layers), ())


def attention_layer(attention: GqaAttention | LinearAttention) -> LayerSpec:
    return LayerSpec(attention, None, ())


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("kimi-k2.5", 70272, 35136),
        ("kimi-k2.6", 70272, 35136),
        ("glm-5.2", 92628, 53940),
        ("glm-5", 100152, 61464),
        ("glm-5.1", 100152, 61464),
        ("deepseek-v3.2", 78324, 48068),
        ("minimax-m2.5", 253952, 126976),
        ("minimax-m2.7", 253952, 126976),
        ("qwen3-235b-a22b", 192512, 96256),
        ("qwen3-coder-480b", 253952, 126976),
        ("devstral-2-123b", 360448, 180224),
        ("llama-3.1-70b", 327680, 163840),
        ("llama-3.1-8b", 131072, 65536),
    ],
)
def test_bytes_per_token_of_the_whole_model(name: str, bf16: int, fp8: int) -> None:
    model = load_model(name)
    assert kv_bytes_per_token(model, WHOLE, "bf16") == bf16
    assert kv_bytes_per_token(model, WHOLE, "fp8_e4m3") == fp8


def test_sliding_layers_hold_at_most_their_window() -> None:
    model = load_model("gpt-oss-120b")
    assert kv_bytes_per_token(model, WHOLE, "bf16") == 36864
    assert kv_bytes_per_token(model, WHOLE, "fp8_e4m3") == 18432
    assert request_kv_bytes(model, WHOLE, "bf16", 128) == 128 * 73728
    held = request_kv_bytes(model, WHOLE, "bf16", [1, 128, 129, 100_000])
    windowed = 128 * 36864
    assert held.tolist() == [73728, 128 * 73728, 129 * 36864 + windowed, 1e5 * 36864 + windowed]
    (shape,) = stage_kv_shapes(model, WHOLE, "bf16")
    assert shape.billed_bytes_per_token == 73728


def test_sparse_attention_indexer_is_counted_where_a_layer_owns_one() -> None:
    # SGLang pull request 11309: the log said 54.52 GiB, 65.49 were taken.
    shape = kv_shape(load_model("deepseek-v3.2").layers, WHOLE, "fp8_e4m3")
    assert shape.whole_bytes_per_token == 61 * 132
    assert shape.growing_bytes_per_token * 1_462_784 / GIB == pytest.approx(65.49, rel=1e-3)
    assert shape.shared_bytes_per_token * 1_462_784 / GIB == pytest.approx(54.52, rel=1e-3)
    owned = kv_shape(load_model("glm-5.2").layers, WHOLE, "fp8_e4m3").whole_bytes_per_token
    assert owned == 21 * 132


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_a_latent_is_whole_on_every_tensor_rank(tp: int) -> None:
    model = load_model("kimi-k2.6")
    assert kv_bytes_per_token(model, ParallelLayout(tp=tp), "bf16") == 70272


def test_a_latent_is_shared_by_context_parallel_ranks_but_not_its_indexer() -> None:
    shared = ParallelLayout(tp=8, dcp=8)
    assert kv_bytes_per_token(load_model("kimi-k2.6"), shared, "bf16") == 70272 / 8
    glm_bytes = kv_bytes_per_token(load_model("glm-5.2"), shared, "fp8_e4m3")
    assert glm_bytes == 656 * 78 / 8 + 132 * 21


@pytest.mark.parametrize(
    ("tp", "share"), [(1, 1), (2, 1 / 2), (4, 1 / 4), (8, 1 / 8), (16, 1 / 8), (64, 1 / 8)]
)
def test_kv_heads_are_split_at_most_kv_heads_ways(tp: int, share: float) -> None:
    model = load_model("qwen3-32b")  # 8 kv heads
    assert kv_bytes_per_token(model, ParallelLayout(tp=tp), "bf16") == 262144 * share


def test_qwen3_32b_on_four_ranks_holds_834_thousand_tokens() -> None:
    # transformers pull request 48566: an unsharded pool held 208 thousand.
    model = load_model("qwen3-32b")
    pool_bytes = 208_500 * kv_bytes_per_token(model, WHOLE, "bf16")
    sharded = pool_bytes / kv_bytes_per_token(model, ParallelLayout(tp=4), "bf16")
    assert sharded == pytest.approx(834_000, rel=1e-3)


def test_a_printed_pool_is_that_of_the_group() -> None:
    # vllm issue 13061: two RTX 4090, 8.69 GiB each, hold 81,536 tokens together. The report does
    # not give the model's shape; 56 layers of 8 kv heads is the one whose bytes agree.
    layer = attention_layer(GqaAttention(48, 8, 128, 128))
    per_gpu = kv_bytes_per_token(model_of(*[layer] * 56), ParallelLayout(tp=2), "bf16")
    assert 8.69 * GIB / per_gpu == pytest.approx(81_536, rel=3e-3)


def test_attention_dp_ranks_hold_all_heads() -> None:
    model = load_model("qwen3-coder-480b")
    assert kv_bytes_per_token(model, ParallelLayout(tp=8, attention_dp=8), "bf16") == 253952


def test_key_and_value_widths_may_differ() -> None:
    layer = attention_layer(GqaAttention(8, 4, 192, 128))
    assert kv_bytes_per_token(model_of(layer), WHOLE, "bf16") == 4 * (192 + 128) * 2


def test_linear_layers_hold_a_state_and_no_tokens() -> None:
    linear = attention_layer(LinearAttention("gated_delta_net", 8, 1000, 100))
    full = attention_layer(GqaAttention(8, 4, 64, 64))
    shape = kv_shape([linear, linear, full], ParallelLayout(tp=4), "bf16")
    assert shape.state_bytes == 2 * (1000 * 4 + 100 * 2) / 4
    assert shape.growing_bytes_per_token == 1 * 128 * 2
    assert shape.request_bytes([0, 1, 10]).tolist() == [0, 2100 + 256, 2100 + 2560]


def test_full_and_sliding_pools_of_a_hybrid_model() -> None:
    # MiMo-V2-Flash, tp 4 (SGLang pull request 15464): both pools print 1,496,958 tokens; sliding
    # K 41.76 + V 27.84 GiB, full K 4.82 + V 3.21 GiB.
    windows = attention_layer(GqaAttention(64, 8, 192, 128, window_tokens=128))
    full = attention_layer(GqaAttention(64, 4, 192, 128))
    shape = kv_shape([windows] * 39 + [full] * 9, ParallelLayout(tp=4), "bf16")
    tokens = 1_496_958
    assert shape.growing_bytes_per_token * tokens / GIB == pytest.approx(8.03, rel=2e-3)
    (_, sliding_bytes), *rest = shape.windows
    assert not rest
    assert sliding_bytes * tokens / GIB == pytest.approx(69.60, rel=2e-3)


def test_pages_round_up_and_a_window_reaches_into_one_more() -> None:
    full = attention_layer(GqaAttention(1, 1, 1, 1))
    sliding = attention_layer(GqaAttention(1, 1, 1, 1, window_tokens=100))
    shape = kv_shape([full, sliding], WHOLE, "fp8_e4m3")  # 2 bytes per token and layer
    assert shape.request_bytes([1, 64, 65, 1000], page_tokens=64).tolist() == [
        2 * (64 + 64),
        2 * (64 + 64),
        2 * (128 + 128),
        2 * (1024 + 192),
    ]


def test_stages_hold_their_own_layers_of_every_request() -> None:
    model = load_model("llama-3.1-8b")
    shapes = stage_kv_shapes(model, ParallelLayout(pp=2), "bf16")
    assert [shape.growing_bytes_per_token for shape in shapes] == [65536, 65536]


def test_a_remainder_of_layers_goes_where_the_engine_puts_it() -> None:
    layout = ParallelLayout(pp=4)
    sglang = [len(stage) for stage in stage_layers(61, layout, "sglang")]
    vllm = [len(stage) for stage in stage_layers(61, layout, "vllm")]
    assert sglang == [15, 15, 15, 16]
    assert vllm == [15, 15, 16, 15]
    with pytest.raises(BadInputError, match="pp: 4 stages are more than the 3 layers"):
        stage_layers(3, layout)


@given(
    pp=st.integers(1, 16),
    layers=st.integers(16, 130),
    engine=st.sampled_from(["sglang", "vllm"]),
)
def test_stages_cover_all_layers_once(pp: int, layers: int, engine: str) -> None:
    stages = stage_layers(layers, ParallelLayout(pp=pp), engine)
    assert [index for stage in stages for index in stage] == list(range(layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@given(
    tokens=st.lists(st.integers(0, 10**6), min_size=2, max_size=20),
    page_tokens=st.sampled_from([1, 16, 64]),
    name=st.sampled_from(["gpt-oss-120b", "glm-5.2", "qwen3-32b"]),
    dcp=st.sampled_from([1, 2]),
)
def test_request_bytes_grow_with_tokens_and_never_beat_the_rate(
    tokens: list[int], page_tokens: int, name: str, dcp: int
) -> None:
    layout = ParallelLayout(tp=2, dcp=dcp)
    shape = kv_shape(load_model(name).layers, layout, "fp8_e4m3")
    ordered = np.sort(np.asarray(tokens))
    held = shape.request_bytes(ordered, page_tokens)
    assert np.all(np.diff(held) >= 0)
    assert np.all(held >= ordered * shape.growing_bytes_per_token - 1e-6)
    assert np.all(held >= shape.request_bytes(ordered) - 1e-6)


@given(split=st.integers(1, 60), tokens=st.integers(0, 10**6))
def test_layers_add_up(split: int, tokens: int) -> None:
    layers = load_model("kimi-k2.6").layers
    parts = [kv_shape(part, WHOLE, "bf16") for part in (layers[:split], layers[split:])]
    whole = kv_shape(layers, WHOLE, "bf16").request_bytes(tokens)
    assert sum(float(part.request_bytes(tokens)) for part in parts) == pytest.approx(float(whole))
