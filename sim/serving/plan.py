"""What a scheduler decides at a step boundary, and what a committed step changed."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Protocol

from tonnage.sim.domain import Step
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.prompts import Chunk
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.tiers import LoadPlan


@dataclass(slots=True)
class Plan:
    """The next step, how often it can be repeated, and what was decided on the way.

    `step` is None when there is nothing to run. `decoding`: sequences that get a token in each
    step; `tokens_per_step`: tokens they get together. `batch_version` is equal for two plans with
    no prompt chunks exactly if the second goes on with the batch of the first. `load_tokens`: of KV
    that comes from host memory while the step runs, which does not end before.
    """

    step: Step | None = None
    max_steps: int = 0
    decoding: int = 0
    tokens_per_step: float = 0.0
    batch_version: int = 0
    load_tokens: int = 0
    started: ListLike[Sequence] = ()  # first prompt chunk
    newcomers: ListLike[Sequence] = ()  # first decode step
    retracted: ListLike[Sequence] = ()  # lost their pages
    admitted: ListLike[Sequence] = ()  # were given pages for KV that will come
    restored: ListLike[Sequence] = ()  # were given pages for KV backed up
    failed: ListLike[Sequence] = ()  # aborted by the server
    dropped: ListLike[Sequence] = ()  # aborted by their client
    ranks: ListLike[Plan] = ()  # under attention-DP, what was joined

    @property
    def moved(self) -> bool:
        """Whether anybody but the instance must know of it."""
        return bool(self.admitted or self.restored or self.failed or self.dropped)


@dataclass(slots=True)
class Outcome:
    """What a committed step changed: prompts that are complete, requests that are complete.

    `tokens_together`: tokens that came in one step with another token of their request, of those
    that are no longer in the batch; between two such tokens a client sees no gap. `parts`: chunks,
    computed for another instance, of prompts that are not complete with them.
    """

    prefilled: ListLike[Sequence] = ()
    finished: ListLike[Sequence] = ()
    dropped: ListLike[Sequence] = ()
    tokens_together: int = 0
    parts: ListLike[Chunk] = ()


class Lane(Protocol):
    """One batch that is planned and run step after step.

    Steps are numbered. What is added while a segment runs says how many of its steps have begun
    (`lead`, 0 between steps): it is looked at `lag_steps` after the step in progress.
    """

    lag_steps: int

    def next_step(self) -> Plan:
        """Decide what runs next."""

    def commit(self, steps: int) -> Outcome:
        """Take in that the last step planned was done `steps` times."""

    def interruption_after(self, lead: int) -> int | None:
        """Return the steps after which a segment should end to let in what waits; None: not."""

    def visit_after(self, lead: int) -> int | None:
        """Return the steps after which something is decided while the segment goes on."""

    def visit(self, steps: int) -> Plan:
        """Decide it; the segment can go on for `max_steps` in all."""


class Scheduler(Protocol):
    """All that one instance schedules: a lane, or the micro-batches of a pipeline."""

    @property
    def lanes(self) -> ListLike[Lane]:
        """The batches that run side by side, in the order in which they enter the pipeline."""

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence at the next boundary, wherever it is here."""

    def waiting_requests(self) -> int:
        """Return how many requests wait here."""

    def used_pages(self) -> int:
        """Return the pages that requests hold here."""

    def pools(self) -> ListLike[PagePool]:
        """Return the pages of each attention-DP rank."""

    def pool_of(self, sequence: Sequence) -> PagePool:
        """Return the pages of the rank that a sequence is at."""

    def settle(self) -> None:
        """Write the progress of the running sequences to them: a crash takes the batch away."""


class PromptTaker(Scheduler, Protocol):
    """A scheduler that computes prompts."""

    def add(self, sequence: Sequence, lead: int = 0) -> LoadPlan | None:
        """Queue a request; what is returned is to be loaded, and it may wait for that first."""

    def loaded(self, sequence: Sequence, plan: LoadPlan, blocks: int, lead: int = 0) -> None:
        """Take in that the first blocks of a plan are there, and queue what waited for it."""


class Sender(PromptTaker, Protocol):
    """A scheduler that computes prompts for another instance."""

    def hand_over(self, sequence: Sequence) -> None:
        """Free the pages of a prompt whose KV has arrived elsewhere, or will not be wanted."""


class Receiver(Scheduler, Protocol):
    """A scheduler whose sequences bring the KV of their prompt."""

    @property
    def admitted(self) -> int:
        """Sequences that hold pages here, arrived or not."""

    def request_pages(self, sequence: Sequence, lead: int = 0) -> None:
        """Queue a sequence for the pages of its prompt."""

    def join(self, sequence: Sequence, lead: int = 0) -> None:
        """Let a sequence whose KV has arrived into the batch."""

    def release(self, sequence: Sequence) -> None:
        """Free the pages of a sequence that was complete when its KV arrived, or is not wanted."""
