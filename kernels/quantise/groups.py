"""Split a tensor's last dimension into runs of equal length."""

from __future__ import annotations

import torch


def in_groups(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return `[..., k]` as `[..., k / size, size]`."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)
