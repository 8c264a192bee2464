"""What is held out of the attention tables, and how a model is trained on the rest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from tonnage.calibrate.attention_errors import Fold, Predictor, every_second, whole_values
from tonnage.calibrate.attention_forms import (
    Forms,
    dense_rates,
    fit_forms,
    fit_sparse_forms,
)
from tonnage.calibrate.imports.sparse_attention import is_dense
from tonnage.sim.cost.models.attention import (
    DSA_KINDS,
    AttentionShape,
    Rates,
    decode_work,
)
from tonnage.sim.cost.models.attention_table import Columns
from tonnage.sim.cost.models.decode_attention import DecodeAttentionModel
from tonnage.sim.cost.models.linear_attention import LinearAttentionModel, linear_work
from tonnage.sim.cost.models.prefill_attention import PrefillAttentionModel, prefill_work
from tonnage.sim.domain import FloatArray

_JUDGED_CONTEXT = 128  # shorter contexts only launch
_JUDGED_TOKENS = 128
# Sparse modules as chunked prefill runs them: below 2048 tokens the host bounds nearly all rows,
# and beyond 16 sequences the longest of them hold more than any pool.
_JUDGED_SPARSE_TOKENS, _JUDGED_SPARSE_BATCH = 2048, 16
_FAR_CONTEXT, _FAR_BATCH = 16384, 64
_FAR_PROMPT = 4096
_HEADS = "whole head counts"


# --- decode -------------------------------------------------------------------------------------


def decode_folds(thinned: pd.DataFrame, rows: pd.DataFrame) -> Iterator[Fold]:
    """Yield the folds of decode attention; `rows` are judged, from a context of 128 tokens."""
    test = rows[rows["context_tokens"] >= _JUDGED_CONTEXT]
    yield from whole_values(thinned, test, lambda one: one["heads"], "", _HEADS)
    gqa, gqa_test = thinned[thinned["kind"] == "gqa"], test[test["kind"] == "gqa"]
    yield from whole_values(
        gqa,
        gqa_test,
        lambda one: one["heads"] / one["kv_heads"],
        "heads per kv head",
        "whole ratios of heads to KV heads",
    )
    yield from whole_values(
        gqa, gqa_test, lambda one: one["head_dim"], "head sizes", "whole head sizes"
    )
    between = every_second(thinned["context_tokens"]) & (thinned["context_tokens"] > 2)
    held = test["context_tokens"].isin(set(thinned.loc[between, "context_tokens"]))
    yield Fold("knots", "every second context", thinned[~between], test[held], "interpolation")
    near = (thinned["context_tokens"] <= _FAR_CONTEXT) & (thinned["batch"] <= _FAR_BATCH)
    far = (test["context_tokens"] > _FAR_CONTEXT) | (test["batch"] > _FAR_BATCH)
    what = f"contexts above {_FAR_CONTEXT} and batches above {_FAR_BATCH}"
    yield Fold("far", what, thinned[near], test[far], "extrapolation")


def decode_trainer(
    train: pd.DataFrame, rates: Rates, start: Forms, slower: float = 1.0
) -> Predictor:
    """Return a predictor fitted to the rows of a table alone."""
    forms = fit_forms(train, decode_work, "context_tokens", start, slower)
    model = DecodeAttentionModel(train, {"forms": forms}, rates)

    def predict(shape: AttentionShape, rows: Columns) -> tuple[FloatArray, str]:
        seconds = np.empty(len(rows["batch"]))
        for batch in np.unique(rows["batch"]):
            which = rows["batch"] == batch
            context = rows["context_tokens"][which]
            seconds[which] = model.curve(shape, float(batch)).at(context).seconds
        return seconds, model.regime(shape)

    return predict


# --- prefill ------------------------------------------------------------------------------------


def prefill_folds(thinned: pd.DataFrame, rows: pd.DataFrame) -> Iterator[Fold]:
    """Yield the folds of prefill attention; the short prompts of sparse models apart."""
    tokens = rows["batch"] * rows["new_tokens"]
    is_sparse = rows["kind"].isin(DSA_KINDS)
    is_short = is_sparse & is_dense(rows)
    least = np.where(is_sparse, _JUDGED_SPARSE_TOKENS, _JUDGED_TOKENS)
    is_many = is_sparse & (rows["batch"] > _JUDGED_SPARSE_BATCH)
    test = rows[(tokens >= least) & ~is_short & ~is_many]
    yield from whole_values(thinned, test, lambda one: one["heads"], "", _HEADS)
    yield from _short_prompt_folds(thinned, rows[is_short & (tokens >= _JUDGED_SPARSE_TOKENS)])
    is_plain = ~test["kind"].isin(DSA_KINDS)
    known = thinned[["batch", "new_tokens"]].drop_duplicates()
    calls = test[["batch", "new_tokens"]].merge(known, how="left", indicator=True)
    between = pd.Series((calls["_merge"] == "left_only").to_numpy(), index=test.index)
    what = "batches and prompt lengths between the knots"
    yield Fold("knots", what, thinned, test[between & is_plain], "interpolation")
    dense, dense_test = thinned[~thinned["kind"].isin(DSA_KINDS)], test[is_plain]
    yield Fold(
        "far",
        f"prompts above {_FAR_PROMPT}",
        dense[dense["new_tokens"] <= _FAR_PROMPT],
        dense_test[dense_test["new_tokens"] > _FAR_PROMPT],
        "extrapolation",
    )
    gqa = thinned["kind"] == "gqa"
    yield from whole_values(
        thinned[gqa],
        test[test["kind"] == "gqa"],
        lambda one: one["head_dim"],
        "head sizes",
        "whole head sizes",
    )


def _short_prompt_folds(thinned: pd.DataFrame, dense: pd.DataFrame) -> Iterator[Fold]:
    """Yield folds of sparse models' dense path: its rates are learned from other head counts."""
    sparse = thinned[thinned["kind"].isin(DSA_KINDS)]
    for heads in sorted(set(dense["heads"])):
        others = pd.concat([sparse, dense[dense["heads"] != heads]], ignore_index=True)
        test = dense[(dense["heads"] == heads) & (dense["past_tokens"] == 0)]
        yield Fold("short prompts", _HEADS, others, test, "extrapolation")


