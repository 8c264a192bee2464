"""Refuse shapes that a number format cannot hold, with one message that says what would fit."""

from __future__ import annotations

from tonnage.sim.domain import BadInputError


def require_multiple(name: str, value: int, of: int, reason: str) -> None:
    """Refuse a dimension that is no positive multiple of what the format stores together."""
    if value <= 0 or value % of:
        raise BadInputError(f"{name} = {value} must be a positive multiple of {of}: {reason}")


def require(condition: bool, message: str) -> None:
    """Refuse with this message unless the condition holds."""
    if not condition:
        raise BadInputError(message)
