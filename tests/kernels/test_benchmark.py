"""The benchmark of kernels: it knows every kernel, finds wrong ones, and goes on where it was."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tonnage.kernels import dense_specs
from tonnage.kernels.peaks import Peaks
from tonnage.kernels.provenance import provenance
from tonnage.kernels.timing import Method, measure

PATH = Path(__file__).parents[2] / "benchmarks" / "gpu_kernels.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """Return the benchmark's module, which is no part of the package."""
    found = spec_from_file_location("gpu_kernels", PATH)
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    sys.modules["gpu_kernels"] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture
def few(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Leave three kernels in the benchmark."""
    chosen = {name: benchmark.SPECS[name] for name in ("tag_check", "noop", "gemm_bf16")}
    monkeypatch.setattr(benchmark, "SPECS", chosen)
    return benchmark


def run(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the program with these arguments on a CPU."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["gpu_kernels", "--device", "cpu", "--quick", *arguments])
    try:
        return int(benchmark.main())
    finally:
        torch.set_num_threads(threads)


def test_every_kernel_has_points_at_its_own_axes(benchmark: ModuleType) -> None:
    for name, spec in benchmark.SPECS.items():
        for sizes in (benchmark.GPU, benchmark.CPU, benchmark.QUICK):
            found = list(benchmark.points(spec, sizes))
            assert found, name
            assert all(set(axes) == set(spec.axes) for axes in found), name


def test_a_run_checks_times_and_resumes(
    few: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "rows.jsonl"
    assert run(few, monkeypatch, "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "| gemm_bf16 | m=64 n=1024 k=1024 |" in said
    assert "torch comparison" in said
    rows = out.read_text(encoding="utf-8").splitlines()
    assert len(rows) == 6
    out.write_text("".join(f"{row}\n" for row in rows[:-1]), encoding="utf-8")
    assert run(few, monkeypatch, "--out", str(out)) == 0
    again = out.read_text(encoding="utf-8").splitlines()
    assert again[:-1] == rows[:-1]
    assert len(again) == 6


def test_a_wrong_kernel_fails_the_run(
    few: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = replace(few.SPECS["gemm_bf16"], tolerances={"out": 1e-9})
    few.SPECS["gemm_bf16"] = wrong
    assert run(few, monkeypatch, "--out", str(tmp_path / "rows.jsonl")) == 1
    assert "out is off by" in capsys.readouterr().out


def test_no_time_left_is_said_and_fails(
    few: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(few, monkeypatch, "--minutes", "0", "--out", str(tmp_path / "rows.jsonl")) == 1
    assert "no time was left" in capsys.readouterr().out


def test_shares_are_of_the_rate_of_the_format() -> None:
    peaks = Peaks(copy_bytes_per_s=4e12, matrix_flops_per_s=8e14, fp8_flops_per_s=16e14)
    assert peaks.shares(1e12, 4e14, fp8=False) == (0.25, 0.5)
    assert peaks.shares(1e12, 4e14, fp8=True) == (0.25, 0.25)
    assert Peaks(4e12, 8e14).shares(1e12, 4e14, fp8=True) == (0.25, 0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("graph", [False, True])
def test_a_gpu_is_timed_with_its_clocks(graph: bool) -> None:
    method = Method(device="cuda", backend="torch", graph=graph)
    axes = {"m": 64, "n": 4096, "k": 4096}
    row = measure(dense_specs.GEMM_BF16, axes, method, provenance("cuda"))
    assert row.graph == graph
    assert 1e-6 < row.timing.seconds_median < 1e-3
    assert row.copies * row.bytes > 3 * torch.cuda.get_device_properties("cuda").L2_cache_size
    assert row.provenance.driver
    assert row.state.sm_clock_hz is not None
    assert row.state.sm_clock_hz > 1e8
