"""The attention models: exact where measured, monotone, honest about what was not measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.sim.cost.models.attention import (
    AttentionForm,
    AttentionShape,
    attention_shape,
    decode_work,
    monotone_surface,
)
from tonnage.sim.cost.models.attention_table import SHAPE_COLUMNS, form_key, shapes_of
from tonnage.sim.cost.models.decode_attention import DecodeAttentionModel
from tonnage.sim.cost.models.linear_attention import (
    LinearAttentionModel,
    linear_shape,
    linear_work,
)
from tonnage.sim.cost.models.mla_bmm import MlaBmmModel
from tonnage.sim.cost.models.prefill_attention import (
    PrefillAttentionModel,
    pairs_per_sequence,
    prefill_work,
    tokens_of_pairs,
)
from tonnage.sim.cost.models.sparse_attention import SparsePrefillForm
from tonnage.sim.cost.operators import causal_pairs
from tonnage.sim.domain import GqaAttention, Indexer, MlaAttention, ParallelLayout


@dataclass(frozen=True)
class H200:
    memory_bandwidth_bytes_per_s = 4.8e12
    dense_flops_per_s = {"bf16": 989e12, "fp8": 1979e12}  # noqa: RUF012


RATES = H200()
FORM = AttentionForm(1e-5, 0.0, 1e-8, 0.0, 4e12, 6e14, 2e12, 4.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (2, 128, 512, 2048, 8192, 32768)
MLA = AttentionShape("mla", "bf16", 8, 1, 576)
GQA = AttentionShape("gqa", "bf16", 32, 8, 128)
FULL = AttentionShape("dsa_full", "fp8_e4m3", 8, 1, 576, None, "fp8_block", 6144)


def table(
    shapes: list[AttentionShape],
    seconds_of: Any = None,
    batches: tuple[int, ...] = BATCHES,
    tokens: tuple[int, ...] = CONTEXTS,
    name: str = "context_tokens",
    work_of: Any = decode_work,
) -> pd.DataFrame:
    """Return rows of shapes; by default the form's own seconds."""
    rows = []
    for shape in shapes:
        for batch in batches:
            for count in tokens:
                exact = float(FORM.seconds(work_of(shape, batch, count)).ravel()[0])
                seconds = exact if seconds_of is None else seconds_of(shape, batch, count, exact)
                values = [getattr(shape, column) for column in SHAPE_COLUMNS]
                rows.append([*values, batch, count, 0, seconds])
    frame = pd.DataFrame(rows, columns=[*SHAPE_COLUMNS, "batch", name, "past_tokens", "seconds"])
    for column in ("window_tokens", "hidden_size"):
        frame[column] = frame[column].astype(np.float64)
    frame["content"] = "module" if shapes[0].kind.startswith("dsa") else "kernel"
    return frame.assign(source_framework="sglang")


def fitted(*shapes: AttentionShape) -> dict[str, Any]:
    regimes = {"measured": [0.9, 1.1], "heads": [0.8, 1.2], "outside": [0.6, 1.6]}
    return {
        "forms": {form_key(shape): FORM.to_json() for shape in shapes},
        "intervals": {f"{shape.kind}/{shape.kv_format}": regimes for shape in shapes},
    }


def decode_model(rows: pd.DataFrame, *shapes: AttentionShape) -> DecodeAttentionModel:
    return DecodeAttentionModel(rows, fitted(*shapes), RATES)


# --- decode -------------------------------------------------------------------------------------


def test_a_measured_call_is_returned_as_it_was_measured() -> None:
    model = decode_model(table([MLA], lambda *call: call[3] * 1.3), MLA)
    estimate = model.seconds(MLA, 16, [128, 8192])
    exact = FORM.seconds(decode_work(MLA, 16, [128, 8192]))
    assert estimate.seconds == pytest.approx(1.3 * exact, rel=1e-6)
    assert (estimate.source, estimate.inside) == ("imported", True)
    assert (estimate.low, estimate.high) == (0.9, 1.1)


def test_between_contexts_the_curve_is_linear_and_says_who_measured_it() -> None:
    curve = decode_model(table([MLA]), MLA).curve(MLA, 8)
    low, middle, high = np.interp([2048, 5120, 8192], curve.context_tokens, curve.seconds)
    assert middle == pytest.approx((low + high) / 2)
    assert (curve.framework, curve.content) == ("sglang", "kernel")
    assert np.all(curve.roofline_s < curve.seconds)


