"""Every kernel of the product, as data. Importing this loads neither torch nor triton.

Use::

    spec = kernel("gqa_decode_fp8")
    inputs = spec.make_inputs(spec.examples[0], seed=0, device="cpu")
    outputs = spec.run(spec.prepare(inputs, "triton"))  # or "cpu"
    errors = compare.output_errors(spec, outputs, spec.reference(inputs))

To add a kernel: `ops/<name>.py` holds the Triton code, its launcher `run(inputs)` and `CONFIGS`
(or a tuple a format, such as `FP8_CONFIGS`) of `LaunchConfig`, made by the function the launcher
asks for any shape, so that what ships is what is compiled ahead of time. Its neighbour
`ops/<name>_reference.py` holds `make_inputs(axes, seed, device)` and `reference(inputs)` and
imports torch alone. A `KernelSpec` in a `*_specs.py` file names them, and that file's tuple is
listed here. A format is a kernel of its own (`gqa_decode_bf16`, `gqa_decode_fp8`): axes are whole
numbers. Outputs are dicts by name; a kernel that writes in place returns the tensors it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tonnage.kernels.attention_specs import ATTENTION_KERNELS
from tonnage.kernels.cache_specs import CACHE_KERNELS
from tonnage.kernels.cpu.backend import with_cpu
from tonnage.kernels.dense_specs import DENSE_KERNELS
from tonnage.kernels.gemm_specs import ACTIVATION_KERNELS, GEMM_KERNELS
from tonnage.kernels.spec import KernelSpec

SPECS: tuple[KernelSpec, ...] = tuple(
    map(
        with_cpu,
        (
            *CACHE_KERNELS,
            *ATTENTION_KERNELS,
            *GEMM_KERNELS,
            *ACTIVATION_KERNELS,
            *DENSE_KERNELS,
        ),
    )
)


def by_name(specs: tuple[KernelSpec, ...]) -> Mapping[str, KernelSpec]:
    """Return the specs by name, refusing a name used twice."""
    named = {spec.name: spec for spec in specs}
    if len(named) != len(specs):
        raise ValueError("two kernels have one name")
    return MappingProxyType(named)


KERNELS: Mapping[str, KernelSpec] = by_name(SPECS)


def kernel(name: str) -> KernelSpec:
    """Return the kernel of that name."""
    if name not in KERNELS:
        raise KeyError(f"no kernel {name!r}; there are {', '.join(KERNELS)}")
    return KERNELS[name]
