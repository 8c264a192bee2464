"""Run a scheduler step by step, without a clock, and write down what it does as a table.

A row per step, `step | prompts | decode | notes | free`: the chunks of prompts as
`name:tokens@tokens before`; the requests that get a token, those whose token nobody waits for in
brackets; what the step's plan decided (give: pages to a request whose KV will come, back: pages to
one that lost them, retract, abort, drop: its client has gone) and who got its last token in it
(end); and the pages that are free while it runs. A plan that runs nothing has a row of its own if
it decided something. Attention-DP ranks are separated by strokes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from tonnage.sim.domain import Request, Step
from tonnage.sim.serving.plan import Outcome, Plan
from tonnage.sim.serving.sequence import Sequence

BLOCK_TOKENS = 4


@dataclass(frozen=True)
class Ask:
    """A request that comes while step `during` runs, or before the first (None).

    `limit`: the output tokens that its client allows. `leaves`: the step during which the client
    gives it up. `kv`: the step during which its KV comes to a decode instance, if it has pages by
    then; else that in which it is given them. `blocks`: a letter for what each of its first
    blocks of four tokens holds.
    """

    name: str
    input_tokens: int
    output_tokens: int
    during: int | None = None
    limit: int | None = None
    leaves: int | None = None
    kv: int = -1
    blocks: str = ""

    def request(self, number: int) -> Request:
        """Return it as a request that is here from the beginning."""
        prefixes = [self.blocks[: n + 1] for n in range(len(self.blocks))]
        ids = tuple(int.from_bytes(prefix.encode(), "big") for prefix in prefixes)
        tokens = self.input_tokens, self.output_tokens, self.limit
        return Request(number, 0.0, *tokens, None, ids, BLOCK_TOKENS if ids else 0)


def table(text: str) -> list[str]:
    """Return the rows of a table in a test, without its heading."""
    rows = text.strip().splitlines()[1:]
    return [" | ".join(cell.strip() for cell in row.split("|")) for row in rows]


def rehearse(scheduler: Any, asks: Iterable[Ask], *, restore_steps: int = 0) -> list[str]:
    """Return the rows of a schedule until nothing is left to do.

    `restore_steps`: the steps after that of its plan in which KV comes back from host memory.
    """
    return _Rehearsal(scheduler, list(asks), restore_steps).rows()


@dataclass
class _Rank:
    """What the table knows of one rank: names in the order in which they joined."""

    running: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # in the step before
    under_way: str = ""  # the prompt of which there is more to compute


class _Rehearsal:
    def __init__(self, scheduler: Any, asks: list[Ask], restore_steps: int) -> None:
        self._scheduler = scheduler
        self._decodes = hasattr(scheduler, "request_pages")
        self._restore_steps = restore_steps
        self._names = [ask.name for ask in asks]
        self._asks = {ask.name: ask for ask in asks}
        self._sequences = {
            ask.name: Sequence(ask.request(number)) for number, ask in enumerate(asks)
        }
        self._due: list[tuple[int, str, str]] = []  # (during step, what, name)
        for ask in asks:
            self._due.append((-1 if ask.during is None else ask.during, "comes", ask.name))
            if ask.leaves is not None:
                self._due.append((ask.leaves, "leaves", ask.name))
        self._ranks = [_Rank() for _ in getattr(scheduler, "ranks", [scheduler])]
        self._rows: list[str] = []

    def rows(self, most_steps: int = 500) -> list[str]:
        self._happen(-1, 0)
        for step in range(most_steps):
            plan = self._next_plan(step)
            if plan is None:
                return self._rows
            free = self._free()
            self._happen(step, 1)
            outcome = self._scheduler.commit(1)
            self._write(str(step), plan, outcome, free)
        raise AssertionError(f"still at work after {most_steps} steps")

    def _next_plan(self, step: int) -> Plan | None:
        """Return the next plan that runs something, bringing forward what is due while idle."""
        while True:
            plan: Plan = self._scheduler.next_step()
            now = step - (plan.step is None)
            for sequence in plan.restored:
                self._due.append((now + self._restore_steps, "arrives", self._name(sequence)))
            for sequence in plan.admitted:
                name = self._name(sequence)
                self._due.append((max(self._asks[name].kv, now), "arrives", name))
            if plan.step is not None:
                return plan
            if self._notes(plan):
                self._write("-", plan, Outcome(), self._free())
            if not self._due:
                return None
            self._happen(min(due for due, _, _ in self._due), 0)

    def _happen(self, step: int, lead: int) -> None:
        """Let happen what is due by that step."""
        now = [entry for entry in self._due if entry[0] <= step]
        self._due = [entry for entry in self._due if entry[0] > step]
        for _, what, name in now:
            sequence = self._sequences[name]
            if what == "leaves":
                sequence.gave_up = True
                self._scheduler.abort(sequence)
            elif what == "comes" and not self._decodes:
                self._scheduler.add(sequence, lead)
            elif what == "comes":
                self._scheduler.request_pages(sequence, lead)
            elif sequence.gave_up:
                self._scheduler.release(sequence)
            else:
                sequence.generated_tokens = max(sequence.generated_tokens, 1)
                self._scheduler.join(sequence, lead)

    # --- writing --------------------------------------------------------------------------------

    def _name(self, sequence: Sequence) -> str:
        return self._names[sequence.request.id]

    def _names_of(self, sequences: Iterable[Sequence]) -> list[str]:
        return [self._name(sequence) for sequence in sequences]

    def _free(self) -> str:
        ranks = getattr(self._scheduler, "ranks", [self._scheduler])
        return " / ".join(str(rank.pool.free_pages) for rank in ranks)

    def _write(self, label: str, plan: Plan, outcome: Outcome, free: str) -> None:
        parts = plan.ranks or [plan]
        steps = () if plan.step is None else plan.step.ranks or (plan.step,)
        ended, complete = self._names_of(outcome.finished), self._names_of(outcome.prefilled)
        prompts, decodes = [], []
        for rank, part, step in zip_longest(self._ranks, parts, steps):
            names = self._prompt_names(rank, part, step)
            prompts.append(_chunks(names, step))
            decodes.append(self._decode(rank, part, step))
            if names:
                rank.under_way = "" if names[-1] in complete else names[-1]
            rank.ended = [name for name in (*rank.running, *names) if name in ended]
            rank.running = [name for name in rank.running if name not in ended]
        notes = self._notes(plan) + [f"drop {one}" for one in self._names_of(outcome.dropped)]
        notes += [f"end {one}" for one in ended]
        cells = [label, " / ".join(prompts), " / ".join(decodes), ", ".join(notes), free]
        self._rows.append(" | ".join(cell.strip() for cell in cells))

    def _prompt_names(self, rank: _Rank, part: Plan, step: Step | None) -> list[str]:
        """Return the names that belong to the chunks: the prompt under way, then new ones."""
        started = self._names_of(part.started)
        chunks = 0 if step is None else len(step.prefill_chunks)
        return [rank.under_way] * (chunks - len(started)) + started

    def _decode(self, rank: _Rank, part: Plan, step: Step | None) -> str:
        left = self._names_of([*part.retracted, *part.failed, *part.dropped])
        rank.running = [name for name in rank.running if name not in left]
        rank.running += self._names_of(part.newcomers)
        if step is None or not step.decode_requests:
            return ""
        assert len(rank.running) == part.decoding
        wasted = step.decode_requests - part.decoding
        assert wasted in (0, len(rank.ended))
        return " ".join(rank.running + [f"({' '.join(rank.ended)})"] * (wasted > 0))

    def _notes(self, plan: Plan) -> list[str]:
        decided = {
            "drop": plan.dropped,
            "back": plan.restored,
            "give": plan.admitted,
            "retract": plan.retracted,
            "abort": plan.failed,
        }
        return [f"{what} {self._name(one)}" for what, ones in decided.items() for one in ones]


def _chunks(names: list[str], step: Step | None) -> str:
    chunks = () if step is None else step.prefill_chunks
    pairs = zip(names, chunks, strict=True)
    return " ".join(f"{name}:{chunk.new_tokens}@{chunk.past_tokens}" for name, chunk in pairs)
