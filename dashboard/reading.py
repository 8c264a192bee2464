"""Reads what people type or upload: bounded, by the strict readers, from one folder only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tonnage.scenarios.load import changed, parse_scenario, parse_yaml
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError

MOST_TEXT_BYTES = 200_000  # of a scenario; the longest shipped one has 3 kB
MOST_UPLOAD_BYTES = 20_000_000
MOST_REQUESTS = 1_000_000
MOST_SESSIONS = 20_000
MOST_POINTS = 64
_PROSE = ("name", "description")  # fields that hold text and never a file
_SOURCE = "scenario"


def read_scenario(text: str, folder: Path) -> Scenario:
    """Check the text of a scenario and return it; relative paths start from `folder`.

    Raises BadInputError as `load_scenario` does, and for files outside the folder, aliases, and
    runs too large to share a server with others.
    """
    return parse_scenario({"name": _SOURCE, **checked_data(text, folder)}, _SOURCE, folder)


def read_variants(text: str, folder: Path) -> dict[str, Scenario]:
    """Return the variants of a scenario, each merged over it."""
    base = read_scenario(text, folder)
    variants = {}
    for name, change in base.variants.items():
        overrides = [f"{field}={_flow(value)}" for field, value in _leaves(change)]
        variants[name] = changed(base, overrides) if overrides else base
    return variants


def _leaves(change: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in change.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def _flow(value: object) -> str:
    spelled = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return spelled.removesuffix("...\n").strip()


def checked_data(text: str, folder: Path) -> dict[str, Any]:
    """Return the fields of a scenario's text, before the schema looks at them."""
    if len(text.encode("utf-8")) > MOST_TEXT_BYTES:
        limit = f"{MOST_TEXT_BYTES // 1000} kB"
        raise BadInputError(f"{_SOURCE}: longer than {limit}; put lengths and traces into files")
    _refuse_aliases(text)
    data = parse_yaml(text, _SOURCE)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise BadInputError(f"{_SOURCE}: write a mapping of fields, such as 'model: kimi-k2.6'")
    for field, value in _texts(data):
        if field.split(".")[-1] not in _PROSE:
            _refuse_outside(field, value, folder)
    _refuse_large(data)
    return data


def _refuse_aliases(text: str) -> None:
    """Refuse aliases: a few lines of them can stand for more than memory holds."""
    if "*" not in text or "&" not in text:
        return
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                mark = event.start_mark
                line = f"line {mark.line + 1}: " if mark else ""
                problem = f"*{event.anchor} is an alias; write the value out"
                raise BadInputError(f"{_SOURCE}: {line}{problem}")
    except yaml.YAMLError:
        return  # the reader says it better


def _texts(value: object, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, place)


def _refuse_outside(field: str, value: str, folder: Path) -> None:
    """Refuse a text that, were it a file's name, would lie outside the folder."""
    if "\0" in value or len(value) > 1000:
        raise BadInputError(f"{_SOURCE}: {field}: is no name; shorten it")
    root = folder.resolve()
    try:
        place = (root / value).resolve()
    except OSError as error:
        raise BadInputError(f"{_SOURCE}: {field}: {error.strerror}") from error
    if not place.is_relative_to(root):
        problem = "files outside the dashboard's folder are not read"
        raise BadInputError(f"{_SOURCE}: {field}: {value!r}: {problem}; use a name or a file in it")


def _refuse_large(data: Mapping[str, Any]) -> None:
    """Refuse what would keep the one worker, or a page itself, from everybody else."""
    traffic = data.get("traffic")
    if not isinstance(traffic, Mapping):
        return
    session = traffic.get("session")
    count = session.get("count") if isinstance(session, Mapping) else None
    for field, value, most in (
        ("requests", traffic.get("requests"), MOST_REQUESTS),
        ("session.count", count, MOST_SESSIONS),
    ):
        if isinstance(value, int | float) and value > most:
            mend = f"at most {most:,} here; run larger ones with tonnage simulate"
            raise BadInputError(f"{_SOURCE}: traffic.{field}: {value:,}; {mend}")
    for field in ("concurrency", "rate_per_s"):
        points = traffic.get(field)
        if isinstance(points, list) and len(points) > MOST_POINTS:
            mend = f"at most {MOST_POINTS} here; run longer lists with tonnage sweep"
            raise BadInputError(f"{_SOURCE}: traffic.{field}: {len(points)} points; {mend}")


def upload_text(name: str, data: bytes) -> str:
    """Return an uploaded file as text; BadInputError where it is too large or no text."""
    if len(data) > MOST_UPLOAD_BYTES:
        size = f"{len(data) / 1e6:,.0f} MB"
        limit = f"{MOST_UPLOAD_BYTES // 10**6} MB"
        raise BadInputError(f"{name}: {size}; at most {limit} can be uploaded, so cut it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{name}: not text in UTF-8; save it as UTF-8") from error
