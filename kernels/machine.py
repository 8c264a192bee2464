"""Which devices there are to measure on."""

from __future__ import annotations

import torch

from tonnage.kernels.provenance import cpu_name
from tonnage.sim.domain import BadInputError


def best_device() -> str:
    """Return `cuda` where there is a CUDA GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> str:
    """Return a device's name; raises BadInputError where there is no such device."""
    if device == "cpu":
        return cpu_name()
    if not torch.cuda.is_available():
        raise BadInputError(
            f"device: {device}: torch {torch.__version__} finds no CUDA GPU; use cpu, or install a "
            "CUDA build of torch"
        )
    number = torch.device(device).index or 0
    if number >= torch.cuda.device_count():
        raise BadInputError(f"device: {device}: there are {torch.cuda.device_count()} GPUs")
    return str(torch.cuda.get_device_name(number))
