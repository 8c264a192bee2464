"""Tensors between pages that may not be touched, so that a stray access kills the process.

A tensor is copied into fresh pages with a PROT_NONE page before and after. Placed at the `end`,
its last byte is the last byte allowed, and reading or writing one element past it is a SIGSEGV;
placed at the `start`, one element before it is. The rest of its pages holds 0xFF, which is NaN or
-1 in every format used, and `check` finds it changed. Masked-off elements are never touched by
the interpreter, so only real accesses count. As a fault ends the process, the kernels run in
processes of their own: see `guarded_run`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PAGE = mmap.PAGESIZE
POISON = 0xFF
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PROT_NONE = 0


def guarded_pages(byte_count: int) -> tuple[int, int]:
    """Map pages for that many bytes between two untouchable ones: their address and size."""
    size = -(-byte_count // PAGE) * PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = LIBC.mmap(None, size + 2 * PAGE, PROT_NONE, private, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    if LIBC.mprotect(address + PAGE, size, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")
    return address + PAGE, size


class Guards:
    """Places tensors at one side of guarded pages and remembers what must stay poisoned."""

    def __init__(self, side: str) -> None:
        self.at_end = {"start": False, "end": True}[side]
        self._slack: list[torch.Tensor] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in guarded pages, with its strides."""
        if tensor.numel() == 0:
            return tensor
        extents = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in extents)
        byte_count = elements * tensor.element_size()
        address, size = guarded_pages(byte_count)
        pages = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        pages.fill_(POISON)
        start = size - byte_count if self.at_end else 0
        self._slack.append(pages[:start] if self.at_end else pages[byte_count:])
        flat = pages[start : start + byte_count].view(tensor.dtype)
        placed = flat.as_strided(tensor.shape, tensor.stride())
        return placed.copy_(tensor)

    def copy_all(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs with every tensor in guarded pages."""
        return {
            name: self.copy(value) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }

    def check(self) -> None:
        """Fail if a byte beside a tensor, on its pages, was written."""
        for slack in self._slack:
            assert bool((slack == POISON).all()), "written beside a tensor"


class GuardedAllocations(TorchFunctionMode):
    """Inside the block, tensors that code under test allocates are guarded, empty ones poisoned."""

    POISONED = (torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided)
    FILLED = (torch.zeros, torch.zeros_like, torch.full, torch.full_like, torch.ones)

    def __init__(self, guards: Guards) -> None:
        super().__init__()
        self.guards = guards

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.POISONED and result.numel():
            placed = self.guards.copy(result)
            placed.view(torch.uint8).fill_(POISON)
            return placed
        if func in self.FILLED or func is torch.Tensor.new_zeros:
            return self.guards.copy(result)
        return result
