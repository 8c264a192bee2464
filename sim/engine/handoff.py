"""The path of KV from prefill to decode instances: chunk by chunk, or all of a prompt at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tonnage.sim.domain import LinkSpec
from tonnage.sim.engine.clock import Clock, call_at, on_grid
from tonnage.sim.engine.network import Flow, Network, PortSpec
from tonnage.sim.serving.sequence import Sequence


def _nothing(_tokens: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the KV of so many tokens costs on its way, and when it may leave.

    `wire_bytes`: that one GPU of the sender sends for a prompt; `early_bytes`: those that may leave
    before the prompt is complete (all of them when not given). `overlap`: they leave with every
    chunk. `sender_convert_s`, `receiver_convert_s`: time to change the format of the KV, before it
    leaves and after it has arrived. `receiver_share`: bytes that one GPU of the receiver takes in
    per byte that one of the sender sends. `sender_ranks`, `receiver_ranks`: attention-DP ranks of
    an instance, whose GPUs send and receive different requests side by side. `sender_check_s`,
    `receiver_check_s`: time to check so many tokens, a part before it leaves, a prompt after it has
    arrived.
    """

    link: LinkSpec
    wire_bytes: Callable[[int], float]
    early_bytes: Callable[[int], float] | None = None
    overlap: bool = False
    sender_convert_s: Callable[[int], float] = _nothing
    receiver_convert_s: Callable[[int], float] = _nothing
    receiver_share: float = 1.0
    sender_ranks: int = 1
    receiver_ranks: int = 1
    sender_check_s: Callable[[int], float] = _nothing
    receiver_check_s: Callable[[int], float] = _nothing

    def network(self, env: Clock, senders: int, receivers: int) -> Network:
        """Return an idle network between so many instances."""
        link = self.link
        into_bytes_per_s = link.receiver_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s
        return Network(
            env,
            senders,
            receivers,
            PortSpec(link.bandwidth_bytes_per_s, self.sender_ranks),
            PortSpec(into_bytes_per_s, self.receiver_ranks, self.receiver_share),
        )


class _Transfer:
    """The KV of one prompt that has left so far."""

    __slots__ = ("flow", "sent_bytes", "sent_tokens")

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.sent_tokens = 0
        self.sent_bytes = 0.0


class Transfers:
    """All prompts whose KV is on its way, each a flow between its two instances.

    A part waits for its conversion, where the sender converts, for its check, and for the set-up of
    the link; then it shares the ports. What arrived is handed over after the receiver's conversion
    and check.
    """

    def __init__(
        self,
        env: Clock,
        handoff: Handoff,
        network: Network,
        on_arrival: Callable[[Sequence], None],
        on_ready: Callable[[Sequence], None],
    ) -> None:
        """`on_arrival`: the sender is done with a prompt; `on_ready`: the receiver can use it."""
        self._env = env
        self._handoff = handoff
        self._network = network
        self._on_arrival = on_arrival
        self._on_ready = on_ready
        self._early_bytes = handoff.early_bytes or handoff.wire_bytes
        self._under_way: dict[int, _Transfer] = {}  # by request

    def send_early(self, sequence: Sequence, tokens: int) -> None:
        """Send the KV of the first `tokens` tokens of a prompt that is not complete."""
        transfer = self._transfer_of(sequence)
        if tokens > transfer.sent_tokens:
            self._send(transfer, tokens, self._early_bytes(tokens) - transfer.sent_bytes)

    def send_rest(self, sequence: Sequence) -> None:
        """Send what has not left yet of a complete prompt; tell when all of it has arrived."""
        transfer = self._transfer_of(sequence)
        tokens = sequence.request.input_tokens
        self._send(transfer, tokens, self._handoff.wire_bytes(tokens) - transfer.sent_bytes)
        self._network.close(transfer.flow, lambda: self._arrived(sequence))

    def abandon(self, sequence: Sequence, then: Callable[[Sequence], None]) -> None:
        """Send no more of a prompt; call `then` when nothing of it is on its way any more."""
        transfer = self._under_way.pop(sequence.request.id, None)
        if transfer is None or transfer.flow.idle:
            then(sequence)
        else:
            self._network.close(transfer.flow, lambda: then(sequence))

    def cancel(self, sequence: Sequence) -> None:
        """Send no more of a prompt, and let nobody be told: one of its instances is down."""
        transfer = self._under_way.pop(sequence.request.id, None)
        if transfer is not None:
            self._network.cancel(transfer.flow)

    def _transfer_of(self, sequence: Sequence) -> _Transfer:
        transfer = self._under_way.get(sequence.request.id)
        if transfer is None:
            sender, receiver = sequence.prefill_instance, sequence.decode_instance
            assert sender is not None
            assert receiver is not None
            transfer = _Transfer(self._network.open(sender, receiver))
            self._under_way[sequence.request.id] = transfer
            sequence.transfer_start_s = self._env.now
        return transfer

    def _send(self, transfer: _Transfer, tokens: int, part_bytes: float) -> None:
        convert_s = self._handoff.sender_convert_s
        before_s = convert_s(tokens) - convert_s(transfer.sent_tokens)
        before_s += self._handoff.sender_check_s(tokens - transfer.sent_tokens)
        transfer.sent_tokens = tokens
        transfer.sent_bytes += part_bytes
        self._network.send(transfer.flow, part_bytes, before_s + self._handoff.link.setup_s)

    def _arrived(self, sequence: Sequence) -> None:
        del self._under_way[sequence.request.id]
        sequence.transfer_end_s = self._env.now
        self._on_arrival(sequence)
        tokens = sequence.request.input_tokens
        after_s = self._handoff.receiver_convert_s(tokens) + self._handoff.receiver_check_s(tokens)
        waiting_s = on_grid(after_s)
        if waiting_s:
            call_at(self._env, self._env.now + waiting_s, self._on_ready, sequence)
        else:
            self._on_ready(sequence)