def prefill_trainer(
    train: pd.DataFrame, rates: Rates, start: Forms, slower: float = 1.0
) -> Predictor:
    """Return a predictor fitted to the rows of a table alone."""
    is_sparse = train["kind"].isin(DSA_KINDS)
    is_short = is_sparse & is_dense(train)
    fitted = {
        "forms": fit_forms(train[~is_sparse], prefill_work, "new_tokens", start, slower),
        "sparse_forms": fit_sparse_forms(train[~is_short]),
        "dense_flops_per_s": dense_rates(train[is_short]),
    }
    model = PrefillAttentionModel(train[~is_short], fitted, rates)

    def predict(shape: AttentionShape, rows: Columns) -> tuple[FloatArray, str]:
        seconds = np.empty(len(rows["batch"]))
        for batch in np.unique(rows["batch"]):
            which = rows["batch"] == batch
            new, past = rows["new_tokens"][which], rows["past_tokens"][which]
            seconds[which] = model.seconds(shape, new, past, float(batch)).seconds
        return seconds, model.regime(shape)

    return predict


# --- linear attention ---------------------------------------------------------------------------


def linear_folds(thinned: pd.DataFrame, rows: pd.DataFrame) -> Iterator[Fold]:
    """Yield the folds of linear attention."""
    yield from whole_values(thinned, rows, lambda one: one["heads"], "", _HEADS)
    between = every_second(thinned["batch"])
    held = rows["batch"].isin(set(thinned.loc[between, "batch"]))
    yield Fold("knots", "every second batch", thinned[~between], rows[held], "interpolation")


def linear_trainer(train: pd.DataFrame, rates: Rates, start: Forms) -> Predictor:
    """Return a predictor fitted to the rows of a table alone."""
    forms = fit_forms(train, linear_work, "new_tokens", start)
    model = LinearAttentionModel(train, {"forms": forms}, rates)

    def predict(shape: AttentionShape, rows: Columns) -> tuple[FloatArray, str]:
        seconds = model.of_shape(shape, rows["batch"], rows["new_tokens"]).seconds
        return np.asarray(seconds), model.regime(shape)

    return predict
