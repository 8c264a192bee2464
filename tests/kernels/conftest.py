"""Run every kernel test under Triton's interpreter, mended, whether or not there is a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

# Triton decides at its own import and at each decoration whether to interpret. The variable is
# taken back at once so that a process started by a test compiles unless it asks otherwise.
if "triton" in sys.modules:
    assert sys.modules["triton"].knobs.runtime.interpret, "triton was imported before its tests"
os.environ["TRITON_INTERPRET"] = "1"
import triton
import triton.language

triton.knobs.runtime.interpret = True
del os.environ["TRITON_INTERPRET"]

from tests.kernels.interpreter import patched  # noqa: E402


@pytest.fixture(autouse=True)
def mended_interpreter() -> Iterator[None]:
    """Mend the interpreter for the test."""
    with patched():
        yield
