"""Ground of the scenario schema: strict sections, quantities with units, errors with a mend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator
from pydantic_core import PydanticCustomError

from tonnage.sim.domain import BadInputError
from tonnage.sim.units import parse_bandwidth, parse_bytes, parse_seconds

FIELD_ERROR: Final = "tonnage"  # pydantic error type whose context names the field and the mend


def field_error(field: str, problem: str) -> PydanticCustomError:
    """Return an error about a dotted `field` of the section at hand ("" is the section)."""
    return PydanticCustomError(FIELD_ERROR, "{problem}", {"field": field, "problem": problem})


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Name the nearest known word, or all of them when none is near."""
    near = get_close_matches(word, known, 1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"


class Section(BaseModel):
    """A section of the scenario: frozen, and without fields that the schema does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_fields(cls, data: Any) -> Any:
        """Refuse an unknown field here, where its neighbours are known, with the nearest one."""
        if data is None:
            raise field_error("", "the section is empty; give it fields or remove it")
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    mend = did_you_mean(str(key), list(cls.model_fields))
                    raise field_error(str(key), f"unknown field; {mend}")
        return data


def quantity(parse: Callable[[object], float]) -> Callable[[object], float]:
    """Turn a parser of `sim.units` into a validator."""

    def validate(value: object) -> float:
        try:
            return parse(value)
        except BadInputError as error:
            raise field_error("", str(error)) from error

    return validate


def _whole_number(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise field_error("", f"{shown(value)} is not a whole number")
    return value


def _number(value: object) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    raise field_error("", f"{shown(value)} is not a number")


def _text(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise field_error("", f'{value} is read as a number; write it in quotes: "{value}"')
    if not isinstance(value, str):
        raise field_error("", f"{shown(value)} is not text")
    return value


def _list_of(item: Callable[[object], object]) -> Callable[[object], object]:
    def validate(value: object) -> object:
        if isinstance(value, list | tuple):
            return tuple(item(entry) for entry in value)
        if isinstance(value, str) and "," in value:
            raise field_error("", f"{value!r} is not a list; write it like [1, 8, 16]")
        return (item(value),)

    return validate


def shown(value: object) -> str:
    """Spell a value as YAML does."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


Whole = Annotated[int, BeforeValidator(_whole_number), Field(ge=1)]
WholeOrZero = Annotated[int, BeforeValidator(_whole_number), Field(ge=0)]
Number = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]
Text = Annotated[str, BeforeValidator(_text)]
Seconds = Annotated[float, BeforeValidator(quantity(parse_seconds)), Field(ge=0)]
PositiveSeconds = Annotated[Seconds, Field(gt=0)]
Bytes = Annotated[float, BeforeValidator(quantity(parse_bytes)), Field(ge=0)]
Bandwidth = Annotated[float, BeforeValidator(quantity(parse_bandwidth)), Field(gt=0)]
WholeList = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_list_of(_whole_number))
]
PositiveList = Annotated[
    tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_list_of(_number))
]

_AUTO = PlainSerializer(lambda value: "auto" if value is None else value)


def _or_auto(validate: Callable[[object], object]) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value in ("auto", None) else validate(value))


# `auto` is None inside: the engine's own rule decides.
AutoWhole = Annotated[Annotated[int, Field(ge=1)] | None, _or_auto(_whole_number), _AUTO]
AutoFraction = Annotated[Annotated[float, Field(gt=0, lt=1)] | None, _or_auto(_number), _AUTO]
AutoText = Annotated[str | None, _or_auto(_text), _AUTO]
