"""Devices that run the steps of a pool for real; imported when a scenario is executed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from tonnage.execution import DeviceMaker, StepDevice
from tonnage.pools import BuiltPool
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.domain import BadInputError, Step

_SHARE_OF_FREE = 0.8  # of the memory that is free: the rest is for what the kernels allocate


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where steps run, and how much of a rank: `layers` None is all; `check_tags` in every step."""

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
    free = _free_bytes(choice.device)
    rank = RankSpec(pool.model, spec.layout, spec.kv_format, choice.layers)
    model = RankModel(rank, place_on(choice.device), None if free is None else free)
    runner = StepRunner.of(
        model,
        pages=_most_pages(steps, spec.page_tokens),
        page_tokens=spec.page_tokens,
        requests_max=max(_requests(step) for step in steps),
        free_bytes=_free_bytes(choice.device),
    )
    repeats = Repeats(samples=choice.samples, budget_s=choice.step_budget_s, threads=choice.threads)
    yield _Device(runner, choice, repeats)
    del runner, model
    gc.collect()


@dataclass(frozen=True, slots=True)
class _Device:
    """A rank and its pages on a device."""

    runner: Any  # StepRunner: kernels are imported where they are used
    choice: DeviceChoice
    repeats: Any

    def measure(self, step: Step) -> float:
        timing = self.runner.measure(step, self.choice.check_tags, self.repeats)
        return float(timing.seconds_median)

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
            "tag_check": choice.check_tags,
            "weight_bytes": model.held_bytes,
            "kv_pages": self.runner.memory.shape.pages,
            "kv_bytes": self.runner.memory.shape.bytes,
        }


def _requests(step: Step) -> int:
    return step.decode_requests + len(step.prefill_chunks)


def _most_pages(steps: Sequence[Step], page_tokens: int) -> int:
    """Return the pages of the largest of the steps."""
    return max(
        sum(ceil(int(tokens) / page_tokens) for tokens in step.decode_context_tokens)
        + sum(ceil(sum(chunk) / page_tokens) for chunk in step.prefill_chunks)
        for step in steps
    )


def _free_bytes(device: str) -> float | None:
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
