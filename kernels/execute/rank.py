"""One tensor-parallel rank of a model: its layers with random weights, run on a batch.

What a real rank waits for from the others, collectives, is not run: a caller charges it. Every rank
of plain tensor parallelism has the same shapes, so one stands for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tonnage.kernels.execute.attention import batched_type
from tonnage.kernels.execute.batch import Batch
from tonnage.kernels.execute.build import Layer, LayerBuilder, RankSpec
from tonnage.kernels.execute.formats import KV_SUFFIX, stored_bytes
from tonnage.kernels.execute.guard import masked, verdict_on
from tonnage.kernels.execute.marks import Marks
from tonnage.kernels.execute.pages import LayerCache, PagedMemory
from tonnage.kernels.execute.place import Place
from tonnage.kernels.execute.plan import (
    ENGINE,
    LayerGroup,
    RowShape,
    head_product,
    layer_groups,
    left_out,
    refuse_unrunnable,
    row_shape,
)
from tonnage.kernels.execute.products import product_of
from tonnage.kernels.execute.small_ops import rms_norm, rope_angles
from tonnage.sim.domain import BadInputError, InfeasibleError, Role
from tonnage.sim.model.weights import tensor_ways
from tonnage.sim.units import format_bytes

BF16_BYTES = 2
TAG_CHECK = "tag check"  # the label of its segment


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a step that is timed as one: what runs before all layers, one kind's layers, the end.

    `scale` is what its time is multiplied by to stand for all layers of its kind.
    """

    label: str
    scale: float
    run: Callable[[], None]


def rank_bytes(spec: RankSpec, place: Place) -> float:
    """Estimate the weights of a rank in memory, absorbed copies and the embedding counted."""
    model, layout = spec.model, spec.layout
    rearranged_bytes = batched_type(place.device).itemsize
    total = 0.0
    for group in layer_groups(model, spec.layers):
        for tensor in group.spec.weights:
            parameters = tensor.parameters / tensor_ways(tensor, layout, ENGINE)
            total += group.run * stored_bytes(tensor.format, parameters, place.backend)
            if tensor.name.endswith("kv_b_proj"):
                total += group.run * rearranged_bytes * parameters
    for tensor in model.outer_weights:
        if tensor.role is not Role.VISION:
            total += BF16_BYTES * tensor.parameters / tensor_ways(tensor, layout, ENGINE)
    return total


class RankModel:
    """A rank's weights and its forward pass."""

    def __init__(self, spec: RankSpec, place: Place, free_bytes: float | None = None) -> None:
        """Draw all weights; refuse what is not executed, or what does not fit `free_bytes`."""
        refuse_unrunnable(spec.model, spec.layout)
        if spec.kv_format not in KV_SUFFIX:
            raise BadInputError(f"kv: {spec.kv_format} is not executed; use {', '.join(KV_SUFFIX)}")
        needed_bytes = rank_bytes(spec, place)
        if free_bytes is not None and needed_bytes > free_bytes:
            raise InfeasibleError(
                f"the weights of one rank of {spec.model.name} take {format_bytes(needed_bytes)}, "
                f"and {format_bytes(free_bytes)} are free; run fewer layers"
            )
        self.spec = spec
        self.place = place
        self.marks = Marks()
        self.groups: tuple[LayerGroup, ...] = layer_groups(spec.model, spec.layers)
        self.left_out = left_out(spec.model, spec.layout)
        builder = LayerBuilder(spec, place, self.marks)
        self.layers = tuple(
            tuple(builder.layer(group.spec) for _ in range(group.run)) for group in self.groups
        )
        hidden = spec.model.hidden_size
        self.head = product_of(
            head_product(spec.model, spec.layout), place, keep_values=spec.keep_values
        )
        self.vocabulary = self.head.weight.shape[0]
        self.embedding = place.normal(self.vocabulary, hidden)
        self.final_norm = torch.ones(hidden, dtype=torch.bfloat16, device=place.device)
        self._residual = self.embedding[:0]
        self._output = self.embedding[:0]

    @property
    def row_shapes(self) -> tuple[RowShape, ...]:
        """Return what each executed layer stores of a token, in the order they run."""
        layout = self.spec.layout
        return tuple(row_shape(g.spec, layout) for g in self.groups for _ in range(g.run))

    @property
    def held_bytes(self) -> int:
        """Return the bytes of all weights as they are held on the device."""
        blocks = sum(layer.bytes for group in self.layers for layer in group)
        return blocks + self.head.weight.bytes + 2 * self.embedding.numel()

    def random_tokens(self, rows: int) -> torch.Tensor:
        """Draw indices of the rank's vocabulary."""
        random, device = self.place.random, self.place.device
        return torch.randint(self.vocabulary, (rows,), generator=random, device=device)

    def forward(self, batch: Batch, memory: PagedMemory, check_tags: bool = False) -> torch.Tensor:
        """Run a step: logits BF16 `[sampled rows, vocabulary of the rank]`."""
        for segment in self.segments(batch, memory, check_tags):
            segment.run()
        return self._output

    def segments(
        self, batch: Batch, memory: PagedMemory, check_tags: bool = False
    ) -> list[Segment]:
        """Return the parts of a step, to be run in order; all of them again give the same.

        With the tag check, it comes first, and what it finds wrong is masked.
        """
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        caches = iter(memory.layers)
        run = [batch]  # what attention sees

        def check() -> None:
            run[0] = masked(batch, verdict_on(batch, memory).bad, memory)
            self.marks.mark(TAG_CHECK)

        def begin() -> None:
            self._residual = torch.nn.functional.embedding(batch.tokens, self.embedding)
            for dim in {layer.rope_dim for group in self.layers for layer in group}:
                found[dim] = rope_angles(batch.positions, dim)
            self.marks.mark("embedding and angles")

        def of_group(
            layers: tuple[Layer, ...], own_caches: tuple[LayerCache, ...]
        ) -> Callable[[], None]:
            def run_layers() -> None:
                for layer, cache in zip(layers, own_caches, strict=True):
                    self._run_layer(layer, cache, run[0], found[layer.rope_dim])

            return run_layers

        segments = [Segment(TAG_CHECK, 1.0, check)] if check_tags else []
        segments.append(Segment("embedding", 1.0, begin))
        for group, layers in zip(self.groups, self.layers, strict=True):
            own = tuple(next(caches) for _ in layers)
            segments.append(Segment(group.label, group.scale, of_group(layers, own)))
        return [*segments, Segment("head", 1.0, lambda: self._end(batch))]

    def _run_layer(
        self,
        layer: Layer,
        cache: LayerCache,
        batch: Batch,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        x = rms_norm(self._residual, layer.input_norm)
        self.marks.mark("norms and rope")
        residual = self._residual + layer.attention(x, angles, batch, cache)
        x = rms_norm(residual, layer.mlp_norm)
        self.marks.mark("norms and rope")
        self._residual = residual + layer.mlp(x)
        self.marks.mark("norms and rope")

    def _end(self, batch: Batch) -> None:
        rows = self._residual if batch.sampled is None else self._residual[batch.sampled]
        self._output = self.head(rms_norm(rows, self.final_norm))
        self.marks.mark("head")
        self._output.argmax(-1)
        self.marks.mark("sampling")
