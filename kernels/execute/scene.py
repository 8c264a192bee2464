"""Several requests running on real pages, played once without a fault and again with one.

A play is a function of its seed: the same requests come and go in the same order, with the same KV
and the same tokens, so that all that differs between two plays is the fault. One request, the
victim, came by a handoff from another memory; one had ended before and left it its pages; one
newcomer is admitted before the step. All but the ended one then decode one token together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import ceil

import torch

from tonnage.kernels.cpu.pages import write_rows
from tonnage.kernels.execute.batch import Batch, make_batch
from tonnage.kernels.execute.handoff import hand_over
from tonnage.kernels.execute.pages import HeldPages, PagedMemory, PageShape
from tonnage.kernels.execute.place import place_on
from tonnage.kernels.execute.rank import RankModel
from tonnage.kernels.paged_inputs import quantised
from tonnage.sim.domain import PromptChunk

NOISE = 1 << 16  # numbers that all KV is cut from
VICTIM, OTHER = 0, -1  # which noise is whose; neighbours count from one


@dataclass(frozen=True, slots=True)
class SceneSize:
    """How many requests decode together, the newcomer too, and how long their contexts are."""

    requests: int = 6
    tokens_min: int = 33
    tokens_max: int = 128
    page_tokens: int = 16

    def __post_init__(self) -> None:
        if self.requests < 3 or not 2 <= self.tokens_min <= self.tokens_max:
            raise ValueError("a victim, a neighbour and a newcomer, of two tokens at least")

    @property
    def pages(self) -> int:
        """Return the pages of a memory with room for all of them and the request that ended."""
        return (self.requests + 3) * ceil(self.tokens_max / self.page_tokens)


@dataclass(slots=True, eq=False)
class Running:
    """A request of the scene: what it holds, its context with the token it computes, its KV."""

    held: HeldPages
    context: int
    key: int


class Scene:
    """The memories and requests of one play.

    `draw` decides what all plays of a seed share, `choice` what the fault does. `former` is what
    the ended request still believes to hold, `late` a step of it that nobody waited for.
    """

    running: list[Running]
    sent: HeldPages
    former: HeldPages
    late: Batch
    before_load: list[list[torch.Tensor]]

    def __init__(self, model: RankModel, size: SceneSize, seed: int) -> None:
        """Make two memories, whose pages hold numbers, and nobody in them."""
        self.model, self.size = model, size
        self.draw = random.Random(f"scene {seed}")
        self.choice = random.Random(f"fault {seed}")
        place = model.place
        self.place = place_on(place.device, place.backend, seed)
        self.memory, self.source = self._memory(), self._memory()
        for memory in (self.memory, self.source):
            memory.fill_randomly(NOISE)
        self._noise = self.place.normal(NOISE)
        self.victim_content_scale = 1.0
        self.late_is_due = False

    # --- the script -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Let requests come and go, one end beside its successor, and the victim be given pages."""
        for _ in range(self.draw.randint(0, 4)):
            self.memory.close(self.memory.open(self._tokens()))
        neighbours = [self._admitted(number + 1) for number in range(self.size.requests - 2)]
        context = self._tokens()
        self._end_one_before(context)
        victim = Running(self.memory.open(context), context, VICTIM)
        neighbours.insert(self.draw.randrange(len(neighbours) + 1), victim)
        self.running = neighbours
        self.sent = self.source.open(context)

    def fill_source(self) -> None:
        """Compute the victim's KV where its prompt was run."""
        tokens, scale = self.victim.context, self.victim_content_scale
        self.write(self.source, self.sent, tokens, VICTIM, scale)

    def hand_over(self) -> None:
        """Copy the victim's KV to its pages, keeping what those held before."""
        self.before_load = [
            [part.view(torch.uint8)[self.victim.held.pages].clone() for part in layer.parts]
            for layer in self.memory.layers
        ]
        hand_over(self.source, [self.sent], self.memory, [self.victim.held])

    def admit_newcomer(self) -> None:
        """Give another request pages and KV, and a place at the end of the batch."""
        self.running.append(self._admitted(self.size.requests - 1))

    def batch(self) -> Batch:
        """Return the step in which all running requests compute a token."""
        tokens = torch.tensor(
            [self.draw.randrange(self.model.vocabulary) for _ in self.running],
            device=self.place.device,
        )
        held = [one.held for one in self.running]
        return make_batch(self.memory, held, [one.context for one in self.running], [], tokens)

    def end(self) -> None:
        """Let all requests end, the masked ones by an abort: it is the same."""
        for one in self.running:
            self.memory.close(one.held)

    # --- who is who -----------------------------------------------------------------------------

    @property
    def victim(self) -> Running:
        """Return the request that came by handoff."""
        return self.running[self.victim_row]

    @property
    def victim_row(self) -> int:
        """Return its row in the batch."""
        return next(row for row, one in enumerate(self.running) if one.key == VICTIM)

    # --- real KV --------------------------------------------------------------------------------

    def write(
        self, memory: PagedMemory, held: HeldPages, tokens: int, key: int, scale: float = 1.0
    ) -> None:
        """Write the KV of a request's tokens to the pages it was given.

        `scale` multiplies the one that FP8 numbers are divided by, but not the one they are read
        with.
        """
        entry = torch.arange(tokens) // self.size.page_tokens
        slots = torch.tensor(held.pages)[entry] * self.size.page_tokens
        slots = (slots + torch.arange(tokens) % self.size.page_tokens).to(self.place.device)
        count = 0
        for layer in memory.layers:
            for part in layer.parts:
                width = part[0, 0].numel()
                at = torch.arange(tokens * width, device=self.place.device)
                start = (key * 104729 + count * 7919) % NOISE
                rows = self._noise[(at + start) % NOISE].view(tokens, width)
                write_rows(
                    part, slots, quantised(rows, layer.scale * scale) if memory.is_fp8 else rows
                )
                count += 1

    def _memory(self) -> PagedMemory:
        spec, size = self.model.spec, self.size
        shape = PageShape(
            layers=self.model.row_shapes,
            kv_format=spec.kv_format,
            pages=size.pages,
            page_tokens=size.page_tokens,
            requests_max=size.requests + 4,
            request_tokens_max=size.tokens_max,
        )
        return PagedMemory(shape, self.place)

    def _tokens(self) -> int:
        return self.draw.randint(self.size.tokens_min, self.size.tokens_max)

    def _admitted(self, key: int) -> Running:
        tokens = self._tokens()
        one = Running(self.memory.open(tokens), tokens, key)
        self.write(self.memory, one.held, tokens, key)
        return one

    def _end_one_before(self, tokens: int) -> None:
        """Let a request end that leaves its pages to the next one, with a step of it under way."""
        ended, new = self.memory.open(tokens), self.draw.randint(1, tokens)
        chunk = PromptChunk(new, tokens - new)
        ids = torch.zeros(new, dtype=torch.int64, device=self.place.device)
        self.late = make_batch(self.memory, [], [], [(ended, chunk)], ids)
        self.former = replace(ended, pages=list(ended.pages), tags=list(ended.tags))
        self.memory.close(ended)
        self.memory.offer_next(self.former.pages)
