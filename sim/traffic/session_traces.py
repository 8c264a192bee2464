"""Readers of recorded sessions: JSON, one file per session, and CSV, a line per turn; also gzipped.

The formats are those of callanjfox/kv-cache-tester (Apache-2.0): block ids that hold within a
session, or, in the CSV, how many of a turn's blocks begin the turn before too. What a sub-agent
asked is a session of its own. A turn without an answer is kept with one output token, for its
prompt was computed; `unanswered` counts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from tonnage.sim.domain import BadInputError
from tonnage.sim.traffic.fields import (
    Place,
    bad,
    block_ids,
    count,
    csv_records,
    number,
    seconds,
    tokens,
)
from tonnage.sim.traffic.files import numbered_lines

_NEEDED = ("trace", "t_s", "in_tokens", "out_tokens", "n_blocks", "shared_prefix_blocks_with_prev")
_OF_SESSION = ("block_size", "tool_tokens", "system_tokens")
CSV_COLUMNS = (*_NEEDED, *_OF_SESSION, "subagent", "api_time_s", "think_time_s")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One request as recorded: its first `kept_blocks` blocks are those of the turn before.

    `start_s`: seconds after the session began. `think_s`: seconds between the answer before and
    this request, None where it is not known.
    """

    start_s: float
    think_s: float | None
    input_tokens: int
    output_tokens: int
    kept_blocks: int
    new_block_ids: Sequence[int]

    def block_ids(self, before: tuple[int, ...], offset: int = 0) -> tuple[int, ...]:
        """Return all ids of the turn from those of the turn before; `offset` is added to new."""
        if offset == 0:
            return (*before[: self.kept_blocks], *self.new_block_ids)
        return (*before[: self.kept_blocks], *(one + offset for one in self.new_block_ids))


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """The turns of one conversation in order, and the tokens of its tools and system prompt.

    `shares_ids`: its block ids hold across sessions, not only within this one.
    """

    name: str
    block_tokens: int
    tool_tokens: int
    system_tokens: int
    turns: tuple[RecordedTurn, ...]
    unanswered: int = 0
    shares_ids: bool = False


def looks_like_sessions(path: Path, first_line: str) -> bool:
    """Tell a session's JSON from JSON lines."""
    try:
        record = json.loads(first_line)
    except ValueError:
        return ".json" in path.suffixes
    return isinstance(record, dict) and "requests" in record


def read_sessions(path: Path) -> Iterator[RecordedSession]:
    """Yield the sessions of a CSV file, a JSON file, or a folder of JSON files in order of name."""
    if not path.is_dir():
        yield from _read_json(path) if ".json" in path.suffixes else _read_csv(path)
        return
    files = sorted(file for file in path.iterdir() if ".json" in file.suffixes)
    if not files:
        raise BadInputError(f"{path}: no session in this folder; it needs .json files")
    for file in files:
        yield from _read_json(file)


# --- JSON ---------------------------------------------------------------------------------------


def _read_json(path: Path) -> Iterator[RecordedSession]:
    text = "\n".join(line for _, line in numbered_lines(path))
    try:
        record = json.loads(text)
    except ValueError as error:
        problem = f"truncated or invalid JSON ({error})"
        raise BadInputError(f"{path}: {problem}; fetch it again") from error
    if not isinstance(record, dict) or not isinstance(record.get("requests"), list):
        raise BadInputError(f"{path}: no list of requests; expected the JSON of one session")
    name = str(record.get("id", path.stem))
    yield from _sessions(path, name, record, record["requests"], "requests")


def _sessions(
    path: Path, name: str, record: Mapping[str, object], entries: list[object], place: str
) -> Iterator[RecordedSession]:
    """Yield a session, then those of its sub-agents, which are lists of requests within it."""
    turns: list[tuple[str, Mapping[str, object]]] = []
    inner: list[tuple[str, list[object]]] = []
    for index, entry in enumerate(entries):
        where = f"{place}[{index}]"
        if not isinstance(entry, dict):
            raise bad(path, where, "expected a JSON object with t, in and out")
        nested = entry.get("requests")
        if isinstance(nested, list):
            inner.append((f"{where}.requests", nested))
        else:
            turns.append((where, entry))
    if turns:
        yield _json_session(path, name, record, turns)
    elif place == "requests":
        raise BadInputError(f"{path}: the session holds no request")
    for where, nested in inner:
        yield from _sessions(path, f"{name}/{where}", record, nested, where)


def _json_session(
    path: Path,
    name: str,
    record: Mapping[str, object],
    entries: list[tuple[str, Mapping[str, object]]],
) -> RecordedSession:
    block_tokens = tokens(path, "block_size", "block_size", record.get("block_size"))
    clock = _Clock(path)
    turns: list[RecordedTurn] = []
    before: tuple[int, ...] = ()
    unanswered = 0
    for place, entry in entries:
        ids = block_ids(path, place, "hash_ids", entry.get("hash_ids", []))
        prompt = tokens(path, place, "in", entry.get("in"))
        answer = count(path, place, "out", entry.get("out"))
        _check_cover(path, place, len(ids), prompt, block_tokens)
        start_s, think_s = clock.turn(
            place, entry.get("t"), entry.get("api_time"), entry.get("think_time")
        )
        kept = _common(before, ids)
        turns.append(RecordedTurn(start_s, think_s, prompt, max(1, answer), kept, ids[kept:]))
        unanswered += answer == 0
        before = ids
    return RecordedSession(
        name,
        block_tokens,
        count(path, "tool_tokens", "tool_tokens", record.get("tool_tokens", 0)),
        count(path, "system_tokens", "system_tokens", record.get("system_tokens", 0)),
        tuple(turns),
        unanswered,
        record.get("hash_id_scope") == "global",
    )


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return how many ids two prompts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))


