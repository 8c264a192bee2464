"""Lines of a CSV file with named columns, each with the words that say where it stands."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tonnage.sim.domain import BadInputError


class Line(NamedTuple):
    """The cells of a line by column, and `FILE: line N`."""

    fields: dict[str, str | None]
    where: str


def csv_lines(path: Path, columns: Sequence[str]) -> Iterator[Line]:
    """Yield the lines of a file that has these columns; BadInputError names the file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise BadInputError(f"{path}: missing columns: {', '.join(missing)}")
            for fields in reader:
                yield Line(fields, f"{path}: line {reader.line_num}")
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: not a CSV file in UTF-8: {error}") from error
