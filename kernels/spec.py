"""The types that describe a kernel: pure data, importing neither torch nor triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

Axes = Mapping[str, int]
Inputs = dict[str, Any]  # torch tensors and plain numbers, by name
Outputs = dict[str, Any]  # torch tensors by name


def load(dotted: str) -> Any:
    """Import and return the object that `package.module:name` names."""
    module, _, name = dotted.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """One shipped way to compile a Triton kernel, complete enough to compile it ahead of time.

    `signature` gives the Triton type of every argument that is no constant ("*bf16", "*fp8e4nv",
    "i32", "fp32", "tensordesc<bf16[64,64]>"); `constants` the value of every constexpr one.
    `aligned` names the arguments a launch guarantees to be multiples of 16 (pointers, strides):
    without it no 128-bit load is made. `instruction` is the matrix instruction the PTX must hold
    per compute capability, and its keys are the architectures the configuration ships for.
    """

    kernel: str  # the jit function's name in the module that holds the configuration
    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...]
    instruction: Mapping[int, str | None]
    vector_loads: bool = True  # the PTX must read global memory 128 bits at a time
    stack_bytes_max: int = 0  # above zero only with `exception` saying why
    exception: str = ""

    def __post_init__(self) -> None:
        if both := set(self.signature) & set(self.constants):
            raise ValueError(f"{self.name}: {sorted(both)} both typed and constant")
        if self.stack_bytes_max and not self.exception:
            raise ValueError(f"{self.name}: a spill budget needs its reason")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel: its axes, what it computes and moves, and where its code is.

    `flops` counts a multiply-add as two; `bytes` counts every byte that must cross HBM once.
    `tolerances` bounds each output's `compare.row_error` against the reference; 0.0 asks for the
    same bytes. `examples` are axes small enough to check correctness on a CPU, odd sizes included.
    """

    name: str
    summary: str
    axes: Mapping[str, str]  # axis -> meaning
    flops: Callable[[Axes], float]
    bytes: Callable[[Axes], float]
    inputs: str  # "module:function(axes, seed, device) -> Inputs", importing torch only
    reference_function: str  # "module:function(inputs) -> Outputs", in higher precision, torch only
    runs: Mapping[str, str]  # backend -> "module:function(inputs) -> Outputs"
    tolerances: Mapping[str, float]
    examples: tuple[Axes, ...]
    configs_name: str | None = None  # "module:CONFIGS", what the Triton backend ships
    prepares: Mapping[str, str] = field(default_factory=dict)  # backend -> one-time weight packing
    capability_min: int = 80  # lowest CUDA compute capability (90 is Hopper) that runs it

    def __post_init__(self) -> None:
        for axes in self.examples:
            if set(axes) != set(self.axes):
                raise ValueError(f"{self.name}: example {dict(axes)} lacks or adds axes")

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that run this kernel: `triton` (CUDA or interpreter), `cpu` (torch)."""
        return tuple(self.runs)

    def make_inputs(self, axes: Axes, seed: int, device: str = "cpu") -> Inputs:
        """Return fresh random inputs, with page tables in random order."""
        made: Inputs = load(self.inputs)(axes, seed, device)
        return made

    def prepare(self, inputs: Inputs, backend: str) -> Inputs:
        """Return the inputs as the backend wants its weights: once per weight, never timed."""
        if dotted := self.prepares.get(backend):
            prepared: Inputs = load(dotted)(inputs)
            return prepared
        return inputs

    def run(self, inputs: Inputs, backend: str = "triton") -> Outputs:
        """Run the kernel on prepared inputs; running it again on them gives the same outputs."""
        outputs: Outputs = load(self.runs[backend])(inputs)
        return outputs

    def reference(self, inputs: Inputs) -> Outputs:
        """Return what the kernel should have computed, in higher precision."""
        expected: Outputs = load(self.reference_function)(inputs)
        return expected

    def configs(self) -> tuple[LaunchConfig, ...]:
        """Return the shipped launch configurations; imports triton."""
        return load(self.configs_name) if self.configs_name else ()
