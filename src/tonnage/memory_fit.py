"""`tonnage memory --fit`: which GPUs, and how many, can host a model at a context length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from tonnage.scenarios.catalogue import gpu_names, load_gpu, load_model
from tonnage.scenarios.schema import EngineSection
from tonnage.sim.domain import (
    BadInputError,
    EngineSpec,
    GpuSpec,
    InfeasibleError,
    ModelSpec,
    ParallelLayout,
)
from tonnage.sim.model.engine_rules import rules_for
from tonnage.sim.model.formats import checkpoint_bytes, kv_element_bytes
from tonnage.sim.model.hosting import GPU_COUNTS, Fit, Guest, best, fits, nearest
from tonnage.sim.model.requantise import with_weights
from tonnage.sim.units import format_bytes

CONTEXT_TOKENS = 8192  # where none is asked for
_SMALLER_WEIGHTS = ("fp8_block", "int4_g128", "int4_g32", "nvfp4")  # as the memory advice tries


@dataclass(frozen=True, slots=True)
class FitQuestion:
    """What is to be hosted; `gpu` None is every GPU of the catalogue."""

    model: str
    context_tokens: int | None = None
    weights: str = "native"
    kv: str = "bf16"
    engine: EngineSpec | None = None  # SGLang, of the version whose rules are known
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class FitReport:
    """What every GPU type and count holds, by layout; `guest` is what was asked."""

    guest: Guest
    gpus: tuple[GpuSpec, ...]
    rows: tuple[Fit, ...]

    def of(self, gpu: str, count: int | None = None) -> list[Fit]:
        """Return the rows of one GPU type, or of so many of them."""
        return [row for row in self.rows if row.gpu == gpu and count in (None, row.gpus)]

    def smallest(self) -> Fit | None:
        """Return the hosting row whose GPUs have the least memory in all."""
        memory = {gpu.name: gpu.memory_bytes for gpu in self.gpus}
        firsts = [row for gpu in self.gpus if (row := best(self.of(gpu.name))) is not None]
        return min(firsts, key=lambda row: row.gpus * memory[row.gpu], default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of `memory --fit`."""
        guest = self.guest
        firsts = {gpu.name: best(self.of(gpu.name)) for gpu in self.gpus}
        return {
            "model": guest.model.name,
            "weights": guest.weights,
            "kv": guest.kv_format,
            "engine": {"name": guest.engine.name, "version": guest.engine.version},
            "context_tokens": guest.context_tokens,
            "checkpoint_bytes": checkpoint_bytes(guest.model),
            "smallest": _row(self.smallest()),
            "by_gpu": {gpu: _row(first) for gpu, first in firsts.items()},
            "rows": [_row(row) for row in self.rows],
            "provenance": {"version": version("tonnage"), "assumptions": list(self.assumptions())},
        }

    def assumptions(self) -> Iterator[str]:
        """Yield what the table rests on."""
        remark = rules_for(self.guest.engine).remark
        if remark is not None:
            yield remark
        if not self.guest.model.verified:
            yield f"{self.guest.model.name}: its geometry is not verified"
        yield "tensor ranks stay within a node, pipeline stages chain what is left"
        yield "context parallelism (dcp) is chosen where no other layout of as many GPUs would do"
        yield "memory alone: nothing is said of speed, or of whether kernels for a format exist"


def fit_memory(question: FitQuestion) -> FitReport:
    """Return which GPUs and layouts hold a request of the context asked for.

    Raises BadInputError for a context that the model has no positions for, InfeasibleError, with
    what comes nearest, where no GPU holds it.
    """
    model = load_model(question.model)
    kv_element_bytes(question.kv)  # refuses an unknown format
    context_tokens = question.context_tokens
    if context_tokens is None:
        context_tokens = min(CONTEXT_TOKENS, model.max_context_tokens)
    if not 1 <= context_tokens <= model.max_context_tokens:
        most = f"{model.name} has positions for {model.max_context_tokens:,} tokens"
        raise BadInputError(f"--context {context_tokens}: {most}; ask for 1 to that many")
    guest = Guest(
        with_weights(model, question.weights),
        question.weights,
        question.kv,
        context_tokens,
        question.engine or EngineSection().spec(),
    )
    gpus = _gpus(question.gpu)
    rows = fits(guest, gpus)
    if not any(row.hosts for row in rows):
        raise InfeasibleError(_message(guest, gpus, rows, model))
    return FitReport(guest, gpus, tuple(rows))


def layout_text(layout: ParallelLayout) -> str:
    """Spell a layout, such as `tp 8, attention_dp 8`; what is 1 is left out."""
    fields = {name: ways for name, ways in asdict(layout).items() if ways > 1 or name == "tp"}
    return ", ".join(f"{name} {ways}" for name, ways in fields.items())


def _gpus(name: str | None) -> tuple[GpuSpec, ...]:
    if name is not None:
        return (load_gpu(name),)
    found = (load_gpu(one) for one in gpu_names())
    # The entry `cpu` stands for a laptop, which nobody buys by the dozen.
    return tuple(gpu for gpu in found if gpu.compute_capability != "0.0")


def _row(row: Fit | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {**asdict(row), "layout": asdict(row.layout), "loads": row.loads}


def _message(guest: Guest, gpus: Sequence[GpuSpec], rows: Sequence[Fit], native: ModelSpec) -> str:
    """Say that nothing hosts the model, what comes nearest, and what would."""
    where = gpus[0].name if len(gpus) == 1 else "any GPU of the catalogue"
    asked = f"a request of {guest.context_tokens:,} tokens"
    head = (
        f"memory --fit: {guest.model.name} with weights {guest.weights} and KV {guest.kv_format} "
        f"does not hold {asked} on 1 to {GPU_COUNTS[-1]} of {where}"
    )
    row = nearest(rows)
    if row is None:
        return f"{head}: it can have no layout there; ask for another GPU"
    place = f"{row.gpus} x {row.gpu} ({layout_text(row.layout)})"
    if row.loads:
        near = f"nearest: {place} holds {row.longest_request_tokens:,} tokens"
    else:
        missing = format_bytes(row.deficit_bytes_per_gpu)
        near = f"nearest: {place} is short of {missing} per GPU for the first page of KV"
    mends = list(_mends(guest, gpus, native))
    return f"{head}; {near}. {'Use ' + ' or '.join(mends) if mends else 'No smaller format helps'}"


def _mends(guest: Guest, gpus: Sequence[GpuSpec], native: ModelSpec) -> Iterator[str]:
    """Yield the smaller KV format and the weights with which some GPU would host it."""

    def hosts(weights: str, kv_format: str) -> bool:
        model = with_weights(native, weights)
        trial = Guest(model, weights, kv_format, guest.context_tokens, guest.engine)
        return any(row.hosts for row in fits(trial, gpus))

    if guest.kv_format != "fp8_e4m3" and hosts(guest.weights, "fp8_e4m3"):
        yield "--kv fp8_e4m3"
    for weights in _SMALLER_WEIGHTS:
        is_smaller = checkpoint_bytes(with_weights(native, weights)) < checkpoint_bytes(guest.model)
        if is_smaller and hosts(weights, guest.kv_format):
            yield f"--weights {weights}"
            return
