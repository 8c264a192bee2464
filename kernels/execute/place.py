"""Where a rank runs: a device, a backend of the kernels, and the random numbers it draws."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tonnage.kernels.execute.formats import BACKENDS
from tonnage.kernels.ops.split_counts import SPLIT_ROWS_MAX, arrivals_for
from tonnage.kernels.registry import kernel
from tonnage.kernels.spec import Inputs, Outputs
from tonnage.sim.domain import BadInputError

WIDEST = 1 << 16  # output features of the widest product that splits K


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A device and a backend; `arrivals` are the counters that products which split K share.

    `rows_alone`: a routed row is multiplied by its experts alone, so that no bit of its result
    depends on how many others chose the same ones. A CPU's product of up to three rows rounds
    otherwise than one of more; grouped kernels of a GPU multiply a row alike in any company.
    """

    device: str
    backend: str
    random: torch.Generator
    arrivals: torch.Tensor
    rows_alone: bool = False

    def run(self, name: str, inputs: Inputs) -> Outputs:
        """Run a kernel of the registry; those of BF16 weights are torch's own on a GPU."""
        spec = kernel(name)
        backend = self.backend if self.backend in spec.runs else "torch"
        return spec.run(inputs, backend)

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        """Draw normal numbers in BF16."""
        drawn = torch.randn(shape, generator=self.random, device=self.device, dtype=torch.bfloat16)
        return drawn.mul_(std)


def place_on(
    device: str, backend: str | None = None, seed: int = 0, rows_alone: bool = False
) -> Place:
    """Return a place; by default Triton runs on a GPU and torch's kernels on a CPU."""
    kind = torch.device(device).type
    chosen = backend or ("triton" if kind == "cuda" else "cpu")
    if chosen not in BACKENDS or (kind == "cuda" and chosen == "cpu"):
        raise BadInputError(f"backend {chosen!r} does not run on {device}")
    return Place(
        device,
        chosen,
        torch.Generator(device).manual_seed(seed),
        arrivals_for(SPLIT_ROWS_MAX, WIDEST, torch.device(device)),
        rows_alone,
    )
