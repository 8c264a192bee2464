"""Time a kernel: many calls on rotated inputs, quantiles over samples, and what it ran on.

On a GPU a sample is the replay of a CUDA graph of many calls, between two events, so that no
launch is in it; `graph=False` launches them one by one instead. On a CPU a sample is a loop of
calls with a fixed number of threads: its processor time with one thread, its wall time with more.
Calls take turns over copies of the inputs that together are three times the last cache (`cold`),
or keep to one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from typing import Any

import torch

from tonnage.kernels.provenance import GpuState, Provenance, gpu_state
from tonnage.kernels.spec import Axes, Inputs, KernelSpec

CACHES_ROTATED = 3
COPIES_MAX = 64
CPU_COPIED_BYTES_MAX = 2 << 30
GPU_COPIED_SHARE = 0.5  # of the memory that is free
CPU_CACHE_BYTES = 32 << 20  # where the system does not tell
CALLS_MAX = 256
BUSY_S = 0.15  # how long a GPU is kept busy while its clocks are read
# Clocks are read again after this: reading them takes longer than timing a kernel does.
CLOCKS_EVERY_S = 4.0

Call = Callable[[], object]
Run = Callable[[Inputs], object]


@dataclass(frozen=True, slots=True)
class Method:
    """How to measure."""

    device: str = "cpu"
    backend: str = "cpu"
    threads: int = 1  # of a CPU
    graph: bool = True  # on a GPU
    cold: bool = True
    warm_ups: int = 3
    samples: int = 20
    sample_s: float = 1e-3  # a sample repeats calls until it lasts about this long
    budget_s: float = 2.0  # no sample is begun after this, once there are three
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 3 or self.warm_ups < 1 or self.threads < 1:
            raise ValueError("three samples, one warm-up and one thread at least")

    @property
    def on_gpu(self) -> bool:
        """Say whether a CUDA device is measured."""
        return torch.device(self.device).type == "cuda"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call, over samples."""

    seconds_p20: float
    seconds_median: float
    seconds_p80: float
    samples: int
    calls_per_sample: int


@dataclass(frozen=True, slots=True)
class TimingRow:
    """One measured point of a kernel."""

    kernel: str
    backend: str
    axes: Mapping[str, int]
    timing: Timing
    flops: float
    bytes: float
    cold: bool  # asked for; `copies * bytes` over the last cache says how far it was reached
    graph: bool
    copies: int
    provenance: Provenance
    state: GpuState = field(default_factory=GpuState)

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes that had to move over the median time."""
        return self.bytes / self.timing.seconds_median

    @property
    def flops_per_s(self) -> float:
        """Return the operations over the median time."""
        return self.flops / self.timing.seconds_median

    def as_row(self) -> dict[str, Any]:
        """Return plain data for a row log."""
        return asdict(self)


def row_key(row: Mapping[str, Any]) -> str:
    """Return what makes a row the same measurement as another, for `RowLog`."""
    names = ("kernel", "backend", "axes", "cold", "graph")
    origin = row["provenance"]
    parts = {name: row[name] for name in names}
    parts |= {name: origin[name] for name in ("device", "threads")}
    return json.dumps(parts, sort_keys=True)


def planned_key(spec: KernelSpec, axes: Axes, method: Method, origin: Provenance) -> str:
    """Return the key that a row will have once it is measured."""
    return row_key(
        {
            "kernel": spec.name,
            "backend": method.backend,
            "axes": dict(axes),
            "cold": method.cold,
            "graph": method.graph and method.on_gpu,
            "provenance": {"device": origin.device, "threads": origin.threads},
        }
    )


def measure(spec: KernelSpec, axes: Axes, method: Method, origin: Provenance) -> TimingRow:
    """Measure one point of a kernel, on fresh inputs prepared for the backend."""
    made = spec.make_inputs(axes, method.seed, method.device)
    inputs = spec.prepare(made, method.backend)
    run = partial(spec.run, backend=method.backend)
    work = Work(spec.name, method.backend, dict(axes), spec.flops(axes), spec.bytes(axes))
    return measure_work(work, run, inputs, method, origin)


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured, and what it computes and moves."""

    kernel: str
    backend: str
    axes: Mapping[str, int]
    flops: float
    bytes: float


def measure_work(
    work: Work, run: Run, inputs: Inputs, method: Method, origin: Provenance
) -> TimingRow:
    """Measure something that runs on inputs: a kernel, or what it is compared with."""
    turns = rotated(inputs, copies_for(work.bytes, inputs, method))
    timing, state = time_calls([partial(run, one) for one in turns], method)
    return TimingRow(
        kernel=work.kernel,
        backend=work.backend,
        axes=work.axes,
        timing=timing,
        flops=work.flops,
        bytes=work.bytes,
        cold=method.cold,
        graph=method.graph and method.on_gpu,
        copies=len(turns),
        provenance=origin,
        state=state,
    )


