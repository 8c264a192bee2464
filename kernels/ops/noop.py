"""Do nothing: what a launch costs, to be told apart from what a kernel does."""

from __future__ import annotations

import triton
import triton.language as tl

from tonnage.kernels.ops.launch import launch
from tonnage.kernels.spec import Inputs, LaunchConfig, Outputs


@triton.jit
def noop_kernel(untouched, never, BLOCK: tl.constexpr):
    """Write only if told to, which no launch does: an empty kernel would have no argument."""
    if never:
        tl.store(untouched + tl.arange(0, BLOCK), 0.0)


CONFIG = LaunchConfig(
    kernel="noop_kernel",
    name="one program",
    signature={"untouched": "*fp32", "never": "i32"},
    constants={"BLOCK": 16},
    num_warps=1,
    num_stages=1,
    aligned=("untouched",),
    instruction={90: None, 100: None},
    vector_loads=False,
)
CONFIGS = (CONFIG,)


def run(inputs: Inputs) -> Outputs:
    """Launch one program that does nothing."""
    launch(noop_kernel, (1,), CONFIG, **inputs, never=0)
    return dict(inputs)
