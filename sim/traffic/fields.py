"""Values of a trace, each checked; a bad one is refused by file, place and mend."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import cast

from tonnage.sim.domain import BadInputError
from tonnage.sim.traffic.files import csv_cells, numbered_lines

Place = int | str  # a line number, or what else finds the value in its file
_TOO_LARGE = 10**9  # tokens or blocks: beyond any context, so a damaged number


def bad(path: Path, place: Place, problem: str) -> BadInputError:
    """Return the error about a place in a file."""
    where = f"line {place}" if isinstance(place, int) else place
    return BadInputError(f"{path}: {where}: {problem}")


def json_object(path: Path, line: int, text: str) -> Mapping[str, object]:
    """Read one JSON object."""
    try:
        record = json.loads(text)
    except ValueError as error:
        mend = "complete or remove the line"
        raise bad(path, line, f"truncated or invalid JSON ({error}); {mend}") from error
    if not isinstance(record, dict):
        raise bad(path, line, "expected a JSON object with timestamp and lengths")
    return record


def csv_records(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield line number and named columns of every line after the header."""
    lines = numbered_lines(path)
    header_line, header_text = next(lines, (1, ""))
    header = csv_cells(path, header_line, header_text)
    missing = [column for column in columns if column not in header]
    if missing:
        raise bad(
            path, header_line, f"the header lacks {', '.join(missing)}; it has {', '.join(header)}"
        )
    places = {column: header.index(column) for column in columns}
    for line, text in lines:
        cells = csv_cells(path, line, text)
        if len(cells) != len(header):
            problem = f"{len(cells)} columns where the header has {len(header)}"
            raise bad(path, line, f"{problem}; complete or remove the line")
        yield line, {column: cells[place] for column, place in places.items()}


def number(path: Path, place: Place, field: str, value: object) -> float:
    """Return a finite number."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            found = float(value)
        except (ValueError, OverflowError):
            found = math.nan
        if math.isfinite(found):
            return found
    shown = "nothing" if value is None else repr(value)
    raise bad(path, place, f"{field}: {shown} is not a number; mend or remove the line")


def seconds(path: Path, place: Place, field: str, value: object) -> float:
    """Return a duration in seconds, 0 or more."""
    found = number(path, place, field, value)
    if found < 0.0:
        problem = f"{field}: a duration cannot be {found:g} s"
        raise bad(path, place, f"{problem}; mend or remove the line")
    return found


def tokens(path: Path, place: Place, field: str, value: object) -> int:
    """Return a number of tokens, at least 1."""
    found = number(path, place, field, value)
    if not 1 <= found < _TOO_LARGE or found != int(found):
        problem = f"{field}: a request has at least 1 token, in whole numbers, not {value}"
        raise bad(path, place, f"{problem}; mend or remove the line")
    return int(found)


def count(path: Path, place: Place, field: str, value: object) -> int:
    """Return a whole number, 0 or more."""
    found = number(path, place, field, value)
    if not 0 <= found < _TOO_LARGE or found != int(found):
        problem = f"{field}: expected a whole number of at least 0, not {value}"
        raise bad(path, place, f"{problem}; mend or remove the line")
    return int(found)


def block_ids(path: Path, place: Place, field: str, value: object) -> tuple[int, ...]:
    """Return the ids of the blocks of a prompt."""
    if not isinstance(value, list) or not _whole(value):
        problem = f"{field}: expected a list of whole numbers of at least 0"
        raise bad(path, place, f"{problem}; mend or remove the line")
    return tuple(value)


def _whole(values: list[object]) -> bool:
    """Tell whether all are whole numbers of at least 0; long lists are the rule."""
    return set(map(type, values)) <= {int} and min(cast(list[int], values), default=0) >= 0


def moment(path: Path, line: int, field: str, text: str) -> datetime:
    """Return a wall-clock time."""
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError as error:
        example = "2023-11-16 18:17:03.9799600"
        problem = f"{field}: {text!r} is not a date and time; write it like {example!r}"
        raise bad(path, line, problem) from error
