"""Readers of request traces: Mooncake JSONL, Azure CSV and plain CSV, also gzipped, all streamed.

Every line is checked; a bad one is refused by file and line. That includes a request without
output tokens: counting it as one token would invent work, dropping it would hide a failed request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path

from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.traffic.files import csv_cells, numbered_lines
from tonnage.sim.traffic.spec import TraceSource

# One request of a trace: line number, seconds on the trace's own clock, input and output tokens.
_Row = tuple[int, float, int, int]
_Reader = Callable[[Path], Iterator[_Row]]

_TOO_MANY_TOKENS = 10**9  # beyond any context: a damaged number

FORMATS = ("auto", "mooncake", "azure", "csv")


def read_trace(source: TraceSource) -> Iterator[Request]:
    """Yield the requests of a trace in order of arrival, the first one at 0 s.

    `rate_scale` divides the times. A time that goes back is an error: a stream cannot be sorted.
    """
    rows = _READERS[_format_of(source)](source.path)
    first_s: float | None = None
    previous_s = -math.inf
    for number, (line, time_s, input_tokens, output_tokens) in enumerate(
        islice(rows, source.limit)
    ):
        if time_s < previous_s:
            raise _bad(source.path, line, "the time is before the previous line's; sort the trace")
        previous_s = time_s
        first_s = time_s if first_s is None else first_s
        arrival_s = (time_s - first_s) / source.rate_scale
        yield Request(number, arrival_s, input_tokens, output_tokens)
    if first_s is None:
        raise BadInputError(f"{source.path}: the trace holds no request")


def detect_format(path: Path) -> str:
    """Name the format of a trace by its first line."""
    for line, text in numbered_lines(path):
        if text.lstrip().startswith("{"):
            return "mooncake"
        columns = csv_cells(path, line, text)
        if "ContextTokens" in columns:
            return "azure"
        if "arrival_s" in columns:
            return "csv"
        raise _bad(
            path,
            line,
            "not a known trace; expected a JSON object with timestamp, input_length and "
            "output_length, or a CSV header with TIMESTAMP,ContextTokens,GeneratedTokens or "
            "arrival_s,input_tokens,output_tokens",
        )
    raise BadInputError(f"{path}: the trace is empty")


def _format_of(source: TraceSource) -> str:
    if source.format not in FORMATS:
        raise BadInputError(
            f"unknown trace format {source.format!r}; use one of {', '.join(FORMATS)}"
        )
    return detect_format(source.path) if source.format == "auto" else source.format


# --- formats ------------------------------------------------------------------------------------


def _read_mooncake(path: Path) -> Iterator[_Row]:
    for line, text in numbered_lines(path):
        record = _json_object(path, line, text)
        time_ms = _number(path, line, "timestamp", record.get("timestamp"))
        yield (
            line,
            time_ms / 1e3,
            _tokens(path, line, "input_length", record.get("input_length")),
            _tokens(path, line, "output_length", record.get("output_length")),
        )


def _read_azure(path: Path) -> Iterator[_Row]:
    start: datetime | None = None
    for line, record in _csv_records(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        moment = _moment(path, line, record["TIMESTAMP"])
        start = moment if start is None else start
        try:
            time_s = (moment - start).total_seconds()
        except TypeError as error:  # one with a time zone, one without
            raise _bad(path, line, "TIMESTAMP: some have a time zone and some not") from error
        yield (
            line,
            time_s,
            _tokens(path, line, "ContextTokens", record["ContextTokens"]),
            _tokens(path, line, "GeneratedTokens", record["GeneratedTokens"]),
        )


def _read_csv(path: Path) -> Iterator[_Row]:
    for line, record in _csv_records(path, ("arrival_s", "input_tokens", "output_tokens")):
        yield (
            line,
            _number(path, line, "arrival_s", record["arrival_s"]),
            _tokens(path, line, "input_tokens", record["input_tokens"]),
            _tokens(path, line, "output_tokens", record["output_tokens"]),
        )


_READERS: dict[str, _Reader] = {
    "mooncake": _read_mooncake,
    "azure": _read_azure,
    "csv": _read_csv,
}


def _json_object(path: Path, line: int, text: str) -> Mapping[str, object]:
    try:
        record = json.loads(text)
    except ValueError as error:
        mend = "complete or remove the line"
        raise _bad(path, line, f"truncated or invalid JSON ({error}); {mend}") from error
    if not isinstance(record, dict):
        raise _bad(path, line, "expected a JSON object with timestamp and lengths")
    return record


def _csv_records(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the named columns of every line after the header."""
    lines = numbered_lines(path)
    header_line, header_text = next(lines, (1, ""))
    header = csv_cells(path, header_line, header_text)
    missing = [column for column in columns if column not in header]
    if missing:
        raise _bad(
            path, header_line, f"the header lacks {', '.join(missing)}; it has {', '.join(header)}"
        )
    places = {column: header.index(column) for column in columns}
    for line, text in lines:
        cells = csv_cells(path, line, text)
        if len(cells) != len(header):
            problem = f"{len(cells)} columns where the header has {len(header)}"
            raise _bad(path, line, f"{problem}; complete or remove the line")
        yield line, {column: cells[place] for column, place in places.items()}


# --- values -------------------------------------------------------------------------------------


def _number(path: Path, line: int, field: str, value: object) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    raise _bad(path, line, f"{field}: {_shown(value)} is not a number; mend or remove the line")


def _tokens(path: Path, line: int, field: str, value: object) -> int:
    number = _number(path, line, field, value)
    if not 1 <= number < _TOO_MANY_TOKENS or number != int(number):
        problem = f"{field}: a request has at least 1 token, in whole numbers, not {value}"
        raise _bad(path, line, f"{problem}; mend or remove the line")
    return int(number)


def _moment(path: Path, line: int, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError as error:
        example = "2023-11-16 18:17:03.9799600"
        problem = f"TIMESTAMP: {text!r} is not a date and time; write it like {example!r}"
        raise _bad(path, line, problem) from error


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)


def _bad(path: Path, line: int, problem: str) -> BadInputError:
    return BadInputError(f"{path}: line {line}: {problem}")
