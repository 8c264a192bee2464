"""Run kernels on guarded tensors, each in a process of its own: `python -m ... NAME...`.

One line a kernel: `NAME CODE`, CODE being 0 or the negative number of the signal that ended it;
what went wrong is on stderr. Values are compared with the reference as well.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback

import torch

from tests.kernels.faulty_kernels import FAULTY
from tests.kernels.guards import GuardedAllocations, Guards
from tests.kernels.interpreter import patched
from tonnage.kernels.compare import output_errors
from tonnage.kernels.registry import KERNELS
from tonnage.kernels.spec import Axes, KernelSpec


def run_guarded(spec: KernelSpec, axes: Axes, side: str) -> None:
    """Run one example with its tensors at one side of their pages; fail on wrong values."""
    inputs = spec.prepare(spec.make_inputs(axes, seed=7), "triton")
    expected = spec.reference(inputs)
    guards = Guards(side)
    placed = guards.copy_all(inputs)
    with GuardedAllocations(guards):
        outputs = spec.run(placed)
    guards.check()
    errors = output_errors(spec, outputs, expected)
    wrong = {name: error for name, error in errors.items() if error > spec.tolerances[name]}
    assert not wrong, f"{spec.name} {dict(axes)}: {wrong}"


def in_child(spec: KernelSpec) -> int:
    """Run a kernel's examples in a forked process, the first at both sides; return how it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        with patched():
            for number, axes in enumerate(spec.examples):
                run_guarded(spec, axes, "start" if number == 0 else "end")
            run_guarded(spec, spec.examples[0], "end")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(names: list[str]) -> None:
    """Run the named kernels."""
    faulthandler.enable()
    torch.set_num_threads(1)
    for name in names:
        print(name, in_child({**KERNELS, **FAULTY}[name]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
