"""What the package ships, by name: GPUs, models and scenarios."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tonnage.sim.domain import BadInputError, GpuSpec, ModelSpec
from tonnage.sim.model.hf_config import read_model
from tonnage.sim.units import parse_bandwidth, parse_bytes

_HERE = Path(__file__).parent


class GpuFile(BaseModel):
    """The contents of one file of `gpus/`; rates are one direction and per GPU, FLOP/s dense."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    memory: str
    memory_bandwidth: str
    dense_flops_per_s: dict[str, float] = Field(min_length=1)
    nvlink: str | None
    pcie: str
    network: str
    gpus_per_node: int = Field(ge=1)
    compute_capability: str = Field(pattern=r"^\d+\.\d+$")
    sources: dict[str, str]

    def to_spec(self) -> GpuSpec:
        """Return the GPU in SI units."""
        return GpuSpec(
            name=self.name,
            memory_bytes=int(parse_bytes(self.memory)),
            memory_bandwidth_bytes_per_s=parse_bandwidth(self.memory_bandwidth),
            dense_flops_per_s=dict(self.dense_flops_per_s),
            nvlink_bytes_per_s=parse_bandwidth(self.nvlink) if self.nvlink else None,
            pcie_bytes_per_s=parse_bandwidth(self.pcie),
            network_bytes_per_s=parse_bandwidth(self.network),
            gpus_per_node=self.gpus_per_node,
            compute_capability=self.compute_capability,
            sources=dict(self.sources),
        )


def gpu_names() -> tuple[str, ...]:
    """Return the names of the shipped GPUs."""
    return _stems("gpus", "yaml")


def model_names() -> tuple[str, ...]:
    """Return the names of the shipped models."""
    return _stems("models", "json")


def scenario_names() -> tuple[str, ...]:
    """Return the names of the shipped scenarios."""
    return _stems(".", "yaml")


def load_gpu(name: str) -> GpuSpec:
    """Return a shipped GPU, or the one that a YAML file describes."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return read_gpu(path)
    if name not in gpu_names():
        raise BadInputError(unknown_name("gpu", name, gpu_names()))
    return _shipped_gpu(name)


def load_model(name_or_path: str | Path) -> ModelSpec:
    """Return a shipped model, or the one of a `config.json` or of a folder that holds one."""
    name = str(name_or_path)
    if name in model_names():
        return _shipped_model(name)
    path = Path(name_or_path)
    if not path.exists():
        hint = "; or give a config.json, or a folder that holds one"
        raise BadInputError(unknown_name("model", name, model_names()) + hint)
    return read_model(path)


def scenario_path(name_or_path: str | Path) -> Path:
    """Return the file of a shipped scenario, or the path itself when it is a file."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    name = str(name_or_path)
    if name not in scenario_names():
        raise BadInputError(unknown_name("scenario", name, scenario_names()))
    return _HERE / f"{name}.yaml"


def read_gpu(path: Path) -> GpuSpec:
    """Return the GPU that a YAML file describes; a mistake names the file and the field."""
    try:
        return GpuFile.model_validate(yaml.safe_load(path.read_text())).to_spec()
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise BadInputError(f"{path}: {field}: {first['msg']}") from error
    except yaml.YAMLError as error:
        raise BadInputError(f"{path}: not YAML: {error}") from error
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from error


def unknown_name(kind: str, name: str, known: Sequence[str]) -> str:
    """Return the message for a name that does not exist: the nearest one, then all of them."""
    wanted = name.lower()
    # "h200" is nearer to h200-sxm than to h20, whatever the share of letters says.
    nearest = [other for other in known if wanted and other.startswith(wanted)]
    nearest = nearest or difflib.get_close_matches(wanted, known, n=1, cutoff=0.4)
    guess = f"; did you mean {nearest[0]!r}?" if nearest else "."
    listed = ", ".join(known) if known else "none"
    return f"{kind}: there is no {kind} named {name!r}{guess} Known: {listed}"


def _stems(folder: str, suffix: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (_HERE / folder).glob(f"*.{suffix}")))


@cache
def _shipped_gpu(name: str) -> GpuSpec:
    return read_gpu(_HERE / "gpus" / f"{name}.yaml")


@cache
def _shipped_model(name: str) -> ModelSpec:
    return read_model(_HERE / "models" / f"{name}.json")
