"""Micro-batches of a pipeline: as many batches as stages, each in another stage at a time."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Generic, TypeVar

from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.plan import Lane, PromptTaker, Receiver, Scheduler, Sender
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.tiers import LoadPlan

Kind = TypeVar("Kind", bound=Scheduler)


class MicroBatches(Generic[Kind]):
    """Schedulers that share pages and waiting prompts; the instance runs each as a lane."""

    def __init__(self, lanes: ListLike[Kind]) -> None:
        """Join the micro-batches of one instance."""
        self._lanes = lanes

    @property
    def lanes(self) -> list[Lane]:
        """The micro-batches, in the order in which they enter the pipeline."""
        return [lane.lanes[0] for lane in self._lanes]

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence at the next boundary of the lane that has it."""
        for lane in self._lanes:
            lane.abort(sequence)

    def waiting_requests(self) -> int:
        """Return how many requests wait; the prompts that wait are every lane's."""
        return max(lane.waiting_requests() for lane in self._lanes)

    def used_pages(self) -> int:
        """Return the pages that requests hold in the shared pool."""
        return self._lanes[0].used_pages()

    def pools(self) -> ListLike[PagePool]:
        """Return the pages of each rank, which all lanes share."""
        return self._lanes[0].pools()

    def pool_of(self, sequence: Sequence) -> PagePool:
        """Return the pages of the rank that a sequence is at."""
        return self._lanes[0].pool_of(sequence)

    def settle(self) -> None:
        """Write the progress of the running sequences of all lanes to them."""
        for lane in self._lanes:
            lane.settle()


class PromptMicroBatches(MicroBatches[PromptTaker]):
    """Micro-batches of a colocated instance."""

    def add(self, sequence: Sequence, lead: int = 0) -> LoadPlan | None:
        """Queue a request for the lane that next has room."""
        return self._lanes[0].add(sequence)

    def loaded(self, sequence: Sequence, plan: LoadPlan, blocks: int, lead: int = 0) -> None:
        """Take in that blocks are on the host."""
        self._lanes[0].loaded(sequence, plan, blocks)


class SenderMicroBatches(MicroBatches[Sender]):
    """Micro-batches of a prefill instance."""

    def add(self, sequence: Sequence, lead: int = 0) -> LoadPlan | None:
        """Queue a prompt for the lane that next has room."""
        return self._lanes[0].add(sequence)

    def loaded(self, sequence: Sequence, plan: LoadPlan, blocks: int, lead: int = 0) -> None:
        """Take in that blocks are on the host."""
        self._lanes[0].loaded(sequence, plan, blocks)

    def hand_over(self, sequence: Sequence) -> None:
        """Free the pages of a prompt."""
        self._lanes[0].hand_over(sequence)


class ReceiverMicroBatches(MicroBatches[Receiver]):
    """Micro-batches of a decode instance; a sequence stays in the one it was given."""

    def __init__(self, lanes: ListLike[Receiver]) -> None:
        """Join the lanes of one instance."""
        super().__init__(lanes)
        self._lane_of: dict[int, Receiver] = {}

    @property
    def admitted(self) -> int:
        """Sequences that hold pages in any lane."""
        return sum(lane.admitted for lane in self._lanes)

    def request_pages(self, sequence: Sequence, lead: int = 0) -> None:
        """Queue a sequence for pages in the lane that has the fewest."""
        lane = min(self._lanes, key=lambda one: one.admitted + one.waiting_requests())
        self._lane_of[sequence.request.id] = lane
        lane.request_pages(sequence)

    def join(self, sequence: Sequence, lead: int = 0) -> None:
        """Let a sequence whose KV has arrived into its lane's batch."""
        self._lane_of[sequence.request.id].join(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the pages of a sequence that does not run."""
        self._lane_of[sequence.request.id].release(sequence)
