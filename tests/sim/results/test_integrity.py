"""The `integrity` object of a point, from runs of small deployments."""

from __future__ import annotations

from dataclasses import replace

from tests.sim.engine.harness import AffineTimes, disaggregated

from tonnage.sim.domain import Coverage, IntegritySpec, Request
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.integrity import WatchedPool, integrity_figures
from tonnage.sim.results.run import RunResult
from tonnage.sim.serving.data_faults import FaultClass, FaultSpec
from tonnage.sim.traffic.loads import OpenLoad

REQUESTS = [Request(number, 0.5 * number, 10, 4) for number in range(6)]
TAGS = IntegritySpec("batched")


def run_of(spec: IntegritySpec, *faults: FaultSpec) -> RunResult:
    """Run six requests one after the other, on pages of 4 tokens."""
    base = disaggregated(times=AffineTimes(), kv_tokens=400, page_tokens=4)
    pools = {
        role: replace(plan, scheduling=replace(plan.scheduling, integrity=spec))
        for role, plan in base.pools.items()
    }
    deployment: Deployment = replace(base, pools=pools, faults=faults)
    return simulate(deployment, OpenLoad(REQUESTS))


def watched(spec: IntegritySpec) -> dict[str, WatchedPool]:
    return {role: WatchedPool(spec, 4, 100, 1) for role in ("prefill", "decode")}


def test_nothing_watched_is_all_zeros() -> None:
    figures = integrity_figures(run_of(IntegritySpec()), watched(IntegritySpec()))
    assert figures == {"checks": 0, "detected": 0, "aborted": 0, "wrong_reads": 0}


def test_entries_by_hand() -> None:
    """A prompt of 10 on 3 pages, written once; sent, with its sender's compared twice; 3 steps.

    The steps read 11, 12 and 13 tokens, on 3, 3 and 4 pages, and write a token each.
    """
    by_place = {
        Coverage.DECODE: (3 + 3 + 4, 3),
        Coverage.PREFIX: (0, 0),
        Coverage.WRITER: (3 + 3, 1 + 3),
        Coverage.HANDOFF: (3 + 3 + 3, 3),
    }
    for place, (entries, runs) in by_place.items():
        spec = replace(TAGS, covers=frozenset({place}))
        figures = integrity_figures(run_of(spec), watched(spec))
        assert (figures["checks"], figures["check_runs"]) == (6 * entries, 6 * runs)
    everywhere = integrity_figures(run_of(TAGS), watched(TAGS))
    assert everywhere["checks"] == 6 * (10 + 0 + 6 + 9)
    assert everywhere["tag_wrap_log10_chance"] < -1e9


def test_what_faults_did_is_told() -> None:
    scale = FaultSpec(FaultClass.WRONG_SCALE, "decode", at_s=(1.02,))
    figures = integrity_figures(run_of(TAGS, scale), watched(TAGS))
    assert figures["injected"] == {"wrong_scale": 1}
    assert (figures["wrong_reads"], figures["victims"], figures["detected"]) == (1, 1, 0)
