"""What a load asks of a fleet, as arrays that a closed form can use: lengths, reuse, pace."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from tonnage.sim.domain import BadInputError, FloatArray, Request
from tonnage.sim.traffic.build import build_load, build_sessions
from tonnage.sim.traffic.loads import ClosedLoad, OpenLoad
from tonnage.sim.traffic.sessions import Session
from tonnage.sim.traffic.spec import LoadPoint, TrafficSpec

_MOST_READ = 20_000  # requests of a trace
_MOST_SESSIONS = 200
_TAIL_FROM = 0.9  # of the requests, by tokens to compute


@dataclass(frozen=True, slots=True)
class Workload:
    """A sample of requests `[requests]`, as likely as their `weights`, and how fast they come.

    `cached_tokens`: what a cache without end would hold of the prompt. `reuse_s`: from the answer
    to the next request that begins with this one's tokens, infinite where there is none. Requests
    come at `rate_per_s`, or from `users` who pause `think_s` on average between answer and request.
    `whole`: what it is a sample of, where it is one: answers and contexts are taken from there, as
    a few requests that stand for all prompts may miss the long answers.
    """

    input_tokens: FloatArray
    cached_tokens: FloatArray
    output_tokens: FloatArray
    reuse_s: FloatArray
    rate_per_s: float | None = None
    users: int | None = None
    think_s: float = 0.0
    arrival_variation: float = 1.0  # squared coefficient of the gaps between arrivals
    weights: FloatArray | None = None  # that sum to 1; None: all alike
    whole: Workload | None = None

    @property
    def all(self) -> Workload:
        """All requests that are known, sampled or not."""
        return self.whole or self

    def mean(self, values: FloatArray) -> float:
        """Return the mean of a figure of the requests."""
        if self.weights is None:
            return float(np.mean(values))
        return float(self.weights @ values)

    @property
    def mean_output_tokens(self) -> float:
        """Mean tokens of an answer."""
        return self.all.mean(self.all.output_tokens)

    @property
    def mean_input_tokens(self) -> float:
        """Mean tokens of a prompt."""
        return self.all.mean(self.all.input_tokens)

    def quantile(self, values: FloatArray, share: float) -> float:
        """Return the value that so large a share of the requests stays below."""
        order = np.argsort(values)
        weights = np.ones(len(values)) if self.weights is None else self.weights
        below = np.cumsum(weights[order]) / weights.sum()
        return float(values[order][min(int(np.searchsorted(below, share)), len(values) - 1)])

    @property
    def decode_context_tokens(self) -> float:
        """Mean context that a decode step reads of one request: long answers are there longer."""
        every = self.all
        contexts = every.input_tokens + every.output_tokens / 2
        return every.mean(contexts * every.output_tokens) / self.mean_output_tokens

    @property
    def held_tokens(self) -> float:
        """Mean tokens of a request when it ends, each weighted by how long it decodes."""
        every = self.all
        held = every.input_tokens + every.output_tokens
        return every.mean(held * every.output_tokens) / self.mean_output_tokens

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request."""
        return int((self.all.input_tokens + self.all.output_tokens).max())

    @property
    def decode_steps(self) -> float:
        """Mean tokens of a request after its first."""
        return self.all.mean(np.maximum(self.all.output_tokens - 1, 0))

    def scaled(self, factor: float) -> Workload:
        """Return so many times the load: of users, or of requests that come as much faster."""
        if self.users is not None:
            return replace(self, users=max(1, math.ceil(self.users * factor - 1e-9)))
        assert self.rate_per_s is not None
        return replace(self, rate_per_s=self.rate_per_s * factor, reuse_s=self.reuse_s / factor)

    def lengthened(self, factor: float) -> Workload:
        """Return requests so many times as long, prompts and answers."""
        whole = None if self.whole is None else self.whole.lengthened(factor)
        inputs = np.maximum(np.round(self.input_tokens * factor), 1)
        return replace(
            self,
            input_tokens=inputs,
            cached_tokens=np.minimum(np.round(self.cached_tokens * factor), inputs - 1),
            output_tokens=np.maximum(np.round(self.output_tokens * factor), 1),
            whole=whole,
        )

    def with_hits(self, share: float) -> Workload:
        """Return requests of whose repeated tokens a cache without end would hold that share."""
        whole = None if self.whole is None else self.whole.with_hits(share)
        return replace(self, cached_tokens=np.round(self.cached_tokens * share), whole=whole)

    def sampled(self, count: int, seed: int) -> Workload:
        """Return at most `count` of the requests: one of every stratum by the tokens to compute.

        The strata get narrower towards the longest: few prompts make most of the waiting.
        """
        size = len(self.input_tokens)
        if size <= count:
            return self
        body = np.linspace(0.0, _TAIL_FROM, count - count // 3, endpoint=False)
        tail = 1.0 - (1.0 - _TAIL_FROM) * np.geomspace(1.0, 1.0 / size, count // 3, endpoint=False)
        edges = np.unique((np.concatenate([body, tail, [1.0]]) * size).astype(np.int64))
        order = np.argsort(self.input_tokens - self.cached_tokens, kind="stable")
        rng = np.random.default_rng(seed)
        chosen = order[rng.integers(edges[:-1], edges[1:])]
        return replace(
            self,
            input_tokens=self.input_tokens[chosen],
            cached_tokens=self.cached_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            reuse_s=self.reuse_s[chosen],
            weights=np.diff(edges) / size,
            whole=self,
        )


def workload_of(traffic: TrafficSpec, point: LoadPoint, seed: int) -> Workload:
    """Return the workload of one point; sessions at a rate are as many users by Little's law.

    Raises BadInputError for resident requests, which never arrive.
    """
    if traffic.kind == "resident":
        raise BadInputError(
            "traffic.kind: resident requests never arrive, so no fleet can be planned for them; "
            "use closed, poisson, gamma, trace or sessions"
        )
    if traffic.kind == "sessions":
        sessions = islice(build_sessions(traffic, point, seed), _MOST_SESSIONS)
        return of_sessions(list(sessions), point)
    load = build_load(traffic, point, seed)
    if isinstance(load, ClosedLoad):
        pairs = [(one.input_tokens, one.output_tokens) for one in islice(load.lengths, _MOST_READ)]
        inputs, outputs = np.asarray(pairs, dtype=np.float64).T
        return _unshared(inputs, outputs, users=point.concurrency)
    assert isinstance(load, OpenLoad)
    variation = traffic.coefficient_of_variation**2 if traffic.kind == "gamma" else 1.0
    return of_requests(islice(load.requests, _MOST_READ), point.rate_per_s, variation)


def _unshared(inputs: FloatArray, outputs: FloatArray, users: int | None) -> Workload:
    never = np.full(len(inputs), np.inf)
    return Workload(inputs, np.zeros(len(inputs)), outputs, never, users=users)


def of_requests(
    requests: Iterable[Request], rate_per_s: float | None, variation: float = 1.0
) -> Workload:
    """Return the workload of requests in order of arrival; no rate: their own mean rate."""
    inputs, cached, outputs = [], [], []
    arrivals_s: list[float] = []
    reuse_s: list[float] = []
    last_user: dict[int, int] = {}  # of a block: the request that read it last
    for number, request in enumerate(requests):
        known = _known_blocks(request.block_ids, last_user)
        if known:
            owner = last_user[request.block_ids[known - 1]]
            reuse_s[owner] = min(reuse_s[owner], request.arrival_s - arrivals_s[owner])
        inputs.append(request.input_tokens)
        cached.append(min(known * request.block_tokens, request.input_tokens - 1))
        outputs.append(request.output_tokens)
        arrivals_s.append(request.arrival_s)
        reuse_s.append(np.inf)
        last_user.update(dict.fromkeys(request.block_ids, number))
    span_s = arrivals_s[-1] - arrivals_s[0] if arrivals_s else 0.0
    if rate_per_s is None:
        if not span_s > 0:
            raise BadInputError("traffic: all requests arrive at once; nothing says at which rate")
        rate_per_s = (len(arrivals_s) - 1) / span_s
    return Workload(
        np.asarray(inputs, dtype=np.float64),
        np.asarray(cached, dtype=np.float64),
        np.asarray(outputs, dtype=np.float64),
        np.asarray(reuse_s, dtype=np.float64),
        rate_per_s=rate_per_s,
        arrival_variation=variation,
    )


def _known_blocks(ids: tuple[int, ...], last_user: dict[int, int]) -> int:
    """Return how many of the first blocks somebody has read before."""
    for index, one in enumerate(ids):
        if one not in last_user:
            return index
    return len(ids)


def of_sessions(sessions: list[Session], point: LoadPoint) -> Workload:
    """Return the workload of users in the middle of such sessions."""
    inputs, cached, outputs, reuse_s, thinks_s = [], [], [], [], []
    seen: set[int] = set()
    for session in sessions:
        for index, turn in enumerate(session.turns):
            known = turn.kept_blocks if index else 0
            for one in turn.new_block_ids if known == turn.kept_blocks else ():
                if one not in seen:
                    break
                known += 1
            seen.update(turn.new_block_ids)
            inputs.append(turn.input_tokens)
            cached.append(max(0, min(known * session.block_tokens, turn.input_tokens - 1)))
            outputs.append(turn.output_tokens)
            thinks_s.append(turn.think_s)
            following = session.turns[index + 1 :][:1]
            reuse_s.append(following[0].think_s if following else np.inf)
    users = point.concurrency
    if users is None:
        assert point.rate_per_s is not None
        users = max(1, round(point.rate_per_s * sum(thinks_s) / len(sessions)))
    return Workload(
        np.asarray(inputs, dtype=np.float64),
        np.asarray(cached, dtype=np.float64),
        np.asarray(outputs, dtype=np.float64),
        np.asarray(reuse_s, dtype=np.float64),
        users=users,
        think_s=float(np.mean(thinks_s)),
    )