@pytest.mark.parametrize("batch", [3, 5.5, 40])
def test_a_batch_between_two_lies_between_them(batch: float) -> None:
    model = decode_model(table([MLA]), MLA)
    below, above = max(b for b in BATCHES if b <= batch), min(b for b in BATCHES if b >= batch)
    found = np.asarray(model.curve(MLA, batch).seconds)
    assert np.all(found >= model.curve(MLA, below).seconds)
    assert np.all(found <= model.curve(MLA, above).seconds)


@settings(max_examples=30, deadline=None)
@given(noise=st.lists(st.floats(0.7, 1.4), min_size=42, max_size=42))
def test_times_never_fall_with_the_context_or_the_batch(noise: list[float]) -> None:
    factors = iter(noise)
    model = decode_model(table([MLA], lambda *call: call[3] * next(factors)), MLA)
    contexts = np.unique(np.geomspace(1, 300_000, 60))
    times = np.array(
        [model.seconds(MLA, batch, contexts).seconds for batch in (1, 1.5, 2, 3, 7, 16, 50, 99)]
    )
    assert np.all(np.diff(times, axis=1) >= -1e-12)
    assert np.all(np.diff(times, axis=0) >= -1e-12)


def test_a_neighbour_with_other_kv_heads_is_read_at_as_many_streams() -> None:
    # What the form does not know: calls of many streams take longer.
    def slow(shape: AttentionShape, batch: int, context: int, exact: float) -> float:
        return exact * (1.5 if batch * shape.kv_heads > 16 else 1.0)

    quarter = replace(GQA, heads=8, kv_heads=2)
    model = decode_model(table([quarter], slow), GQA)
    for batch, factor in ((2, 1.0), (4, 1.5), (16, 1.5)):
        expected = factor * FORM.seconds(decode_work(GQA, batch, 2048))
        assert model.seconds(GQA, batch, 2048).seconds == pytest.approx(expected, rel=1e-6)
    assert model.regime(GQA) == "heads"


def test_heads_between_two_measured_ones_take_both_residuals() -> None:
    factors = {8: 1.2, 32: 1.5}
    shapes = [replace(MLA, heads=heads) for heads in factors]
    model = decode_model(table(shapes, lambda *call: call[3] * factors[call[0].heads]), MLA)
    wanted = replace(MLA, heads=16)
    expected = np.sqrt(1.2 * 1.5) * FORM.seconds(decode_work(wanted, 8, 8192))
    found = model.seconds(wanted, 8, 8192)
    assert found.seconds == pytest.approx(expected, rel=1e-6)
    assert (found.low, found.high) == (0.8, 1.2)
    assert model.seconds(replace(MLA, heads=128), 8, 8192).high == 1.6  # beyond those measured


def test_a_shape_that_another_kernel_ran_does_not_stand_in() -> None:
    factors = {2: 1.1, 3: 4.0, 8: 1.1}
    shapes = [replace(GQA, heads=heads, kv_heads=1) for heads in factors]
    rows = table(shapes, lambda *call: call[3] * factors[call[0].heads])
    rows["kernel"] = np.where(rows["heads"] == 3, "triton", "fa3")
    model = decode_model(rows, GQA)
    wanted = replace(GQA, heads=4, kv_heads=1)
    expected = 4.0 * FORM.seconds(decode_work(wanted, 16, 2048))  # the nearest ratio ran on triton
    assert model.seconds(wanted, 16, 2048).seconds == pytest.approx(expected, rel=1e-6)
    wanted = replace(GQA, heads=6, kv_heads=1)
    expected = 1.1 * FORM.seconds(decode_work(wanted, 16, 2048))
    assert model.seconds(wanted, 16, 2048).seconds == pytest.approx(expected, rel=1e-6)


def test_beyond_the_grid_the_roofline_carries_on_at_the_edge_with_a_wider_interval() -> None:
    model = decode_model(table([MLA], lambda *call: call[3] * 1.25), MLA)
    far = model.seconds(MLA, 64, 131072)
    assert far.seconds == pytest.approx(1.25 * FORM.seconds(decode_work(MLA, 64, 131072)), rel=1e-6)
    assert not far.inside
    assert (far.low, far.high) == (0.6, 1.6)
    crowded = model.seconds(MLA, 256, 8192)
    assert not crowded.inside
    assert crowded.seconds > model.seconds(MLA, 64, 8192).seconds


