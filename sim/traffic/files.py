"""Text files read line by line, gzipped or not, and token counts read from a column of one."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TextIO

import numpy as np

from tonnage.sim.domain import BadInputError, FloatArray
from tonnage.sim.traffic.lengths import Empirical


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    number = 0
    try:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        problem = "not text in UTF-8; if it is compressed its name must end in .gz"
        raise BadInputError(f"{path}: line {number + 1}: {problem}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"the gzip file is damaged or cut short after this line ({error})"
        raise BadInputError(f"{path}: line {number}: {problem}; fetch it again") from error
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror or error}") from error


def csv_cells(path: Path, line: int, text: str) -> list[str]:
    """Split one line of a CSV file; the cells lose their outer blanks."""
    try:
        return [cell.strip() for cell in next(csv.reader([text]), [])]
    except csv.Error as error:
        raise BadInputError(f"{path}: line {line}: {error}; mend or remove the line") from error


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def read_lengths(path: Path, column: str) -> Empirical:
    """Read the token counts of one named column of a CSV file."""
    values = [_whole_number(path, line, column, cell) for line, cell in _cells(path, column)]
    return Empirical(np.array(values, dtype=np.int64))


def read_durations(path: Path, column: str) -> FloatArray:
    """Read the seconds in one named column of a CSV file."""
    return np.array([_seconds(path, line, column, cell) for line, cell in _cells(path, column)])


def _cells(path: Path, column: str) -> list[tuple[int, str]]:
    """Return the cells of a column with their lines."""
    lines = numbered_lines(path)
    _, header_text = next(lines, (1, ""))
    header = csv_cells(path, 1, header_text)
    if column not in header:
        near = get_close_matches(column, header, 1)
        mend = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(header)}"
        raise BadInputError(f"{path}: no column {column!r}; {mend}")
    place = header.index(column)
    found = []
    for line, text in lines:
        cells = csv_cells(path, line, text)
        found.append((line, cells[place] if place < len(cells) else ""))
    if not found:
        raise BadInputError(f"{path}: no value in column {column!r}")
    return found


def _whole_number(path: Path, line: int, column: str, cell: str) -> int:
    # Nine digits are beyond any context and within any integer type.
    if not (cell.isascii() and cell.isdigit() and len(cell) <= 9 and int(cell) >= 1):
        problem = f"{column}: {cell!r} is not a whole number of at least 1 token"
        raise BadInputError(f"{path}: line {line}: {problem}; mend or remove the line")
    return int(cell)


def _seconds(path: Path, line: int, column: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        problem = f"{column}: {cell!r} is not a number of seconds"
        raise BadInputError(f"{path}: line {line}: {problem}; mend or remove the line")
    return value
