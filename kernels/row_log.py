"""A file of measured rows, one JSON object a line, that a killed program can go on with.

A row is on disk when `append` returns. A line that a kill cut short is dropped at the next start;
a row with a key that is there already is refused; a second program on the same file is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from tonnage.sim.domain import BadInputError

Row = Mapping[str, Any]
Key = Callable[[Row], str]


class RowLog:
    """The rows of a file, open for appending; use it in a `with`."""

    def __init__(self, path: Path, key: Key) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._key = key
        self._file: BinaryIO = path.open("ab+")
        try:
            self.rows: list[Row] = self._whole_rows()
        except BaseException:
            self._file.close()
            raise
        self._keys = {key(row) for row in self.rows}

    def _whole_rows(self) -> list[Row]:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{self.path}: another program is writing rows there"
            raise BadInputError(message) from None
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        return [self._parsed(n, line) for n, line in enumerate(data[:whole].splitlines(), 1)]

    def _parsed(self, number: int, line: bytes) -> Row:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadInputError(f"{self.path}, line {number}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise BadInputError(f"{self.path}, line {number}: no JSON object")
        return row

    def has(self, key: str) -> bool:
        """Say whether a row with that key is on disk."""
        return key in self._keys

    def append(self, row: Row) -> None:
        """Put a row on disk."""
        key = self._key(row)
        if key in self._keys:
            raise ValueError(f"{self.path} has a row {key} already")
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows.append(row)
        self._keys.add(key)

    def __enter__(self) -> RowLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
