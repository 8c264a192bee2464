"""The finished points of a sweep as lines of JSON, appended one by one and read again later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tonnage.sim.domain import BadInputError

Entry = dict[str, Any]


class Journal:
    """A file with one JSON object per line; `key` names the point that a line is about.

    A later line about the same point replaces an earlier one. A last line that a crash cut short is
    removed when the file is opened. Raises BadInputError for a file that cannot be read or written,
    and for a damaged line with others after it: no crash leaves that.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[str, Entry] = {}
        try:
            self._read(path.read_bytes() if path.exists() else b"")
        except OSError as error:
            raise BadInputError(f"{path}: cannot be read: {error.strerror or error}") from error

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add one line and have it written before this returns."""
        line = json.dumps(entry, separators=(",", ":"), allow_nan=False) + "\n"
        try:
            with self._path.open("ab") as file:
                file.write(line.encode())
        except OSError as error:
            text = error.strerror or error
            raise BadInputError(f"{self._path}: cannot be written: {text}") from error
        self.entries[entry["key"]] = dict(entry)

    def _read(self, data: bytes) -> None:
        start, number = 0, 0
        while start < len(data):
            number += 1
            newline = data.find(b"\n", start)
            stop = len(data) if newline < 0 else newline + 1
            entry = _entry(data[start:stop]) if newline >= 0 else None
            if entry is not None:
                self.entries[entry["key"]] = entry
            elif stop < len(data):
                raise BadInputError(
                    f"{self._path}: line {number}: not a point of a sweep; remove the line, "
                    "or start over with --fresh"
                )
            else:
                with self._path.open("r+b") as file:
                    file.truncate(start)
            start = stop


def _entry(line: bytes) -> Entry | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    named = isinstance(entry, dict) and isinstance(entry.get("key"), str)
    return entry if named else None
