"""Time what GPUs send each other: one process per rank, NCCL on GPUs, gloo on a CPU.

A message is the largest buffer of one rank: what an all-reduce sums, an all-gather's output, a
reduce-scatter's input, what an all-to-all sends to all, what is sent from one rank to another.
A sample is a loop of calls between barriers, by the wall; the slowest rank's time counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as distributed
from torch.multiprocessing.spawn import ProcessContext, spawn

from tonnage.kernels.provenance import Provenance
from tonnage.kernels.timing import CALLS_MAX, Timing, TimingRow
from tonnage.sim.domain import BadInputError

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")
_WAIT_S = 60.0  # for the other ranks: more means that one has died
_SHARE_ALIGNED_BYTES = 16  # of a message, what each rank has

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation to time; `graph`: calls are captured (on GPUs) instead of launched."""

    op: str
    message_bytes: int
    graph: bool = False


@dataclass(frozen=True, slots=True)
class RankMethod:
    """How collectives are timed: as `timing.Method`, of all ranks together."""

    kind: str  # cpu or cuda
    warm_ups: int = 3
    samples: int = 9
    sample_s: float = 2e-3
    budget_s: float = 0.3

    @property
    def backend(self) -> str:
        """The library that moves the bytes."""
        return "nccl" if self.kind == "cuda" else "gloo"


def ranks_there(kind: str) -> int:
    """Return how many ranks a machine has by itself: its GPUs; of a CPU one."""
    return torch.cuda.device_count() if kind == "cuda" else 1


def check_ranks(kind: str, ranks: int) -> None:
    """Refuse more ranks than there are GPUs."""
    if kind == "cuda" and ranks > ranks_there(kind):
        raise BadInputError(f"ranks: {ranks}: there are {ranks_there(kind)} GPUs")


def measured_collectives(
    wanted: Sequence[Collective], ranks: int, method: RankMethod, origin: Provenance
) -> Iterator[TimingRow]:
    """Yield a row of each, as soon as it is measured, by so many new processes.

    They are ended with the iterator, whatever ends it.
    """
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="tonnage-ranks-") as folder:
        meeting = Path(folder, "meeting").as_uri()
        group: ProcessContext = spawn(
            _rank, (ranks, meeting, list(wanted), method, sender), ranks, join=False, daemon=True
        )
        sender.close()
        try:
            for one in wanted:
                timing = _received(receiver, group)
                yield _row(one, timing, ranks, method, origin)
            while not group.join():
                pass
        finally:
            for process in group.processes:
                process.kill()
                process.join()
            receiver.close()


def _received(receiver: Connection, group: ProcessContext) -> Timing:
    """Wait for the next timing; raises what a rank raised if one dies instead."""
    while not receiver.poll(0.1):
        if group.join(timeout=0.0):
            break
    timing: Timing = receiver.recv()
    return timing


def _row(
    one: Collective, timing: Timing, ranks: int, method: RankMethod, origin: Provenance
) -> TimingRow:
    return TimingRow(
        kernel=one.op,
        backend=method.backend,
        axes={"gpus": ranks, "message_bytes": one.message_bytes},
        timing=timing,
        flops=0.0,
        bytes=float(one.message_bytes),
        cold=False,
        graph=one.graph,
        copies=1,
        provenance=origin,
    )


# --- in a rank's process ------------------------------------------------------------------------


def _rank(
    rank: int,
    ranks: int,
    meeting: str,
    wanted: Sequence[Collective],
    method: RankMethod,
    sender: Connection,
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if method.kind == "cuda" else torch.device("cpu")
    if method.kind == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        method.backend,
        init_method=meeting,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_WAIT_S),
    )
    try:
        for one in wanted:
            timing = _timing(_Timer(device, one.graph), _call(one, rank, ranks, device), method)
            if rank == 0:
                # A one-way trip is half of one there and back.
                sender.send(_halved(timing) if one.op == "point_to_point" else timing)
    finally:
        distributed.destroy_process_group()


def _call(one: Collective, rank: int, ranks: int, device: torch.device) -> Call:
    """Return what runs an operation once on this rank, on buffers of its own."""
    numbers = torch.bfloat16 if device.type == "cuda" else torch.float32
    share = max(one.message_bytes // ranks // _SHARE_ALIGNED_BYTES, 1) * _SHARE_ALIGNED_BYTES
    part = torch.ones(share // numbers.itemsize, dtype=numbers, device=device)
    whole = torch.ones(ranks * part.numel(), dtype=numbers, device=device)
    if one.op == "all_reduce":
        message = whole if one.message_bytes >= whole.nbytes else part
        message.zero_()  # so that sums of sums stay finite
        return lambda: distributed.all_reduce(message)
    if one.op == "all_gather":
        return lambda: _ALL_GATHER(whole, part)
    if one.op == "reduce_scatter":
        return lambda: _REDUCE_SCATTER(part, whole)
    if one.op == "all_to_all":
        target = torch.empty_like(whole)
        return lambda: distributed.all_to_all_single(target, whole)
    message = torch.ones(
        max(one.message_bytes // numbers.itemsize, 1), dtype=numbers, device=device
    )
    return lambda: _there_and_back(rank, message)


# torch 2.13 renamed them; the old names warn there.
_ALL_GATHER = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_REDUCE_SCATTER = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)


def _there_and_back(rank: int, message: torch.Tensor) -> None:
    if rank == 0:
        distributed.send(message, 1)
        distributed.recv(message, 1)
    elif rank == 1:
        distributed.recv(message, 0)
        distributed.send(message, 0)


def _halved(timing: Timing) -> Timing:
    return Timing(
        timing.seconds_p20 / 2,
        timing.seconds_median / 2,
        timing.seconds_p80 / 2,
        timing.samples,
        timing.calls_per_sample,
    )


@dataclass(slots=True)
class _Timer:
    """Times loops of calls on a rank; every rank gets the slowest one's time."""

    device: torch.device
    graph: bool

    def loop(self, call: Call, number: int) -> Call:
        """Return what runs a call so many times, as one graph where it is asked for."""

        def calls() -> None:
            for _ in range(number):
                call()

        if not self.graph:
            return calls
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            calls()
        return captured.replay

    def seconds(self, run: Call) -> float:
        """Return the seconds of a run that all ranks begin together, the slowest rank's."""
        self._wait()
        begun = perf_counter()
        run()
        self._synchronise()
        slowest = torch.tensor([perf_counter() - begun], dtype=torch.float64, device=self.device)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        return float(slowest.item())

    def _wait(self) -> None:
        distributed.barrier()
        self._synchronise()

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _timing(timer: _Timer, call: Call, method: RankMethod) -> Timing:
    """Time an operation; all that ranks decide on is the same on each, as the times are."""
    once = _Timer(timer.device, graph=False)
    call_s = min(once.seconds(call) for _ in range(method.warm_ups))
    number = max(1, min(ceil(method.sample_s / max(call_s, 1e-9)), CALLS_MAX))
    run = timer.loop(call, number)
    timer.seconds(run)
    found: list[float] = []
    while len(found) < method.samples:
        found.append(timer.seconds(run) / number)
        if len(found) >= 3 and sum(found) * number > method.budget_s:
            break
    fifths = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    low, middle, high = torch.tensor(found, dtype=torch.float64).quantile(fifths).tolist()
    return Timing(low, middle, high, len(found), number)
