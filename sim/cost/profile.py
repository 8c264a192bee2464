"""The profile: what `calibrate` writes and the cost model reads.

A profile is a folder: `header.json` and one Parquet file per table, written whole or not at all.
The header lists rows and SHA-256 of every table, so that a file that was cut off or changed is
found when it is read, not when a prediction is wrong. The same profile gives the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from tonnage.sim.domain import BadInputError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
SUFFIX = ".profile"
HEADER_FILE = "header.json"
RESIDUAL_OCTAVES = 1.0  # a header's histograms reach from half to twice what is predicted

Source = Literal["measured", "imported", "scaled"]
Parameters = dict[str, Any]  # of a fitted form: JSON values, their units in their names
HeldOutError = dict[str, Any]

_NAME = r"^[a-z0-9][a-z0-9_.\-]*$"
_TABLE_NAME = r"^[a-z0-9][a-z0-9_]*$"
_MEND = "make the profile again with 'tonnage profile import'"


class _Listed(BaseModel):
    """What the header says of one table's file."""

    rows: int
    sha256: str


_LISTING = TypeAdapter(dict[Annotated[str, Field(pattern=_TABLE_NAME)], _Listed])


class ProfileHeader(BaseModel):
    """What a profile says of itself.

    `fitted`: parameters of the physical form, by operator. `errors`: by operator and weight or KV
    format, of shapes held out whole: `median` and `p90` (relative), `interval` (true / predicted at
    5 % and 95 %), `held_out` (what was), `n` (rows). `residuals`: by table and format, how many
    measured rows, thinned away or not, lie in equal bins of log2(measured / predicted) over +-
    `RESIDUAL_OCTAVES`, those beyond in the outermost. `missing`: tables that the source lacks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(pattern=_NAME)
    gpu: str = Field(min_length=1)
    engine: str = Field(min_length=1)
    engine_version: str
    source: Source
    source_text: str = Field(min_length=1)
    licence: str = ""
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    tonnage_version: str
    driver: str | None = None
    clocks: dict[str, float] = Field(default={})
    fitted: dict[str, Parameters] = Field(default={})
    errors: dict[str, dict[str, HeldOutError]] = Field(default={})
    residuals: dict[str, dict[str, tuple[int, ...]]] = Field(default={})
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @model_validator(mode="after")
    def _errors_are_plausible(self) -> ProfileHeader:
        for operator, formats in self.errors.items():
            for name, error in formats.items():
                _check_error(f"errors.{operator}.{name}", error)
        return self


def _check_error(where: str, error: HeldOutError) -> None:
    missing = sorted({"median", "p90", "interval", "held_out", "n"} - error.keys())
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    low, high = error["interval"]
    if not 0 < low <= high:
        raise ValueError(f"{where}.interval: {low} to {high} are not rising positive factors")
    if not 0 <= error["median"] <= error["p90"]:
        raise ValueError(f"{where}: median {error['median']} and p90 {error['p90']} do not rise")


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Timings of one GPU under one engine: thinned tables by operator, and their header.

    Columns of a table are text, numbers or booleans, in SI units named by the column; a column
    `seconds` is positive. Columns that are text come back as pandas' text type.
    """

    header: ProfileHeader
    tables: Mapping[str, pd.DataFrame] = field(repr=False)

    def __post_init__(self) -> None:
        for name, table in self.tables.items():
            _check_table(name, table)


def _check_table(name: str, table: pd.DataFrame) -> None:
    import numpy as np
    from pandas.api.types import infer_dtype

    if not re.match(_TABLE_NAME, name):
        raise BadInputError(f"profile table {name!r}: use small letters, digits and _")
    if table.columns.has_duplicates or not all(isinstance(one, str) for one in table.columns):
        raise BadInputError(f"profile table {name}: column names must be text, each once")
    for column in table.columns:
        kind = infer_dtype(table[column], skipna=True)
        if table[column].dtype.kind not in "biuf" and kind not in ("string", "empty"):
            raise BadInputError(f"profile table {name}: {column} is {kind}, not text or numbers")
    if "seconds" in table.columns:
        seconds = table["seconds"].to_numpy(dtype=np.float64)
        if not bool(np.all((seconds > 0) & np.isfinite(seconds))):
            raise BadInputError(f"profile table {name}: seconds must be positive and finite")


