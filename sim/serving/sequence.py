"""A request while it is being served, and the record of it that stays."""

from __future__ import annotations

from tonnage.sim.domain import Request


class Sequence:
    """One request on its way: progress in tokens, pages held, and the times of its milestones.

    The engine writes the times (seconds of simulated time; None until it happened), the schedulers
    write the progress. What is left of it when it ends is a row of the results.
    """

    __slots__ = (
        "decode_instance",
        "decode_pages",
        "finish_s",
        "first_token_s",
        "generated_tokens",
        "prefill_end_s",
        "prefill_instance",
        "prefill_start_s",
        "prefilled_tokens",
        "prompt_pages",
        "rejected",
        "request",
        "transfer_end_s",
        "transfer_start_s",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prefilled_tokens = 0
        self.generated_tokens = 0
        self.prompt_pages = 0  # held where the prompt is computed
        self.decode_pages = 0  # held at a decode instance
        self.rejected: str | None = None
        self.prefill_instance: int | None = None
        self.decode_instance: int | None = None
        self.prefill_start_s: float | None = None
        self.prefill_end_s: float | None = None
        self.transfer_start_s: float | None = None
        self.transfer_end_s: float | None = None
        self.first_token_s: float | None = None
        self.finish_s: float | None = None

    @property
    def remaining_input_tokens(self) -> int:
        """Prompt tokens whose KV is not yet computed."""
        return self.request.input_tokens - self.prefilled_tokens

    @property
    def remaining_output_tokens(self) -> int:
        """Output tokens not yet generated."""
        return self.request.output_tokens - self.generated_tokens
