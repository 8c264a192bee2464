"""Changes one field in the text of a scenario and leaves the rest, comments too, as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from tonnage.sim.domain import BadInputError


def with_value(text: str, path: Sequence[str], value: object) -> str:
    """Return the text with the field at `path` set; what is missing on the way is added."""
    node = yaml.compose(text, yaml.SafeLoader)
    if node is None:
        gap = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{gap}{path[0]}: {_flow(_nested(path[1:], value))}\n"
    for depth, key in enumerate(path):
        if not isinstance(node, yaml.MappingNode):
            raise BadInputError("scenario: is not a mapping of fields")
        child = _child(node, key)
        rest = path[depth + 1 :]
        if child is None:
            return _inserted(text, node, key, _flow(_nested(rest, value)))
        if not rest or not isinstance(child, yaml.MappingNode):
            return _replaced(text, child, _flow(_nested(rest, value)))
        node = child
    raise ValueError("the path is empty")


def _nested(path: Sequence[str], value: object) -> object:
    for key in reversed(path):
        value = {key: value}
    return value


def _child(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for name, value in node.value if name.value == key), None)


def _flow(value: object) -> str:
    """Spell a value on one line."""
    spelled = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return spelled.removesuffix("...\n").strip()


def _replaced(text: str, node: yaml.Node, spelled: str) -> str:
    start, end = node.start_mark.index, _end(text, node)
    gap = "" if start == 0 or text[start - 1].isspace() or text[start - 1] in "{[" else " "
    return f"{text[:start]}{gap}{spelled}{text[end:]}"


def _end(text: str, node: yaml.Node) -> int:
    """Return where a node ends; the mark of a block lies at the next token, past comments."""
    last: Any = node
    while isinstance(last, yaml.CollectionNode) and not last.flow_style and last.value:
        last = last.value[-1]
        last = last[1] if isinstance(last, tuple) else last
    start, end = last.start_mark.index, last.end_mark.index
    return int(start + len(text[start:end].rstrip()))


def _inserted(text: str, node: yaml.MappingNode, key: str, spelled: str) -> str:
    """Add a field after the last one of a mapping."""
    line = f"{key}: {spelled}"
    if node.flow_style or not node.value:
        place = node.end_mark.index - 1
        comma = ", " if node.value else ""
        return f"{text[:place].rstrip()}{comma}{line}{text[place:]}"
    indent = " " * node.value[0][0].start_mark.column
    place = text.find("\n", _end(text, node))
    if place < 0:
        return f"{text}\n{indent}{line}\n"
    return f"{text[:place]}\n{indent}{line}{text[place:]}"
