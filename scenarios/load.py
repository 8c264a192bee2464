"""Reads a scenario from YAML: the file, the overrides of a command line, and named variants."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tonnage.scenarios.catalogue import scenario_path
from tonnage.scenarios.messages import Problem, first_problem
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError

_Mapping = dict[str, Any]


def load_scenario(path: Path | str, overrides: Sequence[str] = ()) -> Scenario:
    """Read one scenario from a YAML file or a shipped name; `overrides` are `a.b=c` texts."""
    file = _locate(path)
    data = {"name": file.stem, **_read_mapping(file)}
    return parse_scenario(data, str(path), file.parent, overrides)


def load_variants(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, Scenario]:
    """Read the named variants of a scenario file, each merged over it; overrides come before."""
    file = _locate(path)
    data = {"name": file.stem, **_read_mapping(file)}
    base = parse_scenario(data, str(path), file.parent, overrides)
    for text in overrides:
        _assign(data, text)
    return {
        name: parse_scenario(
            _merged(data, _nested(variant)), f"{path} (variant {name})", file.parent
        )
        for name, variant in base.variants.items()
    }


def parse_scenario(
    data: Mapping[str, Any],
    source: str = "scenario",
    folder: Path | None = None,
    overrides: Sequence[str] = (),
) -> Scenario:
    """Check a mapping and return the scenario; `source` is what messages call its file."""
    changed = copy.deepcopy(dict(data))
    for text in overrides:
        _assign(changed, text)
    try:
        scenario = Scenario.model_validate(changed)
    except ValidationError as error:
        problem = first_problem(error, changed)
        raise BadInputError(f"{_blame(problem, source, overrides)}: {problem}") from error
    scenario = scenario.came_from(source, (folder or Path()).resolve())
    scenario.traffic_spec()  # finds the trace and reads the files of lengths now, not halfway
    return scenario


def changed(scenario: Scenario, overrides: Sequence[str]) -> Scenario:
    """Return the scenario with `a.b=c` texts applied, as if they had been in its file."""
    # Only what was set: a default may follow from other fields, such as the engine's version.
    data = scenario.model_dump(mode="json", exclude_unset=True)
    source, folder = scenario.origin()
    return parse_scenario(data, source, folder, overrides)


def _blame(problem: Problem, source: str, overrides: Sequence[str]) -> str:
    """Name the override that set the field, if one did, beside the file."""
    for text in reversed(overrides):
        key = text.partition("=")[0].strip()
        if f"{problem.field}.".startswith(f"{key}.") or key.startswith(f"{problem.field}."):
            return f"{source} with --set {text}"
    return source


# --- files --------------------------------------------------------------------------------------


def _locate(path: Path | str) -> Path:
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        raise BadInputError(f"{path}: is a folder; give the scenario file in it")
    if isinstance(path, Path) or file.suffix in (".yaml", ".yml") or len(file.parts) > 1:
        raise BadInputError(f"{path}: no such scenario file; check the path")
    return scenario_path(path)


def _read_mapping(file: Path) -> _Mapping:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{file}: not text in UTF-8; save it as UTF-8") from error
    except OSError as error:
        raise BadInputError(f"{file}: cannot be read: {error.strerror}") from error
    data = parse_yaml(text, str(file))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise BadInputError(
            f"{file}: a scenario is a mapping of fields, such as 'model: kimi-k2.6'"
        )
    return data


def parse_yaml(text: str, source: str) -> Any:
    """Read one YAML value; a key that is there twice is refused."""
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise BadInputError(f"{source}: {line}{error.problem or 'invalid YAML'}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise BadInputError(f"{source}: invalid YAML: {reason}") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that a mapping holds twice: YAML keeps the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                problem = f"{key}: the field is there twice; remove one"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# --- overrides and variants ---------------------------------------------------------------------


def _assign(data: _Mapping, text: str) -> None:
    """Apply one `a.b=c`, the value read as YAML, to nested mappings in place."""
    key, equals, value_text = text.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not equals or not all(keys):
        raise BadInputError(f"--set {text}: write it as field=value, such as pools.decode.tp=8")
    place = data
    for part in keys[:-1]:
        inner = place.get(part)
        if inner is None:
            inner = place[part] = {}
        if not isinstance(inner, dict):
            raise BadInputError(f"--set {text}: {part} holds {inner!r} and has no fields to set")
        place = inner
    place[keys[-1]] = parse_yaml(value_text, f"--set {text}")


def _nested(flat: Mapping[str, Any]) -> _Mapping:
    """Expand dotted keys, so that `{"pools.serve.tp": 8}` is a mapping in a mapping."""
    nested: _Mapping = {}
    for dotted, value in flat.items():
        for part in reversed(str(dotted).split(".")):
            value = {part: value}
        nested = _merged(nested, value)
    return nested


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> _Mapping:
    """Merge `change` over `base`, mapping by mapping; anything else replaces."""
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        merged[key] = value
    return merged
