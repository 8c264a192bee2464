"""Files of results: JSON, CSV and Parquet, each written whole or not at all."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.sim.domain import BadInputError

if TYPE_CHECKING:
    import pandas as pd

JsonObject = dict[str, Any]


def json_text(data: Mapping[str, Any]) -> str:
    """Return one JSON object; numbers that are not finite become null."""
    return json.dumps(plain(data), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """Replace numpy numbers, mappings and sequences by JSON's own."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_destinations(json_file: str | None, folder: Path | None) -> None:
    """Refuse places that cannot be written, before the work rather than after it."""
    if json_file not in (None, "-"):
        file = Path(str(json_file))
        if file.is_dir():
            raise BadInputError(f"--json {file}: is a folder; name a file in it, or '-'")
        if not os.access(file.parent, os.W_OK):
            raise BadInputError(f"--json {file}: the folder {file.parent} cannot be written to")
    if folder is not None:
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise BadInputError(f"--out {folder}: {existing} is not a folder one can write to")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path` that becomes it if the block ends well."""
    if path.exists() and not path.is_file():  # a pipe or a device has no name to replace
        yield path
        return
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(json_file: str | None, data: Mapping[str, Any]) -> bool:
    """Write the JSON where it is wanted; return whether tables are still to be printed."""
    if json_file == "-":
        print(json_text(data))
        return False
    if json_file is not None:
        write_text(Path(json_file), json_text(data) + "\n")
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")


def write_folder(
    folder: Path,
    summary: JsonObject,
    runs: Mapping[str, JsonObject],
    records: Mapping[str, Sequence[pd.DataFrame]],
) -> None:
    """Write summary.json, points.csv and a Parquet file of requests per point.

    `runs` and `records` are by variant; "" is the scenario itself. The summary comes last: where it
    is, the rest is complete.
    """
    make_folder(folder)
    for variant, frames in records.items():
        for point, frame in zip(runs[variant]["points"], frames, strict=True):
            with whole_file(folder / f"{point_stem('requests', variant, point)}.parquet") as file:
                frame.to_parquet(file, index=False)
    with whole_file(folder / "points.csv") as file:
        _write_points(file, runs)
    write_summary(folder, summary)


def write_summary(folder: Path, summary: JsonObject) -> None:
    """Write summary.json, making the folder where it is missing."""
    make_folder(folder)
    write_text(folder / "summary.json", json_text(summary) + "\n")


def make_folder(folder: Path) -> None:
    """Make the folder of --out, and those above it, where they are missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"--out {folder}: cannot be made: {error.strerror}") from error


def point_stem(first: str, variant: str, point: Mapping[str, Any]) -> str:
    """Name a point's file, such as `requests_colocated_rate_2`."""
    parts = [first, variant]
    if point.get("concurrency") is not None:
        parts += ["concurrency", str(point["concurrency"])]
    elif point.get("rate_per_s") is not None:
        parts += ["rate", f"{point['rate_per_s']:g}"]
    safe = ("".join(c if c.isalnum() or c in ".-" else "-" for c in part) for part in parts)
    return "_".join(part for part in safe if part)


def _write_points(file: Path, runs: Mapping[str, JsonObject]) -> None:
    rows = [
        {"variant": variant, **flattened(plain(point))} if variant else flattened(plain(point))
        for variant, report in runs.items()
        for point in report["points"]
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)


def flattened(data: Mapping[str, Any], prefix: str = "") -> JsonObject:
    """Return nested mappings as one with dotted keys."""
    flat: JsonObject = {}
    for key, value in data.items():
        flat |= (
            flattened(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {prefix + key: value}
        )
    return flat
