"""Runs the steps that a simulation visits on real kernels, and says how long each takes.

    place = place_on("cpu")
    rank = RankSpec(with_weights(spec, "int4_g128"), ParallelLayout(), "fp8_e4m3")
    model = RankModel(rank, place)
    runner = StepRunner.of(model, pages=4096, page_tokens=64)
    timing = runner.measure(step)

Times are those of one rank without collectives. With fewer layers than the model has, the time of
each kind of layer is multiplied by `LayerGroup.scale`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from tonnage.kernels.execute.batch import Batch, make_batch
from tonnage.kernels.execute.build import RankSpec
from tonnage.kernels.execute.pages import HeldPages, PagedMemory, PageShape
from tonnage.kernels.execute.place import Place, place_on
from tonnage.kernels.execute.rank import RankModel, Segment
from tonnage.kernels.timing import fixed_threads
from tonnage.sim.domain import BadInputError, Step

__all__ = [
    "Place",
    "RankModel",
    "RankSpec",
    "Repeats",
    "StepRunner",
    "StepTiming",
    "place_on",
]


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a step is run: once or more unmeasured, then samples within a budget."""

    warm_ups: int = 1
    samples: int = 5
    budget_s: float = 5.0  # no sample is begun after this, once there are three
    threads: int = 1  # of a CPU
    graph: bool = True  # on a GPU, of steps without prompt chunks
    shares: bool = False  # on a CPU: run once more to split the time by operator

    def __post_init__(self) -> None:
        if self.samples < 3 or self.warm_ups < 1 or self.threads < 1:
            raise ValueError("three samples, one warm-up and one thread at least")


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of one step, over samples, all layers of the model counted.

    `segments`: median seconds of the embedding, each kind of layer, and the head; they add up to
    the median but for its being a median. `shares`: of processor time by operator, unscaled by
    kinds of layers, largest first.
    """

    seconds_p20: float
    seconds_median: float
    seconds_p80: float
    samples: int
    segments: Mapping[str, float]
    shares: Mapping[str, float] = field(default_factory=dict)


class StepRunner:
    """Makes the batch that a step describes, on real pages, and runs it."""

    def __init__(self, model: RankModel, memory: PagedMemory) -> None:
        """Run on this memory, whose pages must hold numbers already."""
        self.model = model
        self.memory = memory

    @classmethod
    def of(
        cls,
        model: RankModel,
        pages: int,
        page_tokens: int,
        requests_max: int = 512,
        free_bytes: float | None = None,
    ) -> StepRunner:
        """Return a runner with its own memory, filled with random numbers."""
        spec = model.spec
        shape = PageShape(
            layers=model.row_shapes,
            kv_format=spec.kv_format,
            pages=pages,
            page_tokens=page_tokens,
            requests_max=requests_max,
            request_tokens_max=min(spec.model.max_context_tokens, pages * page_tokens),
        )
        memory = PagedMemory(shape, model.place, free_bytes)
        memory.fill_randomly()
        return cls(model, memory)

    def measure(
        self, step: Step, check_tags: bool = False, repeats: Repeats | None = None
    ) -> StepTiming:
        """Return how long the step takes on this rank, from the median of repeats."""
        chosen = repeats or Repeats()
        with self.batch(step) as batch, torch.no_grad():
            segments = self.model.segments(batch, self.memory, check_tags)
            device = torch.device(self.model.place.device)
            if device.type == "cuda":
                graph = chosen.graph and not step.prefill_chunks
                with torch.cuda.device(device):
                    return _timing(segments, _gpu_samples(segments, graph, chosen))
            with fixed_threads(chosen.threads):
                timing = _timing(segments, _cpu_samples(segments, chosen))
                if chosen.shares:
                    timing = replace(timing, shares=self._shares(segments))
            return timing

    def mismatches(self, held: Sequence[HeldPages]) -> torch.Tensor:
        """Return how many pages of each request fail the tag check, int32."""
        found: torch.Tensor = self.model.place.run("tag_check", self.memory.checked(held))[
            "mismatches"
        ]
        return found

    @contextmanager
    def batch(self, step: Step) -> Iterator[Batch]:
        """Hold pages for the requests of a step, and give them back after."""
        _refuse(step)
        contexts = [int(tokens) for tokens in step.decode_context_tokens]
        held: list[HeldPages] = []
        try:
            for tokens in (*contexts, *(sum(chunk) for chunk in step.prefill_chunks)):
                held.append(self.memory.open(tokens))
            decoding, prefilling = held[: len(contexts)], held[len(contexts) :]
            chunks = list(zip(prefilling, step.prefill_chunks, strict=True))
            rows = len(contexts) + sum(chunk.new_tokens for chunk in step.prefill_chunks)
            tokens_of_rows = self.model.random_tokens(rows)
            yield make_batch(self.memory, decoding, contexts, chunks, tokens_of_rows)
        finally:
            for one in held:
                self.memory.close(one)

    def _shares(self, segments: Sequence[Segment]) -> dict[str, float]:
        self.model.marks.begin()
        for segment in segments:
            segment.run()
        seconds = self.model.marks.end()
        total = sum(seconds.values()) or 1.0
        return {name: part / total for name, part in seconds.items()}


def _refuse(step: Step) -> None:
    if step.ranks:
        raise BadInputError("steps of attention-DP ranks are not executed; use attention_dp 1")
    if step.query_tokens != 1:
        raise BadInputError(
            f"steps that verify {step.query_tokens} tokens of a request are not executed; "
            "switch speculation off"
        )
    if not step.decode_requests and not step.prefill_chunks:
        raise BadInputError("a step without requests is nothing to execute")


Samples = list[list[float]]  # seconds of each segment, per sample


def _timing(segments: Sequence[Segment], samples: Samples) -> StepTiming:
    """Scale every segment to its kind's layers and take quantiles of the sums."""
    scaled = [
        [segment.scale * seconds for segment, seconds in zip(segments, sample, strict=True)]
        for sample in samples
    ]
    low, middle, high = _quantiles([sum(sample) for sample in scaled])
    parts = {
        segment.label: _quantiles([sample[place] for sample in scaled])[1]
        for place, segment in enumerate(segments)
    }
    return StepTiming(low, middle, high, len(samples), parts)


