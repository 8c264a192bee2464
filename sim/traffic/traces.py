"""Readers of request traces: Mooncake JSONL, Azure CSV and plain CSV, also gzipped, all streamed.

A file of one session (`session_traces.py`) is read too. Every line is checked; a bad one is refused
by file and line. That includes a request without output tokens: counting it as one token would
invent work, dropping it would hide a failed request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.traffic.fields import bad, block_ids, csv_records, json_object, moment
from tonnage.sim.traffic.fields import number as read_number
from tonnage.sim.traffic.fields import tokens as read_tokens
from tonnage.sim.traffic.files import csv_cells, numbered_lines
from tonnage.sim.traffic.session_traces import CSV_COLUMNS, looks_like_sessions, read_sessions
from tonnage.sim.traffic.spec import TraceSource

MOONCAKE_BLOCK_TOKENS = 512  # of `hash_ids`; kvcache-ai/Mooncake, FAST25-release/traces

FORMATS = ("auto", "mooncake", "azure", "csv", "sessions")


class _Row(NamedTuple):
    """One request of a trace; seconds are on the trace's own clock."""

    line: int
    time_s: float
    input_tokens: int
    output_tokens: int
    session: int | None = None
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0


_Reader = Callable[[Path], Iterator[_Row]]


def read_trace(source: TraceSource) -> Iterator[Request]:
    """Yield the requests of a trace in order of arrival, the first one at 0 s.

    `rate_scale` divides the times. A time that goes back is an error: a stream cannot be sorted.
    """
    rows = _READERS[format_of(source)](source.path)
    first_s: float | None = None
    previous_s = -math.inf
    for number, row in enumerate(islice(rows, source.limit)):
        if row.time_s < previous_s:
            problem = "the time is before the previous line's; sort the trace"
            raise bad(source.path, row.line, problem)
        previous_s = row.time_s
        first_s = row.time_s if first_s is None else first_s
        yield Request(
            number,
            (row.time_s - first_s) / source.rate_scale,
            row.input_tokens,
            row.output_tokens,
            None,
            row.session,
            row.block_ids,
            row.block_tokens,
        )
    if first_s is None:
        raise BadInputError(f"{source.path}: the trace holds no request")


def detect_format(path: Path) -> str:
    """Name the format of a trace by its first line; a folder holds sessions."""
    if path.is_dir():
        return "sessions"
    for line, text in numbered_lines(path):
        if text.lstrip().startswith("{"):
            return "sessions" if looks_like_sessions(path, text) else "mooncake"
        columns = csv_cells(path, line, text)
        if "ContextTokens" in columns:
            return "azure"
        if "arrival_s" in columns:
            return "csv"
        if set(CSV_COLUMNS) <= set(columns):
            return "sessions"
        raise bad(
            path,
            line,
            "not a known trace; expected a JSON object with timestamp, input_length and "
            "output_length, a CSV header with TIMESTAMP,ContextTokens,GeneratedTokens or "
            "arrival_s,input_tokens,output_tokens, or sessions (docs/traffic.md)",
        )
    raise BadInputError(f"{path}: the trace is empty")


def format_of(source: TraceSource) -> str:
    """Return the format of a trace: the one that was named, or by its first line."""
    if source.format not in FORMATS:
        raise BadInputError(
            f"unknown trace format {source.format!r}; use one of {', '.join(FORMATS)}"
        )
    return detect_format(source.path) if source.format == "auto" else source.format


# --- formats ------------------------------------------------------------------------------------


def _read_mooncake(path: Path) -> Iterator[_Row]:
    for line, text in numbered_lines(path):
        record = json_object(path, line, text)
        time_ms = read_number(path, line, "timestamp", record.get("timestamp"))
        input_tokens = read_tokens(path, line, "input_length", record.get("input_length"))
        output_tokens = read_tokens(path, line, "output_length", record.get("output_length"))
        row = _Row(line, time_ms / 1e3, input_tokens, output_tokens)
        hashes = record.get("hash_ids")
        if hashes is not None:
            ids = block_ids(path, line, "hash_ids", hashes)
            _check_cover(path, line, ids, input_tokens)
            row = row._replace(block_ids=ids, block_tokens=MOONCAKE_BLOCK_TOKENS if ids else 0)
        yield row


def _check_cover(path: Path, line: int, ids: tuple[int, ...], input_tokens: int) -> None:
    """Refuse ids that reach beyond the prompt: their blocks are of another size."""
    most = -(-input_tokens // MOONCAKE_BLOCK_TOKENS)
    if len(ids) > most:
        size = MOONCAKE_BLOCK_TOKENS
        problem = f"hash_ids: {len(ids)} blocks of {size} tokens for {input_tokens} tokens"
        raise bad(path, line, f"{problem}, which are {most}; mend or remove the line")


def _read_azure(path: Path) -> Iterator[_Row]:
    start: datetime | None = None
    for line, record in csv_records(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        time = moment(path, line, "TIMESTAMP", record["TIMESTAMP"])
        start = time if start is None else start
        try:
            time_s = (time - start).total_seconds()
        except TypeError as error:  # one with a time zone, one without
            raise bad(path, line, "TIMESTAMP: some have a time zone and some not") from error
        yield _Row(
            line,
            time_s,
            read_tokens(path, line, "ContextTokens", record["ContextTokens"]),
            read_tokens(path, line, "GeneratedTokens", record["GeneratedTokens"]),
        )


def _read_csv(path: Path) -> Iterator[_Row]:
    for line, record in csv_records(path, ("arrival_s", "input_tokens", "output_tokens")):
        yield _Row(
            line,
            read_number(path, line, "arrival_s", record["arrival_s"]),
            read_tokens(path, line, "input_tokens", record["input_tokens"]),
            read_tokens(path, line, "output_tokens", record["output_tokens"]),
        )


def _read_one_session(path: Path) -> Iterator[_Row]:
    """Yield the turns of one session at their recorded times."""
    sessions = read_sessions(path)
    session = next(sessions)
    if next(sessions, None) is not None:
        raise BadInputError(
            f"{path}: holds several sessions and does not say when each began; replay them with "
            "traffic.kind: sessions and traffic.session.path"
        )
    ids: tuple[int, ...] = ()
    for number, turn in enumerate(session.turns, start=1):
        ids = turn.block_ids(ids)
        yield _Row(
            number,
            turn.start_s,
            turn.input_tokens,
            turn.output_tokens,
            0,
            ids,
            session.block_tokens if ids else 0,
        )


_READERS: dict[str, _Reader] = {
    "mooncake": _read_mooncake,
    "azure": _read_azure,
    "csv": _read_csv,
    "sessions": _read_one_session,
}
