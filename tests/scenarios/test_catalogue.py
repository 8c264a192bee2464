"""The shipped GPUs and models load, and a wrong name is answered with the nearest one."""

from __future__ import annotations

from pathlib import Path

import pytest

import tonnage.scenarios
from tonnage.scenarios.catalogue import (
    gpu_names,
    load_gpu,
    load_model,
    model_names,
    read_gpu,
    scenario_path,
    unknown_name,
)
from tonnage.sim.domain import BadInputError

MIB = 2**20
FIELDS = {
    "memory",
    "memory_bandwidth",
    "dense_flops_per_s",
    "nvlink",
    "pcie",
    "network",
    "gpus_per_node",
    "compute_capability",
}


def test_the_usual_gpus_are_there() -> None:
    wanted = {"h100-sxm", "h200-sxm", "h20", "h20-141g", "a100-80g", "l40s", "b200-sxm"}
    wanted |= {"b300-sxm", "gb200", "gb300", "rtx-4090", "rtx-5090", "rtx-pro-6000"}
    assert wanted <= set(gpu_names())


@pytest.mark.parametrize("name", sorted(set(gpu_names()) - {"cpu"}))
def test_a_gpu_is_plausible_and_says_where_each_figure_is_from(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.name == name
    assert 20 * 2**30 < gpu.memory_bytes < 300 * 2**30
    assert 0.5e12 < gpu.memory_bandwidth_bytes_per_s <= 8e12
    assert set(gpu.dense_flops_per_s) <= {"bf16", "fp8", "int8", "fp4"}
    assert 100e12 < gpu.dense_flops_per_s["bf16"] < 3e15
    if "fp8" in gpu.dense_flops_per_s:
        ratio = gpu.dense_flops_per_s["fp8"] / gpu.dense_flops_per_s["bf16"]
        assert ratio == pytest.approx(2, rel=0.02)  # dense, as BF16 is
    assert gpu.network_bytes_per_s <= gpu.pcie_bytes_per_s * 2
    assert set(gpu.sources) == FIELDS
    assert all(gpu.sources.values())


def test_a_cpu_is_described_as_a_modest_one_of_nobody() -> None:
    cpu = load_gpu("cpu")
    assert cpu.nvlink_bytes_per_s is None
    assert cpu.memory_bytes == 8 * 2**30
    assert set(cpu.sources) == FIELDS
    assert all("assumed" in cpu.sources[name] for name in ("memory", "memory_bandwidth"))


def test_figures_of_the_h200() -> None:
    gpu = load_gpu("h200-sxm")
    assert gpu.memory_bytes == 143_771 * MIB
    assert gpu.memory_bandwidth_bytes_per_s == 4.8e12
    assert gpu.dense_flops_per_s["fp8"] == 1978e12
    assert gpu.nvlink_bytes_per_s == 450e9
    assert gpu.network_bytes_per_s == 50e9
    assert gpu.gpus_per_node == 8


def test_only_data_centre_gpus_have_nvlink() -> None:
    without = {name for name in gpu_names() if load_gpu(name).nvlink_bytes_per_s is None} - {"cpu"}
    assert without == {"l40s", "rtx-4090", "rtx-5090", "rtx-pro-6000"}


@pytest.mark.parametrize("name", model_names())
def test_a_model_loads_under_its_name(name: str) -> None:
    assert load_model(name).name == name


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("h200", "h200-sxm"), ("H100-SXM5", "h100-sxm"), ("b20", "b200-sxm")]
)
def test_an_unknown_gpu_is_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(BadInputError, match=rf"did you mean '{nearest}'\? Known: a100-80g, b200"):
        load_gpu(wrong)


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadInputError, match=r"did you mean 'kimi-k2\.6'\? .*or give a config"):
        load_model("kimi-2.6")


def test_an_unknown_scenario_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="there is no scenario named 'zzz'"):
        scenario_path("zzz")
    file = tmp_path / "mine.yaml"
    file.touch()
    assert scenario_path(file) == file


def test_nothing_near_is_not_guessed() -> None:
    assert unknown_name("gpu", "zzz", ["h20"]) == "gpu: there is no gpu named 'zzz'. Known: h20"
    assert unknown_name("gpu", "", []) == "gpu: there is no gpu named ''. Known: none"


def test_a_model_may_be_a_file_or_a_folder(tmp_path: Path) -> None:
    config = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen2.5-7b.json"
    copy = tmp_path / "config.json"
    copy.write_text(config.read_text())
    assert load_model(copy) == load_model(tmp_path)
    assert len(load_model(str(copy)).layers) == 28


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("memory: 10 parsecs\n", "unknown unit"),
        ("tensor_cores: 4\n", "tensor_cores: Extra inputs are not permitted"),
        ("gpus_per_node: 0\n", "gpus_per_node: Input should be greater than or equal to 1"),
        ("sources: [\n", "not YAML"),
    ],
)
def test_a_wrong_gpu_file_names_file_and_field(tmp_path: Path, change: str, message: str) -> None:
    shipped = scenario_file("h200-sxm").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(shipped + change)
    with pytest.raises(BadInputError, match=f"mine.yaml: .*{message}"):
        read_gpu(path)


def test_a_gpu_may_be_a_file() -> None:
    assert load_gpu(str(scenario_file("h200-sxm"))).name == "h200-sxm"


def scenario_file(gpu: str) -> Path:
    """Return the shipped description of a GPU."""
    return Path(tonnage.scenarios.__file__).parent / "gpus" / f"{gpu}.yaml"