def cache_bytes(device: str) -> int:
    """Return the size of a device's last cache."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    path = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(text[:-1]) << 10 if text.endswith("K") else CPU_CACHE_BYTES


def copies_for(call_bytes: float, inputs: Inputs, method: Method) -> int:
    """Return how many copies of the inputs calls take turns over."""
    if not method.cold or call_bytes <= 0:
        return 1
    held = sum(t.numel() * t.element_size() for t in inputs.values() if torch.is_tensor(t))
    wanted = ceil(CACHES_ROTATED * cache_bytes(method.device) / call_bytes)
    return max(1, min(wanted, COPIES_MAX, copied_bytes_max(method.device) // max(held, 1)))


def copied_bytes_max(device: str) -> int:
    """Return how much memory copies may take."""
    if torch.device(device).type == "cuda":
        return int(GPU_COPIED_SHARE * torch.cuda.mem_get_info(device)[0])
    return CPU_COPIED_BYTES_MAX


def rotated(inputs: Inputs, copies: int) -> list[Inputs]:
    """Return the inputs and so many less one copies of their tensors."""
    return [inputs] + [
        {name: value.clone() if torch.is_tensor(value) else value for name, value in inputs.items()}
        for _ in range(copies - 1)
    ]


def time_calls(calls: Sequence[Call], method: Method) -> tuple[Timing, GpuState]:
    """Time calls that take turns; on a GPU say also what it did meanwhile."""
    if method.on_gpu:
        return _time_on_gpu(calls, method)
    with fixed_threads(method.threads):
        return _time_on_cpu(calls, method), GpuState()


@contextmanager
def fixed_threads(threads: int) -> Iterator[None]:
    """Let torch use so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def calls_per_sample(call_s: float, sample_s: float) -> int:
    """Return how many calls make a sample: long enough, but not too many."""
    return max(1, min(ceil(sample_s / max(call_s, 1e-9)), CALLS_MAX))


def _time_on_cpu(calls: Sequence[Call], method: Method) -> Timing:
    clock = time.process_time if method.threads == 1 else time.perf_counter
    turns = cycle(calls)  # through all samples, so that no two calls in a row share inputs

    def seconds_of(number: int) -> float:
        taken = list(islice(turns, number))
        begun = clock()
        for call in taken:
            call()
        return clock() - begun

    call_s = min(seconds_of(1) for _ in range(method.warm_ups))
    number = calls_per_sample(call_s, method.sample_s)
    return _quantiles(_sampled(lambda: seconds_of(number) / number, method), number)


def _time_on_gpu(calls: Sequence[Call], method: Method) -> tuple[Timing, GpuState]:
    for turn in range(max(method.warm_ups, len(calls))):
        calls[turn % len(calls)]()
    torch.cuda.synchronize(method.device)

    def eager(number: int) -> None:
        for turn in range(number):
            calls[turn % len(calls)]()

    call_s = _event_seconds(lambda: eager(len(calls)), method.device) / len(calls)
    # whole rounds: a replay starts again with the first inputs
    number = len(calls) * ceil(calls_per_sample(call_s, method.sample_s) / len(calls))
    replay: Call = partial(eager, number)
    if method.graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            eager(number)
        replay = graph.replay
    for _ in range(method.warm_ups):
        replay()
    torch.cuda.synchronize(method.device)
    seconds = _sampled(lambda: _event_seconds(replay, method.device) / number, method)
    state = CLOCKS.state(
        method.device, lambda: _state_while_busy(replay, seconds[0] * number, method.device)
    )
    return _quantiles(seconds, number), state


def _state_while_busy(replay: Call, replay_s: float, device: str) -> GpuState:
    for _ in range(min(ceil(BUSY_S / max(replay_s, 1e-6)), 1000)):
        replay()
    state = gpu_state(device)
    torch.cuda.synchronize(device)
    return state


class ClockReadings:
    """What GPUs did while they were busy, read every few seconds instead of at every point.

    Every state was read while its GPU was busy, and is at most `every_s` old when a row takes it.
    """

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._last: dict[str, tuple[float, GpuState]] = {}

    def state(self, device: str, read: Callable[[], GpuState]) -> GpuState:
        """Return the last state of a device and its age, read anew where that is too old."""
        now = self._clock()
        if device not in self._last or now - self._last[device][0] > self._every_s:
            self._last[device] = self._clock(), read()
            now = self._last[device][0]
        read_at, state = self._last[device]
        return replace(state, age_s=round(now - read_at, 3))


CLOCKS = ClockReadings(CLOCKS_EVERY_S)


def _event_seconds(work: Call, device: str) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    work()
    ended.record()
    torch.cuda.synchronize(device)
    return float(begun.elapsed_time(ended)) / 1e3


def _sampled(sample: Callable[[], float], method: Method) -> list[float]:
    begun = time.perf_counter()
    seconds: list[float] = []
    while len(seconds) < method.samples:
        seconds.append(sample())
        if len(seconds) >= 3 and time.perf_counter() - begun > method.budget_s:
            break
    return seconds


def _quantiles(seconds: list[float], calls: int) -> Timing:
    points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    low, middle, high = torch.tensor(seconds, dtype=torch.float64).quantile(points).tolist()
    return Timing(low, middle, high, len(seconds), calls)