def test_what_the_grid_lacks_in_a_corner_is_continued_and_marked() -> None:
    rows = table([MLA])
    rows = rows[rows["batch"] * rows["context_tokens"] <= 262_144]
    curve = decode_model(rows, MLA).curve(MLA, 64)
    assert curve.measured_tokens == 2048
    expected = FORM.seconds(decode_work(MLA, 64, 32768))
    assert curve.at(32768).seconds == pytest.approx(expected, rel=1e-6)
    assert not curve.at(32768).inside


def test_a_window_that_was_not_measured_clips_the_context_and_is_scaled() -> None:
    model = decode_model(table([GQA]), GQA)
    windowed = replace(GQA, window_tokens=512)
    found = model.seconds(windowed, 8, [512, 32768, 10**6])
    assert np.ptp(found.seconds) == pytest.approx(0.0, abs=1e-12)
    assert found.source == "scaled"
    assert found.seconds[0] == pytest.approx(float(model.seconds(GQA, 8, 512).seconds), rel=1e-6)


def test_another_kv_format_is_scaled_by_its_bytes_and_says_so() -> None:
    model = decode_model(table([MLA]), MLA)
    found = model.seconds(replace(MLA, kv_format="fp8_e4m3"), 64, 32768)
    assert found.source == "scaled"
    bf16 = float(model.seconds(MLA, 64, 32768).seconds)
    assert bf16 / 2.1 < float(found.seconds) < bf16 / 1.5


def test_without_rows_of_a_kind_the_datasheet_answers() -> None:
    found = decode_model(table([MLA]), MLA).seconds(GQA, 64, 32768)
    moved = 64 * 32768 * 8 * 2 * 128 * 2
    assert found.source == "datasheet"
    assert found.seconds == pytest.approx(moved / RATES.memory_bandwidth_bytes_per_s)
    assert not found.inside


def test_sparse_layers_read_at_most_the_top_k_and_only_full_ones_grow_on() -> None:
    shared = replace(FULL, kind="dsa_shared")
    model = decode_model(table([FULL, shared]), FULL, shared)
    flat = model.seconds(shared, 64, [2048, 8192, 200_000]).seconds
    assert np.ptp(flat) == pytest.approx(0.0, abs=1e-9)
    grown = np.asarray(model.seconds(FULL, 64, [32768, 65536, 131072]).seconds)
    assert np.diff(grown)[1] == pytest.approx(2 * np.diff(grown)[0], rel=1e-6)
    assert model.content(FULL) == "module"


def test_modules_of_another_model_are_scaled() -> None:
    model = decode_model(table([FULL]), FULL)
    assert model.seconds(replace(FULL, hidden_size=7168), 8, 2048).source == "scaled"
    assert model.seconds(replace(FULL, kind="dsa_shared"), 8, 2048).source == "scaled"


def test_the_shape_of_a_rank_holds_local_heads() -> None:
    layout = ParallelLayout(tp=16)
    shape = attention_shape(GqaAttention(64, 8, 128, 128, 128), layout, "bf16")
    assert (shape.heads, shape.kv_heads, shape.window_tokens) == (4, 1, 128)
    mla = MlaAttention(64, 2048, 512, 192, 64, 256, 2048, Indexer(32, 128))
    sparse = attention_shape(mla, ParallelLayout(tp=8), "fp8_e4m3", "fp8_block", 6144)
    assert sparse == FULL


def test_shapes_of_a_table_come_back_as_they_went_in() -> None:
    shapes = {GQA, replace(GQA, window_tokens=128), replace(GQA, heads=64)}
    assert {shape for shape, _ in shapes_of(table(sorted(shapes, key=repr)))} == shapes


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(0.5, 2.0), min_size=20, max_size=20))
def test_a_surface_made_monotone_rises_and_stays_when_made_again(values: list[float]) -> None:
    risen = monotone_surface(np.array(values).reshape(4, 5))
    assert np.all(np.diff(risen, axis=0) >= 0)
    assert np.all(np.diff(risen, axis=1) >= 0)
    assert monotone_surface(risen) == pytest.approx(risen, rel=1e-9)
    assert min(values) * 0.99 <= risen.min() <= risen.max() <= max(values) * 1.01


# --- prefill ------------------------------------------------------------------------------------

PROMPTS = (16, 128, 512, 2048, 8192)


def prefill_model(shape: AttentionShape, seconds_of: Any = None) -> PrefillAttentionModel:
    rows = table([shape], seconds_of, (1, 4, 16), PROMPTS, "new_tokens", prefill_work)
    return PrefillAttentionModel(rows, fitted(shape), RATES)


