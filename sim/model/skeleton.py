"""What an architecture's reader returns: layers in the unquantised format, and where they live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tonnage.sim.domain import LayerSpec, WeightTensor
from tonnage.sim.model.config_fields import ConfigFields


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model's layers before quantisation.

    `mtp_root` is the module path of the first MTP layer's parent, with `{index}` for its number:
    DeepSeek numbers MTP layers after the others, Qwen keeps them under `mtp`.
    """

    layers: tuple[LayerSpec, ...]
    mtp_layers: tuple[LayerSpec, ...] = ()
    mtp_root: str = "mtp.layers.{index}"
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
