"""Launch a Triton kernel exactly as one of its shipped configurations says."""

from __future__ import annotations

from typing import Any

import torch

from tonnage.kernels.spec import LaunchConfig

INTERPRETED_PROCESSORS = 4  # stands for a GPU's SMs where there is none, to keep grids small


def launch(kernel: Any, grid: tuple[int, ...], config: LaunchConfig, **arguments: Any) -> None:
    """Launch the kernel on a grid; one without programs is nothing to do."""
    if set(arguments) != set(config.signature):
        raise ValueError(f"{config.kernel}: {sorted(set(arguments) ^ set(config.signature))}")
    if min(grid) > 0:
        kernel[grid](
            **arguments,
            **config.constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def processor_count(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
