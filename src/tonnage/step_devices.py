"""Devices that run the steps of a pool for real; imported when a scenario is executed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import Any

from tonnage.execution import DeviceMaker, StepDevice
from tonnage.pools import BuiltPool
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.domain import BadInputError, Coverage, IntegritySpec, Step

_SHARE_OF_FREE = 0.8  # of the memory that is free: the rest is for what the kernels allocate


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where steps run, and how much of a rank: `layers` None is all.

    `check_tags`: in every step, whatever watches the pool.
    """

    device: str = "cpu"
    threads: int = 1
    layers: int | None = None
    check_tags: bool = False
    samples: int = 5
    step_budget_s: float = 2.0  # no sample of a step is begun after this, once there are three


def device_maker(choice: DeviceChoice) -> DeviceMaker:
    """Return what makes the device of each pool, one pool at a time.

    Raises BadInputError without torch, or without the device.
    """
    try:
        import torch
    except ImportError as error:
        raise BadInputError(
            "executing needs torch and triton: pip install 'tonnage[kernels]'"
        ) from error
    kind = choice.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise BadInputError(f"device {choice.device!r}: use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInputError("device cuda: torch finds no CUDA GPU here; use --device cpu")

    def make(
        role: Role, pool: BuiltPool, steps: Sequence[Step]
    ) -> AbstractContextManager[StepDevice]:
        return _opened(choice, pool, steps)

    return make


@contextmanager
def _opened(choice: DeviceChoice, pool: BuiltPool, steps: Sequence[Step]) -> Iterator[StepDevice]:
    """Hold the weights and the KV pages of one rank while its steps are measured."""
    from tonnage.kernels.executor import RankModel, RankSpec, Repeats, StepRunner, place_on

    spec = pool.spec
    free = free_bytes(choice.device)
    rank = RankSpec(pool.model, spec.layout, spec.kv_format, choice.layers)
    model = RankModel(rank, place_on(choice.device), None if free is None else free)
    runner = StepRunner.of(
        model,
        pages=_most_pages(steps, spec.page_tokens),
        page_tokens=spec.page_tokens,
        requests_max=max(_requests(step) for step in steps),
        free_bytes=free_bytes(choice.device),
    )
    repeats = Repeats(samples=choice.samples, budget_s=choice.step_budget_s, threads=choice.threads)
    yield _Device(runner, choice, repeats, spec.integrity)
    del runner, model
    gc.collect()


@dataclass(slots=True)
class _Device:
    """A rank and its pages on a device."""

    runner: Any  # StepRunner: kernels are imported where they are used
    choice: DeviceChoice
    repeats: Any
    integrity: IntegritySpec
    last: Any = None  # StepTiming
    checks_s: list[float] = field(default_factory=list)  # of the steps, on average over n of them

    def measure(self, step: Step) -> float:
        """Return the seconds of a step; one that is checked now and then, of its mean."""
        share = checked_share(self.integrity, step, self.choice.device)
        if self.choice.check_tags:
            share = 1.0
        self.last = self.runner.measure(step, share > 0.0, self.repeats)
        check_s = float(self.last.segments.get("tag check", 0.0))
        self.checks_s.append(share * check_s)
        return float(self.last.seconds_median) - (1.0 - share) * check_s

    def spread(self) -> tuple[float, float]:
        """Return how far the samples of the last step lay apart, over their median."""
        median_s = self.last.seconds_median
        return self.last.seconds_p20 / median_s, self.last.seconds_p80 / median_s

    def facts(self) -> dict[str, Any]:
        choice, model = self.choice, self.runner.model
        run = sum(group.run for group in model.groups)
        return {
            "device": choice.device,
            "backend": model.place.backend,
            "threads": choice.threads if choice.device == "cpu" else None,
            "layers_run": run,
            "layers": sum(group.count for group in model.groups),
            "left_out": list(model.left_out),
            "tag_check": any(self.checks_s),
            "tag_check_s": fmean(self.checks_s) if any(self.checks_s) else None,
            "weight_bytes": model.held_bytes,
            "kv_pages": self.runner.memory.shape.pages,
            "kv_bytes": self.runner.memory.shape.bytes,
        }


def checked_share(integrity: IntegritySpec, step: Step, device: str) -> float:
    """Return the share of such steps that wait for a check of page tags, 0 where none does.

    One that is overlapped runs beside the step on a GPU, and is not executed; a CPU does nothing
    beside. A check looks at all pages that the step reads, also where the writer's are to be
    compared alone.
    """
    decodes = integrity.checks(Coverage.DECODE) and step.decode_requests
    reads = integrity.checks(Coverage.PREFIX) and step.prefill_chunks
    runs_beside = integrity.overlapped and device != "cpu"
    if runs_beside or not (decodes or reads or integrity.checks(Coverage.WRITER)):
        return 0.0
    return 1.0 if step.prefill_chunks else 1 / integrity.every_steps


def _requests(step: Step) -> int:
    return step.decode_requests + len(step.prefill_chunks)


def _most_pages(steps: Sequence[Step], page_tokens: int) -> int:
    """Return the pages of the largest of the steps."""
    return max(
        sum(ceil(int(tokens) / page_tokens) for tokens in step.decode_context_tokens)
        + sum(ceil(sum(chunk) / page_tokens) for chunk in step.prefill_chunks)
        for step in steps
    )


def free_bytes(device: str) -> float | None:
    """Return the free memory that weights and pages may take; None where nobody tells."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return _SHARE_OF_FREE * float(free)
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):
        return None
    return _SHARE_OF_FREE * pages * os.sysconf("SC_PAGE_SIZE")
