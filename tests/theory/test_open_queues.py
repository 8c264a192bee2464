"""Open loads through the engine with made-up step times, against queueing theory.

The mean service takes one second throughout. Every test also runs with a service that takes
5 % longer, 10 % for several servers, and must then disagree: it cannot pass for want of precision.
"""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from tests.sim.engine.harness import AffineTimes, colocated
from tests.theory.queueing import (
    Observation,
    agrees,
    erlang_c_wait_s,
    pollaczek_khinchine_wait_s,
)

from tonnage.sim.domain import FloatArray, IntArray, Request
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.traffic.loads import OpenLoad

AMPLE = 100_000_000  # tokens of KV and of a chunk: neither is ever short
WARM_UP = 0.1  # share of the requests that is left out, since the system starts empty; without the
# engine, the recursion of four servers over 2,000 such runs is then 0.2 % below theory (+- 0.8 %)
PROMPT_TOKENS = 1000  # on average
STEPS = 200  # of decoding, on average


def as_theory_or_slower(slower: float = 1.05) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("slower", "agreement"), [(1.0, True), (slower, False)], ids=["theory", "slower"]
    )


def gaps_s(seed: int, rate_per_s: float, count: int) -> FloatArray:
    return np.random.default_rng([seed, 1]).exponential(1 / rate_per_s, count)


def waits_s(load: list[Request], times: AffineTimes, slots: int) -> FloatArray:
    """Return the time from arrival to service `[requests]` on one instance."""
    deployment = colocated(
        times=times, running=slots, mixed=True, kv_tokens=AMPLE, chunk_tokens=AMPLE
    )
    frame = simulate(deployment, OpenLoad(load)).records.frame()
    return (frame["prefill_start_s"] - frame["arrival_s"]).to_numpy()


def observation(
    waits: FloatArray, gaps: FloatArray, services: FloatArray, load: float
) -> Observation:
    """Return the mean wait, and by how much the work drawn exceeds what arrives on average."""
    mean_wait_s = float(waits[round(WARM_UP * len(waits)) :].mean())
    servers_and_load = load * float(gaps.mean())
    return Observation(mean_wait_s, float(services.mean()) - servers_and_load)


# --- one server ---------------------------------------------------------------------------------
# One request at a time, served by its prefill alone: the service is the length of the prompt.
# Prompts are whole numbers of tokens, 1,000 on average: against a continuous distribution that
# changes the variance of the service by less than 0.1 %, and the mean wait by half of it.


def prompt_requests(gaps: FloatArray, prompts: IntArray) -> list[Request]:
    return [
        Request(number, arrival_s, tokens, 1)
        for number, (arrival_s, tokens) in enumerate(
            zip(np.cumsum(gaps).tolist(), prompts.tolist(), strict=True)
        )
    ]


def prefill_times(slower: float = 1.0) -> AffineTimes:
    return AffineTimes(0.0, 0.0, 0.0, slower / PROMPT_TOKENS)


def single_server(seed: int, load: float, prompts: IntArray, slower: float) -> Observation:
    gaps = gaps_s(seed, load, len(prompts))
    waits = waits_s(prompt_requests(gaps, prompts), prefill_times(slower), 1)
    return observation(waits, gaps, prompts / PROMPT_TOKENS, load)


@as_theory_or_slower()
@pytest.mark.parametrize("load", [0.5, 0.7])
def test_m_m_1(load: float, slower: float, agreement: bool) -> None:
    """Geometric prompts: exponential, in whole numbers."""

    def run(seed: int) -> Observation:
        prompts = np.random.default_rng(seed).geometric(1 / PROMPT_TOKENS, 2500)
        return single_server(seed, load, prompts, slower)

    assert agrees(run, pollaczek_khinchine_wait_s(load, 1.0, 1.0)) == agreement


