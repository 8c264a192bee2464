"""The simulation of one load on one deployment, from the first arrival to the last token."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.engine.clients import Clients, Users
from tonnage.sim.engine.clock import TICK_S, Clock, Process, call_at, on_grid
from tonnage.sim.engine.disaggregated import DisaggregatedFleet, ResidentFleet
from tonnage.sim.engine.faults import RunIntegrity, identified
from tonnage.sim.engine.fleet import ColocatedFleet, Deployment, Fleet, Surroundings
from tonnage.sim.engine.outages import OutageDriver
from tonnage.sim.results.records import Attempts, Records
from tonnage.sim.results.run import RunResult
from tonnage.sim.results.sketch import QuantileSketch
from tonnage.sim.results.timeline import Timeline
from tonnage.sim.serving.retries import ClientSpec
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.traffic.loads import ClosedLoad, Lengths, Load, OpenLoad, ResidentLoad
from tonnage.sim.traffic.sessions import Due, SessionLoad, SessionRun

Progress = Callable[[int], None]  # told the number of requests that have ended
_PROGRESS_EVERY = 256


def simulate(
    deployment: Deployment,
    load: Load,
    *,
    seed: int = 0,
    exact: bool = False,
    progress: Progress | None = None,
    timeline: Timeline | None = None,
) -> RunResult:
    """Run a load through a deployment; `exact` steps token by token with the same result.

    `timeline` is given every segment of every instance.
    """
    env = Clock()
    run = _Run(env, load, progress)
    run.clients = clients = _clients(env, deployment, load, run, seed)
    on_end = run.end if clients is None else clients.out
    integrity = RunIntegrity(env, deployment.faults, seed)
    around = Surroundings(env, seed, on_end, exact, timeline, integrity)
    run.fleet = _fleet(around, _identified(deployment), load)
    outages = None if clients is None else _let_happen(env, deployment, run.fleet, clients, seed)
    env.process(run.arrivals())
    with _no_cycle_collection():
        env.run(until=run.finished)
        result = run.result()
        result.integrity = integrity.result()
        if outages is not None:
            outages.stop()
        if not isinstance(load, ResidentLoad):
            env.run()  # until the engines are idle: what is held now is lost
            result.pages_left = run.used_pages()
    return result


@contextmanager
def _no_cycle_collection() -> Iterator[None]:
    """Pause Python's search for reference cycles: a run makes none, and looking costs a tenth."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _identified(deployment: Deployment) -> Deployment:
    """Give the pages of all pools an identity where faults of data act on them."""
    if not deployment.faults:
        return deployment
    pools = {
        role: replace(plan, scheduling=identified(plan.scheduling))
        for role, plan in deployment.pools.items()
    }
    return replace(deployment, pools=pools)


def _fleet(around: Surroundings, deployment: Deployment, load: Load) -> Fleet:
    if isinstance(load, ResidentLoad):
        return ResidentFleet(around, deployment)
    if "serve" in deployment.pools:
        return ColocatedFleet(around, deployment)
    return DisaggregatedFleet(around, deployment)


def _clients(
    env: Clock, deployment: Deployment, load: Load, users: Users, seed: int
) -> Clients | None:
    """Return clients that try again, or whose requests an outage may hit; None: neither."""
    outages = deployment.outages
    if deployment.clients is None and not outages:
        return None
    resident = isinstance(load, ResidentLoad)
    return Clients(
        env,
        deployment.clients or ClientSpec(),
        users,
        seed,
        timeout_s=None if isinstance(load, ResidentLoad) else load.timeout_s,
        lost_abort=0.0 if outages is None else outages.lost_abort,
        resident=resident,
    )


def _let_happen(
    env: Clock, deployment: Deployment, fleet: Fleet, clients: Clients, seed: int
) -> OutageDriver | None:
    """Let clients and outages have their fleet."""
    clients.fleet = fleet
    outages = deployment.outages
    if isinstance(fleet, ResidentFleet):
        if outages is not None and (outages.crashes or outages.links):
            raise BadInputError("outages: resident requests are held in one instance that stays up")
        return None
    assert isinstance(fleet, ColocatedFleet | DisaggregatedFleet)
    clients.breakers.watch(fleet, fleet.door)
    return OutageDriver(env, outages, fleet, clients, seed) if outages else None


