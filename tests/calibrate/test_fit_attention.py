"""The fit of attention: forms come back, folds leak nothing, a figure per format and regime."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import util

import numpy as np
import pandas as pd
import pytest

from tonnage.calibrate import attention_folds as folds
from tonnage.calibrate.attention_errors import every_second, intervals, judged, summarised
from tonnage.calibrate.attention_forms import fit_forms, fit_sparse_forms
from tonnage.calibrate.fit_attention import as_shipped, datasheet, fit_bmm, fit_linear
from tonnage.calibrate.imports.attention_rows import DECODE_COLUMNS, PREFILL_COLUMNS
from tonnage.sim.cost.models.attention import AttentionForm, AttentionShape, decode_work
from tonnage.sim.cost.models.attention_table import SHAPE_COLUMNS, form_key
from tonnage.sim.cost.models.sparse_attention import SparsePrefillForm

needs_wheel = pytest.mark.skipif(
    util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)
FORM = AttentionForm(1e-5, 0.0, 1e-8, 0.0, 4e12, 6e14, 2e12, 3.0)
SHAPES = [
    AttentionShape("gqa", "bf16", heads, kv_heads, 128)
    for kv_heads in (1, 2, 4, 8)
    for heads in (4 * kv_heads, 8 * kv_heads)
]
CONTEXTS = (2, 128, 256, 512, 1024, 2048, 8192, 32768, 65536)
FULL = AttentionShape("dsa_full", "fp8_e4m3", 8, 1, 576, None, "fp8_block", 6144)


def decode_rows() -> pd.DataFrame:
    """Return rows that follow the form exactly."""
    rows = []
    for shape in SHAPES:
        for batch in (1, 4, 16, 64, 128):
            for context in CONTEXTS:
                seconds = float(FORM.seconds(decode_work(shape, batch, context)))
                source = ("kernel", "sglang", "0.5.14", "fa3")
                keys = [getattr(shape, name) for name in SHAPE_COLUMNS]
                rows.append((*keys, batch, context, seconds, *source))
    frame = pd.DataFrame(rows, columns=list(DECODE_COLUMNS))
    return frame.astype({"window_tokens": np.float64, "hidden_size": np.float64})


def test_a_form_comes_back_from_rows_that_follow_it() -> None:
    forms = fit_forms(decode_rows(), decode_work, "context_tokens")
    assert set(forms) == {form_key(SHAPES[0])}
    fitted = AttentionForm.from_json(forms[form_key(SHAPES[0])])
    work = decode_work(SHAPES[-1], np.array([1.0, 16.0, 128.0])[:, None], np.array(CONTEXTS))
    assert fitted.seconds(work) == pytest.approx(FORM.seconds(work), rel=0.03)
    again = fit_forms(decode_rows(), decode_work, "context_tokens", forms)
    assert AttentionForm.from_json(again[form_key(SHAPES[0])]).sharpness == fitted.sharpness


def test_the_sparse_form_comes_back_from_rows_that_follow_it() -> None:
    form = SparsePrefillForm(1e-4, 6e-7, 1e-8, 1.2e-11, 1e-9)
    rows = []
    for heads in (8, 16):
        for batch, new in ((1, 2048), (1, 8192), (16, 256)):
            for past in (2048, 8192, 131072):
                tokens, held = batch * new, batch * (new + past)
                shape = replace(FULL, heads=heads)
                pairs = tokens * (past + new / 2)
                seconds = form.launch_s + tokens * (form.token_s + heads * form.head_token_s)
                seconds += pairs * form.index_pair_s + held * form.index_held_s
                keys = [getattr(shape, name) for name in SHAPE_COLUMNS]
                source = ("module", "sglang", "0.5.14", "flashmla")
                rows.append((*keys, batch, new, past, seconds, *source))
    table = pd.DataFrame(rows, columns=list(PREFILL_COLUMNS))
    found = fit_sparse_forms(table.astype({"window_tokens": np.float64}))[form_key(FULL)]
    assert found == pytest.approx(form.to_json(), rel=1e-3)


def test_no_fold_learns_from_what_it_is_judged_on() -> None:
    rows = decode_rows()
    keys = [*SHAPE_COLUMNS, "batch", "context_tokens"]
    questions = set()
    for fold in folds.decode_folds(rows, rows):
        questions.add(fold.question)
        both = fold.train[keys].merge(fold.test[keys], how="inner")
        assert both.empty, fold.question
        assert len(fold.test) > 0
    assert questions == {"", "heads per kv head", "knots", "far"}


def test_held_out_heads_are_whole() -> None:
    rows = decode_rows()
    for fold in folds.decode_folds(rows, rows):
        if fold.question == "":
            assert not set(fold.train["heads"]) & set(fold.test["heads"])


def test_rows_that_follow_the_form_have_no_error_and_one_figure_per_format_and_regime() -> None:
    rows = decode_rows()
    forms = fit_forms(rows, decode_work, "context_tokens")
    trainer = partial(folds.decode_trainer, rates=datasheet("h200_sxm"), start=forms)
    lines = judged(folds.decode_folds(rows, rows), trainer)
    figures = summarised(lines, "attention_decode")
    assert not figures.duplicated(["operator", "format", "regime"]).any()
    regimes = figures.groupby("format")["regime"].agg(set).to_dict()
    assert regimes["gqa/bf16"] == {"interpolation"}
    assert regimes["gqa/bf16, far"] == {"extrapolation"}
    assert (figures.loc[figures["format"] == "gqa/bf16", "median"] < 0.01).all()
    factors = intervals(lines)["gqa/bf16"]
    assert set(factors) == {"measured", "heads", "outside"}
    assert all(low <= high for low, high in factors.values())


def test_every_second_knot_leaves_the_ends() -> None:
    which = every_second(pd.Series([1, 2, 4, 8, 16, 16, 1]))
    assert which.tolist() == [False, True, False, True, False, False, False]


def test_rows_ship_with_four_digits_small_integers_and_one_order() -> None:
    rows = decode_rows()
    shipped = as_shipped(rows)
    assert shipped.equals(as_shipped(rows.sample(frac=1.0, random_state=1)))
    assert shipped["batch"].dtype == np.int32
    order = [name for name in rows.columns if name != "seconds"]
    exact = rows.sort_values(order)["seconds"].to_numpy()
    assert shipped["seconds"].to_numpy() == pytest.approx(exact, rel=5e-4)


@needs_wheel
def test_the_products_around_mla_and_linear_attention_are_fitted_from_the_installed_tables() -> (
    None
):
    rates = datasheet("h200_sxm")
    for fit, operator in ((fit_bmm, "mla_bmm"), (fit_linear, "linear_attention")):
        found = fit("h200_sxm", "sglang", rates)
        assert set(found.tables) == set(found.fitted) == {operator}
        inside = found.errors[found.errors["regime"] == "interpolation"]
        assert (inside["median"] < 0.08).all()
        assert not found.errors.duplicated(["operator", "format", "regime"]).any()
