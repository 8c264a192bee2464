"""Readers of traces: three formats, streamed, and refused by file and line."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.traffic.spec import TraceSource
from tonnage.sim.traffic.traces import detect_format, read_trace

MOONCAKE = (
    '{"timestamp": 1000, "input_length": 10, "output_length": 2, "hash_ids": [0]}\n'
    '{"timestamp": 1500, "input_length": 20, "output_length": 3, "hash_ids": [1]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,10,2\n"
    "2023-11-16 18:17:04.4799600,20,3\n"
)
PLAIN = "arrival_s,output_tokens,input_tokens,who\n7,2,10,a\n7.5,3,20,b\n"
WANTED = [Request(0, 0.0, 10, 2), Request(1, 0.5, 20, 3)]
WITH_BLOCKS = [
    replace(request, block_ids=ids, block_tokens=512)
    for request, ids in zip(WANTED, [(0,), (1,)], strict=True)
]


def trace(folder: Path, text: str, name: str = "trace.txt") -> Path:
    """Write a trace file."""
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "name"), [(MOONCAKE, "mooncake"), (AZURE, "azure"), (PLAIN, "csv")]
)
def test_every_format_is_recognised_and_starts_at_zero(
    tmp_path: Path, text: str, name: str
) -> None:
    path = trace(tmp_path, text)
    wanted = WITH_BLOCKS if name == "mooncake" else WANTED
    assert detect_format(path) == name
    assert list(read_trace(TraceSource(path))) == wanted
    assert list(read_trace(TraceSource(path, format=name))) == wanted


def test_a_gzipped_trace_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert list(read_trace(TraceSource(path))) == WITH_BLOCKS


def test_without_hash_ids_nothing_is_known_of_blocks(tmp_path: Path) -> None:
    plain = MOONCAKE.replace(', "hash_ids": [0]', "").replace("[1]", "[]")
    assert list(read_trace(TraceSource(trace(tmp_path, plain)))) == WANTED


def test_windows_line_ends_a_byte_order_mark_and_blank_lines_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + PLAIN.replace("\n", "\r\n\r\n").encode())
    assert list(read_trace(TraceSource(path))) == WANTED


def test_the_scale_divides_times_and_the_limit_cuts(tmp_path: Path) -> None:
    path = trace(tmp_path, MOONCAKE)
    fast = list(read_trace(TraceSource(path, rate_scale=2.0)))
    assert [request.arrival_s for request in fast] == [0.0, 0.25]
    # What lies beyond the limit is not even read.
    path = trace(tmp_path, MOONCAKE + "not json\n")
    assert list(read_trace(TraceSource(path, limit=2))) == WITH_BLOCKS


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        (MOONCAKE + '{"timestamp": 2000, "inp', 3, "truncated or invalid JSON"),
        (MOONCAKE + "[1, 2]\n", 3, "expected a JSON object"),
        (MOONCAKE + '{"timestamp": 2000, "input_length": 5}\n', 3, "output_length: nothing is not"),
        (MOONCAKE + MOONCAKE, 3, "the time is before the previous line's; sort the trace"),
        (MOONCAKE.replace('"output_length": 3', '"output_length": 0'), 2, "at least 1 token"),
        (MOONCAKE.replace('"input_length": 20', '"input_length": 2.5'), 2, "in whole numbers"),
        (MOONCAKE.replace("1500", "true"), 2, "timestamp: True is not a number"),
        (MOONCAKE.replace("1500", "NaN"), 2, "timestamp: nan is not a number"),
        (MOONCAKE.replace("[1]", "[1, 2]"), 2, "2 blocks of 512 tokens for 20 tokens, which are 1"),
        (MOONCAKE.replace("[1]", '["a"]'), 2, "hash_ids: expected a list of whole numbers"),
        (MOONCAKE.replace("[1]", "1"), 2, "hash_ids: expected a list of whole numbers"),
        (AZURE + "2023-11-16 18:17:05.00,30", 4, "2 columns where the header has 3"),
        (AZURE + "yesterday,30,4\n", 4, "TIMESTAMP: 'yesterday' is not a date and time"),
        (AZURE + "2023-11-16 18:17:05+00:00,30,4\n", 4, "some have a time zone and some not"),
        (PLAIN + "8,x,30,c\n", 4, "output_tokens: 'x' is not a number"),
        ("when,what\n1,2\n", 1, "not a known trace"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, line: int, expected: str) -> None:
    path = trace(tmp_path, text)
    with pytest.raises(BadInputError) as caught:
        list(read_trace(TraceSource(path)))
    assert str(caught.value).startswith(f"{path}: line {line}: ")
    assert expected in str(caught.value)


def test_requests_before_a_bad_line_are_streamed(tmp_path: Path) -> None:
    requests = read_trace(TraceSource(trace(tmp_path, MOONCAKE + "{")))
    assert next(requests) == WITH_BLOCKS[0]


def test_a_header_without_the_columns_of_a_named_format(tmp_path: Path) -> None:
    path = trace(tmp_path, "arrival_s,input_tokens\n1,2\n")
    with pytest.raises(BadInputError, match="the header lacks output_tokens; it has arrival_s, in"):
        list(read_trace(TraceSource(path, format="csv")))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"gone\.csv: cannot be read"):
        list(read_trace(TraceSource(tmp_path / "gone.csv")))
    with pytest.raises(BadInputError, match="the trace is empty"):
        list(read_trace(TraceSource(trace(tmp_path, ""))))
    with pytest.raises(BadInputError, match="holds no request"):
        list(read_trace(TraceSource(trace(tmp_path, "arrival_s,input_tokens,output_tokens\n"))))
    with pytest.raises(BadInputError, match="unknown trace format 'xml'"):
        list(read_trace(TraceSource(trace(tmp_path, MOONCAKE), format="xml")))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(MOONCAKE.encode())[:-12])
    with pytest.raises(BadInputError, match="damaged or cut short"):
        list(read_trace(TraceSource(cut)))
    (tmp_path / "binary.jsonl").write_bytes(gzip.compress(MOONCAKE.encode()))
    with pytest.raises(BadInputError, match=r"its name must end in \.gz"):
        list(read_trace(TraceSource(tmp_path / "binary.jsonl")))