@pytest.mark.parametrize("limit", [None, 128])
@pytest.mark.parametrize("tokens", [1, 100, 128, 129, 5000])
def test_tokens_of_pairs_inverts_the_pairs(limit: int | None, tokens: int) -> None:
    pairs = pairs_per_sequence(tokens, 0, limit)
    assert float(tokens_of_pairs(pairs, limit)) == pytest.approx(tokens)
    assert float(pairs_per_sequence(tokens, 70, limit)) == causal_pairs(tokens, 70, limit)


def test_a_measured_prompt_is_returned_as_it_was_measured() -> None:
    model = prefill_model(GQA, lambda *call: call[3] * 1.4)
    found = model.seconds(GQA, [128, 2048], batch=4)
    exact = FORM.seconds(prefill_work(GQA, 4, np.array([128, 2048])))
    assert found.seconds == pytest.approx(1.4 * exact, rel=1e-3)
    assert (found.inside, found.source) == (True, "imported")


@settings(max_examples=20, deadline=None)
@given(noise=st.lists(st.floats(0.8, 1.25), min_size=15, max_size=15))
def test_prefill_never_gets_cheaper_with_tokens_past_or_batch(noise: list[float]) -> None:
    factors = iter(noise)
    model = prefill_model(GQA, lambda *call: call[3] * next(factors))
    tokens = np.geomspace(1, 100_000, 50)
    for past in (0.0, 3000.0):
        times = np.array([model.seconds(GQA, tokens, past, b).seconds for b in (1, 2, 4, 9, 40)])
        assert np.all(np.diff(times, axis=1) >= -1e-12)
        assert np.all(np.diff(times, axis=0) >= -1e-12)
    pasts = np.asarray(model.seconds(GQA, 512, np.geomspace(1, 500_000, 40)).seconds)
    assert np.all(np.diff(pasts) >= -1e-12)


def test_a_past_is_read_by_pairs_and_never_faster_than_its_kv() -> None:
    model = prefill_model(GQA)
    pairs = float(pairs_per_sequence(1024, 6000, None))
    equal = float(tokens_of_pairs(pairs, None))
    found = model.seconds(GQA, 1024, 6000)
    assert found.seconds == pytest.approx(float(model.seconds(GQA, equal).seconds), rel=1e-6)
    assert not found.inside
    one = model.seconds(GQA, 1, 10**6)
    assert one.seconds >= 10**6 * 8 * 2 * 128 * 2 / FORM.bytes_per_s


def test_equal_chunks_are_a_batch_and_unequal_ones_have_their_pairs() -> None:
    model = prefill_model(GQA)
    equal = model.chunks(GQA, ((500, 0),) * 4).seconds
    assert equal == pytest.approx(float(model.seconds(GQA, 500, 0, 4).seconds), rel=1e-6)
    mixed = float(model.chunks(GQA, ((900, 0), (100, 0))).seconds)
    assert float(model.seconds(GQA, 500, 0, 2).seconds) < mixed
    assert mixed < float(model.seconds(GQA, 900, 0, 2).seconds)


# --- sparse modules in prefill ------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 40000)), min_size=1, max_size=40),
    st.sampled_from([None, 512]),
)
@settings(max_examples=60, deadline=None)
def test_what_steps_ask_for_is_what_is_explained(
    chunks: list[tuple[int, int]], window: int | None
) -> None:
    shape = replace(GQA, window_tokens=window)
    model = prefill_model(shape)
    explained = float(np.asarray(model.chunks(shape, tuple(chunks)).seconds))
    assert model.chunks_s(shape, tuple(chunks)) == pytest.approx(explained, rel=1e-12)


SPARSE = SparsePrefillForm(1e-4, 6e-7, 1e-8, 1e-11, 1e-9)


def sparse_model() -> PrefillAttentionModel:
    rows = []
    for new in (2048, 4096, 8192):
        for past in (0, 2048, 8192, 32768):
            if new + past > 2048:
                values = [getattr(FULL, column) for column in SHAPE_COLUMNS]
                rows.append([*values, 1, new, past, 1.1 * float(SPARSE.seconds(FULL, new, past))])
    names = [*SHAPE_COLUMNS, "batch", "new_tokens", "past_tokens", "seconds"]
    frame = pd.DataFrame(rows, columns=names).assign(content="module", source_framework="sglang")
    frame["window_tokens"] = frame["window_tokens"].astype(np.float64)
    values = {
        **fitted(FULL),
        "sparse_forms": {form_key(FULL): SPARSE.to_json()},
        "dense_flops_per_s": {"fp8_block": 8e14},
    }
    return PrefillAttentionModel(frame, values, RATES)


