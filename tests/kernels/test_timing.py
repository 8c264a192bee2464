"""Timings: quantiles, rotated inputs, provenance; and the log of rows that a kill cannot spoil."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tonnage.kernels import timing
from tonnage.kernels.cpu.backend import with_cpu
from tonnage.kernels.provenance import GpuState, parsed_state, provenance
from tonnage.kernels.registry import kernel
from tonnage.kernels.row_log import Row, RowLog
from tonnage.kernels.timing import (
    ClockReadings,
    Method,
    measure,
    planned_key,
    row_key,
    time_calls,
)
from tonnage.sim.domain import BadInputError

QUICK = Method(samples=3, warm_ups=1, sample_s=1e-4, budget_s=0.2)
TAGS = with_cpu(kernel("tag_check"))
AXES = {"requests": 3, "pages": 17, "ragged": 0}


def test_a_row_holds_quantiles_work_and_provenance() -> None:
    origin = provenance("cpu", threads=1)
    row = measure(TAGS, AXES, QUICK, origin)
    timed = row.timing
    assert 0 < timed.seconds_p20 <= timed.seconds_median <= timed.seconds_p80 < 1
    assert timed.samples == 3
    assert row.bytes_per_s == TAGS.bytes(AXES) / timed.seconds_median
    assert row.provenance.torch == torch.__version__
    assert row.provenance.threads == 1
    assert row.provenance.driver is None


def test_the_key_is_known_before_the_row_is_measured() -> None:
    origin = provenance("cpu", threads=1)
    row = measure(TAGS, AXES, QUICK, origin).as_row()
    assert planned_key(TAGS, AXES, QUICK, origin) == row_key(json.loads(json.dumps(row)))
    warm = replace(QUICK, cold=False)
    assert planned_key(TAGS, AXES, warm, origin) != row_key(row)


def test_cold_inputs_are_three_times_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 10_000)
    inputs = {"x": torch.zeros(1000), "number": 3}
    assert timing.copies_for(4000.0, inputs, QUICK) == 8  # ceil(30000 / 4000)
    assert timing.copies_for(4000.0, inputs, replace(QUICK, cold=False)) == 1
    assert timing.copies_for(0.0, inputs, QUICK) == 1
    monkeypatch.setattr(timing, "CPU_COPIED_BYTES_MAX", 12_000)
    assert timing.copies_for(4000.0, inputs, QUICK) == 3
    copies = timing.rotated(inputs, 3)
    assert len({one["x"].data_ptr() for one in copies}) == 3
    assert [one["number"] for one in copies] == [3, 3, 3]


def test_calls_take_turns_through_all_samples() -> None:
    taken: list[str] = []
    calls = [lambda name=name: taken.append(name) for name in "abc"]
    timed, state = time_calls(calls, replace(QUICK, samples=4, sample_s=1e-9, budget_s=10))
    assert state == GpuState()
    assert timed.calls_per_sample == 1
    assert "".join(taken) == "abcab"


def test_threads_are_what_was_asked_and_are_put_back() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    calls = [lambda: seen.append(torch.get_num_threads())]
    time_calls(calls, replace(QUICK, threads=before + 1))
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


def test_sampling_stops_at_its_budget_but_not_before_three(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instants = iter(range(100))  # looked at once at the start and once after the third, fourth ...
    monkeypatch.setattr("time.perf_counter", lambda: float(next(instants)))
    timed, _ = time_calls([lambda: None], replace(QUICK, samples=20, budget_s=4.5))
    assert timed.samples == 2 + 5
    timed, _ = time_calls([lambda: None], replace(QUICK, samples=20, budget_s=0.0))
    assert timed.samples == 3


def test_nvidia_smi_is_read_in_si() -> None:
    line = "580.95.05, 1980, 2619, 141.27, 0x0000000000000004"
    state = parsed_state(line)
    assert state == GpuState("580.95.05", 1.98e9, 2.619e9, 141.27, "0x0000000000000004")
    assert parsed_state("580.95.05, [N/A], 2619, [N/A], [N/A]") == GpuState(
        "580.95.05", None, 2.619e9, None, None
    )


def key(row: Row) -> str:
    return str(row["at"])


def test_a_log_resumes_without_the_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RowLog(path, key) as log:
        log.append({"at": 1})
        log.append({"at": 2})
    whole = path.read_bytes()
    for cut in range(1, len(b'{"at": 2}\n') + 1):
        path.write_bytes(whole[:-cut])
        with RowLog(path, key) as log:
            assert [row["at"] for row in log.rows] == [1]
            assert log.has("1")
            assert not log.has("2")
            log.append({"at": 2})
        assert path.read_bytes() == whole


def test_a_log_refuses_duplicates_other_writers_and_garbage(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RowLog(path, key) as log:
        log.append({"at": 1})
        with pytest.raises(ValueError, match="already"):
            log.append({"at": 1})
        with pytest.raises(BadInputError, match="another program"):
            RowLog(path, key)
        with pytest.raises(ValueError, match="JSON"):
            log.append({"at": float("nan")})
    path.write_text('{"at": 1}\nrubbish\n{"at": 2}\n', encoding="utf-8")
    with pytest.raises(BadInputError, match="line 2"):
        RowLog(path, key)


def write_for_ever(path: Path) -> None:
    with RowLog(path, key) as log:
        for at in range(len(log.rows), 100_000):
            log.append({"at": at, "padding": "x" * (at % 97)})


def test_killed_writers_lose_and_repeat_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lengths = [0]
    for turn in range(4):
        written = path.stat().st_size if path.exists() else 0
        writer = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(path,))
        writer.start()
        enough = written + 1000 + turn * 311
        while not path.exists() or path.stat().st_size < enough:
            assert writer.is_alive()
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        with RowLog(path, key) as log:
            assert [row["at"] for row in log.rows] == list(range(len(log.rows)))
            lengths.append(len(log.rows))
    assert lengths == sorted(set(lengths))


# --- clocks -------------------------------------------------------------------------------------


def test_clocks_are_read_every_few_seconds_and_a_row_says_how_long_ago() -> None:
    now = 0.0
    read_at: list[float] = []

    def read() -> GpuState:
        read_at.append(now)
        return GpuState(sm_clock_hz=1e9 + len(read_at))

    readings = ClockReadings(4.0, clock=lambda: now)
    ages = []
    for moment in range(12):
        now = float(moment)
        state = readings.state("cuda:0", read)
        assert state.sm_clock_hz == 1e9 + len(read_at)
        ages.append(state.age_s)
    assert read_at == [0.0, 5.0, 10.0]
    assert ages == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_each_gpu_has_its_own_readings() -> None:
    readings = ClockReadings(4.0, clock=lambda: 1.0)
    first = readings.state("cuda:0", lambda: GpuState(power_w=1.0))
    second = readings.state("cuda:1", lambda: GpuState(power_w=2.0))
    assert (first.power_w, second.power_w) == (1.0, 2.0)
