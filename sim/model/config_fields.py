"""Typed access to the fields of a JSON object, with messages that name file and field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tonnage.sim.domain import BadInputError


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields of one JSON object; `where` names the file and section in messages.

    A field that is absent or null is missing. `fallback` is the enclosing object, in which
    multimodal configs keep some of the text model's fields.
    """

    values: Mapping[str, object]
    where: str
    fallback: Mapping[str, object] | None = None

    def get(self, *names: str) -> object | None:
        """Return the first of these fields that is present, else None."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return value
        for name in names:
            value = None if self.fallback is None else self.fallback.get(name)
            if value is not None:
                return value
        return None

    def refuse(self, name: str, problem: str) -> BadInputError:
        """Return the error that names file, field and problem."""
        return BadInputError(f"{self.where}: field {name!r} {problem}")

    def integer(self, *names: str) -> int:
        """Return a positive integer; refuse if none of the fields is present."""
        value = self.optional_integer(*names)
        if value is None:
            alternatives = " or ".join(repr(name) for name in names)
            raise BadInputError(f"{self.where}: field {alternatives} is missing")
        if value == 0:
            raise self.refuse(names[0], "must be a positive integer, not 0")
        return value

    def optional_integer(self, *names: str) -> int | None:
        """Return an integer that is not negative, or None where the field is absent."""
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refuse(names[0], f"must be a positive integer, not {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean, or the default where the field is absent."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, not {value!r}")
        return value

    def text(self, *names: str) -> str | None:
        """Return a string, or None where the field is absent."""
        value = self.get(*names)
        if value is not None and not isinstance(value, str):
            raise self.refuse(names[0], f"must be a string, not {value!r}")
        return value

    def items(self, *names: str) -> Sequence[object] | None:
        """Return a list, or None where the field is absent."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.refuse(names[0], f"must be a list, not {value!r}")
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """Return a list of strings; empty where the field is absent."""
        return tuple(str(item) for item in self.items(*names) or ())

    def per_layer(self, name: str, layers: int) -> Sequence[object] | None:
        """Return a list with one item per layer, or None where the field is absent."""
        values = self.items(name)
        if values is not None and len(values) != layers:
            raise self.refuse(name, f"has {len(values)} items for {layers} layers")
        return values

    def section(self, name: str) -> ConfigFields | None:
        """Return a nested object, or None where the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, f"must be an object, not {value!r}")
        return ConfigFields(value, f"{self.where}: {name}")
