"""Norms, rope and activations: torch's own operators, in f32 inside."""

from __future__ import annotations

import torch
import torch.nn.functional as functional

NORM_EPSILON = 1e-6
ROPE_THETA = 1e4


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Divide rows by their root mean square and multiply by the weight."""
    if x.is_cuda:
        return functional.rms_norm(x, weight.shape, weight, NORM_EPSILON)
    values = x.float()  # torch's own takes twice the time on a CPU
    shrink = (values.square().mean(-1, keepdim=True) + NORM_EPSILON).rsqrt_()
    return (values * shrink * weight).to(x.dtype)


def rope_angles(positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine f32 `[rows, 1, dim / 2]` of each row's position."""
    exponent = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    angles = positions[:, None, None].float() * ROPE_THETA**-exponent
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the halves of `[rows, heads, dim]` against each other."""
    cosine, sine = angles
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    return turned.to(x.dtype)


def gated(x: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` of rows that hold both, gate first."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def causal(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend `[new, heads, dim]`, the last of `[tokens, heads, dim]`, values narrower or not.

    torch's fast kernels want values as wide as keys: narrower ones are padded with zeros.
    """
    width = values.shape[-1]
    if width < keys.shape[-1]:
        values = functional.pad(values, (0, keys.shape[-1] - width))
    if queries.is_cuda:
        return _causal_on_gpu(queries, keys, values, scale)[..., :width]
    from tonnage.kernels.cpu.attention import causal_attention

    return causal_attention(queries, keys, values, scale).to(queries.dtype)[..., :width]


def _causal_on_gpu(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = (part.transpose(0, 1)[None] for part in (queries, keys, values))
    attended = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=causal_lower_right(q.shape[2], k.shape[2]),
        scale=scale,
    )
    return attended[0].transpose(0, 1)
