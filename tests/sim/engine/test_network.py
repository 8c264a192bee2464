"""Bytes on the clock: flows that share ports, by hand and against a fluid."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.sim.engine.clock import Clock, call_at, on_grid
from tonnage.sim.engine.network import Flow, Network, PortSpec
from tonnage.sim.serving.fair_share import Demand, max_min_rates

GB = 1e9
ROUNDING = 1e-9


class Wire:
    """A network whose flows are started by time and watched until they end."""

    def __init__(self, sending: PortSpec, receiving: PortSpec, ends: int = 3) -> None:
        self.env = Clock()
        self.network = Network(self.env, ends, ends, sending, receiving)
        self.ends_s: dict[str, float] = {}

    def send(self, name: str, at_s: float, path: tuple[int, int], *parts: float) -> None:
        """Send parts of a flow, the first one `at_s`, the next ones half a second apart."""
        flow = self.network.open(*path)
        for number, part_bytes in enumerate(parts):
            last = number == len(parts) - 1
            part = (name if last else None, flow, part_bytes)
            call_at(self.env, at_s + 0.5 * number, self._part, part)

    def _part(self, part: tuple[str | None, Flow, float]) -> None:
        name, flow, part_bytes = part
        self.network.send(flow, part_bytes, 0.0)
        if name is not None:
            self.network.close(flow, lambda: self.ends_s.update({name: self.env.now}))

    def run(self) -> dict[str, float]:
        self.env.run()
        return self.ends_s


def wire(out: float = GB, into: float = GB) -> Wire:
    return Wire(PortSpec(out), PortSpec(into))


# --- fair shares --------------------------------------------------------------------------------


def test_two_equal_transfers_on_one_link_take_twice_as_long_as_one() -> None:
    alone, both = wire(), wire()
    alone.send("A", 0.0, (0, 0), 2 * GB)
    both.send("A", 0.0, (0, 0), 2 * GB)
    both.send("B", 0.0, (0, 0), 2 * GB)
    assert alone.run() == {"A": 2.0}
    assert both.run() == {"A": 4.0, "B": 4.0}


def test_transfers_between_different_instances_do_not_meet() -> None:
    apart = wire()
    apart.send("A", 0.0, (0, 0), 2 * GB)
    apart.send("B", 0.0, (1, 1), 2 * GB)
    assert apart.run() == {"A": 2.0, "B": 2.0}


def test_three_flows_over_two_links() -> None:
    """A and B leave sender 0, which sends 5 GB/s; B and C enter receiver 1, which takes 4 GB/s.

    B and C get 2 GB/s, A the other 3: its 6 GB end at 2 s. C's 6 GB end at 3 s. B has 4 of its
    10 GB to go then and its receiver for itself: it ends at 4 s.
    """
    three = wire(5 * GB, 4 * GB)
    three.send("A", 0.0, (0, 0), 6 * GB)
    three.send("B", 0.0, (0, 1), 10 * GB)
    three.send("C", 0.0, (1, 1), 6 * GB)
    assert three.run() == pytest.approx({"A": 2.0, "C": 3.0, "B": 4.0}, abs=ROUNDING)


def test_a_later_transfer_slows_an_earlier_one() -> None:
    """A has 1 of 2 GB to go when B comes at 1 s: until 3 s. B's second GB goes alone: until 4 s."""
    two = wire()
    two.send("A", 0.0, (0, 0), 2 * GB)
    two.send("B", 1.0, (0, 1), 2 * GB)
    assert two.run() == {"A": 3.0, "B": 4.0}


def test_the_parts_of_a_transfer_take_one_share() -> None:
    """A's second GB waits for the first: at 1 GB/s for two, A's 2 GB and B's 2 GB need 4 s."""
    two = wire()
    two.send("A", 0.0, (0, 0), GB, GB)
    two.send("B", 0.0, (0, 1), 2 * GB)
    assert two.run() == {"A": 4.0, "B": 4.0}


