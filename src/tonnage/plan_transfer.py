"""The way of a prompt's KV between two pool configurations, in figures for the screening."""

from __future__ import annotations

from tonnage.handoff import End, Terms, handoff_of
from tonnage.pools import BuiltPool
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import GpuSpec
from tonnage.sim.planning.candidates import PairTransfer
from tonnage.sim.planning.workload import Workload


def pair_transfer(
    scenario: Scenario, workload: Workload, sender: BuiltPool, receiver: BuiltPool
) -> PairTransfer:
    """Return how the KV of a prompt gets from one pool to the other, all of it at the end."""
    terms = _terms(scenario, sender.gpu, receiver.gpu)
    handoff = handoff_of(terms, _end(sender), _end(receiver))
    tokens = max(1, round(workload.mean_input_tokens))
    link = terms.link
    rates = [link.bandwidth_bytes_per_s]
    if link.receiver_bandwidth_bytes_per_s is not None:
        rates.append(link.receiver_bandwidth_bytes_per_s / handoff.receiver_share)
    convert_s = handoff.sender_convert_s(tokens) + handoff.receiver_convert_s(tokens)
    return PairTransfer(
        bytes_per_token=handoff.wire_bytes(tokens) / tokens,
        bandwidth_bytes_per_s=min(rates),
        fixed_s=link.setup_s,
        convert_s_per_token=convert_s / tokens,
        tail_tokens=None,
    )


def _terms(scenario: Scenario, sender: GpuSpec, receiver: GpuSpec) -> Terms:
    return Terms(
        scenario.link.spec(sender, receiver),
        scenario.engine_spec().name,
        scenario.sends_early(),
        scenario.link.convert == "sender",
    )


def _end(pool: BuiltPool) -> End:
    spec = pool.spec
    return End(pool.model, spec.layout, spec.kv_format, pool.gpu, spec.integrity, spec.page_tokens)
