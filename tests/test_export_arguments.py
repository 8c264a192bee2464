"""The script that reads the arguments of engines out of their wheels, on small sources."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SGLANG = {
    "sglang/srt/arg_groups/choices.py": 'KINDS = ["a", "b"]\n',
    "sglang/srt/arg_groups/fields/memory.py": (
        "class Memory:\n"
        '    fraction: A[Optional[float], "A share."] = None\n'
        '    kind: A[str, Arg(help="x", choices=KINDS + ["c"], aliases=["--sort"])] = "a"\n'
        '    mode: A[Literal["x", "y"], "Either."] = "x"\n'
        '    fast: A[bool, "Be fast."] = False\n'
        "    both: A[bool, Arg(action=argparse.BooleanOptionalAction)] = False\n"
        "    extra: A[Optional[Dict], Arg(type_parser=json.loads)] = None\n"
        '    backend: A[Literal[None, "one"], "Which."] = None\n'
        "    hidden: A[bool, Arg(no_cli=True)] = False\n"
        '    urls: A[List[str], "Several."] = None\n'
        '    plain: str = "no argument"\n'
    ),
    "sglang/srt/server_args.py": 'parser.add_argument("--config", type=str, help="A file.")\n',
}
VLLM = {
    "vllm/engine/arg_utils.py": (
        "model_kwargs = get_kwargs(ModelConfig)\n"
        'group.add_argument("--max-model-len", **model_kwargs["max_model_len"])\n'
        'group.add_argument("--eager", "-e", **model_kwargs["eager"])\n'
        'group.add_argument("--cache", **{**model_kwargs["cache"], "default": None})\n'
    ),
    "vllm/config/model.py": (
        'Cache = Literal["auto", "fp8"]\n'
        "class ModelConfig:\n"
        "    max_model_len: int | None = None\n"
        "    eager: bool = False\n"
        "    cache: Cache | str = 'auto'\n"
    ),
    "vllm/entrypoints/common/cli_args.py": "class FrontendArgs:\n    port: int = 8000\n",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Load the script as a module."""
    path = ROOT / "benchmarks" / "engine_arguments.py"
    spec = importlib.util.spec_from_file_location("engine_arguments", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(sources: dict[str, str]) -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in sources.items()}


def test_sglangs_fields_become_arguments(script: ModuleType) -> None:
    assert script.sglang_arguments(parsed(SGLANG)) == {
        "--config": {"type": "str"},
        "--fraction": {"type": "float"},
        "--kind": {"type": "str", "choices": ["a", "b", "c"], "aliases": ["--sort"]},
        "--mode": {"type": "str", "choices": ["x", "y"]},
        "--fast": {"type": "bool"},
        "--both": {"type": "bool", "negatable": True},
        "--extra": {"type": "json"},
        "--backend": {"type": "str", "choices": ["one"]},
        "--urls": {"type": "list"},
    }


def test_vllms_calls_take_the_types_of_its_classes(script: ModuleType) -> None:
    assert script.vllm_arguments(parsed(VLLM)) == {
        "--max-model-len": {"type": "int"},
        "--eager": {"type": "bool", "negatable": True, "aliases": ["-e"]},
        "--cache": {"type": "str", "known": ["auto", "fp8"]},
        "--port": {"type": "int"},
    }


def test_a_routers_flags_lose_their_empty_prefix(script: ModuleType) -> None:
    source = 'group.add_argument(f"--{prefix}policy", type=str, choices=["x"], help="y")\n'
    found = script.router_arguments(parsed({"sglang_router/router_args.py": source}))
    assert found == {"--policy": {"type": "str", "choices": ["x"]}}


def test_a_wheel_becomes_a_table(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "sglang-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in SGLANG.items():
            archive.writestr(name, text)
    monkeypatch.setattr(script, "ARGUMENTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["engine_arguments.py", str(wheel)])
    script.main()
    table = json.loads((tmp_path / "sglang-9.9.9.json").read_text())
    assert (table["package"], table["version"]) == ("sglang", "9.9.9")
    assert table["arguments"]["--fraction"] == {"type": "float"}


@pytest.mark.parametrize("path", sorted((ROOT / "sim/export/arguments").glob("*.json")))
def test_a_shipped_table_says_where_it_is_from(path: Path) -> None:
    table = json.loads(path.read_text())
    assert path.stem == f"{table['package']}-{table['version']}"
    assert table["version"] in table["source"]
    assert len(table["arguments"]) > 60