def test_a_transfer_that_waits_for_its_next_part_takes_no_share() -> None:
    """A's first quarter is through at 0.5 s (half the rate), when its second comes."""
    gap = wire()
    gap.send("A", 0.0, (0, 0), GB / 8, GB / 4)
    gap.send("B", 0.0, (0, 1), GB)
    # A until 0.25; B alone until 0.5, with 0.625 GB to go; both until 1.0; B's last 0.375 GB.
    assert gap.run() == {"A": 1.0, "B": 1.375}


def test_ranks_receive_side_by_side() -> None:
    """Two attention-DP ranks, 1 GB/s each: two flows at full speed, of three each has 2/3."""
    two, three = (Wire(PortSpec(8 * GB), PortSpec(GB, flows=2)) for _ in range(2))
    for name in "AB":
        two.send(name, 0.0, (0, 0), 2 * GB)
    for name in "ABC":
        three.send(name, 0.0, (0, 0), 2 * GB)
    assert two.run() == {"A": 2.0, "B": 2.0}
    assert three.run() == pytest.approx(dict.fromkeys("ABC", 3.0), abs=ROUNDING)


def test_a_receiver_with_fewer_gpus_takes_in_more_per_gpu() -> None:
    """Every byte sent is two at the receiver's port: it is the slower end."""
    narrow = Wire(PortSpec(GB), PortSpec(GB, share=2.0))
    narrow.send("A", 0.0, (0, 0), 2 * GB)
    assert narrow.run() == {"A": 4.0}


PARTS = st.tuples(
    st.integers(0, 20), st.integers(0, 2), st.integers(0, 2), st.floats(1e6, 3e9)
)  # tenths of a second, sender, receiver, bytes


def fluid(parts: Iterable[tuple[int, int, int, float]], out: float, into: float) -> list[float]:
    """Return the ends of flows: every one followed by itself, no sums shared, no grid."""
    starts = [(tenths / 10, sender, receiver, size) for tenths, sender, receiver, size in parts]
    left = [size for *_, size in starts]
    ends = [0.0] * len(starts)
    now = 0.0
    while any(size > 0 for size in left):
        moving = [
            number for number, start in enumerate(starts) if start[0] <= now and left[number] > 0
        ]
        coming = [start[0] for start in starts if start[0] > now]
        demands = [
            Demand(1, ((starts[number][1], 1.0), (3 + starts[number][2], 1.0)), min(out, into))
            for number in moving
        ]
        ports = {port: out if port < 3 else into for port in range(6)}
        found = max_min_rates(demands, ports)
        steps = [left[number] / rate for number, rate in zip(moving, found, strict=True)]
        step = min([*steps, *(time_s - now for time_s in coming)])
        now = min([now + step, *coming]) if coming else now + step
        for number, rate, whole in zip(moving, found, steps, strict=True):
            left[number] = 0.0 if whole <= step * (1 + 1e-12) else left[number] - rate * step
            if not left[number]:
                ends[number] = now
    return ends


@settings(max_examples=100, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=8), st.sampled_from([GB, 3 * GB]))
def test_shares_on_the_clock_are_those_of_a_fluid(
    parts: list[tuple[int, int, int, float]], out: float
) -> None:
    on_clock = wire(out, GB)
    for number, (tenths, sender, receiver, size) in enumerate(parts):
        on_clock.send(str(number), tenths / 10, (sender, receiver), size)
    found = on_clock.run()
    expected = fluid(parts, out, GB)
    assert [found[str(number)] for number in range(len(parts))] == pytest.approx(expected, abs=1e-6)
    assert on_clock.network.sent_bytes == pytest.approx(sum(size for *_, size in parts))


@settings(max_examples=100, deadline=None)
@given(st.lists(PARTS, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_events_at_one_instant_does_not_matter(
    parts: list[tuple[int, int, int, float]], shuffler: Random
) -> None:
    """All times to the bit, whatever starts first of what starts together."""
    named = [(str(number), part) for number, part in enumerate(parts)]
    mixed = list(named)
    shuffler.shuffle(mixed)
    runs = []
    for order in (named, mixed):
        one = wire(2 * GB, GB)
        for name, (tenths, sender, receiver, size) in order:
            one.send(name, on_grid(tenths / 10), (sender, receiver), size)
        runs.append(one.run())
    assert runs[0] == runs[1]
