"""A deployment's instances wired together: what happens to a request, milestone by milestone."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Protocol

from tonnage.sim.engine.clock import Clock
from tonnage.sim.engine.door import Door
from tonnage.sim.engine.faults import RunIntegrity
from tonnage.sim.engine.handoff import Handoff
from tonnage.sim.engine.instance import Executor, Instance, Listener, Watched
from tonnage.sim.engine.loads import Intake
from tonnage.sim.results.timeline import Timeline
from tonnage.sim.serving.build import SchedulerSpec, serve_scheduler
from tonnage.sim.serving.custody import Custody
from tonnage.sim.serving.data_faults import FaultSpec
from tonnage.sim.serving.outages import Outages
from tonnage.sim.serving.plan import Outcome, Plan, PromptTaker, Scheduler
from tonnage.sim.serving.retries import ClientSpec
from tonnage.sim.serving.router import Dispatcher, RoutingSpec
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.tiers import HierarchySpec, SharedTiers


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What the engine needs to know of one pool of identical instances.

    `restore_s`: seconds that the KV of so many tokens takes from host memory back to the GPU.
    """

    role: str
    instances: int
    scheduling: SchedulerSpec  # of one instance
    longest_request_tokens: int  # what the rank that serves a request, or the model, can hold
    executor: Executor
    restore_s: Callable[[int], float] = lambda tokens: 0.0

    @property
    def tiers(self) -> HierarchySpec | None:
        """What holds prefixes beyond the GPUs of an instance, if anything does."""
        return None if self.scheduling.cache is None else self.scheduling.cache.tiers

    def shared(self) -> SharedTiers | None:
        """Return what the prefix caches of its instances have in common; None without any."""
        return None if self.scheduling.cache is None else SharedTiers(self.tiers)

    def too_long(self, tokens: int) -> str | None:
        """Return why not even an empty instance could hold a request; None if it could."""
        held = min(self.longest_request_tokens, self.scheduling.longest_tokens)
        if tokens <= held:
            return None
        return f"{tokens} tokens of KV; a {self.role} instance holds {held} of one request"