def _quantiles(values: list[float]) -> tuple[float, float, float]:
    fifths = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    )
    low, middle, high = fifths.tolist()
    return low, middle, high


def _cpu_samples(segments: Sequence[Segment], repeats: Repeats) -> Samples:
    """Time segments by processor time with one thread, by the wall with more."""
    clock = time.process_time if repeats.threads == 1 else time.perf_counter

    def sample() -> list[float]:
        moments = [clock()]
        for segment in segments:
            segment.run()
            moments.append(clock())
        return [after - before for before, after in pairwise(moments)]

    for _ in range(repeats.warm_ups):
        sample()
    return _sampled(sample, repeats)


def _gpu_samples(segments: Sequence[Segment], graph: bool, repeats: Repeats) -> Samples:
    """Time segments between events; each is a graph of its own where one is asked for."""
    for _ in range(max(repeats.warm_ups, 2)):  # the first compiles
        for segment in segments:
            segment.run()
    torch.cuda.synchronize()
    calls = _captured(segments) if graph else [segment.run for segment in segments]

    def sample() -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        events[0].record()
        for call, event in zip(calls, events[1:], strict=True):
            call()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]

    sample()
    return _sampled(sample, repeats)


def _captured(segments: Sequence[Segment]) -> list[Callable[[], None]]:
    """Capture every segment; they share one pool, as they are replayed in the order captured."""
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    for segment in segments:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            segment.run()
        graphs.append(graph)
    return [graph.replay for graph in graphs]


def _sampled(sample: Callable[[], list[float]], repeats: Repeats) -> Samples:
    begun = time.perf_counter()
    samples: Samples = []
    while len(samples) < repeats.samples:
        samples.append(sample())
        if len(samples) >= 3 and time.perf_counter() - begun > repeats.budget_s:
            break
    return samples