# --- writing ------------------------------------------------------------------------------------


def write_profile(profile: Profile, folder: Path) -> None:
    """Write a profile as a folder, whole or not at all; replaces a profile that is there.

    Raises BadInputError where the place cannot be written or holds something else.
    """
    check_place(folder)
    # Resolved, so that a link to a profile goes on pointing to it.
    target = folder.resolve()
    fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        _write_files(profile, fresh)
        _put_in_place(fresh, target)
    except OSError as error:
        raise BadInputError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def check_place(folder: Path) -> None:
    """Refuse a place for a profile that holds something else."""
    if folder.exists() and not (folder / HEADER_FILE).is_file():
        raise BadInputError(f"{folder}: is there and is no profile; choose another place")


def _write_files(profile: Profile, folder: Path) -> None:
    folder.mkdir(parents=True)
    listed = {}
    for name in sorted(profile.tables):
        content = _table_bytes(profile.tables[name])
        (folder / f"{name}.parquet").write_bytes(content)
        digest = sha256(content).hexdigest()
        listed[name] = {"rows": len(profile.tables[name]), "sha256": digest}
    header = {**profile.header.model_dump(mode="json"), "tables": listed}
    text = json.dumps(header, indent=1, sort_keys=True, allow_nan=False)
    (folder / HEADER_FILE).write_text(text + "\n", encoding="utf-8")


def _put_in_place(fresh: Path, target: Path) -> None:
    """Rename a finished folder to its name; what was there comes back if that fails."""
    if not target.exists():
        fresh.rename(target)
        return
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _table_bytes(table: pd.DataFrame) -> bytes:
    """Return a table as Parquet; without pandas' own metadata, which names its version."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    content = BytesIO()
    columns = arrow.Table.from_pandas(table, preserve_index=False).replace_schema_metadata(None)
    parquet.write_table(columns, content, compression="zstd", compression_level=15)
    return content.getvalue()


# --- reading ------------------------------------------------------------------------------------


def load_profile(folder: Path) -> Profile:
    """Read and check a profile; the same folder is read once per process until it changes."""
    path = folder / HEADER_FILE
    try:
        status = path.stat()
    except OSError as error:
        raise BadInputError(f"{folder}: no profile there: it has no {HEADER_FILE}") from error
    return _load(folder.resolve(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=16)
def _load(folder: Path, header_mtime_ns: int, header_bytes: int) -> Profile:
    header, listed = _read_header(folder / HEADER_FILE)
    return Profile(header, {name: _read_table(folder, name, listed[name]) for name in listed})


def load_header(folder: Path) -> ProfileHeader:
    """Read the header of a profile and none of its tables."""
    return _read_header(folder / HEADER_FILE)[0]


def _read_header(path: Path) -> tuple[ProfileHeader, dict[str, _Listed]]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInputError(f"{path}: not JSON, perhaps cut off; {_MEND}") from error
    found = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(found, int):
        raise BadInputError(f"{path}: schema_version: missing; this is no profile's header")
    if found > SCHEMA_VERSION:
        raise BadInputError(
            f"{path}: schema_version: {found} is newer than {SCHEMA_VERSION}, the newest that this "
            "tonnage reads; upgrade tonnage, or make the profile with this version"
        )
    tables = data.pop("tables", None)
    with _naming(path):
        header = ProfileHeader.model_validate(data)
    with _naming(path, "tables"):
        return header, _LISTING.validate_python(tables)


@contextmanager
def _naming(path: Path, field: str = "") -> Iterator[None]:
    """Turn pydantic's first error into one line with the file, the field and the mend."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in (field, *first["loc"]) if part != "")
        text = first["msg"].removeprefix("Value error, ")
        raise BadInputError(f"{path}: {f'{place}: ' if place else ''}{text}; {_MEND}") from error


def _read_table(folder: Path, name: str, listed: _Listed) -> pd.DataFrame:
    import pyarrow.parquet as parquet

    path = folder / f"{name}.parquet"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}; {_MEND}") from error
    if sha256(content).hexdigest() != listed.sha256:
        raise BadInputError(f"{path}: is not what the header lists: cut off or changed; {_MEND}")
    table: pd.DataFrame = parquet.read_table(BytesIO(content)).to_pandas()
    return table
