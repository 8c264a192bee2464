"""No kernel reads or writes outside its tensors, and the guard pages would tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.kernels.faulty_kernels import FAULTY
from tonnage.kernels.registry import KERNELS

NAMES = (*FAULTY, *(name for name, spec in KERNELS.items() if "triton" in spec.runs))


@pytest.fixture(scope="module")
def endings() -> tuple[dict[str, int], str]:
    """Return how each kernel's process ended, and what they had to say."""
    command = [sys.executable, "-m", "tests.kernels.guarded_run", *NAMES]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = (line.rsplit(" ", 1) for line in done.stdout.splitlines())
    return {name: int(code) for name, code in lines}, done.stderr


@pytest.mark.parametrize("name", ["read_after", "read_before", "write_before"])
def test_one_element_too_far_ends_the_process(
    endings: tuple[dict[str, int], str], name: str
) -> None:
    codes, _ = endings
    assert codes[name] == -signal.SIGSEGV


def test_a_write_beside_the_tensor_on_its_own_page_is_seen(
    endings: tuple[dict[str, int], str],
) -> None:
    codes, said = endings
    assert codes["write_after"] == 1
    assert "written beside a tensor" in said


@pytest.mark.parametrize("name", ["sound", *(name for name in NAMES if name not in FAULTY)])
def test_a_kernel_stays_inside_its_tensors(endings: tuple[dict[str, int], str], name: str) -> None:
    codes, said = endings
    assert codes.get(name) == 0, said
