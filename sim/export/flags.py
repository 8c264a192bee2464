"""Flags per engine version as data: which setting is which flag, and every flag there is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.sim.domain import BadInputError
from tonnage.sim.units import version_key

_HERE = Path(__file__).parent
_TABLES = {"sglang": "sglang-0.5.23", "vllm": "vllm-0.33"}
_TYPES = {"int": int, "float": float}


@dataclass(frozen=True, slots=True)
class Option:
    """A flag and its value; `variable` names what a user may set in its place.

    Without a value it is a switch, or what the user has to fill in where there is a `variable`; no
    flag: a value that stands alone. `values`: several behind one flag.
    """

    flag: str
    value: str | None = None
    variable: str | None = None
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ArgumentList:
    """Every argument that a program's version takes."""

    name: str
    arguments: Mapping[str, Mapping[str, Any]]

    def problem(self, option: Option) -> str | None:
        """Say what is wrong with an option; None where the program would take it."""
        known = self._argument(option.flag)
        if known is None:
            return f"{option.flag}: {self.name} has no such flag"
        if known["type"] == "bool":
            return None if option.value is None else f"{option.flag}: takes no value"
        if option.value is None or option.variable is not None:
            return None if option.variable or option.values else f"{option.flag}: needs a value"
        allowed = known.get("choices") or known.get("known")
        if allowed is not None and option.value not in map(str, allowed):
            return f"{option.flag} {option.value}: not one of {', '.join(map(str, allowed))}"
        return self._mistyped(option, known["type"])

    def _argument(self, flag: str) -> Mapping[str, Any] | None:
        by_alias = {one: known for known in self.arguments.values() for one in _aliases(known)}
        found = self.arguments.get(flag) or by_alias.get(flag)
        positive = "--" + flag.removeprefix("--no-")
        if found is None and flag.startswith("--no-"):
            found = self.arguments.get(positive)
            return found if found is not None and found.get("negatable") else None
        return found

    @staticmethod
    def _mistyped(option: Option, kind: str) -> str | None:
        read = json.loads if kind == "json" else _TYPES.get(kind, str)
        try:
            read(option.value or "")
        except ValueError:
            return f"{option.flag} {option.value}: not of type {kind}"
        return None


def _aliases(known: Mapping[str, Any]) -> Sequence[str]:
    aliases: Sequence[str] = known.get("aliases", ())
    return aliases


@cache
def argument_list(name: str) -> ArgumentList:
    """Return a shipped list by name, such as `sglang-0.5.23`."""
    data = _read("arguments", name)
    return ArgumentList(f"{data['package']} {data['version']}", data["arguments"])


@dataclass(frozen=True, slots=True)
class FlagTable:
    """One engine's table, and the version whose settings are asked for."""

    data: Mapping[str, Any]
    version: str

    @property
    def engine(self) -> str:
        """The engine's name."""
        return str(self.data["engine"])

    @property
    def arguments(self) -> ArgumentList:
        """The list of the version asked for, else of the nearest older one, else the oldest."""
        return argument_list(self.data["arguments"][self.listed_version])

    @property
    def listed_version(self) -> str:
        """The version of that list."""
        known = sorted(self.data["arguments"], key=version_key)
        older = [one for one in known if version_key(one) <= version_key(self.version)]
        return str((older or known[:1])[-1])

    def cannot(self, what: str) -> str:
        """Return what the engine does instead, where it cannot do a thing."""
        return str(self.data["cannot"][what])

    def options(self, settings: Mapping[str, Any]) -> list[Option]:
        """Return the flags of the settings that are there, in the table's order."""
        found = []
        for row in self.data["settings"]:
            value = settings.get(row["setting"])
            if value is None or not self._applies(row, value):
                continue
            own = isinstance(value, Option)
            option = replace(value, flag=row["flag"]) if own else self._option(row, value)
            if row.get("form") != "switch" or value:
                found.append(option)
        return found

    def _applies(self, row: Mapping[str, Any], value: Any) -> bool:
        asked = version_key(self.version)
        since, until = row.get("since"), row.get("until")
        if since is not None and asked < version_key(since):
            return False
        if until is not None and asked >= version_key(until):
            return False
        return "unless" not in row or value != row["unless"]

    @staticmethod
    def _option(row: Mapping[str, Any], value: Any) -> Option:
        flag = row["flag"]
        if row.get("form") == "switch":
            return Option(flag)
        if row.get("form") == "json":
            return Option(flag, json.dumps(value, separators=(",", ":")))
        if "values" in row:
            value = row["values"].get(value, value)
        return Option(flag, str(value))

    def value_of(self, setting: str, value: str) -> str | None:
        """Return the engine's word for a setting's value, None where it has none."""
        rows = [row for row in self.data["settings"] if row["setting"] == setting]
        found = rows[0]["values"].get(value) if rows else None
        return None if found is None else str(found)


def engines() -> tuple[str, ...]:
    """Return the engines whose flags are known."""
    return tuple(_TABLES)


def flag_table(engine: str, version: str) -> FlagTable:
    """Return the table of an engine; BadInputError names those that there are."""
    if engine not in _TABLES:
        known = " or ".join(_TABLES)
        raise BadInputError(f"engine: no flags are known for {engine!r}; plan for {known}")
    return FlagTable(_read("flags", _TABLES[engine]), version)


def dynamo_data() -> Mapping[str, Any]:
    """Return the table of Dynamo: its API, its routing modes, the engines it brings."""
    return _read("flags", "dynamo-1.6")


def kubernetes_data() -> Mapping[str, Any]:
    """Return the table of node labels and images."""
    return _read("flags", "kubernetes")


@cache
def _read(folder: str, name: str) -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads((_HERE / folder / f"{name}.json").read_text("utf-8"))
    return data
