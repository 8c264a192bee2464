"""Sessions: contexts that grow, ids that say what is equal, and turns that wait for answers."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.engine.harness import colocated, disaggregated
from tests.sim.traffic.session_specs import SPEC, drawn
from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.traffic.build import build_load, session_totals
from tonnage.sim.traffic.durations import ConstantDuration
from tonnage.sim.traffic.lengths import Constant, Uniform
from tonnage.sim.traffic.session_sources import RecordedSessions
from tonnage.sim.traffic.session_traces import read_sessions
from tonnage.sim.traffic.sessions import Session, SessionLoad, SessionRun
from tonnage.sim.traffic.spec import LoadPoint, SessionTrace, TrafficSpec

TICK_S = 2.0**-34
TRACES = Path(__file__).parents[3] / "scenarios" / "traces"


def ids_of(session: Session) -> list[tuple[int, ...]]:
    """Return the block ids of every turn."""
    found: list[tuple[int, ...]] = []
    for turn in session.turns:
        before = found[-1] if found else ()
        found.append((*before[: turn.kept_blocks], *turn.new_block_ids))
    return found


def played(load: SessionLoad, seed: int) -> dict[tuple[int, int], Request]:
    """Answer every turn after a random time; return the requests by session and turn."""
    rng = np.random.default_rng(seed)
    run = load.run()
    ends: list[tuple[float, int, Request | None]] = [
        (one.time_s, one.session, None) for one in run.starts()
    ]
    heapq.heapify(ends)
    requests: dict[tuple[int, int], Request] = {}
    turns: dict[int, int] = {}
    while ends:
        now_s, session, ended = heapq.heappop(ends)
        if ended is None:
            request = run.send(session, len(requests), now_s)
            requests[session, turns.setdefault(session, 0)] = request
            turns[session] += 1
            # A session has one turn under way, so that requests, without order, never compare.
            heapq.heappush(ends, (now_s + rng.exponential(3.0), session, request))
        elif (following := run.after(ended, now_s, answered=True)) is not None:
            heapq.heappush(ends, (following.time_s, following.session, None))
    assert run.over
    return requests


# --- what a session is --------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 64), st.integers(0, 900))
def test_a_context_holds_all_that_was_said(seed: int, block_tokens: int, prefix: int) -> None:
    source = drawn(seed=seed, count=4, block_tokens=block_tokens, shared_prefix_tokens=prefix)
    for session in source:
        ids = ids_of(session)
        assert session.turns[0].input_tokens > prefix
        for before, after in pairwise(session.turns):
            assert after.input_tokens > before.input_tokens + before.output_tokens
        for turn, own in zip(session.turns, ids, strict=True):
            assert len(own) == (turn.input_tokens + turn.output_tokens) // block_tokens
            assert len(set(own)) == len(own)
        for earlier, later in pairwise(ids):
            assert later[: len(earlier)] == earlier


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 64))
def test_sessions_share_their_prefix_and_nothing_else(seed: int, block_tokens: int) -> None:
    sessions = [ids_of(one)[-1] for one in drawn(seed=seed, count=8, block_tokens=block_tokens)]
    shared = SPEC.shared_prefix_tokens // block_tokens
    assert 1 <= len({own[:shared] for own in sessions}) <= SPEC.shared_prefixes
    private = [block for own in sessions for block in own[shared:]]
    assert len(set(private)) == len(private)
    prefixes = {block for own in sessions for block in own[:shared]}
    assert not prefixes & set(private)


def test_an_id_has_one_place_and_one_beginning() -> None:
    behind: dict[int, tuple[int, ...]] = {}
    for session in drawn(count=40, rewrite_share=0.3, compact_at_tokens=1500):
        for ids in ids_of(session):
            for place, block in enumerate(ids):
                assert behind.setdefault(block, ids[:place]) == ids[:place]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000))
def test_a_context_beyond_the_limit_is_compacted_to_prefix_and_new_text(seed: int) -> None:
    limit, shared = 1500, SPEC.shared_prefix_tokens // 16
    for session in drawn(seed=seed, count=4, turns=Constant(12), compact_at_tokens=limit):
        ids = ids_of(session)
        for turn in session.turns:
            assert turn.input_tokens + turn.output_tokens <= limit
        for (before, old), (after, new) in pairwise(zip(session.turns, ids, strict=True)):
            grown = before.input_tokens + before.output_tokens
            if after.input_tokens > grown:
                assert new[: len(old)] == old
            else:
                assert after.input_tokens == SPEC.shared_prefix_tokens + 100
                assert new[:shared] == old[:shared]
                assert not set(new[shared:]) & set(old)
        lengths = [turn.input_tokens for turn in session.turns]
        assert lengths != sorted(lengths)  # twelve turns do not fit without


def test_rewritten_turns_keep_their_length_and_lose_their_ids() -> None:
    plain, rewritten = drawn(turns=Constant(9)), drawn(turns=Constant(9), rewrite_share=1.0)
    shared = SPEC.shared_prefix_tokens // 16
    for session, same in zip(rewritten, plain, strict=True):
        assert [one.input_tokens for one in session.turns] == [
            one.input_tokens for one in same.turns
        ]
        for old, new in pairwise(ids_of(session)):
            assert new[:shared] == old[:shared]
            assert not set(new[shared:]) & set(old)
    half = [
        turn.kept_blocks == shared
        for session in drawn(turns=Constant(9), count=300, rewrite_share=0.5)
        for turn in session.turns[1:]
    ]
    assert np.mean(half) == pytest.approx(0.5, abs=0.05)


def test_frequent_prefixes_are_as_frequent_as_zipf_says() -> None:
    source = drawn(count=2000, turns=Constant(1), shared_prefixes=4, zipf_exponent=1.0)
    firsts = [ids_of(session)[0][0] for session in source]
    counts = sorted((firsts.count(one) for one in set(firsts)), reverse=True)
    expected = 2000 * np.array([12, 6, 4, 3]) / 25
    assert counts == pytest.approx(expected, rel=0.15)


# --- draws --------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_sessions_every_time() -> None:
    source = drawn(rate_per_s=1.0)
    assert list(source) == list(source) == list(drawn(rate_per_s=1.0))
    assert list(source) != list(drawn(rate_per_s=1.0, seed=1))


def test_changing_one_quantity_leaves_the_others() -> None:
    changed = drawn(output_tokens=Constant(5), think_time=ConstantDuration(1.0))
    for session, other in zip(drawn(), changed, strict=True):
        news = [
            [b.input_tokens - a.input_tokens - a.output_tokens for a, b in pairwise(one.turns)]
            for one in (session, other)
        ]
        assert news[0] == news[1]
        assert session.turns[0].input_tokens == other.turns[0].input_tokens


def test_a_session_does_not_depend_on_how_many_there_are() -> None:
    assert list(drawn(count=30))[:10] == list(drawn(count=10))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 100), st.sampled_from([None, 1, 4, 50]))
def test_when_answers_come_changes_no_request(seed: int, concurrency: int | None) -> None:
    rate_per_s = 0.5 if concurrency is None else None
    load = SessionLoad(drawn(rate_per_s=rate_per_s), concurrency)
    plain = played(load, 0)
    other = played(load, seed)
    assert plain.keys() == other.keys()
    assert len(plain) == sum(len(session.turns) for session in load.sessions)
    for key, request in plain.items():
        assert request.block_ids == other[key].block_ids
        assert request.input_tokens == other[key].input_tokens
        assert request.output_tokens == other[key].output_tokens


# --- through the engine -------------------------------------------------------------------------


class NotedRun(SessionRun):
    """A run that notes whose turn each request was."""

    def __init__(self, load: SessionLoad) -> None:
        super().__init__(load)
        self.session_of: dict[int, int] = {}

    def send(self, number: int, request_id: int, now_s: float) -> Request:
        self.session_of[request_id] = number
        return super().send(number, request_id, now_s)


@dataclass(frozen=True, slots=True)
class NotedLoad(SessionLoad):
    """A load that can be asked for its runs."""

    runs: list[NotedRun] = field(default_factory=list)

    def run(self) -> NotedRun:
        self.runs.append(NotedRun(self))
        return self.runs[-1]


def turns_in_order(
    load: SessionLoad, deployment: Deployment
) -> dict[int, list[tuple[float, float]]]:
    """Run a load; return arrival and end of every turn by session."""
    noted = NotedLoad(load.sessions, load.concurrency)
    result = simulate(deployment, noted)
    assert result.pages_left == 0
    session_of = noted.runs[-1].session_of
    spans: dict[int, list[tuple[float, float]]] = {}
    frame = result.records.frame()
    for number, *span in zip(frame["id"], frame["arrival_s"], frame["finish_s"], strict=True):
        spans.setdefault(session_of[number], []).append((span[0], span[1]))
    return spans


@pytest.mark.parametrize("deployment", [colocated(), disaggregated(2, 2)], ids=["serve", "split"])
@pytest.mark.parametrize("concurrency", [None, 5])
def test_a_turn_comes_a_think_time_after_the_answer(
    deployment: Deployment, concurrency: int | None
) -> None:
    source = drawn(rate_per_s=None if concurrency else 2.0)
    spans = turns_in_order(SessionLoad(source, concurrency), deployment)
    for session in source:
        turns = spans[session.number]
        assert len(turns) == len(session.turns)
        for (_, finish_s), (arrival_s, _), turn in zip(
            turns, turns[1:], session.turns[1:], strict=False
        ):
            assert arrival_s - finish_s == pytest.approx(turn.think_s, abs=2 * TICK_S)
        if concurrency is None:
            assert turns[0][0] == pytest.approx(session.start_s, abs=2 * TICK_S)


def test_no_more_sessions_than_users_are_under_way() -> None:
    source = drawn(count=40)
    spans = turns_in_order(SessionLoad(source, concurrency=6), colocated())
    assert len(spans) == 40
    events = [(turns[0][0], 1) for turns in spans.values()]
    events += [(turns[-1][1], -1) for turns in spans.values()]
    under_way = np.cumsum([change for _, change in sorted(events)])
    assert under_way.max() == 6
    # One that ends makes room for the next: until the last ones begin, six users have one each.
    starts_s = sorted(turns[0][0] for turns in spans.values())
    ends_s = sorted(turns[-1][1] for turns in spans.values())
    for start_s, end_s, session in zip(starts_s[6:], ends_s, list(source)[6:], strict=False):
        assert start_s >= end_s - 2 * TICK_S
        assert session.turns[0].think_s >= 0.0


def test_the_engine_offers_the_same_requests_whatever_its_speed() -> None:
    load = SessionLoad(drawn(rate_per_s=1.0))
    frames = [
        simulate(deployment, load).records.frame()
        for deployment in (colocated(), disaggregated(3, 1))
    ]
    sizes = [sorted(zip(one.input_tokens, one.output_tokens, strict=True)) for one in frames]
    assert sizes[0] == sizes[1]
    for frame in frames:
        assert frame["arrival_s"].is_monotonic_increasing  # ids are in order of arrival


def test_a_turn_that_is_given_up_ends_its_session() -> None:
    source = drawn(turns=Constant(5))
    result = simulate(colocated(), SessionLoad(source, concurrency=4, timeout_s=0.05))
    frame = result.records.frame()
    gone = frame["status"] == "timed_out"
    assert gone.any()
    assert (frame["status"] == "completed").sum() + gone.sum() == len(frame)
    assert len(frame) < 5 * 30
    assert result.pages_left == 0


def test_a_turn_that_no_instance_holds_ends_its_session() -> None:
    source = drawn(turns=Constant(9), first_input_tokens=Constant(100))
    result = simulate(colocated(kv_tokens=1500), SessionLoad(source, concurrency=4))
    frame = result.records.frame()
    rejected = frame["status"] == "rejected"
    assert rejected.sum() == 30  # each of them grows beyond what is held
    assert frame.loc[rejected, "input_tokens"].min() > 1500 - 60


# --- recorded -----------------------------------------------------------------------------------


def test_recorded_sessions_say_what_they_said_and_share_no_ids() -> None:
    path = TRACES / "agentic_sample.csv.gz"
    source = RecordedSessions(SessionTrace(path, 20), None, np.random.SeedSequence(3))
    known = {
        tuple((turn.input_tokens, turn.output_tokens, turn.think_s or 0.0) for turn in one.turns)
        for one in read_sessions(path)
    }
    seen: set[int] = set()
    for session in source:
        asked = tuple((t.input_tokens, t.output_tokens, t.think_s) for t in session.turns)
        assert asked in known
        own = {block for ids in ids_of(session) for block in ids}
        assert not own & seen
        seen |= own
    assert list(source) == list(source)
    other = RecordedSessions(SessionTrace(path, 20), None, np.random.SeedSequence(4))
    assert list(source) != list(other)


def test_more_sessions_than_are_recorded() -> None:
    trace = SessionTrace(TRACES / "agentic_0002.json.gz", 2)
    source = RecordedSessions(trace, None, np.random.SeedSequence(0))
    with pytest.raises(BadInputError, match=r"holds 1 sessions, not 2; lower traffic\.session"):
        list(source)


# --- from a specification -----------------------------------------------------------------------


def test_a_point_of_sessions_is_a_rate_or_a_number() -> None:
    traffic = TrafficSpec(kind="sessions", concurrency=(4, 8), sessions=SPEC)
    users = [build_load(traffic, point, 0) for point in traffic.points()]
    assert all(isinstance(load, SessionLoad) for load in users)
    assert [load.concurrency for load in users if isinstance(load, SessionLoad)] == [4, 8]
    by_rate = TrafficSpec(kind="sessions", rates_per_s=(0.5, 1.0), sessions=SPEC)
    slow, fast = (build_load(by_rate, point, 0) for point in by_rate.points())
    assert isinstance(slow, SessionLoad)
    assert isinstance(fast, SessionLoad)
    for one, other in zip(slow.sessions, fast.sessions, strict=True):
        assert one.turns == other.turns
        assert one.start_s == pytest.approx(2.0 * other.start_s)
    for point, expected in ((LoadPoint(), r"traffic\.concurrency"), (LoadPoint(1), "session")):
        spec = by_rate if "conc" in expected else TrafficSpec(kind="sessions")
        with pytest.raises(BadInputError, match=expected):
            build_load(spec, point, 0)


def test_totals_are_those_of_a_draw() -> None:
    traffic = TrafficSpec(kind="sessions", concurrency=(4,), sessions=SPEC)
    requests, tokens = session_totals(traffic)
    load = build_load(traffic, traffic.points()[0], 0)
    assert isinstance(load, SessionLoad)
    sizes = [t.input_tokens + t.output_tokens - 1 for one in load.sessions for t in one.turns]
    assert requests == len(sizes)
    assert tokens == pytest.approx(np.mean(sizes))


def test_clients_may_allow_more_than_they_get() -> None:
    run = SessionLoad(drawn(output_tokens=Uniform(1, 5)), 1, output_limit_tokens=400).run()
    due = next(run.starts())
    assert run.send(due.session, 0, due.time_s).max_new_tokens == 400