class _Run:
    """The bookkeeping of one run: who arrives next, who has ended, when the load is steady."""

    fleet: Fleet
    clients: Clients | None = None

    def __init__(self, env: Clock, load: Load, progress: Progress | None) -> None:
        self.finished = env.event()
        self._env = env
        self._load = load
        self._progress = progress
        self._records = Records()
        self._lengths: Iterator[Lengths] = iter(
            load.lengths if isinstance(load, ClosedLoad | ResidentLoad) else ()
        )
        self._sessions: SessionRun | None = load.run() if isinstance(load, SessionLoad) else None
        self._sent = 0
        self._due = 0
        self._all_sent = False
        self._ramp = _ramp_requests(load)
        self._steady_from: tuple[float, float] = (0.0, 0.0)
        self._steady_to: tuple[float, float] = (0.0, 0.0)

    def arrivals(self) -> Process:
        """Offer the load: open arrivals one by one, or the first set of closed requests."""
        if isinstance(self._load, OpenLoad):
            yield from self._open_arrivals(self._load.requests)
            return
        if self._sessions is not None:
            yield from self._session_starts(self._sessions)
            return
        assert not isinstance(self._load, SessionLoad)
        for position in range(self._load.concurrency):
            self._send_one(position / self._load.concurrency)
        yield self._env.timeout(0)

    def _open_arrivals(self, requests: Iterable[Request]) -> Process:
        for request in requests:
            arrival_s = on_grid(request.arrival_s)
            if arrival_s < self._env.now:
                raise BadInputError(f"request {request.id} arrives before the one before it")
            if arrival_s > self._env.now:
                yield self._env.timeout(arrival_s - self._env.now)
            self._sent += 1
            self._offer(Sequence(request))
        self._no_more()
        yield self._env.timeout(0)

    def _session_starts(self, sessions: SessionRun) -> Process:
        for due in sessions.starts():
            delay_s = on_grid(due.time_s) - self._env.now
            if delay_s > 0.0:
                yield self._env.timeout(delay_s)
            self._send_turn(due)
        yield self._env.timeout(0)

    def _send_turn(self, due: Due) -> None:
        assert self._sessions is not None
        request = self._sessions.send(due.session, self._sent, self._env.now)
        self._sent += 1
        self._offer(Sequence(request))
        if self._sessions.over:
            self._no_more()

    def _next_turn(self, sequence: Sequence, *, answered: bool) -> None:
        """Let a user think, and send the next turn, or the first one of another session."""
        assert self._sessions is not None
        due = self._sessions.after(sequence.request, self._env.now, answered=answered)
        if due is not None:
            call_at(self._env, max(on_grid(due.time_s), self._env.now), self._send_turn, due)
        elif self._sessions.over:
            self._no_more()

    def _send_next(self) -> None:
        """Send a request; a loop, for one that is rejected at once makes the next one due."""
        self._due += 1
        if self._due > 1:
            return
        while self._due:
            self._send_one()
            self._due -= 1

    def _send_one(self, written_share: float = 0.0) -> None:
        lengths = next(self._lengths, None)
        if lengths is None:
            self._no_more()
            return
        request = Request(
            self._sent,
            self._env.now,
            lengths.input_tokens,
            lengths.output_tokens,
            lengths.output_limit_tokens,
        )
        self._sent += 1
        sequence = Sequence(request)
        if isinstance(self._load, ResidentLoad):
            written = int(written_share * (request.output_tokens - 1))
            sequence.generated_tokens = 1 + written
        self._offer(sequence)

    def _offer(self, sequence: Sequence) -> None:
        if self.clients is not None:
            self.clients.send(sequence)
            return
        timeout_s = None if isinstance(self._load, ResidentLoad) else self._load.timeout_s
        if timeout_s is not None:
            until_s = on_grid(sequence.request.arrival_s) + max(on_grid(timeout_s), TICK_S)
            call_at(self._env, until_s, self._give_up, sequence)
        self.fleet.arrive(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """The client has waited long enough: it goes, and its user sends the next request."""
        if sequence.ended:
            return
        sequence.gave_up = True
        self.fleet.give_up(sequence)
        self.free_user(sequence, answered=False)

    def free_user(self, sequence: Sequence, *, answered: bool) -> None:
        """Let whoever waited for a request send what follows, in a load that reacts."""
        if self._sessions is not None:
            self._next_turn(sequence, answered=answered)
        elif not isinstance(self._load, OpenLoad):
            self._send_next()

    def end(self, sequence: Sequence) -> None:
        """Take in a request that was served or rejected; a closed user sends the next."""
        sequence.ended = True
        self._note_end(sequence)
        if not sequence.gave_up:
            answered = sequence.rejected is None and sequence.aborted is None
            self.free_user(sequence, answered=answered)
        self._finish_if_done()

    def record(self, sequence: Sequence, attempts: Attempts) -> None:
        """Take in a request that has ended after so many attempts; its user knows already."""
        self._note_end(sequence, attempts)
        self._finish_if_done()

    def _note_end(self, sequence: Sequence, attempts: Attempts | None = None) -> None:
        self._records.add(sequence, attempts)
        ended = len(self._records)
        if ended == self._ramp:
            self._steady_from = self._decode_tokens()
        if self._progress is not None and ended % _PROGRESS_EVERY == 0:
            self._progress(ended)

    def _no_more(self) -> None:
        if not self._all_sent:
            self._all_sent = True
            self._steady_to = self._decode_tokens()
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        drained = len(self._records) == self._sent or isinstance(self._load, ResidentLoad)
        if self._all_sent and drained and not self.finished.triggered:
            self.finished.succeed()

    def _decode_tokens(self) -> tuple[float, float]:
        role = "serve" if "serve" in self.fleet.instances else "decode"
        instances = self.fleet.instances[role]
        return self._env.now, sum(instance.decode_tokens_at_now() for instance in instances)

    def used_pages(self) -> int:
        """Return the pages that are held now."""
        return sum(
            instance.scheduler.used_pages()
            for instances in self.fleet.instances.values()
            for instance in instances
        )

    def result(self) -> RunResult:
        """Return what the run left behind."""
        gaps = QuantileSketch()
        for instances in self.fleet.instances.values():
            for instance in instances:
                gaps.merge(instance.token_gaps())
        clients = self.clients
        if clients is not None:
            gaps.merge(clients.gaps.sketch)
            clients.outages.breakers_opened = clients.breakers.times_opened
        (from_s, from_tokens), (to_s, to_tokens) = self._steady_from, self._steady_to
        rate = (to_tokens - from_tokens) / (to_s - from_s) if to_s > from_s else None
        shared = self.fleet.shared
        return RunResult(
            records=self._records,
            gaps=gaps,
            makespan_s=float(self._env.now),
            busy_s={
                role: [instance.busy_s for instance in instances]
                for role, instances in self.fleet.instances.items()
            },
            steady_decode_tokens_per_s=rate,
            steady_from_s=from_s,
            steady_to_s=to_s,
            peak_requests=sum(
                instance.peak_decode_requests
                for instances in self.fleet.instances.values()
                for instance in instances
            ),
            cache=None if shared is None else shared.books,
            attempts=None if clients is None else clients.attempts,
            outages=None if clients is None else clients.outages,
        )


def _ramp_requests(load: Load) -> int | None:
    """Return how many requests must have ended before the load counts as steady.

    Closed, or a number of sessions: as many as there are users, so that everyone's start is over.
    Open: the first one, when decoding is under way. Resident: none, the batch starts in its steady
    state.
    """
    if isinstance(load, ResidentLoad):
        return None
    return 1 if isinstance(load, OpenLoad) else load.concurrency or 1
