"""Faults injected on real pages: what each check catches of them, and what neighbours see of it.

    place = place_on("cpu", rows_alone=True)
    model = RankModel(RankSpec(spec, layout, "fp8_e4m3", layers=2), place)
    report = injected(model, FAULTS["stale_page_table"], count=20, size=SceneSize())

A scene is played three times: without the fault; with it and no check acting; with it and all
checks acting, the victim masked where one of them speaks. All numbers are counted, none declared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from tonnage.kernels.execute.batch import Batch
from tonnage.kernels.execute.faults import Fault, Moment
from tonnage.kernels.execute.guard import Books, audit, masked, verdict_on
from tonnage.kernels.execute.handoff import kv_sum
from tonnage.kernels.execute.rank import RankModel
from tonnage.kernels.execute.scene import Scene, SceneSize


@dataclass(frozen=True, slots=True)
class Earlier:
    """What checks said before the step.

    `handoff_tags`: wrong entries among the pages that the handoff read. `late_writes`: among those
    that a step of the ended request wrote. `sums_agree`: of what was sent and what arrived.
    """

    handoff_tags: int
    sums_agree: bool
    late_writes: int


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What was seen of one play; lists are by row of the batch.

    `read`, `stored`: sums of the KV that each request was about to read, and of all that it held
    after the step.
    """

    victim: int
    logits: torch.Tensor
    read: list[int]
    stored: list[int]
    tags: list[int]
    writers: list[int]
    earlier: Earlier
    masked: list[bool]
    books: Books

    def row(self, number: int) -> torch.Tensor:
        """Return the bits of a request's logits."""
        return self.logits[number].view(torch.int16)

    def same(self, other: Seen, number: int) -> bool:
        """Tell whether a request got the same logits in both plays, bit by bit, and the same KV."""
        is_stored = self.stored[number] == other.stored[number]
        return is_stored and torch.equal(self.row(number), other.row(number))

    @property
    def neighbours(self) -> list[int]:
        """Return the rows of all others."""
        return [row for row in range(len(self.logits)) if row != self.victim]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one injection did, and who noticed. `changed_read`: the KV in the victim's context.

    With all checks acting: `neighbours_equal`, all others got the bits of the play without a fault;
    `wrong_returned`, the victim was not stopped and got others.
    """

    changed_read: bool
    changed_output: bool
    by_tags: bool
    by_writer: bool
    by_checksum: bool
    false_alarm: bool
    neighbours_harmed_unchecked: bool
    neighbours_equal: bool
    wrong_returned: bool
    books_sound: bool


def inject(model: RankModel, fault: Fault, seed: int, size: SceneSize) -> Outcome:
    """Play a scene without and with a fault, and compare."""
    clean = play(model, size, seed)
    unchecked = play(model, size, seed, fault)
    checked = play(model, size, seed, fault, acts=True)
    victim, others = clean.victim, clean.neighbours
    found = unchecked
    return Outcome(
        changed_read=found.read[victim] != clean.read[victim],
        changed_output=not torch.equal(found.row(victim), clean.row(victim)),
        by_tags=found.tags[victim] > 0 or found.earlier.handoff_tags > 0,
        by_writer=found.writers[victim] > 0 or found.earlier.late_writes > 0,
        by_checksum=not found.earlier.sums_agree,
        false_alarm=any(found.tags[row] or found.writers[row] for row in others),
        neighbours_harmed_unchecked=not all(found.same(clean, row) for row in others),
        neighbours_equal=all(checked.same(clean, row) for row in others),
        wrong_returned=not checked.masked[victim] and not checked.same(clean, victim),
        books_sound=all(seen.books == Books() for seen in (clean, unchecked, checked)),
    )


def play(
    model: RankModel, size: SceneSize, seed: int, fault: Fault | None = None, acts: bool = False
) -> Seen:
    """Play a scene, with a fault or without; where the checks act, what they find is masked."""

    def now(moment: Moment) -> None:
        if fault is not None and fault.moment is moment:
            fault.act(scene)

    scene = Scene(model, size, seed)
    scene.begin()
    now(Moment.PROMPT)
    scene.fill_source()
    now(Moment.LEASE)
    handoff_tags = _wrong_entries(scene)
    sent = kv_sum(scene.source, scene.sent, scene.victim.context)
    scene.hand_over()
    now(Moment.TRANSIT)
    sums_agree = bool(sent == kv_sum(scene.memory, scene.victim.held, scene.victim.context))
    now(Moment.ADMISSION)
    scene.admit_newcomer()
    now(Moment.STEP)
    batch = scene.batch()
    now(Moment.LATE)
    with torch.no_grad():
        late_writes = _late_step(scene, acts)
        return _step(scene, batch, acts, Earlier(handoff_tags, sums_agree, late_writes))


def _wrong_entries(scene: Scene) -> int:
    """Return the wrong entries among the pages that the handoff is about to read."""
    inputs = scene.source.checked([scene.sent])
    return int(scene.place.run("tag_check", inputs)["mismatches"].sum())


def _late_step(scene: Scene, acts: bool) -> int:
    """Run the step that outlived its request where it is due; return its wrong entries."""
    if not scene.late_is_due:
        return 0
    verdict = verdict_on(scene.late, scene.memory, reads=False, writes=True)
    late = masked(scene.late, verdict.bad, scene.memory) if acts else scene.late
    scene.model.forward(late, scene.memory)
    assert verdict.writes is not None
    return int(verdict.writes.sum())


def _step(scene: Scene, batch: Batch, acts: bool, earlier: Earlier) -> Seen:
    """Run the step of all requests, and let them end."""
    memory, victim = scene.memory, scene.victim_row
    verdict = verdict_on(batch, memory, reads=True, writes=True)
    assert verdict.reads is not None
    assert verdict.writes is not None
    read = [int(kv_sum(memory, one.held, one.context - 1)) for one in scene.running]
    bad = verdict.bad & acts
    bad[victim] |= acts and (earlier.handoff_tags > 0 or not earlier.sums_agree)
    logits = scene.model.forward(masked(batch, bad, memory) if acts else batch, memory)
    stored = [int(kv_sum(memory, one.held, one.context)) for one in scene.running]
    scene.end()
    return Seen(
        victim=victim,
        logits=logits,
        read=read,
        stored=stored,
        tags=verdict.reads.tolist(),
        writers=verdict.writes.tolist(),
        earlier=earlier,
        masked=bad.tolist(),
        books=audit(memory, []),
    )


@dataclass(frozen=True, slots=True)
class ClassReport:
    """How many injections of a class did what; counts, of `injected`."""

    name: str
    family: str
    injected: int
    changed_read: int
    changed_output: int
    caught_by_tags: int
    caught_by_writer: int
    caught_by_checksum: int
    false_alarms: int
    neighbours_harmed_unchecked: int
    neighbours_equal: int
    wrong_returned: int
    books_unsound: int

    @classmethod
    def of(cls, fault: Fault, outcomes: Sequence[Outcome]) -> ClassReport:
        """Count outcomes."""

        def count(name: str) -> int:
            return sum(getattr(one, name) for one in outcomes)

        return cls(
            name=fault.name,
            family=fault.family,
            injected=len(outcomes),
            changed_read=count("changed_read"),
            changed_output=count("changed_output"),
            caught_by_tags=count("by_tags"),
            caught_by_writer=count("by_writer"),
            caught_by_checksum=count("by_checksum"),
            false_alarms=count("false_alarm"),
            neighbours_harmed_unchecked=count("neighbours_harmed_unchecked"),
            neighbours_equal=count("neighbours_equal"),
            wrong_returned=count("wrong_returned"),
            books_unsound=len(outcomes) - count("books_sound"),
        )

    def to_dict(self) -> dict[str, object]:
        """Return the JSON object of a class."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def injected(
    model: RankModel, fault: Fault, count: int, size: SceneSize, seed: int = 0
) -> ClassReport:
    """Inject a fault in so many scenes; none where the pool's pages cannot have it."""
    if fault.only_fp8 and model.spec.kv_format == "bf16":
        return ClassReport.of(fault, ())
    return ClassReport.of(
        fault, [inject(model, fault, seed + number, size) for number in range(count)]
    )
