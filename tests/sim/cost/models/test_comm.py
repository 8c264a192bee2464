"""Collectives from rows: messages between knots, other numbers of GPUs, other nodes, no rows."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.models.comm import CommModel, RingForm, moved_share
from tonnage.sim.cost.models.expert_comm import ExpertCommModel, ExpertForm, ExpertShape

GPU = load_gpu("h200-sxm")
BYTES = [2.0**power for power in range(8, 31, 2)]
FORM = {"t0_s": 3e-6, "hop_s": 0.5e-6, "bytes_per_s": 3e11}
OPERATION = {"form": FORM, "interval": [0.9, 1.1], "outside_interval": [0.8, 1.2]}
FITTED = {"comm": {"operations": {"all_reduce/graph": OPERATION, "all_to_all/eager": OPERATION}}}


def rows(op: str, *, in_graph: bool) -> pd.DataFrame:
    found = [
        (op, gpus, size, in_graph, 1.1 * float(RingForm(**FORM).seconds(op, gpus, size)))
        for gpus, size in product((2, 4, 8), BYTES)
    ]
    return pd.DataFrame(found, columns=["op", "gpus", "message_bytes", "in_graph", "seconds"])


def model(fitted: dict[str, object] = FITTED) -> CommModel:
    tables = {
        "all_reduce": rows("all_reduce", in_graph=True),
        "all_to_all": rows("all_to_all", in_graph=False),
    }
    return CommModel.from_tables(tables, fitted, GPU)


def test_a_ring_moves_an_all_reduce_twice() -> None:
    assert moved_share("all_reduce", 8) == 2 * moved_share("all_gather", 8) == 1.75


def test_a_row_is_given_back() -> None:
    predicted = model().all_reduce(8, 2.0**20)
    expected = 1.1 * float(RingForm(**FORM).seconds("all_reduce", 8, 2.0**20))
    assert predicted.seconds == pytest.approx(expected)
    assert (predicted.source, predicted.inside, predicted.high) == ("imported", True, 1.1)


def test_a_larger_message_than_any_keeps_the_bandwidth() -> None:
    one = model()
    largest, larger = one.all_reduce(8, BYTES[-1]), one.all_reduce(8, 4 * BYTES[-1])
    assert larger.seconds == pytest.approx(4 * largest.seconds, rel=0.01)
    assert not larger.inside


def test_another_number_of_gpus_is_scaled_by_the_ring() -> None:
    predicted = model().all_reduce(6, 2.0**20)
    expected = 1.1 * float(RingForm(**FORM).seconds("all_reduce", 6, 2.0**20))
    assert predicted.seconds == pytest.approx(expected)
    assert (predicted.source, predicted.inside, predicted.high) == ("scaled", False, 1.2)


def test_an_eager_call_without_rows_is_scaled_from_the_captured_one() -> None:
    one = model()
    eager, captured = one.all_reduce(8, 1e6, in_graph=False), one.all_reduce(8, 1e6)
    assert eager.seconds == captured.seconds
    assert (eager.source, eager.inside) == ("scaled", False)


def test_one_gpu_sends_nothing() -> None:
    assert model().all_reduce(1, 1e9).seconds == 0.0


def test_between_nodes_a_ring_uses_all_adapters_and_an_all_to_all_its_own() -> None:
    one, size = model(), 2.0**30
    ring, exchange = one.all_reduce(16, size), one.all_to_all(16, size)
    assert ring.seconds >= 2 * 15 / 16 * size / (8 * GPU.network_bytes_per_s)
    assert ring.seconds < 2 * 15 / 16 * size / GPU.network_bytes_per_s
    assert exchange.seconds >= 0.5 * size / GPU.network_bytes_per_s
    assert {ring.source, exchange.source} == {"scaled"}
    assert ring.high > 2


def test_a_rack_that_shares_nvlink_is_one_node() -> None:
    in_rack = {"comm": {**FITTED["comm"], "nvlink_gpus": 72}}
    assert model(in_rack).all_reduce(16, 2.0**30).seconds < model().all_reduce(16, 2.0**30).seconds


def test_half_of_an_exchange_of_two_travels() -> None:
    one = model()
    assert one.p2p(1e6).seconds == one.all_to_all(2, 2e6).seconds
    assert one.p2p(1e6).source == "scaled"
    assert one.p2p(1e6, within_node=False).seconds == 1e6 / GPU.network_bytes_per_s


def test_without_rows_the_link_answers() -> None:
    predicted = CommModel.from_tables({}, {}, GPU).all_gather(4, 1e9)
    assert predicted.seconds == pytest.approx(0.75e9 / (GPU.nvlink_bytes_per_s or 0.0), rel=1e-6)
    assert (predicted.source, predicted.inside) == ("datasheet", False)


@settings(max_examples=20, deadline=None)
@given(gpus=st.integers(2, 32), seed=st.integers(0, 100))
def test_a_larger_message_never_takes_less(gpus: int, seed: int) -> None:
    noisy = rows("all_reduce", in_graph=True)
    noise = np.random.default_rng(seed).normal(0.0, 0.3, len(noisy))
    tables = {"all_reduce": noisy.assign(seconds=noisy["seconds"] * np.exp(noise))}
    sizes = np.geomspace(1.0, 1e12, 300)
    predicted = CommModel.from_tables(tables, FITTED, GPU).all_reduce(gpus, sizes)
    assert (np.diff(predicted.seconds) >= 0).all()


# --- dispatch and combine -----------------------------------------------------------------------

EXPERT_FORM = {"t0_s": 1e-5, "expert_s": 1e-8, "bytes_per_s": 3e11, "local": 0.5}
PHASE = {
    "form": EXPERT_FORM,
    "payload": "fp8",
    "interval": [0.9, 1.1],
    "outside_interval": [0.8, 1.3],
}
EXPERT_FITTED = {"expert_comm": {"phases": {"dispatch/low_latency": PHASE}}}
SHAPES = [ExpertShape(8, hidden, 8, experts) for hidden in (4096, 7168) for experts in (128, 384)]


def expert_model() -> ExpertCommModel:
    form = ExpertForm(**EXPERT_FORM)
    found = []
    for shape, tokens in product(SHAPES, (1, 16, 128)):
        factor = 1.2 if shape.hidden == 4096 else 1.0
        seconds = factor * float(form.seconds("low_latency", shape, "fp8", tokens))
        found.append(("dispatch", "low_latency", *_values(shape), tokens, seconds))
    columns = ["op", "mode", "gpus", "hidden", "top_k", "experts", "tokens", "seconds"]
    table = pd.DataFrame(found, columns=columns)
    return ExpertCommModel.from_tables({"expert_comm": table}, EXPERT_FITTED, GPU)


def _values(shape: ExpertShape) -> tuple[int, int, int, int]:
    return shape.gpus, shape.hidden, shape.top_k, shape.experts


def test_a_measured_shape_is_given_back() -> None:
    expected = 1.2 * float(ExpertForm(**EXPERT_FORM).seconds("low_latency", SHAPES[0], "fp8", 16))
    predicted = expert_model().seconds("dispatch", "low_latency", SHAPES[0], 16)
    assert predicted.seconds == pytest.approx(expected, rel=1e-4)
    assert (predicted.source, predicted.inside, predicted.low) == ("imported", True, 0.9)


def test_a_shape_between_takes_the_nearest_residuals() -> None:
    shape = ExpertShape(8, 6144, 8, 384)
    formed = float(ExpertForm(**EXPERT_FORM).seconds("low_latency", shape, "fp8", 64))
    predicted = expert_model().seconds("dispatch", "low_latency", shape, 64)
    assert formed < predicted.seconds < 1.1 * formed
    assert predicted.source == "imported"


def test_a_wider_payload_and_other_gpus_are_scaled() -> None:
    one = expert_model()
    narrow = one.seconds("dispatch", "low_latency", SHAPES[-1], 4096)
    wide = one.seconds("dispatch", "low_latency", SHAPES[-1], 4096, payload="bf16")
    assert wide.seconds == pytest.approx(narrow.seconds * 2 / (1 + 1 / 32), rel=0.02)
    assert (wide.source, wide.inside, wide.high) == ("scaled", False, 1.3)


def test_the_network_bounds_a_dispatch_beyond_the_node() -> None:
    shape = ExpertShape(64, 7168, 8, 384)
    predicted = expert_model().seconds("dispatch", "low_latency", shape, 128)
    remote_bytes = 56 / 64 * 128 * 7168 * (1 + 1 / 32) * 8
    assert predicted.seconds >= remote_bytes / GPU.network_bytes_per_s
    assert predicted.source == "scaled"


def test_a_phase_without_rows_is_the_datasheets() -> None:
    predicted = expert_model().seconds("combine", "normal", SHAPES[-1], 1024)
    ranks = 8 * (1 - (7 / 8) ** 8)
    expected = 1024 * 7168 * 2 * ranks / (GPU.nvlink_bytes_per_s or 0.0)
    assert predicted.seconds == pytest.approx(expected)
    assert predicted.source == "datasheet"
