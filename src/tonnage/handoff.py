"""The handoff between two pools: bytes on the wire, conversions, ports, and what is assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tonnage.scenarios.schema import Scenario
from tonnage.sim.cost.check_prices import check_prices
from tonnage.sim.cost.handoff_checks import SideChecks
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.domain import GpuSpec, IntegritySpec, LinkSpec, ModelSpec, ParallelLayout
from tonnage.sim.engine.handoff import Handoff
from tonnage.sim.model.kv import KvShape, stage_kv_shapes

TokensTo = Callable[[int], float]
_NOT_WATCHED = IntegritySpec()
_LONG_TOKENS = 8192  # at which layouts are compared: what stops growing weighs little by then


@dataclass(frozen=True, slots=True)
class Terms:
    """What a scenario says of a handoff."""

    link: LinkSpec
    engine: str
    sends_early: bool
    sender_converts: bool

    @classmethod
    def of(cls, scenario: Scenario) -> Terms:
        """Take them from a scenario; raises BadInputError if the link's rate is not known."""
        return cls(
            scenario.link_spec(),
            scenario.engine_spec().name,
            scenario.sends_early(),
            scenario.link.convert == "sender",
        )


@dataclass(frozen=True, slots=True)
class End:
    """One of the two pools, as far as KV goes."""

    model: ModelSpec
    layout: ParallelLayout
    kv_format: str
    gpu: GpuSpec
    integrity: IntegritySpec = _NOT_WATCHED
    page_tokens: int = 1

    def shapes(self, kv_format: str, engine: str) -> list[KvShape]:
        """Return what the GPUs of each stage hold, were the KV in some format."""
        return stage_kv_shapes(self.model, self.layout, kv_format, engine)

    def held_bytes(self, shapes: list[KvShape]) -> float:
        """Return the bytes of a long prompt on all GPUs that serve it."""
        per_rank = sum(float(shape.request_bytes(_LONG_TOKENS)) for shape in shapes)
        return per_rank * self.layout.attention_tp


def handoff_of(terms: Terms, prefill: End, decode: End) -> Handoff:
    """Return how KV gets from one pool to the other.

    Every GPU sends an equal share of what the receiving GPUs must hold; replicated KV (MLA under
    TP) so crosses the wire once per GPU that holds it. A conversion reads the KV in one format and
    writes it in the other, at the datasheet's memory bandwidth; the steps beside it go on as fast.
    """
    wire_kv = decode.kv_format if terms.sender_converts else prefill.kv_format
    sent = prefill.shapes(wire_kv, terms.engine)
    received = decode.shapes(wire_kv, terms.engine)
    copies = decode.held_bytes(received) / prefill.held_bytes(sent)
    wire_bytes = _scaled(copies, wire_bytes_per_gpu(sent))
    received_bytes = wire_bytes_per_gpu(received)
    convert_s: TokensTo = _no_time
    if prefill.kv_format != decode.kv_format:
        end = prefill if terms.sender_converts else decode
        share = min(copies, 1.0) if terms.sender_converts else 1.0
        convert_s = _convert_s(end, (prefill.kv_format, decode.kv_format), terms.engine, share)
    handoff = Handoff(
        terms.link,
        wire_bytes,
        early_bytes=_scaled(copies, _growing_bytes_per_gpu(sent)),
        overlap=terms.sends_early,
        sender_convert_s=convert_s if terms.sender_converts else _no_time,
        receiver_convert_s=_no_time if terms.sender_converts else convert_s,
        receiver_share=received_bytes(_LONG_TOKENS) / wire_bytes(_LONG_TOKENS),
        sender_ranks=prefill.layout.attention_dp,
        receiver_ranks=decode.layout.attention_dp,
    )
    sender, receiver = _side_checks(prefill, decode, wire_bytes, received_bytes)
    if not sender.is_nothing:
        handoff = replace(handoff, sender_check_s=sender)
    if not receiver.is_nothing:
        handoff = replace(handoff, receiver_check_s=receiver)
    return handoff


def _side_checks(
    prefill: End, decode: End, wire_bytes: TokensTo, received_bytes: TokensTo
) -> tuple[SideChecks, SideChecks]:
    """Return what each side checks of a prompt; one that asks for a checksum asks it of both."""
    summed = prefill.integrity.handoff_checksum or decode.integrity.handoff_checksum

    def side(end: End, moved_bytes: TokensTo, *, receives: bool) -> SideChecks:
        prices = check_prices(end.gpu, ways=end.layout.attention_tp)
        return SideChecks(end.integrity, end.page_tokens, moved_bytes, prices, receives, summed)

    return side(prefill, wire_bytes, receives=False), side(decode, received_bytes, receives=True)


