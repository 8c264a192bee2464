"""What of the installed `aiconfigurator-core` may be opened, and that nothing else ever is."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

from tonnage.calibrate.imports import wheel
from tonnage.scenarios.catalogue import gpu_names, load_gpu
from tonnage.sim.domain import BadInputError

ROOT = Path(__file__).parent.parent.parent
needs_wheel = pytest.mark.skipif(
    util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)


def gemm_table() -> wheel.KernelTable:
    return wheel.kernel_tables("h200_sxm", "gemm", "sglang", "0.5.14", "gemm")[0]


# --- what is open -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "relative",
    [
        "systems/silicon_sample.csv",
        "systems/query_versions.yaml",
        "systems/attention_lane_defaults.yaml",
        "systems/perf_data_reuse_manifest.yaml",
        "systems/support_matrix/h200_sxm.csv",
        "systems/data/h200_sxm/gemm/sglang/0.5.14/reuse.yaml",
        "systems/data/h200_sxm/comm/trtllm/1.3.0rc11/errors_moe_a2a_trtllm.json",
        "systems/data/h200_sxm/gemm/../sglang/gemm_perf.parquet",
        "systems/data/../../sdk/x/gemm_perf.parquet",
        "systems/data/h200_sxm/gemm/sglang/0.5.14/gemm_perf.parquet/../reuse.yaml",
        "model_configs/../sdk/common.py",
        "model_configs/../h200_sxm.yaml",
        "sdk/perf_database.py",
        "__init__.py",
        "/etc/hostname",
        "",
    ],
)
@needs_wheel
def test_every_other_file_is_refused_before_it_is_looked_for(relative: str) -> None:
    with pytest.raises(BadInputError, match="not opened"):
        wheel._open(relative)


@needs_wheel
def test_tables_descriptions_and_configs_are_open() -> None:
    assert wheel.gpu_description("h200_sxm")["gpu"]["mem_bw"] == 4.8e12
    assert wheel.model_config("zai-org--GLM-5")["hidden_size"] == 6144
    assert wheel.collection_status(gemm_table())["status"] == "complete"
    frame = wheel.read_table(
        gemm_table(),
        ["framework", "version", "device", "op_name", "kernel_source"],
        ["gemm_dtype", "m", "n", "k", "latency"],
    )
    assert len(frame) > 100_000
    assert set(frame["version"]) == {"0.5.14"}


_AUDITED_IMPORT = """
import json, sys
opened, listed = [], []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        opened.append(str(arguments[0]))
    if event in ("os.listdir", "os.scandir"):
        listed.append(str(arguments[0]))
sys.addaudithook(hook)
from tonnage.calibrate.build import build_profile
build_profile("h200-sxm", "trtllm", only=["comm"])
print(json.dumps([opened, listed, sorted(sys.modules)]))
"""


@needs_wheel
def test_an_import_opens_and_lists_nothing_else_of_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _AUDITED_IMPORT], capture_output=True, text=True, check=True
    )
    opened, listed, modules = json.loads(done.stdout.splitlines()[-1])
    mark = "/aiconfigurator_core/"
    inside = {path.partition(mark)[2] for path in opened if mark in path}
    assert any(path.endswith("_perf.parquet") for path in inside)  # the hook does see them
    assert {path for path in inside if not wheel._OPEN_TO_US.fullmatch(path)} == set()
    folders = {path.partition(mark)[2] for path in listed if mark in path}
    assert all(folder.startswith("systems/data") for folder in folders)
    assert not [name for name in modules if name.startswith("aiconfigurator")]


def names_the_package(path: Path) -> bool:
    """Tell whether a file's code, its docstrings and comments left out, has the module's name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]
    imports = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
    ]
    return any("aiconfigurator_core" in text for text in [*texts, *filter(None, imports)])


def test_no_other_file_knows_where_the_package_lies(tmp_path: Path) -> None:
    folders = ("sim", "scenarios", "calibrate", "src")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    assert [path for path in files if names_the_package(path)] == []
    offender = tmp_path / "reader.py"
    offender.write_text('open("site-packages/aiconfigurator_core/sdk/common.py")', "utf-8")
    assert names_the_package(offender)


# --- versions and schemas -----------------------------------------------------------------------


@pytest.mark.parametrize("found", ["0.11.9", "0.13.0", "0.120.0", "1.0"])
def test_another_version_is_refused_with_the_one_that_is_supported(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found)
    with pytest.raises(BadInputError, match=rf"{found}.*pip install.*0\.12\.x"):
        wheel.package_version()


def test_a_missing_package_is_said_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(BadInputError, match="not installed; install it with: pip install"):
        wheel.package_version()


@needs_wheel
def test_a_schema_that_is_not_known_is_refused() -> None:
    known = ["framework", "version", "device", "op_name", "kernel_source", "m", "n", "k", "latency"]
    with pytest.raises(BadInputError, match="unknown gemm_dtype"):
        wheel.read_table(gemm_table(), known)
    with pytest.raises(BadInputError, match="lacks power"):
        wheel.read_table(gemm_table(), [*known, "gemm_dtype", "power"])


# --- names --------------------------------------------------------------------------------------


@needs_wheel
@pytest.mark.parametrize("name", wheel.GPU_FOLDERS)
def test_a_folder_is_that_of_our_gpu(name: str) -> None:
    assert name in gpu_names()
    folder = wheel.GPU_FOLDERS[name]
    described = wheel.gpu_description(folder)["gpu"]
    ours = load_gpu(name)
    # Ours of the L40S is a sixteenth lower: its ECC lies in the same memory.
    assert described["mem_bw"] == pytest.approx(ours.memory_bandwidth_bytes_per_s, rel=0.07)
    assert described["bfloat16_tc_flops"] == pytest.approx(ours.dense_flops_per_s["bf16"], rel=0.05)
    for backend in ("sglang", "vllm", "trtllm"):
        version = wheel.current_version(folder, backend)
        assert wheel.kernel_tables(folder, "gemm", backend, version), (folder, backend)