@as_theory_or_slower()
@pytest.mark.parametrize("load", [0.3, 0.8])
def test_m_d_1(load: float, slower: float, agreement: bool) -> None:
    def run(seed: int) -> Observation:
        return single_server(seed, load, np.full(2000, PROMPT_TOKENS), slower)

    assert agrees(run, pollaczek_khinchine_wait_s(load, 1.0, 0.0)) == agreement


@as_theory_or_slower()
def test_m_g_1(slower: float, agreement: bool) -> None:
    load, shape = 0.6, 0.625
    variation = float(np.sqrt(np.expm1(shape**2)))

    def run(seed: int) -> Observation:
        rng = np.random.default_rng(seed)
        prompts = rng.lognormal(np.log(PROMPT_TOKENS) - shape**2 / 2, shape, 2500)
        return single_server(seed, load, np.rint(prompts).clip(1).astype(np.int64), slower)

    assert agrees(run, pollaczek_khinchine_wait_s(load, 1.0, variation)) == agreement


def test_every_wait_is_that_of_lindleys_recursion() -> None:
    """wait = max(0, wait before + service before - gap), request by request."""
    rng = np.random.default_rng(0)
    prompts, gaps = rng.geometric(1 / PROMPT_TOKENS, 2000), gaps_s(0, 0.9, 2000)
    expected = [0.0]
    for tokens, gap in zip(prompts[:-1], gaps[1:], strict=True):
        expected.append(max(0.0, expected[-1] + tokens / PROMPT_TOKENS - gap))
    waits = waits_s(prompt_requests(gaps, prompts), prefill_times(), 1)
    assert waits == pytest.approx(expected, abs=1e-6)  # times are rounded to the engine's grid


# --- several servers ----------------------------------------------------------------------------
# Slots of a batch are servers, for a step takes the same time however many requests decode, and a
# prompt, of one token, costs nothing beside it. A request is served for as many steps as it has
# tokens of output, geometric with a mean of 200. One that finds a free slot in a busy batch starts
# with the next step, half a step late on average: 0.25 % of the service, 1.4 % of the shortest mean
# wait here, a tenth of the half-width of its interval.


def output_requests(gaps: FloatArray, outputs: IntArray) -> list[Request]:
    return [
        Request(number, arrival_s, 1, tokens)
        for number, (arrival_s, tokens) in enumerate(
            zip(np.cumsum(gaps).tolist(), outputs.tolist(), strict=True)
        )
    ]


def decode_times(slower: float = 1.0) -> AffineTimes:
    return AffineTimes(slower / STEPS, 0.0, 0.0, 0.0)


@as_theory_or_slower(1.1)
@pytest.mark.parametrize("servers", [3])
def test_m_m_c(servers: int, slower: float, agreement: bool) -> None:
    load = 0.7

    def run(seed: int) -> Observation:
        outputs = np.random.default_rng(seed).geometric(1 / STEPS, 1600)
        gaps = gaps_s(seed, servers * load, len(outputs))
        waits = waits_s(output_requests(gaps, outputs), decode_times(slower), servers)
        return observation(waits, gaps, outputs / STEPS, servers * load)

    assert agrees(run, erlang_c_wait_s(servers, load, 1.0)) == agreement


@pytest.mark.parametrize("servers", [2, 5])
def test_waits_for_slots_are_those_of_as_many_servers(servers: int) -> None:
    """First come, first served by the server that is free first, at most a step late."""
    rng = np.random.default_rng(0)
    outputs, gaps = rng.geometric(1 / STEPS, 2000), gaps_s(0, 0.9 * servers, 2000)
    free_s, expected = [0.0] * servers, []
    for arrival_s, tokens in zip(np.cumsum(gaps).tolist(), outputs.tolist(), strict=True):
        start_s = max(arrival_s, heapq.heappop(free_s))
        heapq.heappush(free_s, start_s + tokens / STEPS)
        expected.append(start_s - arrival_s)
    late_s = waits_s(output_requests(gaps, outputs), decode_times(), servers) - expected
    assert late_s.min() * STEPS >= -1e-6
    assert late_s.max() * STEPS <= 1 + 1e-6
