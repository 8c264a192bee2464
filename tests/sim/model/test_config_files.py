"""Reading models from files and folders, with the quantisation that lies beside a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tonnage.scenarios
from tonnage.sim.domain import BadInputError, ModelSpec
from tonnage.sim.model.hf_config import read_model

MODELS = Path(tonnage.scenarios.__file__).parent / "models"
LLAMA: dict[str, Any] = json.loads((MODELS / "llama-3.1-8b.json").read_text(encoding="utf-8"))
del LLAMA["tonnage"]


def up_format(model: ModelSpec) -> str:
    return next(w.format for w in model.layers[0].weights if w.name == "mlp.up_proj")


def test_a_folder_and_a_file_give_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    model = read_model(folder)
    assert model == read_model(folder / "config.json")
    assert model.name == "my-llama"
    assert up_format(model) == "fp8"


def test_the_quantisation_beside_a_prefixed_config_is_applied(tmp_path: Path) -> None:
    (tmp_path / "org--tiny_config.json").write_text(json.dumps(LLAMA))
    quantisation = {"quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "org--tiny_hf_quant_config.json").write_text(json.dumps(quantisation))
    model = read_model(tmp_path / "org--tiny_config.json")
    assert model.name == "org--tiny"
    assert up_format(model) == "nvfp4"


def test_a_catalogue_entry_names_itself(tmp_path: Path) -> None:
    entry = {"tonnage": {"hf_repo": "org/tiny", "verified": False, "source": "a rumour"}}
    (tmp_path / "tiny.json").write_text(json.dumps(entry | LLAMA))
    model = read_model(tmp_path / "tiny.json")
    assert (model.name, model.verified, model.source) == ("tiny", False, "a rumour")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"tiny\.json: is not valid JSON"),
        ("[1]", r"tiny\.json: must hold a JSON object, not list"),
        ("{}", r"tiny\.json: field 'architectures' is missing"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(content)
    with pytest.raises(BadInputError, match=message):
        read_model(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"config\.json: no such file"):
        read_model(tmp_path)
