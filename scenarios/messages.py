"""Turns a pydantic error into the one sentence a user reads: dotted field, problem, mend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tonnage.scenarios.schema_base import FIELD_ERROR, shown


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with which field; `others` more problems were found."""

    field: str
    text: str
    others: int

    def __str__(self) -> str:
        more = f" (and {self.others} more)" if self.others else ""
        return f"{self.field}: {self.text}{more}" if self.field else f"{self.text}{more}"


def first_problem(error: ValidationError, data: Mapping[str, Any]) -> Problem:
    """Describe the first error that pydantic found in `data`."""
    details = error.errors(include_url=False)
    first = details[0]
    parts = _without_tags(first["loc"], data)
    inner = first.get("ctx", {}).get("field") if first["type"] == FIELD_ERROR else None
    if first["type"] == "missing":
        inner = str(first["loc"][-1])
    field = ".".join([*parts, inner] if inner else parts)
    return Problem(field, _text(first), len(details) - 1)


def _without_tags(location: tuple[int | str, ...], data: Any) -> list[str]:
    """Drop the parts of a location that are pydantic's names of union members."""
    parts: list[str] = []
    for part in location:
        if _holds(data, part):
            data = data[part]
            parts.append(str(part))
    return parts


def _holds(data: Any, part: int | str) -> bool:
    if isinstance(data, Mapping):
        return part in data
    return isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)


def _text(error: ErrorDetails) -> str:
    value = error.get("input")
    if error["type"] == "literal_error":
        return _choices(value, str(error.get("ctx", {}).get("expected", "")))
    if error["type"] == "none_required":
        return f"{shown(value)} is not accepted; only null is"
    if error["type"] == FIELD_ERROR:
        return error["msg"]
    if error["type"] == "missing":
        return "is missing; give it"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{shown(value)} is not a mapping of fields"
    text = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"must be {text}, not {shown(value)}"


def _choices(value: object, expected: str) -> str:
    words = re.findall(r"'([^']*)'", expected) or [expected.lower()]
    near = get_close_matches(value, words, 1) if isinstance(value, str) and len(words) > 1 else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    use = f"use {words[0]}" if len(words) == 1 else f"use one of {', '.join(words)}"
    return f"{shown(value)} is not accepted; {use}{hint}"