# --- CSV ----------------------------------------------------------------------------------------

_Line = tuple[int, dict[str, str]]


def _read_csv(path: Path) -> Iterator[RecordedSession]:
    lines = csv_records(path, CSV_COLUMNS)
    seen: set[str] = set()
    for name, of_trace in groupby(lines, key=lambda line: line[1]["trace"]):
        conversations: dict[str, list[_Line]] = {}
        for line in of_trace:  # what sub-agents asked stands between their parent's lines
            conversations.setdefault(line[1]["subagent"], []).append(line)
        if name in seen:
            place = conversations.popitem()[1][0][0]
            raise bad(path, place, f"trace {name!r} was there before; sort the lines by trace")
        seen.add(name)
        for subagent, rows in conversations.items():
            yield _csv_session(path, f"{name}/{subagent}" if subagent else name, rows)
    if not seen:
        raise BadInputError(f"{path}: the trace holds no request")


def _csv_session(path: Path, name: str, rows: list[_Line]) -> RecordedSession:
    line, head = rows[0]
    clock = _Clock(path)
    turns: list[RecordedTurn] = []
    blocks = distinct = unanswered = 0
    block_tokens = tokens(path, line, "block_size", head["block_size"])
    for line, row in rows:
        prompt = tokens(path, line, "in_tokens", row["in_tokens"])
        answer = count(path, line, "out_tokens", row["out_tokens"])
        start_s, think_s = clock.turn(
            line, row["t_s"], row["api_time_s"] or None, row["think_time_s"] or None
        )
        kept, all_blocks = _kept_and_all(path, line, row, blocks if turns else 0)
        _check_cover(path, line, all_blocks, prompt, block_tokens)
        blocks = all_blocks
        new = range(distinct, distinct + blocks - kept)
        distinct = new.stop
        turns.append(RecordedTurn(start_s, think_s, prompt, max(1, answer), kept, new))
        unanswered += answer == 0
    return RecordedSession(
        name,
        block_tokens,
        count(path, rows[0][0], "tool_tokens", head["tool_tokens"]),
        count(path, rows[0][0], "system_tokens", head["system_tokens"]),
        tuple(turns),
        unanswered,
    )


def _kept_and_all(path: Path, line: int, row: dict[str, str], before: int) -> tuple[int, int]:
    """Return the blocks that a turn shares with the one before, and all of its blocks."""
    kept, blocks = (count(path, line, name, row[name]) for name in reversed(_NEEDED[-2:]))
    if kept > min(before, blocks):
        problem = f"shared_prefix_blocks_with_prev: {kept} of {blocks} blocks after {before}"
        raise bad(path, line, f"{problem}; mend or remove the line")
    return kept, blocks


# --- both ---------------------------------------------------------------------------------------


def _check_cover(path: Path, place: Place, blocks: int, prompt: int, block_tokens: int) -> None:
    if blocks > -(-prompt // block_tokens):
        problem = f"{blocks} blocks of {block_tokens} tokens do not fit into {prompt} tokens"
        raise bad(path, place, f"{problem}; mend or remove it")


class _Clock:
    """Start and think time of the turns of one session, as far as they are recorded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_start_s: float | None = None
        self._last_api_s: float | None = None

    def turn(
        self, place: Place, t: object, api_time: object, think_time: object
    ) -> tuple[float, float | None]:
        """Return start and think time of the next turn.

        Without a recorded think time it is what the gap leaves beside the answer's time; without
        that, not known.
        """
        start_s = number(self._path, place, "t", t)
        last_s, api_s = self._last_start_s, self._last_api_s
        if last_s is not None and start_s < last_s:
            raise bad(self._path, place, "the time is before the turn's before; sort the turns")
        think_s: float | None = None
        if think_time is not None:
            think_s = seconds(self._path, place, "think_time", think_time)
        elif last_s is not None and api_s is not None:
            think_s = max(0.0, start_s - last_s - api_s)
        self._last_start_s = start_s
        self._last_api_s = (
            None if api_time is None else seconds(self._path, place, "api_time", api_time)
        )
        return start_s, think_s


def distinct_prefixes(sessions: Iterable[RecordedSession]) -> dict[tuple[int, int], int]:
    """Count sessions by the tokens of their tools and system prompt: what may be the same text."""
    counts: dict[tuple[int, int], int] = {}
    for session in sessions:
        key = (session.tool_tokens, session.system_tokens)
        counts[key] = counts.get(key, 0) + 1
    return dict(sorted(counts.items(), key=itemgetter(1), reverse=True))