def _no_time(_tokens: int) -> float:
    return 0.0


def _scaled(factor: float, bytes_of: TokensTo) -> TokensTo:
    return bytes_of if factor == 1.0 else lambda tokens: factor * bytes_of(tokens)


def wire_bytes_per_gpu(shapes: list[KvShape]) -> TokensTo:
    """Return the bytes that a GPU of the fullest stage holds of a prompt of so many tokens.

    As `KvShape.request_bytes` with pages of one token, for one number: it is asked per request.
    """

    def stage_bytes(shape: KvShape, tokens: int) -> float:
        windows = sum(min(tokens, window) * size for window, size in shape.windows)
        return tokens * shape.growing_bytes_per_token + windows + shape.state_bytes

    def wire_bytes(tokens: int) -> float:
        return max(stage_bytes(shape, tokens) for shape in shapes)

    return wire_bytes


def _growing_bytes_per_gpu(shapes: list[KvShape]) -> TokensTo:
    """Return the part of it that is final before the prompt is complete: no windows, no states."""
    per_token = max(shape.growing_bytes_per_token for shape in shapes)
    return lambda tokens: tokens * per_token


def _convert_s(end: End, formats: tuple[str, str], engine: str, share: float) -> TokensTo:
    """Return the time in which a GPU changes the format of its KV, or of a share of it."""
    moved = [wire_bytes_per_gpu(end.shapes(kv_format, engine)) for kv_format in formats]
    states_bytes = sum(bytes_of(0) for bytes_of in moved)  # have a format of their own
    s_per_byte = share / end.gpu.memory_bandwidth_bytes_per_s

    def convert_s(tokens: int) -> float:
        return (sum(bytes_of(tokens) for bytes_of in moved) - states_bytes) * s_per_byte

    return convert_s


def handoff_figures(handoff: Handoff, tokens: int) -> dict[str, Any]:
    """Return what the handoff of one prompt alone takes: bytes per GPU, seconds."""
    link, wire_bytes = handoff.link, handoff.wire_bytes(tokens)
    rates = [link.bandwidth_bytes_per_s]
    if link.receiver_bandwidth_bytes_per_s is not None:
        rates.append(link.receiver_bandwidth_bytes_per_s / handoff.receiver_share)
    figures: dict[str, Any] = {
        "kind": link.kind,
        "source": link.source,
        "overlap": handoff.overlap,
        "tokens": tokens,
        "wire_bytes_per_gpu": wire_bytes,
        "bandwidth_bytes_per_s_per_gpu": min(rates),
        "setup_s": link.setup_s,
        "wire_s": wire_bytes / min(rates),
        "sender_convert_s": handoff.sender_convert_s(tokens),
        "receiver_convert_s": handoff.receiver_convert_s(tokens),
    }
    checks = [*_check_rows(handoff, tokens)]
    return figures | {"checks": checks} if checks else figures


def _check_rows(handoff: Handoff, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield every item of what watches the KV on its way, of a prompt that leaves at once."""
    for side, check in (("sender", handoff.sender_check_s), ("receiver", handoff.receiver_check_s)):
        if isinstance(check, SideChecks):
            for one in check.items(tokens):
                yield {"side": side, **_time_row(one)}


def _time_row(one: OperatorTime) -> dict[str, Any]:
    return {
        "operator": one.name,
        "seconds": one.seconds,
        "interval_s": [one.low_s, one.high_s],
        "source": one.source,
    }


def handoff_assumptions(terms: Terms, prefill_kv: str, decode_kv: str) -> Iterator[str]:
    """Yield what is assumed of a handoff."""
    link = terms.link
    yield (
        f"handoff: {link.kind}, {link.bandwidth_bytes_per_s / 1e9:g} GB/s per sending GPU "
        f"({link.source}), shared max-min fairly at both ends; the fabric between is never full"
    )
    if prefill_kv != decode_kv:
        side = "sender" if terms.sender_converts else "receiver"
        yield (
            f"handoff: the {side} converts KV from {prefill_kv} to {decode_kv}, its bytes read and "
            "written at the memory bandwidth of the datasheet; stock SGLang and vLLM refuse mixed "
            "KV types"
        )
