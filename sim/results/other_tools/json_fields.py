"""JSON of other tools, read strictly: a mistake names file and field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from tonnage.sim.domain import BadInputError


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one JSON object; `where` names the file and the way to the object."""

    values: Mapping[str, Any]
    where: str

    def has(self, name: str) -> bool:
        """Tell whether a field is there and not null."""
        return self.values.get(name) is not None

    def section(self, name: str) -> Fields:
        """Return an object inside this one."""
        found = self.values.get(name)
        if not isinstance(found, Mapping):
            raise self.refuse(name, "is missing" if found is None else "must be an object")
        return Fields(found, f"{self.where}: {name}")

    def optional_section(self, name: str) -> Fields:
        """Return an object inside this one, empty where it is missing."""
        return self.section(name) if self.has(name) else Fields({}, f"{self.where}: {name}")

    def sections(self, name: str) -> Iterator[Fields]:
        """Return the objects of a list."""
        found = self.values.get(name)
        if not isinstance(found, list) or not found:
            raise self.refuse(name, "must be a list with something in it")
        for index, inner in enumerate(found):
            if not isinstance(inner, Mapping):
                raise self.refuse(name, f"entry {index} must be an object")
            yield Fields(inner, f"{self.where}: {name}[{index}]")

    def number(self, name: str) -> float:
        """Return a number that must be there."""
        found = self.optional(name)
        if found is None:
            raise self.refuse(name, "is missing")
        return found

    def optional(self, name: str) -> float | None:
        """Return a finite number, None where the field is missing or null."""
        found = self.values.get(name)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not isfinite(found):
            raise self.refuse(name, f"{found!r} is not a number")
        return float(found)

    def whole(self, name: str) -> int | None:
        """Return a number of things, None where the field is missing or null."""
        found = self.optional(name)
        return None if found is None else round(found)

    def text(self, name: str) -> str | None:
        """Return a text, None where the field is missing or is none."""
        found = self.values.get(name)
        return found if isinstance(found, str) else None

    def refuse(self, name: str, problem: str) -> BadInputError:
        """Return the error of a field."""
        return BadInputError(f"{self.where}: {name}: {problem}")


def read_objects(path: Path) -> list[Fields]:
    """Return the object of a JSON file, or those of the lines of a JSONL file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: is not text in UTF-8") from error
    try:
        return [_object(json.loads(text), str(path), path)]
    except json.JSONDecodeError:
        pass
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise BadInputError(f"{path}: is empty")
    found = []
    for number, line in lines:
        where = f"{path}: line {number}"
        try:
            found.append(_object(json.loads(line), where, path))
        except json.JSONDecodeError as error:
            raise BadInputError(f"{where}: is not JSON: {error.msg}") from error
    return found


def _object(value: Any, where: str, path: Path) -> Fields:
    if not isinstance(value, Mapping):
        raise BadInputError(f"{where}: must be a JSON object, not {type(value).__name__}")
    return Fields(value, where if value else str(path))
