"""The small operators between kernels, where a profile measured them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tonnage.pools import built_pools, times_of
from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.scenarios.load import parse_scenario
from tonnage.sim.cost.measured import MeasuredExecutor
from tonnage.sim.cost.operator_times import total_s
from tonnage.sim.cost.small_ops import SmallOps, SmallOpTerms
from tonnage.sim.domain import ParallelLayout, PromptChunk, Step

NAMES = ("norm", "rope", "gate", "add", "join", "route", "embed", "sample", "put")


def tables(seconds_per_number: float = 1e-9) -> dict[str, pd.DataFrame]:
    """Every operator takes as long as it has numbers."""
    rows = [
        {"op": name, "rows": count, "width": 64, "seconds": seconds_per_number * count * 64}
        for name in NAMES
        for count in (1, 16, 256, 4096)
    ]
    written = [
        {"kind": kind, "tokens": count, "width": 64, "seconds": seconds_per_number * count * 64}
        for kind in ("gqa", "mla")
        for count in (1, 256)
    ]
    return {"small_ops": pd.DataFrame(rows), "kv_write": pd.DataFrame(written)}


def small() -> SmallOps:
    found = SmallOps.from_tables(tables())
    assert found is not None
    return found


def test_without_the_table_there_are_none() -> None:
    assert SmallOps.from_tables({}) is None


def test_an_operator_is_read_by_rows_times_width_and_an_unknown_one_is_nothing() -> None:
    assert small().seconds("norm", 16, 64) == pytest.approx(16 * 64e-9)
    assert small().seconds("norm", 8, 128) == pytest.approx(16 * 64e-9)
    assert small().seconds("norm", 0.5, 64) == pytest.approx(64e-9)
    assert small().seconds("swirl", 16, 64) == 0.0


def test_the_operators_of_a_grouped_query_rank_are_counted() -> None:
    """laptop-gqa: three dense layers, hidden 640, 10/5 heads of 64, MLP of 1536, BF16 KV."""
    model = load_model("laptop-gqa")
    terms = SmallOpTerms.of(small(), model, ParallelLayout(), "bf16")
    layer = 2 * (640 + 640) + (10 + 5) * 64 + (10 + 2 * 5) * 64 + 2 * 5 * 64 + 1536
    rows = 640 + 64 + 3 * layer
    vocabulary = next(one.out_features for one in model.outer_weights if "head" in one.name)
    seconds = terms.seconds(64.0, 64.0, is_decode=True)
    assert seconds == pytest.approx(64e-9 * (rows + 640 + vocabulary), rel=1e-6)


def test_fp8_kv_is_written_by_its_kernel() -> None:
    model = load_model("laptop")
    bf16, fp8 = (
        SmallOpTerms.of(small(), model, ParallelLayout(), one) for one in ("bf16", "fp8_e4m3")
    )
    assert ("put", 576) in bf16.decoding
    assert ("write_mla", 576) in fp8.decoding
    assert ("put", 576) not in fp8.decoding


def test_rows_of_a_whole_module_hold_the_operators_of_attention() -> None:
    model = load_model("laptop")
    terms = SmallOpTerms.of(small(), model, ParallelLayout(), "fp8_e4m3", in_module=True)
    assert not [name for name, _ in terms.decoding if name.startswith(("write", "put", "join"))]
    assert ("norm", model.hidden_size) in terms.decoding


def test_a_measured_step_holds_them_in_place_of_the_estimates() -> None:
    scenario = parse_scenario(
        {"traffic": {"requests": 64}, "model": "qwen3-8b", "pools": {"serve": {"tp": 1}}}
    )
    pools = built_pools(scenario)
    plain = times_of(scenario, pools)["serve"].executor
    assert isinstance(plain, MeasuredExecutor)
    models = replace(plain._models, small=small())
    model, gpu = pools["serve"].model, load_gpu("h200-sxm")
    executor = MeasuredExecutor(
        model, ParallelLayout(), gpu, "bf16", "sglang", models, tuple(range(1, 65))
    )
    contexts = np.full(8, 500, dtype=np.int64)
    steps = [
        Step(contexts, 4000, ()),
        Step(contexts[:0], 0, (PromptChunk(600, 100),)),
    ]
    for step in steps:
        times = executor.times(step)
        names = {one.name: one.source for one in times}
        assert names["small_operators"] == "measured"
        assert not {"small_kernels", "sampling"} & set(names)
        assert total_s(times) == pytest.approx(executor.run(step, 1)[0], rel=1e-9)
