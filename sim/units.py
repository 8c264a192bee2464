"""Text with a unit to SI numbers and back; used at the edge only.

``parse_bytes("80GiB")``, ``parse_seconds("300ms")``, ``parse_bandwidth("400Gb/s")``. A bare number
is taken as SI. GB is 1e9 bytes, GiB is 2**30; ``b`` is bits and ``B`` bytes, as on datasheets.
"""

from __future__ import annotations

import re

from tonnage.sim.domain import BadInputError

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PREFIX = _DECIMAL | _BINARY
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"^\s*([+-]?\d[\d_,]*\.?\d*(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*$")

GIB = 2.0**30


def _split(text: object, what: str, example: str) -> tuple[float, str]:
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise BadInputError(f"{text!r} is not a {what}; write it like {example!r}")
    if isinstance(text, int | float):
        return float(text), ""
    match = _QUANTITY.match(text)
    if match is None:
        raise BadInputError(f"{text!r} is not a {what}; write it like {example!r}")
    return float(match[1].replace("_", "").replace(",", "")), match[2]


def parse_seconds(text: object) -> float:
    """Return seconds from ``"300ms"``, ``"5s"``, ``"2h"`` or a bare number of seconds."""
    value, unit = _split(text, "duration", "300ms")
    if unit == "":
        return value
    if unit not in _SECONDS:
        units = ", ".join(_SECONDS)
        raise BadInputError(f"{text!r}: unknown unit {unit!r} for a duration; use one of {units}")
    return value * _SECONDS[unit]


def parse_bytes(text: object) -> float:
    """Return bytes from ``"80GiB"``, ``"1.5TB"``, ``"0B"`` or a bare number of bytes."""
    value, unit = _split(text, "size", "80GiB")
    return value * _bytes_factor(unit, text, "80GiB") if unit else value


def parse_bandwidth(text: object) -> float:
    """Return bytes per second from ``"400Gb/s"`` (bits), ``"3.35TB/s"`` or a bare number."""
    value, unit = _split(text, "bandwidth", "400Gb/s")
    if unit == "":
        return value
    if not unit.endswith("/s"):
        raise BadInputError(f"{text!r}: a bandwidth ends in '/s'; write it like '400Gb/s'")
    return value * _bytes_factor(unit.removesuffix("/s"), text, "400Gb/s")


def _bytes_factor(unit: str, text: object, example: str) -> float:
    prefix, base = unit[:-1], unit[-1]
    if base not in ("b", "B") or prefix not in _PREFIX:
        raise BadInputError(f"{text!r}: unknown unit {unit!r}; write it like {example!r}")
    return _PREFIX[prefix] / (8.0 if base == "b" else 1.0)


def format_seconds(value_s: float) -> str:
    """Return a duration with three significant digits, such as ``"29.2 ms"``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value_s) >= factor:
            return f"{value_s / factor:.3g} {unit}" if value_s < 1000 else f"{value_s:,.0f} s"
    return "0 s" if value_s == 0 else f"{value_s / 1e-9:.3g} ns"


def format_bytes(value_bytes: float) -> str:
    """Return a size in GiB (MiB below 1 GiB), such as ``"69.2 GiB"``."""
    if abs(value_bytes) >= GIB:
        return f"{value_bytes / GIB:,.1f} GiB"
    return f"{value_bytes / 2**20:,.0f} MiB"


def version_key(version: str) -> tuple[int, int, int]:
    """Return the first three numbers of a version, such as (0, 10, 1) of "0.10.1.dev101"."""
    match = re.match(r"^v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    if match is None:
        raise BadInputError(f"engine.version: {version!r} is not a version; write it like '0.5.23'")
    major, minor, patch = match.groups(default="0")
    return int(major), int(minor), int(patch)
