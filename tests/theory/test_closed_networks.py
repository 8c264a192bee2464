"""Users who go round between prefill and decode, against mean value analysis and Little's law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.sim.engine.harness import AffineTimes, colocated, disaggregated
from tests.theory.queueing import Observation, Station, agrees, mean_value_analysis

from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.records import Records
from tonnage.sim.traffic.loads import ClosedLoad, Lengths

USERS = 8
REQUESTS = 800
PROMPT_TOKENS = 1000  # on average, exponential
PREFILL_S = 0.5
STEPS = 200  # of decoding, on average, exponential
HANDOFF_S = 1e-4  # what the links of the harness take before the first byte


def network(decode_slots: int, decode_s: float, slower: float) -> Deployment:
    """Return a prefill pool that serves one prompt at a time and a decode pool with some slots.

    A decode step takes the same time however many requests it serves. The harness gives both pools
    the same limits, so each is taken from a deployment of its own.
    """
    ample = {"kv_tokens": 10**8, "chunk_tokens": 10**8, "bandwidth_bytes_per_s": 1e18}
    prefill_times = AffineTimes(0.0, 0.0, 0.0, slower * PREFILL_S / PROMPT_TOKENS)
    decode_times = AffineTimes(decode_s / STEPS, 0.0, 0.0, 0.0)
    prefill = disaggregated(times=prefill_times, running=1, **ample)
    decode = disaggregated(times=decode_times, running=decode_slots, **ample)
    pools = {"prefill": prefill.pools["prefill"], "decode": decode.pools["decode"]}
    return replace(decode, pools=pools)


def lengths(seed: int) -> list[Lengths]:
    """Return prompts and outputs; the first token comes with the KV, before the decode steps."""
    rng = np.random.default_rng(seed)
    prompts = rng.geometric(1 / PROMPT_TOKENS, REQUESTS).tolist()
    steps = rng.geometric(1 / STEPS, REQUESTS).tolist()
    return [Lengths(prompt, 1 + count) for prompt, count in zip(prompts, steps, strict=True)]


def steady_throughput_per_s(records: Records, users: int) -> float:
    """Return requests per second between the first round of the users and the last arrival."""
    finish_s = np.sort(records.times("finish_s"))
    from_s, to_s = float(finish_s[users]), float(records.times("arrival_s").max())
    return float(((finish_s > from_s) & (finish_s <= to_s)).sum()) / (to_s - from_s)


@pytest.mark.parametrize(("slower", "agreement"), [(1.0, True), (1.05, False)])
@pytest.mark.parametrize("decode_slots", [USERS, 3])
def test_throughput_is_that_of_mean_value_analysis(
    decode_slots: int, slower: float, agreement: bool
) -> None:
    """With a slot for everyone decoding is a delay, with fewer a queue with several servers.

    A request joins the batch with its next step, on average half a step late: 0.25 % of the time
    that it decodes, less of a round. The interval is some 2 % wide.
    """
    decode_s = 1.5 if decode_slots == USERS else 0.9
    deployment = network(decode_slots, decode_s, slower)
    servers = None if decode_slots == USERS else decode_slots
    stations = [Station(PREFILL_S), Station(HANDOFF_S, None), Station(decode_s, servers)]

    def run(seed: int) -> Observation:
        load = ClosedLoad(USERS, drawn := lengths(seed))
        found = steady_throughput_per_s(simulate(deployment, load).records, USERS)
        missed = np.mean([one.input_tokens for one in drawn]) / PROMPT_TOKENS - 1
        return Observation(found, float(missed))

    theory = mean_value_analysis(stations, USERS).throughput_per_s
    assert agrees(run, theory) == agreement


def test_littles_law_holds_in_a_closed_load() -> None:
    """users = throughput x mean time in the system, when everyone is always in it."""
    users = 12
    load = ClosedLoad(users, [Lengths(100, 20)] * 6000)
    run = simulate(colocated(2), load)
    through_per_s = len(run.records) / run.makespan_s
    assert through_per_s * run.records.e2e_s().mean() == pytest.approx(users, rel=0.01)
