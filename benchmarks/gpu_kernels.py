"""Checks every kernel on the device at hand, then times it beside torch: cuBLAS, SDPA, copies.

Rows go to a file as they are measured (`--out`), so a run that was ended goes on where it was; each
holds the date, driver, versions and clocks. Figures are shares of the copy bandwidth and the matrix
rate that the same run measured. `--minutes` ends it in time; what was left out is counted. On a CPU
(`--device cpu`) the same runs on the CPU backend.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as functional

from tonnage.kernels.compare import output_errors
from tonnage.kernels.document import DOCUMENT, write_sections
from tonnage.kernels.peaks import Peaks, fp8_operands, measured_peaks, scaled_mm
from tonnage.kernels.provenance import Provenance, provenance
from tonnage.kernels.registry import KERNELS
from tonnage.kernels.row_log import Row, RowLog
from tonnage.kernels.spec import Axes, Inputs, KernelSpec
from tonnage.kernels.timing import (
    Method,
    Run,
    Work,
    measure,
    measure_work,
    planned_key,
    row_key,
)

SPECS = KERNELS  # what is run
CHECK_SHARE = 0.5  # of the time, at most, for correctness: it compiles most kernels


@dataclass(frozen=True, slots=True)
class Sizes:
    """The points of the timing table, and what the peaks are measured with."""

    gemm_nk: tuple[tuple[int, int], ...]
    gemm_m: tuple[int, ...]
    moe: Axes
    moe_tokens: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]  # batch, context tokens
    mla_heads: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]  # cached prefix, new tokens
    written_tokens: tuple[int, ...]
    copied_tokens: int
    tags: tuple[tuple[int, int], ...]  # requests, pages
    peak_side: int
    peak_copied_bytes: int


# Kimi K2 and GLM layers as one of eight tensor-parallel ranks sees them, and square ones.
GPU = Sizes(
    gemm_nk=((8192, 8192), (7168, 2048)),
    gemm_m=(1, 16, 64, 128, 256, 1024, 4096),
    moe={"experts": 384, "top_k": 8, "n": 512, "k": 7168, "skew_percent": 50},
    moe_tokens=(1, 16, 64, 256, 2048),
    decode=((1, 4096), (32, 4096), (64, 8192), (128, 4096)),
    mla_heads=(16, 128),
    prefill=((0, 4096), (8192, 2048)),
    written_tokens=(1, 256, 8192),
    copied_tokens=8192,
    tags=((1, 64), (64, 512), (256, 4096)),
    peak_side=8192,
    peak_copied_bytes=1 << 30,
)
CPU = Sizes(
    gemm_nk=((2048, 2048),),
    gemm_m=(1, 4, 16, 64, 256),
    moe={"experts": 16, "top_k": 4, "n": 512, "k": 1024, "skew_percent": 50},
    moe_tokens=(1, 16, 64),
    decode=((1, 512), (8, 1024)),
    mla_heads=(16,),
    prefill=((0, 256), (512, 128)),
    written_tokens=(1, 256),
    copied_tokens=1024,
    tags=((1, 64), (64, 512)),
    peak_side=2048,
    peak_copied_bytes=64 << 20,
)
QUICK = replace(
    CPU,
    gemm_nk=((1024, 1024),),
    gemm_m=(1, 16, 64),
    moe={**CPU.moe, "experts": 8, "k": 512},
    moe_tokens=(1, 16),
    decode=((4, 512),),
    prefill=((128, 128),),
    peak_side=512,
)


def points(spec: KernelSpec, sizes: Sizes) -> Iterator[Axes]:
    """Yield the axes at which a kernel is timed: its own last example, if none are given here."""
    name = spec.name
    if name.startswith("gemm_"):
        for n, k in sizes.gemm_nk:
            yield from ({"m": m, "n": n, "k": k} for m in sizes.gemm_m)
    elif name.startswith("moe_gemm_"):
        yield from ({"tokens": tokens, **sizes.moe} for tokens in sizes.moe_tokens)
    elif name.startswith("quantise_fp8"):
        k = sizes.gemm_nk[0][1]
        yield from ({"m": m, "k": k} for m in sizes.gemm_m)
    elif name.startswith("gqa_decode"):
        shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_tokens": 64, "ragged": 0}
        yield from ({"batch": b, "context_tokens": c, **shape} for b, c in sizes.decode)
    elif name.startswith("mla_decode"):
        for heads in sizes.mla_heads:
            shape = {"heads": heads, "page_tokens": 64, "ragged": 0}
            yield from ({"batch": b, "context_tokens": c, **shape} for b, c in sizes.decode)
    elif name.startswith("gqa_prefill"):
        shape = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "page_tokens": 64}
        for prefix, new in sizes.prefill:
            yield {**shape, "prefix_tokens": prefix, "new_tokens": new, "ragged": 0}
    elif name.startswith("gqa_write"):
        row = {"kv_heads": 8, "head_dim": 128, "page_tokens": 64}
        yield from ({"tokens": tokens, **row} for tokens in sizes.written_tokens)
    elif "_write_" in name:
        yield from ({"tokens": tokens, "page_tokens": 64} for tokens in sizes.written_tokens)
    elif name.startswith("kv_copy"):
        row = {"row": 576, "page_tokens": 64, "target_page_tokens": 64, "ragged": 0}
        yield {"requests": 1, "tokens": sizes.copied_tokens, **row}
    elif name == "tag_check":
        yield from ({"requests": r, "pages": pages, "ragged": 0} for r, pages in sizes.tags)
    else:
        yield spec.examples[-1]


Baseline = tuple[str, Run, Inputs]


def baseline(spec: KernelSpec, axes: Axes, device: str) -> Baseline | None:
    """Return what torch does for the same result: its name, how it runs, its inputs."""
    random = torch.Generator(device).manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device).bfloat16()

    if spec.name.startswith("gemm_fp8") and device.startswith("cuda"):
        operands = fp8_operands(drawn(axes["m"], axes["k"]), drawn(axes["n"], axes["k"]))
        return "torch._scaled_mm", scaled_mm, operands
    if "decode" in spec.name:
        return _decode_baseline(axes, drawn)
    if "prefill" in spec.name:
        return _prefill_baseline(axes, drawn)
    if "_write_" in spec.name or spec.name.startswith("kv_copy"):
        half = max(int(spec.bytes(axes)) // 2, 1)
        source = torch.ones(half, dtype=torch.uint8, device=device)
        return "copy_", _copied, {"source": source, "target": torch.empty_like(source)}
    if spec.name == "tag_check":
        return "torch comparison", spec.reference, spec.make_inputs(axes, 1, device)
    return None  # gemm_bf16 and moe_gemm_bf16 are in the table themselves


def _copied(inputs: Inputs) -> torch.Tensor:
    target: torch.Tensor = inputs["target"]
    return target.copy_(inputs["source"])


def _attended(inputs: Inputs) -> torch.Tensor:
    return functional.scaled_dot_product_attention(
        inputs["q"], inputs["k"], inputs["v"], is_causal=inputs["causal"]
    )


def _decode_baseline(axes: Axes, drawn: Callable[..., torch.Tensor]) -> Baseline:
    # contiguous caches, and the heads that share a key as rows of queries: SDPA's best case
    batch, context = axes["batch"], axes["context_tokens"]
    if "kv_heads" not in axes:
        latents = drawn(batch, 1, context, 576)
        queries = drawn(batch, 1, axes["heads"], 576)
        return "SDPA", _attended, {"q": queries, "k": latents, "v": latents, "causal": False}
    heads = axes["kv_heads"]
    rows = (batch, heads, axes["heads"] // heads, axes["head_dim"])
    cached = (batch, heads, context, axes["head_dim"])
    inputs = {"q": drawn(*rows), "k": drawn(*cached), "v": drawn(*cached), "causal": False}
    return "SDPA", _attended, inputs


def _prefill_baseline(axes: Axes, drawn: Callable[..., torch.Tensor]) -> Baseline | None:
    if axes["prefix_tokens"]:
        return None  # is_causal means no prefix, and a mask keeps SDPA from its fast kernel
    batch, new, dim = axes["batch"], axes["new_tokens"], axes["head_dim"]
    keys = [
        drawn(batch, axes["kv_heads"], new, dim).repeat_interleave(
            axes["heads"] // axes["kv_heads"], 1
        )
        for _ in range(2)
    ]
    queries = drawn(batch, axes["heads"], new, dim)
    return "SDPA", _attended, {"q": queries, "k": keys[0], "v": keys[1], "causal": True}


def backend_of(spec: KernelSpec, device: str) -> str | None:
    """Return what runs a kernel on a device, or None."""
    if not device.startswith("cuda"):
        return "cpu" if "cpu" in spec.runs else None
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < spec.capability_min:
        return None
    return next((name for name in ("triton", "torch") if name in spec.runs), None)


class Clock:
    """How much of the time a run may take is left."""

    def __init__(self, minutes: float) -> None:
        self._begun = time.monotonic()
        self.allowed_s = 60 * minutes

    @property
    def spent_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._begun


def check(device: str, clock: Clock) -> tuple[list[str], int]:
    """Run every example of every kernel against its reference; return faults and how many ran."""
    faults: list[str] = []
    ran = 0
    for spec in SPECS.values():
        backend = backend_of(spec, device)
        for axes in spec.examples if backend else ():
            if clock.spent_s > CHECK_SHARE * clock.allowed_s:
                return [*faults, f"no time was left to check {spec.name} and what follows"], ran
            ran += 1
            faults += _faults(spec, axes, device, str(backend))
    return faults, ran


def _faults(spec: KernelSpec, axes: Axes, device: str, backend: str) -> list[str]:
    place = f"{spec.name} {dict(axes)}"
    try:
        made = spec.make_inputs(axes, 5, device)
        expected = spec.reference(made)
        outputs = spec.run(spec.prepare(made, backend), backend)
        errors = output_errors(spec, outputs, expected)
    except Exception as error:  # one kernel must not keep the others from being looked at
        return [f"{place}: {type(error).__name__}: {error}"]
    over = {name: e for name, e in errors.items() if e > spec.tolerances[name]}
    return [f"{place}: {name} is off by {e:.3g}" for name, e in over.items()]


def timed(device: str, sizes: Sizes, log: RowLog, run: Measured, clock: Clock) -> list[str]:
    """Time every kernel and what it is compared with; return what was left out and why."""
    left_out = []
    for spec in SPECS.values():
        backend = backend_of(spec, device)
        if backend is None:
            left_out.append(f"{spec.name}: this device has nothing that runs it")
            continue
        for axes in points(spec, sizes):
            if clock.spent_s > clock.allowed_s:
                return [*left_out, f"no time was left for {spec.name} and what follows"]
            left_out += _time_point(spec, axes, replace(run.method, backend=backend), log, run)
    return left_out


@dataclass(frozen=True, slots=True)
class Measured:
    """How rows are measured, where, and beside which peaks."""

    method: Method
    origin: Provenance
    peaks: Peaks


def _time_point(
    spec: KernelSpec, axes: Axes, method: Method, log: RowLog, run: Measured
) -> list[str]:
    if log.has(planned_key(spec, axes, method, run.origin)):
        return []
    try:
        row = measure(spec, axes, method, run.origin).as_row()
        other = baseline(spec, axes, method.device)
        if other is not None:
            name, function, inputs = other
            work = Work(name, "torch", dict(axes), spec.flops(axes), spec.bytes(axes))
            found = measure_work(work, function, inputs, method, run.origin)
            row |= {"baseline": name, "baseline_s": found.timing.seconds_median}
    except Exception as error:  # as above
        return [f"{spec.name} {dict(axes)}: {type(error).__name__}: {error}"]
    log.append({**row, "peaks": asdict(run.peaks)})
    print(line(log.rows[-1]), flush=True)
    return []


HEADER = """\
| kernel | sizes | median | p20 to p80 | of the copy bandwidth | of the matrix rate | torch's |
|---|---|---|---|---|---|---|"""


def line(row: Row) -> str:
    """Return a row of the table."""
    timing = row["timing"]
    seconds = timing["seconds_median"]
    fp8 = "gemm_fp8" in row["kernel"]
    of_copy, of_matrix = Peaks(**row["peaks"]).shares(
        row["bytes"] / seconds, row["flops"] / seconds, fp8
    )
    sizes = " ".join(f"{name}={size}" for name, size in row["axes"].items() if name != "ragged")
    spread = f"{micro(timing['seconds_p20'])} to {micro(timing['seconds_p80'])}"
    other = f"{row['baseline']} {micro(row['baseline_s'])}" if "baseline" in row else ""
    return (
        f"| {row['kernel']} | {sizes} | {micro(seconds)} | {spread} "
        f"| {of_copy:.0%} | {of_matrix:.0%} | {other} |"
    )


def micro(seconds: float) -> str:
    """Return seconds as microseconds."""
    return f"{seconds * 1e6:,.1f} us"


def heading(origin: Provenance, peaks: Peaks, state: Mapping[str, object]) -> str:
    """Return what the table was measured on."""
    known = {name: value for name, value in asdict(origin).items() if value is not None}
    rates = {name: f"{value:.4g}" for name, value in asdict(peaks).items() if value is not None}
    clocks = {name: value for name, value in state.items() if value is not None}
    facts = {**known, **rates, **clocks}
    return "; ".join(f"{name} {value}" for name, value in facts.items()) + "."


def main() -> int:
    """Check, measure peaks, time; return 1 if a kernel is wrong or failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few and small sizes, for a CPU")
    parser.add_argument("--minutes", type=float, default=4.5)
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--write", action="store_true", help="put the table into docs/kernels.md")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_kernels.jsonl"))
    asked = parser.parse_args()
    clock = Clock(asked.minutes)
    on_gpu = asked.device.startswith("cuda")
    torch.set_num_threads(asked.threads)
    faults, ran = check(asked.device, clock)
    print(f"{ran} examples checked in {clock.spent_s:.0f} s, {len(faults)} faults")
    method = Method(
        device=asked.device,
        threads=asked.threads,
        samples=5 if asked.quick else 20,
        budget_s=0.1 if asked.quick else 0.5,
    )
    sizes = GPU if on_gpu else QUICK if asked.quick else CPU
    origin = provenance(asked.device, None if on_gpu else asked.threads)
    peaks = measured_peaks(method, origin, sizes.peak_side, sizes.peak_copied_bytes)
    with RowLog(asked.out, row_key) as log:
        print(HEADER)
        left_out = timed(asked.device, sizes, log, Measured(method, origin, peaks), clock)
        rows = log.rows
    about = heading(origin, peaks, rows[-1]["state"] if rows else {})
    print(f"{about}\n{clock.spent_s:.0f} s")
    if asked.write:
        body = "\n".join((about, "", HEADER, *map(line, rows)))
        write_sections(DOCUMENT, {"gpu" if on_gpu else "cpu": body})
    print("\n".join((*faults, *left_out)))
    failed = [text for text in left_out if "nothing that runs it" not in text]
    return int(bool(faults or failed))


if __name__ == "__main__":
    sys.exit(main())