@dataclass(frozen=True, slots=True)
class Deployment:
    """Pools by role (`serve`; `prefill` and `decode`; or `decode` alone) and what is between them.

    `handoff` is None without a prefill pool. `clients`: what they do when a request fails; None:
    nothing. `outages`: what goes wrong. `faults`: those of data.
    """

    pools: dict[str, PoolPlan]
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    handoff: Handoff | None = None
    clients: ClientSpec | None = None
    outages: Outages | None = None
    faults: tuple[FaultSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a fleet runs in: the clock, the seed, who hears of ends, how finely it steps."""

    env: Clock
    seed: int
    on_end: Callable[[Sequence], None]
    exact: bool
    timeline: Timeline | None
    integrity: RunIntegrity | None = None

    @property
    def custody(self) -> Custody | None:
        """What looks after KV on its way; None where pages have no identity."""
        return None if self.integrity is None else self.integrity.custody

    def watched(self, plan: PoolPlan, number: int) -> Watched | None:
        """Return what looks after the pages of an instance, numbered in its pool."""
        if self.integrity is None:
            return None
        return self.integrity.watched(plan.role, number, plan.scheduling)

    def door(self, deployment: Deployment) -> Door:
        """Return what spreads requests over the instances of all pools."""
        instances = {role: plan.instances for role, plan in deployment.pools.items()}
        dispatcher = Dispatcher(deployment.routing, instances, self.seed)
        return Door(dispatcher, waits=deployment.routing.waits, on_end=self.on_end)


class Fleet(Protocol):
    """Takes requests; reports each one that ends, served or not."""

    instances: dict[str, list[Instance]]
    shared: SharedTiers | None

    def arrive(self, sequence: Sequence) -> None:
        """Take a request at the present instant."""

    def give_up(self, sequence: Sequence) -> None:
        """Drop a request whose client has gone; its end is reported when it is out."""


OnLost = Callable[[Instance, ListLike[Sequence]], None]


class MortalFleet(Fleet, Protocol):
    """A fleet whose instances can go down and come back."""

    door: Door

    def crash(
        self, role: str, index: int, in_flight: ListLike[Sequence], on_lost: OnLost
    ) -> list[Sequence]:
        """Let an instance die; return those of the requests in flight that are lost with it.

        `on_lost` is given them first, and marks them as given up. The end of each is reported when
        no other instance has anything of it any more. The door must know that it is dead.
        """

    def restart(self, role: str, index: int) -> None:
        """Start an instance that is down, empty."""


class ColocatedFleet:
    """Instances that do both phases."""

    def __init__(self, around: Surroundings, deployment: Deployment) -> None:
        """Start idle instances."""
        self._around = around
        self._plan = plan = deployment.pools["serve"]
        self.shared = shared = plan.shared()
        self._schedulers = [serve_scheduler(plan.scheduling, shared) for _ in range(plan.instances)]
        self.door = around.door(deployment)
        self._dispatcher = self.door.dispatcher
        self._instances = make_instances(around, plan, self._schedulers, self)
        self._intakes = make_intakes(around, plan, self._schedulers, self._instances)
        self.instances = {"serve": self._instances}

    def arrive(self, sequence: Sequence) -> None:
        """Route a request and queue it."""
        sequence.rejected = self._plan.too_long(sequence.request.total_tokens)
        if sequence.rejected:
            self._around.on_end(sequence)
            return
        indices = (
            self.door.enter(sequence)
            if self.door.troubled
            else self._dispatcher.assign(sequence.request)
        )
        if indices is None:
            return
        (index,) = indices
        sequence.prefill_instance = sequence.decode_instance = index
        self._intakes[index].take(sequence)

    def give_up(self, sequence: Sequence) -> None:
        """Drop a request at its instance's next step boundary."""
        if sequence.decode_instance is None and self.door.leave(sequence):
            return
        assert sequence.decode_instance is not None
        self._schedulers[sequence.decode_instance].abort(sequence)
        self._instances[sequence.decode_instance].notify()

    def planned(self, instance: Instance, plan: Plan) -> None:
        """Report those that the scheduler gave up on."""
        for sequence in (*plan.failed, *plan.dropped):
            self._end(instance, sequence)

    def committed(self, instance: Instance, outcome: Outcome) -> None:
        """Note first tokens and report those that are complete."""
        now_s = self._around.env.now
        for sequence in outcome.prefilled:
            note_prompt_done(instance, sequence, now_s)
        for sequence in outcome.finished:
            note_finished(sequence, now_s)
            self._end(instance, sequence)
        for sequence in outcome.dropped:
            self._end(instance, sequence)

    def _end(self, instance: Instance, sequence: Sequence) -> None:
        self._dispatcher.done("serve", instance.index, sequence.request)
        self._around.on_end(sequence)

    # --- crashes --------------------------------------------------------------------------------

    def crash(
        self, role: str, index: int, in_flight: ListLike[Sequence], on_lost: OnLost
    ) -> list[Sequence]:
        """Let an instance die with all that it has."""
        instance = self._instances[index]
        instance.stop()
        instance.scheduler.settle()
        self._schedulers[index] = serve_scheduler(self._plan.scheduling, self.shared)
        instance.scheduler = self._schedulers[index]
        self._intakes[index] = make_intakes(
            self._around, self._plan, [self._schedulers[index]], [instance]
        )[0]
        had = [one for one in in_flight if one.decode_instance == index and not one.ended]
        on_lost(instance, had)
        for sequence in had:
            self._end(instance, sequence)
        return had

    def restart(self, role: str, index: int) -> None:
        """Start an instance that is down, empty."""
        self._instances[index].start(self._schedulers[index])


def make_instances(
    around: Surroundings,
    plan: PoolPlan,
    schedulers: ListLike[Scheduler],
    listener: Listener,
    first_index: int = 0,
) -> list[Instance]:
    """Start the instances of one pool, numbered from `first_index` on."""
    return [
        Instance(
            around.env,
            first_index + index,
            scheduler,
            plan.executor,
            listener,
            exact=around.exact,
            timeline=around.timeline,
            load_s=None if plan.tiers is None else plan.tiers.host.load_s,
            watched=around.watched(plan, index),
        )
        for index, scheduler in enumerate(schedulers)
    ]


def make_intakes(
    around: Surroundings,
    plan: PoolPlan,
    schedulers: ListLike[PromptTaker],
    instances: ListLike[Instance],
) -> list[Intake]:
    """Return where the prompts of each instance come in."""
    pairs = zip(schedulers, instances, strict=True)
    return [Intake(around.env, *pair, plan.tiers) for pair in pairs]


def note_prompt_done(instance: Instance, sequence: Sequence, now_s: float) -> None:
    """Note the token that a prompt gives: the first one, or the next of one computed again."""
    sequence.prefill_end_s = now_s if sequence.prefill_end_s is None else sequence.prefill_end_s
    if sequence.first_token_s is None:
        sequence.first_token_s = now_s
    elif sequence.last_token_s is not None:
        instance.add_gap(now_s - sequence.last_token_s)
    sequence.last_token_s = now_s


def note_finished(sequence: Sequence, now_s: float) -> None:
    """Note the end of a request, unless its client has gone."""
    if not sequence.gave_up:
        sequence.finish_s = now_s