def test_a_sparse_chunk_is_returned_as_it_was_measured() -> None:
    found = sparse_model().seconds(FULL, 8192, [0, 8192])
    exact = 1.1 * SPARSE.seconds(FULL, 8192, np.array([0, 8192]))
    assert found.seconds == pytest.approx(exact, rel=1e-3)
    assert found.inside
    assert sparse_model().content(FULL) == "module"


def test_short_sequences_take_the_dense_path_and_are_marked() -> None:
    model = sparse_model()
    short, long = model.seconds(FULL, 1024), model.seconds(FULL, 1024, 1025)
    assert float(short.seconds) < float(long.seconds)
    assert not short.inside


def test_what_steps_ask_of_sparse_chunks_is_what_is_explained() -> None:
    chunks = ((700, 0), (30, 5000), (4096, 4096))
    explained = float(np.asarray(sparse_model().chunks(FULL, chunks).seconds).ravel()[0])
    assert sparse_model().chunks_s(FULL, chunks) == explained


def test_sparse_chunks_of_one_call_share_its_launch() -> None:
    model = sparse_model()
    both = float(model.chunks(FULL, ((4096, 0), (4096, 0))).seconds)
    one = float(model.seconds(FULL, 4096).seconds)
    assert one < both < 2 * one
    assert both < float(model.seconds(FULL, 8192).seconds)


def test_many_long_pasts_cost_the_indexer_a_copy_of_their_keys() -> None:
    model = sparse_model()
    several = float(model.seconds(FULL, 512, 32768, 8).seconds)
    tokens, behind = 4096.0, 32768.0 + 256 - 2048
    alone = float(model.seconds(FULL, tokens, behind).seconds)  # as many tokens and pairs
    copied = 8 * (512 + 32768) - tokens - behind
    assert several - alone == pytest.approx(copied * SPARSE.index_held_s, rel=1e-3)


# --- linear attention, and the products around MLA ----------------------------------------------


def test_linear_decode_depends_on_the_batch_alone() -> None:
    shape = linear_shape("gated_delta_net", 8, "decode")
    rows = table([shape], None, BATCHES, (1,), "new_tokens", linear_work)
    model = LinearAttentionModel(rows, fitted(shape), RATES)
    found = model.decode("gated_delta_net", 8, np.array([1, 16, 64]))
    assert found.seconds == pytest.approx(FORM.seconds(linear_work(shape, [1, 16, 64], 1)))
    assert found.inside
    assert model.decode("kda", 8, 16).source == "datasheet"
    assert model.decode("gated_delta_net", 16, 16).source == "imported"


def test_linear_prefill_between_and_beyond_its_knots_rises() -> None:
    shape = linear_shape("gated_delta_net", 8, "prefill")
    rows = table([shape], None, (1, 4), (64, 1024, 4096), "new_tokens", linear_work)
    model = LinearAttentionModel(rows, fitted(shape), RATES)
    times = np.asarray(
        model.prefill("gated_delta_net", 8, np.array([64, 300, 1024, 4096, 60_000])).seconds
    )
    assert np.all(np.diff(times) > 0)
    assert not model.prefill("gated_delta_net", 8, 60_000).inside


def bmm_table() -> pd.DataFrame:
    rows = [
        (name, heads, tokens, 8e-6 * (1 + heads * tokens / 1e4))
        for name in ("bf16",)
        for heads in (8, 16)
        for tokens in (1, 16, 256, 4096)
    ]
    return pd.DataFrame(rows, columns=["format", "heads", "tokens", "seconds"])


def test_the_products_around_mla_are_read_where_measured_and_scaled_elsewhere() -> None:
    model = MlaBmmModel(bmm_table(), {"launch_s": 8e-6, "interval": [0.9, 1.1]}, RATES)
    found = model.seconds(8, np.array([1, 256]))
    assert found.seconds == pytest.approx([8e-6 * 1.0008, 8e-6 * 1.2048])
    assert (found.inside, found.source, found.low) == (True, "imported", 0.9)
    assert model.seconds(8, 16, "fp8").source == "scaled"
    assert not model.seconds(8, 100_000).inside
    assert MlaBmmModel(bmm_table()[:0], {}, RATES).seconds(8, 16).source == "datasheet"
