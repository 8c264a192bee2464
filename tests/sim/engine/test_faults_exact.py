"""Faults that free pages while the other instance plans: single steps and segments agree."""

from __future__ import annotations

import pytest

from tests.sim.engine.harness import disaggregated
from tests.sim.engine.test_data_faults import traffic, watched
from tonnage.sim.domain import IntegritySpec
from tonnage.sim.engine import disaggregated as fleets
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.serving.data_faults import FaultClass, FaultSpec
from tonnage.sim.serving.policy import VLLM
from tonnage.sim.traffic.loads import OpenLoad

SEED = 174


def deployment() -> Deployment:
    """Return a decode instance that asks for a prompt which its sender must not let go.

    vLLM's rules: it has given pages to the prompt, and takes them back while it plans.
    """
    small = disaggregated(
        kv_tokens=160,
        page_tokens=4,
        chunk_tokens=32,
        running=12,
        policy=VLLM,
        bandwidth_bytes_per_s=2e7,
    )
    faults = (
        FaultSpec(FaultClass.EARLY_REUSE, "prefill", per_allocation=0.05, layers=4),
        FaultSpec(FaultClass.LATE_WRITER, "prefill", per_allocation=0.05, layers=4),
        FaultSpec(FaultClass.CORRUPTED_TRANSFER, "decode", per_step=0.02, layers=4),
    )
    return watched(small, IntegritySpec("batched", handoff_checksum=True), *faults)


def agrees() -> bool:
    load = OpenLoad(traffic(24, SEED))
    runs = [simulate(deployment(), load, seed=SEED, exact=exact) for exact in (False, True)]
    frames = [run.records.frame() for run in runs]
    assert any(frames[0]["status"] == "aborted")
    return frames[0].equals(frames[1]) and runs[0].busy_s == runs[1].busy_s


def test_pages_that_come_back_while_an_instance_plans_are_seen_at_the_next_step() -> None:
    assert agrees()


def test_without_being_told_a_segment_would_not_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    real = fleets.call_at

    def deaf(env: object, time_s: float, call: object, argument: object) -> None:
        if call is not fleets.Instance.notify:
            real(env, time_s, call, argument)  # type: ignore[arg-type]

    monkeypatch.setattr(fleets, "call_at", deaf)
    assert not agrees()
