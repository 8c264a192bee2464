"""Readers of recorded sessions: JSON and CSV say the same; a bad place is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tonnage.sim.domain import BadInputError
from tonnage.sim.traffic.session_traces import RecordedSession, read_sessions
from tonnage.sim.traffic.spec import TraceSource
from tonnage.sim.traffic.traces import detect_format, read_trace

HEAD = (
    "trace,block_size,tool_tokens,system_tokens,seq,subagent,t_s,type,in_tokens,out_tokens,"
    "n_blocks,shared_prefix_blocks_with_prev,api_time_s,think_time_s\n"
)
CSV = (
    HEAD
    + "one,64,100,28,0,,0.0,n,200,10,3,0,2.0,0.0\n"
    + "one,64,100,28,1,,9.0,n,260,20,4,3,3.0,7.0\n"
    + "one,64,100,28,0,2.0,0.0,n,70,5,1,0,1.0,0.0\n"
    + "one,64,100,28,3,,15.0,s,330,0,5,2,,\n"
    + "two,64,90,20,0,,0.0,n,64,1,1,0,,\n"
)
SESSION: dict[str, Any] = {
    "id": "one",
    "block_size": 64,
    "tool_tokens": 100,
    "system_tokens": 28,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "in": 200, "out": 10, "hash_ids": [1, 2, 3], "api_time": 2.0, "think_time": 0.0},
        {
            "t": 9.0,
            "in": 260,
            "out": 20,
            "hash_ids": [1, 2, 3, 4],
            "api_time": 3.0,
            "think_time": 7,
        },
        {"type": "subagent", "requests": [{"t": 0.0, "in": 70, "out": 5, "hash_ids": [9]}]},
        {"t": 15.0, "in": 330, "out": 0, "hash_ids": [1, 2, 5, 6, 7]},
    ],
}


def csv_file(folder: Path, text: str = CSV) -> Path:
    """Write a CSV of sessions."""
    path = folder / "sessions.csv"
    path.write_text(text)
    return path


def json_file(folder: Path, session: object = SESSION, name: str = "one.json") -> Path:
    """Write the JSON of a session."""
    path = folder / name
    path.write_text(json.dumps(session))
    return path


def ids_of(session: RecordedSession) -> list[tuple[int, ...]]:
    """Return the block ids of every turn."""
    ids: list[tuple[int, ...]] = []
    for turn in session.turns:
        ids.append(turn.block_ids(ids[-1] if ids else ()))
    return ids


def test_a_csv_holds_sessions_and_those_of_their_sub_agents(tmp_path: Path) -> None:
    one, agent, two = read_sessions(csv_file(tmp_path))
    assert [one.name, agent.name, two.name] == ["one", "one/2.0", "two"]
    assert [turn.input_tokens for turn in one.turns] == [200, 260, 330]
    assert [turn.think_s for turn in one.turns] == [0.0, 7.0, 3.0]  # 15 - 9 s - 3 s of the answer
    assert [turn.output_tokens for turn in one.turns] == [10, 20, 1]
    assert (one.unanswered, one.tool_tokens, one.system_tokens) == (1, 100, 28)
    first, second, third = ids_of(one)
    assert len(first) == 3
    assert second[:3] == first
    assert third[:2] == first[:2]
    assert not set(third[2:]) & set(second)
    assert len(agent.turns) == len(two.turns) == 1


def test_json_says_the_same_and_keeps_its_own_ids(tmp_path: Path) -> None:
    one, agent = read_sessions(json_file(tmp_path))
    of_csv = next(iter(read_sessions(csv_file(tmp_path))))
    for turn, same in zip(one.turns, of_csv.turns, strict=True):
        assert (turn.start_s, turn.think_s) == (same.start_s, same.think_s)
        assert (turn.input_tokens, turn.output_tokens) == (same.input_tokens, same.output_tokens)
        assert turn.kept_blocks == same.kept_blocks
    assert ids_of(one) == [(1, 2, 3), (1, 2, 3, 4), (1, 2, 5, 6, 7)]
    assert agent.name == "one/requests[2].requests"
    assert not one.shares_ids


def test_a_folder_is_read_in_order_of_name(tmp_path: Path) -> None:
    json_file(tmp_path, SESSION | {"id": "second"}, "b.json")
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(SESSION | {"id": "first"}, indent=1).encode()))
    (tmp_path / "notes.txt").write_text("no session")
    assert [one.name for one in read_sessions(tmp_path)][::2] == ["first", "second"]
    assert detect_format(tmp_path) == detect_format(packed) == "sessions"
    with pytest.raises(BadInputError, match=r"it needs \.json files"):
        list(read_sessions((tmp_path / "none").mkdir() or tmp_path / "none"))


def test_one_session_is_a_trace_and_several_are_not(tmp_path: Path) -> None:
    alone = json_file(tmp_path, SESSION | {"requests": SESSION["requests"][:2]})
    requests = list(read_trace(TraceSource(alone, rate_scale=2.0)))
    assert [request.arrival_s for request in requests] == [0.0, 4.5]
    assert [request.block_ids for request in requests] == [(1, 2, 3), (1, 2, 3, 4)]
    assert {(request.session, request.block_tokens) for request in requests} == {(0, 64)}
    with pytest.raises(BadInputError, match=r"traffic\.kind: sessions and traffic\.session\.path"):
        list(read_trace(TraceSource(csv_file(tmp_path))))


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("260,20,4,3", "260,20,4,9", 3, "shared_prefix_blocks_with_prev: 9 of 4 blocks after 3"),
        ("260,20,4,3", "x,20,4,3", 3, "in_tokens: 'x' is not a number"),
        ("260,20,4,3", "260,-1,4,3", 3, "out_tokens: expected a whole number of at least 0"),
        ("260,20,4,3", "260,20,9,3", 3, "9 blocks of 64 tokens do not fit into 260 tokens"),
        ("9.0,n", "-1.0,n", 3, "the time is before the turn's before; sort the turns"),
        ("3.0,7.0", "3.0,-7.0", 3, "think_time: a duration cannot be -7 s"),
        ("two,", "one,", 6, "the time is before"),
        ("two,64,90,20,0,,0.0", "two,0,90,20,0,,0.0", 6, "block_size: a request has at least 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, old: str, new: str, line: int, expected: str) -> None:
    assert CSV.count(old) == 1
    path = csv_file(tmp_path, CSV.replace(old, new))
    with pytest.raises(BadInputError) as caught:
        list(read_sessions(path))
    assert str(caught.value).startswith(f"{path}: line {line}: ")
    assert expected in str(caught.value)


def test_a_trace_that_comes_back_is_refused(tmp_path: Path) -> None:
    path = csv_file(tmp_path, CSV + "one,64,100,28,0,,0.0,n,200,10,3,0,2.0,0.0\n")
    with pytest.raises(BadInputError, match="line 7: trace 'one' was there before; sort the lines"):
        list(read_sessions(path))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"requests": []}, "the session holds no request"),
        ({"requests": 3}, "no list of requests"),
        ({"requests": [{"t": 0, "out": 1}]}, r"requests\[0\]: in: nothing is not a number"),
        ({"requests": [{"t": 0, "in": 9, "out": 1, "hash_ids": [1.5]}]}, "list of whole numbers"),
        ({"requests": [{"t": "x", "in": 9, "out": 1}]}, r"requests\[0\]: t: 'x' is not a number"),
        ({"requests": [4]}, r"requests\[0\]: expected a JSON object"),
        ({"block_size": None}, "block_size: nothing is not a number"),
    ],
)
def test_a_bad_place_in_json_is_named(
    tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    path = json_file(tmp_path, SESSION | change)
    with pytest.raises(BadInputError, match=expected) as caught:
        list(read_sessions(path))
    assert str(caught.value).startswith(f"{path}: ")


def test_json_that_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(SESSION)[:-9])
    with pytest.raises(BadInputError, match="truncated or invalid JSON"):
        list(read_trace(TraceSource(path)))
