"""What an architecture's reader returns: layers in the unquantised format, and where they live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tonnage.sim.domain import LayerSpec, WeightTensor
from tonnage.sim.model.config_fields import ConfigFields


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model's layers before quantisation.

    `mtp_roots` are the module paths of the MTP layers, which DeepSeek numbers after the others and
    Qwen keeps under `mtp`.
    """

    layers: tuple[LayerSpec, ...]
    mtp_layers: tuple[LayerSpec, ...] = ()
    mtp_roots: tuple[str, ...] = ()
    vision: tuple[WeightTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFields:
    """The config of one model: the text model's fields, and the whole file's around them."""

    text: ConfigFields
    whole: ConfigFields

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.text.integer("hidden_size")

    @property
    def layers(self) -> int:
        """Number of layers, MTP layers excluded."""
        return self.text.integer("num_hidden_layers")


SkeletonReader = Callable[[ModelFields], Skeleton]
