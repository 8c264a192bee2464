"""A request while it is being served, and the record of it that stays."""

from __future__ import annotations

from tonnage.sim.domain import Request
from tonnage.sim.serving.blocks import HeldPrefix

NOT_IN_BATCH = -1


class Sequence:
    """One request on its way: progress in tokens, pages held, and the times of its milestones.

    The engine writes the times (seconds of simulated time; None until it happened), the schedulers
    write the progress. What is left of it when it ends is a row of the results.
    """

    __slots__ = (
        "aborted",
        "admission_order",
        "batch_order",
        "cached_tokens",
        "computed_tokens",
        "decode_instance",
        "decode_pages",
        "eligible_step",
        "ended",
        "finish_s",
        "first_token_s",
        "gave_up",
        "generated_tokens",
        "last_token_s",
        "prefill_end_s",
        "prefill_instance",
        "prefill_start_s",
        "prefilled_tokens",
        "prefix",
        "prompt_pages",
        "prompt_tokens",
        "rejected",
        "request",
        "retractions",
        "transfer_end_s",
        "transfer_start_s",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt_tokens = request.input_tokens  # to compute: after a retraction, outputs too
        self.prefilled_tokens = 0  # of those, handed to a step or in place
        self.generated_tokens = 0
        self.computed_tokens = 0  # prompt tokens computed, again ones included
        self.cached_tokens = 0  # prompt tokens that were in a prefix cache when it first started
        self.prefix: HeldPrefix | None = None  # what it shares through a prefix cache
        self.prompt_pages = 0  # held where the prompt is computed
        self.decode_pages = 0  # held at a decode instance before and after the batch
        self.admission_order = 0  # among the sequences of its scheduler
        self.batch_order = NOT_IN_BATCH
        self.eligible_step = 0  # of its scheduler: the first that it can be part of
        self.retractions = 0
        self.rejected: str | None = None  # at the door, and why
        self.aborted: str | None = None  # by the server, and why
        self.gave_up = False  # the client did
        self.ended = False  # it is out of the system, one way or the other
        self.prefill_instance: int | None = None
        self.decode_instance: int | None = None
        self.prefill_start_s: float | None = None
        self.prefill_end_s: float | None = None
        self.transfer_start_s: float | None = None
        self.transfer_end_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None  # before its next decode step, once it has one
        self.finish_s: float | None = None

    @property
    def remaining_input_tokens(self) -> int:
        """Prompt tokens that no step has taken up yet."""
        return self.prompt_tokens - self.prefilled_tokens

    @property
    def remaining_output_tokens(self) -> int:
        """Output tokens not yet generated."""
        return self.request.output_tokens - self.generated_tokens

    @property
    def stored_tokens(self) -> int:
        """Tokens whose KV is in place before its next decode step: all but the last one."""
        return self.request.input_tokens + self.generated_tokens - 1
