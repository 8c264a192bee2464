"""Collectives are measured between real processes, and predicted from what was measured."""

from __future__ import annotations

from datetime import date
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from tests.calibrate.measured_rows import TINY, measured_row, measured_rows
from tonnage.calibrate.between_ranks import (
    Exchange,
    collect_exchanges,
    exchange_tables,
    exchanges,
    numbers_of_ranks,
)
from tonnage.calibrate.collect import Measurement
from tonnage.calibrate.grid import grid
from tonnage.calibrate.own_profile import profile_of
from tonnage.calibrate.wanted import wanted_of
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.models.comm import OPERATIONS, RingForm
from tonnage.sim.cost.operator_models import operator_models
from tonnage.sim.cost.profile import Profile

FORM = RingForm(t0_s=2e-5, hop_s=3e-6, bytes_per_s=2e9)
SIZES = (1024, 4096, 16384, 65536, 262144)
GPU = load_gpu("cpu")


def row_of(one: Exchange) -> Any:
    op = "all_to_all" if one.op == "point_to_point" else one.op
    return measured_row(one.point(), float(FORM.seconds(op, one.ranks, one.message_bytes)))


@pytest.fixture(scope="module")
def profile() -> Profile:
    planned = grid(wanted_of(("laptop-gqa",), "cpu"), TINY, GPU, on_gpu=False).points
    rows = [*measured_rows(planned), *map(row_of, exchanges("cuda", 4, SIZES))]
    return profile_of(rows, "cpu", day=date(2026, 11, 30))


def test_ranks_double_up_to_those_there_are() -> None:
    assert numbers_of_ranks(1) == []
    assert numbers_of_ranks(2) == [2]
    assert numbers_of_ranks(6) == [2, 4, 6]
    assert numbers_of_ranks(8) == [2, 4, 8]
    assert exchanges("cpu", 1) == []


def test_all_reduces_of_gpus_are_measured_in_a_graph_too_and_messages_between_two() -> None:
    found = exchanges("cuda", 8, SIZES)
    assert len(set(found)) == len(found)
    assert {one.ranks for one in found if one.op == "point_to_point"} == {2}
    assert {one.graph for one in found if one.op == "all_reduce"} == {False, True}
    assert not any(one.graph for one in exchanges("cpu", 8, SIZES))


def test_measured_collectives_are_predicted_as_measured(profile: Profile) -> None:
    comm = operator_models(profile, GPU).comm
    for op in OPERATIONS:
        asked = comm.all_reduce(4, 16384) if op == "all_reduce" else getattr(comm, op)(4, 16384)
        assert asked.seconds == pytest.approx(float(FORM.seconds(op, 4, 16384)), rel=0.01)
        assert (asked.source, asked.inside) == ("measured", True)
    assert comm.all_reduce(8, 16384).source == "scaled"
    assert {"all_reduce", "all_gather", "all_to_all", "point_to_point"} <= profile.tables.keys()
    assert profile.header.errors["all_reduce"]["graph"]["median"] < 0.02
    assert "all_reduce" not in profile.header.missing


needs_torch = pytest.mark.skipif(util.find_spec("torch") is None, reason="torch is not installed")


@needs_torch
def test_two_processes_exchange_messages_and_a_second_run_measures_none(tmp_path: Path) -> None:
    wanted = exchanges("cpu", 2, (1024, 65536, 1048576))
    log = tmp_path / "rows.jsonl"
    told: list[tuple[str, float]] = []
    measurement = Measurement("cpu", 1, TINY)
    first = collect_exchanges(wanted, measurement, log, lambda *one: told.append(one))
    assert (len(first.rows), first.new_rows) == (15, 15)
    assert told[-1] == ("measuring point_to_point between 2 ranks", 1.0)
    for row in first.rows:
        assert row["backend"] == "gloo"
        assert 0 < row["timing"]["seconds_median"] < 1
    tables = exchange_tables(first.rows)
    assert tables["all_gather"]["op"].value_counts().to_dict() == {
        "all_gather": 3,
        "reduce_scatter": 3,
    }
    assert tables["point_to_point"]["message_bytes"].tolist() == [1024, 65536, 1048576]
    again = collect_exchanges(wanted, measurement, log)
    assert (again.rows, again.new_rows) == (first.rows, 0)


@needs_torch
def test_a_collective_moves_what_it_says() -> None:
    """On one rank of one, in this process: sums, parts and wholes have the sizes of the message."""
    import torch

    from tonnage.kernels import collectives

    seen: dict[str, int] = {}

    class Recorded:
        @staticmethod
        def all_reduce(message: torch.Tensor) -> None:
            seen["all_reduce"] = message.nbytes

        @staticmethod
        def all_to_all_single(target: torch.Tensor, source: torch.Tensor) -> None:
            seen["all_to_all"] = source.nbytes
            assert target.nbytes == source.nbytes

        @staticmethod
        def send(message: torch.Tensor, to: int) -> None:
            seen["point_to_point"] = message.nbytes

        @staticmethod
        def recv(message: torch.Tensor, source: int) -> None:
            pass

    def whole(one: torch.Tensor, other: torch.Tensor) -> None:
        seen["gathered"] = max(one.nbytes, other.nbytes)
        assert one.nbytes in (4 * other.nbytes, other.nbytes // 4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "distributed", Recorded)
        patch.setattr(collectives, "_ALL_GATHER", whole)
        patch.setattr(collectives, "_REDUCE_SCATTER", whole)
        for op in collectives.OPERATIONS:
            collectives._call(collectives.Collective(op, 4096), 0, 4, torch.device("cpu"))()
    assert seen == dict.fromkeys(seen, 4096)
    assert len(seen) == 4
