"""The installed `aiconfigurator-core`: the only file that finds it and opens anything of it.

Open to us are its kernel tables, its GPU descriptions and its model configs. Whole-system results
and predictions lie in the same package: they are refused, for what we predict is judged on serving
runs that it may hold. The package is found without being imported, and every byte is read through
`_open`, so that an audit hook sees it (`tests/calibrate/test_wheel.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from tonnage.sim.domain import BadInputError

if TYPE_CHECKING:
    import pandas as pd

DISTRIBUTION = "aiconfigurator-core"
LICENCE = "Apache-2.0"
SUPPORTED = "0.12"  # the minor version whose folders and columns were read

# Our GPU's name to its folder; the A100 tables were measured on the 80 GB SXM card.
GPU_FOLDERS = {
    "a100-80g": "a100_sxm",
    "b200-sxm": "b200_sxm",
    "b300-sxm": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100-sxm": "h100_sxm",
    "h200-sxm": "h200_sxm",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}

# The `current` slots of its systems/query_versions.yaml: full collections. Others fill gaps.
_CURRENT = {"sglang": "0.5.14", "vllm": "0.24.0", "trtllm": "1.3.0rc20"}
_CURRENT_OF_GPU = {"a100_sxm": {"sglang": "0.5.10", "vllm": "0.14.0", "trtllm": "1.0.0"}}

_NAME = r"[A-Za-z0-9_.\-]*[A-Za-z0-9_\-]"  # never "." or ".."
_TABLE_FOLDER = rf"systems/data/{_NAME}/{_NAME}/{_NAME}/{_NAME}"
_OPEN_TO_US = re.compile(
    rf"{_TABLE_FOLDER}/{_NAME}_perf\.parquet"
    rf"|{_TABLE_FOLDER}/collection_meta\.yaml"
    # A GPU's name holds a digit; the package's own settings beside the descriptions do not.
    r"|systems/[a-z_]*[0-9][a-z0-9_]*\.yaml"
    rf"|model_configs/{_NAME}\.json"
)


@dataclass(frozen=True, slots=True, order=True)
class KernelTable:
    """One table of kernel timings: where it lies, such as h200_sxm/gemm/sglang/0.5.14/gemm."""

    gpu: str
    family: str
    backend: str
    version: str
    op: str

    @property
    def folder(self) -> str:
        """Path of its folder inside the package."""
        return f"systems/data/{self.gpu}/{self.family}/{self.backend}/{self.version}"

    def __str__(self) -> str:
        return f"{self.gpu}/{self.family}/{self.backend}/{self.version}/{self.op}"


def package_version() -> str:
    """Return the installed version; BadInputError says what to install where it is not 0.12.x."""
    mend = f"install it with: pip install 'tonnage[import]' ({DISTRIBUTION} {SUPPORTED}.x)"
    try:
        found = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise BadInputError(f"{DISTRIBUTION} is not installed; {mend}") from None
    if not re.match(rf"{re.escape(SUPPORTED)}(\.|$)", found):
        raise BadInputError(f"{DISTRIBUTION} {found}: its tables were not read; {mend}")
    return found


def current_version(gpu: str, backend: str) -> str | None:
    """Return the version of the full collection of a backend on a GPU folder, None without one."""
    return {**_CURRENT, **_CURRENT_OF_GPU.get(gpu, {})}.get(backend)


def kernel_tables(
    gpu: str | None = None,
    family: str | None = None,
    backend: str | None = None,
    version: str | None = None,
    op: str | None = None,
) -> tuple[KernelTable, ...]:
    """Return the tables that the package holds, sorted; those given narrow the search."""
    parts = "/".join(part or "*" for part in (gpu, family, backend, version))
    paths = (_root() / "systems" / "data").glob(f"{parts}/{op or '*'}_perf.parquet")
    places = ((*path.parts[-5:-1], path.name.removesuffix("_perf.parquet")) for path in paths)
    return tuple(sorted(KernelTable(*place) for place in places))


def read_table(
    table: KernelTable, required: Collection[str], optional: Collection[str] = ()
) -> pd.DataFrame:
    """Return the rows of a table as they are; times there are in milliseconds.

    A column that is missing, or that the caller does not know, is an error: its meaning would have
    to be guessed.
    """
    import pyarrow.parquet as parquet

    with _open(f"{table.folder}/{table.op}_perf.parquet") as stream:
        columns = parquet.read_table(stream)
    missing = sorted(set(required) - set(columns.column_names))
    unknown = sorted(set(columns.column_names) - set(required) - set(optional))
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise BadInputError(f"{DISTRIBUTION} {table}: {problem}: a schema that was not read")
    frame: pd.DataFrame = columns.to_pandas()
    return frame


def collection_status(table: KernelTable) -> dict[str, Any]:
    """Return what the collection's own note says of a table, such as its status; {} without."""
    try:
        note = _yaml(f"{table.folder}/collection_meta.yaml")
    except FileNotFoundError:
        return {}
    return dict(note.get("tables", {}).get(f"{table.op}_perf") or {})


def gpu_description(gpu: str) -> dict[str, Any]:
    """Return the description of a GPU folder: bandwidths in bytes/s, rates in FLOP/s."""
    return _yaml(f"systems/{gpu}.yaml")


def model_config(name: str) -> dict[str, Any]:
    """Return a model's `config.json`, such as that of zai-org--GLM-5."""
    import json

    with _open(f"model_configs/{name}_config.json") as stream:
        return dict(json.load(stream))


def _yaml(relative: str) -> dict[str, Any]:
    import yaml

    with _open(relative) as stream:
        return dict(yaml.safe_load(stream) or {})


def _open(relative: str) -> IO[bytes]:
    """Open a file of the package that is open to us; refuse every other."""
    if not _OPEN_TO_US.fullmatch(relative):
        allowed = "kernel tables, GPU descriptions and model configs"
        raise BadInputError(f"{DISTRIBUTION}: {relative} is not opened; only {allowed} are")
    return (_root() / PurePosixPath(relative)).open("rb")


@cache
def _root() -> Path:
    """Return the folder of the package, without importing it (that would load its estimators)."""
    package_version()
    spec = util.find_spec(DISTRIBUTION.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise BadInputError(f"{DISTRIBUTION}: its files are missing; install it again")
    return Path(next(iter(spec.submodule_search_locations)))
