"""Prefill and decode apart: what happens to a request between the two, and decode on its own."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from tonnage.sim.engine.clock import call_at, on_grid
from tonnage.sim.engine.fleet import (
    Deployment,
    OnLost,
    Surroundings,
    make_instances,
    make_intakes,
    note_finished,
    note_prompt_done,
)
from tonnage.sim.engine.handoff import Transfers
from tonnage.sim.engine.instance import Instance
from tonnage.sim.serving.build import decode_scheduler, prefill_scheduler
from tonnage.sim.serving.plan import Outcome, Plan
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.tiers import SharedTiers


class DisaggregatedFleet:
    """Prefill instances, a network, decode instances.

    A request gets both instances at arrival. By the policy it gets pages at the decode instance
    before its prompt is computed (SGLang) or after (vLLM). Its KV travels when the prompt is
    complete, or chunk by chunk where decode pages are there before, while the prefill pages stay
    held; then it decodes. Its first token reaches the client from the decode instance, when the KV
    can be used there.
    """

    def __init__(self, around: Surroundings, deployment: Deployment) -> None:
        """Start idle instances."""
        handoff = deployment.handoff
        assert handoff is not None
        self._around = around
        self._prefill_plan = prefill = deployment.pools["prefill"]
        self._decode_plan = decode = deployment.pools["decode"]
        self._allocates_first = decode.scheduling.policy.allocates_before_prefill
        self._sends_early = handoff.overlap and self._allocates_first
        self.shared = shared = prefill.shared()
        senders = [prefill_scheduler(prefill.scheduling, shared) for _ in range(prefill.instances)]
        self._senders = senders
        self._receivers = [decode_scheduler(decode.scheduling) for _ in range(decode.instances)]
        self.door = around.door(deployment)
        self._dispatcher = self.door.dispatcher
        self._orphans: dict[Sequence, str] = {}  # the role of whose instance died
        self._unwanted: set[Sequence] = set()  # wait for what is on the wire, gone from prefill
        self.network = handoff.network(around.env, prefill.instances, decode.instances)
        self._transfers = Transfers(around.env, handoff, self.network, self._arrived, self._ready)
        self._custody = around.custody
        self._prefills = make_instances(around, prefill, self._senders, self)
        self._decodes = make_instances(around, decode, self._receivers, self, len(self._senders))
        self._intakes = make_intakes(around, prefill, self._senders, self._prefills)
        self.instances = {"prefill": self._prefills, "decode": self._decodes}

    def arrive(self, sequence: Sequence) -> None:
        """Choose both instances; queue the prompt, or first the wish for pages."""
        request = sequence.request
        sequence.rejected = self._prefill_plan.too_long(
            request.input_tokens
        ) or self._decode_plan.too_long(request.total_tokens)
        if sequence.rejected:
            self._around.on_end(sequence)
            return
        indices = (
            self.door.enter(sequence) if self.door.troubled else self._dispatcher.assign(request)
        )
        if indices is None:
            return
        sequence.prefill_instance, sequence.decode_instance = indices
        if self._allocates_first:
            self._request_pages(sequence)
        else:
            self._queue_prompt(sequence)

    def _queue_prompt(self, sequence: Sequence) -> None:
        assert sequence.prefill_instance is not None
        self._intakes[sequence.prefill_instance].take(sequence)

    def _request_pages(self, sequence: Sequence) -> None:
        index = sequence.decode_instance
        assert index is not None
        self._receivers[index].request_pages(sequence, self._decodes[index].lead())
        self._decodes[index].notify()

    # --- what the instances tell ----------------------------------------------------------------

    def planned(self, instance: Instance, plan: Plan) -> None:
        """Go on with those that were given pages; report those that were given up on."""
        if self._sends_early and instance.index < len(self._prefills):
            self._send_cached(plan)
        for sequence in plan.admitted:
            if self._allocates_first:
                self._queue_prompt(sequence)
            else:
                self._send_rest(sequence)
        for sequence in plan.restored:
            tokens = sequence.stored_tokens
            ready_s = self._around.env.now + on_grid(self._decode_plan.restore_s(tokens))
            call_at(self._around.env, ready_s, self._restored, sequence)
        for sequence in plan.failed:
            if instance.index < len(self._prefills):
                self._dropped(instance, sequence)
            else:
                self._end(sequence)
        for sequence in plan.dropped:
            self._dropped(instance, sequence)

    def _send_cached(self, plan: Plan) -> None:
        """Send the cached prefix of prompts that start, while the rest of them is computed."""
        if plan.load_tokens:  # it comes from host memory during the step, and leaves after it
            return
        for sequence in plan.started:
            if sequence.cached_tokens:
                self._transfers.send_early(sequence, sequence.cached_tokens)

    def committed(self, instance: Instance, outcome: Outcome) -> None:
        """Send the KV of complete prompts; note and report those that are complete."""
        if instance.index < len(self._prefills):
            self._prefilled(instance, outcome)
            return
        now_s = self._around.env.now
        for sequence in outcome.prefilled:  # computed again after a preemption
            note_prompt_done(instance, sequence, now_s)
        for sequence in outcome.finished:
            note_finished(sequence, now_s)
            self._end(sequence)
        for sequence in outcome.dropped:
            self._end(sequence)

    def _prefilled(self, instance: Instance, outcome: Outcome) -> None:
        if self._sends_early:
            for chunk in outcome.parts:
                if not chunk.sequence.gave_up:
                    self._transfers.send_early(chunk.sequence, chunk.past_tokens + chunk.tokens)
        for sequence in outcome.prefilled:
            sequence.prefill_end_s = self._around.env.now
            self._dispatcher.done("prefill", instance.index, sequence.request)
            if self._allocates_first:
                self._send_rest(sequence)
            else:
                self._request_pages(sequence)
        for sequence in outcome.dropped:
            self._dropped(instance, sequence)

    def _send_rest(self, sequence: Sequence) -> None:
        """Send what has not left yet of a complete prompt, if its pages are still its own."""
        if self._custody is not None:
            assert sequence.prefill_instance is not None
            pool = self._senders[sequence.prefill_instance].pool_of(sequence)
            if not self._custody.may_leave(sequence, pool):
                self._hand_over(sequence)
                self._unwanted.add(sequence)
                self._transfers.abandon(sequence, self._release)
                # The decode instance may be planning now, and hear of its free pages too early.
                assert sequence.decode_instance is not None
                decode = self._decodes[sequence.decode_instance]
                call_at(self._around.env, self._around.env.now, Instance.notify, decode)
                return
        self._transfers.send_rest(sequence)

    def _arrived(self, sequence: Sequence) -> None:
        """Take in what has arrived, and free the pages that it comes from."""
        if self._custody is not None:
            assert sequence.prefill_instance is not None
            assert sequence.decode_instance is not None
            sender = self._senders[sequence.prefill_instance].pool_of(sequence)
            receiver = self._receivers[sequence.decode_instance].pool_of(sequence)
            self._custody.arrived(sequence, sender, receiver)
        self._hand_over(sequence)

    def _ready(self, sequence: Sequence) -> None:
        if sequence.ended:  # its decode instance died meanwhile
            return
        now_s = self._around.env.now
        index = sequence.decode_instance
        assert index is not None
        receiver = self._receivers[index]
        if sequence.aborted is not None:  # what arrived is not what it should be
            receiver.release(sequence)
            self._end(sequence)
            self._decodes[index].notify()
            return
        if not sequence.gave_up:
            sequence.first_token_s = sequence.last_token_s = now_s
        if sequence.gave_up or not sequence.remaining_output_tokens:
            receiver.release(sequence)
            note_finished(sequence, now_s)
            self._end(sequence)
        else:
            receiver.join(sequence, self._decodes[index].lead())
        self._decodes[index].notify()

    def _hand_over(self, sequence: Sequence) -> None:
        index = sequence.prefill_instance
        assert index is not None
        self._senders[index].hand_over(sequence)
        if self._senders[index].waiting_requests():
            self._prefills[index].notify()

    def _restored(self, sequence: Sequence) -> None:
        if sequence.ended:
            return
        index = sequence.decode_instance
        assert index is not None
        if sequence.gave_up:
            self._receivers[index].release(sequence)
            self._end(sequence)
        else:
            self._receivers[index].join(sequence, self._decodes[index].lead())
        self._decodes[index].notify()

    # --- those that end early -------------------------------------------------------------------

    def give_up(self, sequence: Sequence) -> None:
        """Drop a request where it is; one whose KV is on its way goes when that has arrived."""
        if sequence.decode_instance is None and self.door.leave(sequence):
            return
        assert sequence.prefill_instance is not None
        assert sequence.decode_instance is not None
        if sequence.prefill_end_s is None:
            self._senders[sequence.prefill_instance].abort(sequence)
            self._prefills[sequence.prefill_instance].notify()
        self._receivers[sequence.decode_instance].abort(sequence)
        self._decodes[sequence.decode_instance].notify()

    def _dropped(self, instance: Instance, sequence: Sequence) -> None:
        """Free what a dropped request holds at the other instance."""
        assert sequence.decode_instance is not None
        is_prefill = instance.index < len(self._prefills)
        if is_prefill:
            self._dispatcher.done("prefill", instance.index, sequence.request)
        if self._orphans and self._orphans.pop(sequence, None) is not None:
            pass  # there is nothing left to free
        elif is_prefill:
            if self._allocates_first:
                self._unwanted.add(sequence)
                self._transfers.abandon(sequence, self._release)
                return
        elif sequence.prefill_end_s is None:  # it waited for pages, its prompt was never queued
            assert sequence.prefill_instance is not None
            self._dispatcher.done("prefill", sequence.prefill_instance, sequence.request)
        elif sequence.transfer_start_s is None:
            self._hand_over(sequence)
        self._end(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free the decode pages of a prompt that is not wanted, now that nothing writes to them."""
        self._unwanted.discard(sequence)
        if sequence.ended:
            return
        assert sequence.decode_instance is not None
        self._receivers[sequence.decode_instance].release(sequence)
        self._decodes[sequence.decode_instance].notify()
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        assert sequence.decode_instance is not None
        self._dispatcher.done("decode", sequence.decode_instance, sequence.request)
        self._around.on_end(sequence)

    # --- crashes --------------------------------------------------------------------------------

    def crash(
        self, role: str, index: int, in_flight: ListLike[Sequence], on_lost: OnLost
    ) -> list[Sequence]:
        """Let an instance die; what its requests hold at other instances is freed there."""
        instance = self.instances[role][index]
        instance.stop()
        instance.scheduler.settle()
        if role == "prefill":
            self._renew_prefill(index)
            had = [one for one in in_flight if self._needs_prefill(one, index)]
        else:
            self._receivers[index] = decode_scheduler(self._decode_plan.scheduling)
            instance.scheduler = self._receivers[index]
            had = [one for one in in_flight if self._needs_decode(one, index)]
        on_lost(instance, had)
        for sequence in had:
            self._transfers.cancel(sequence)
            if role == "prefill":
                self._lose_prefill(sequence)
            else:
                self._lose_decode(sequence)
        return had

    def restart(self, role: str, index: int) -> None:
        """Start an instance that is down, empty."""
        instance = self.instances[role][index]
        instance.start(instance.scheduler)

    def _renew_prefill(self, index: int) -> None:
        sender = prefill_scheduler(self._prefill_plan.scheduling, self.shared)
        self._senders[index] = self._prefills[index].scheduler = sender
        self._intakes[index] = make_intakes(
            self._around, self._prefill_plan, [sender], [self._prefills[index]]
        )[0]

    def _needs_prefill(self, sequence: Sequence, index: int) -> bool:
        """Tell whether a request would not end well without that prefill instance."""
        if sequence.prefill_instance != index or sequence.ended or sequence in self._unwanted:
            return False
        return sequence.transfer_end_s is None and self._orphans.get(sequence) != "prefill"

    def _needs_decode(self, sequence: Sequence, index: int) -> bool:
        """Tell whether a request would not end well without that decode instance."""
        if sequence.decode_instance != index or sequence.ended:
            return False
        return self._orphans.get(sequence) != "decode"

    def _lose_prefill(self, sequence: Sequence) -> None:
        """Free what a request holds, or waits for, at its decode instance."""
        index = sequence.decode_instance
        assert index is not None
        assert sequence.prefill_instance is not None
        if sequence.prefill_end_s is None:
            self._dispatcher.done("prefill", sequence.prefill_instance, sequence.request)
        if self._orphans.pop(sequence, None) is not None:
            pass  # its decode instance died before
        elif sequence.decode_pages:
            self._receivers[index].release(sequence)
            self._decodes[index].notify()
        elif self._allocates_first or sequence.prefill_end_s is not None:
            self._orphans[sequence] = "prefill"
            self._receivers[index].abort(sequence)
            self._decodes[index].notify()
            return
        self._end(sequence)

    def _lose_decode(self, sequence: Sequence) -> None:
        """Free what a request holds at its prefill instance."""
        index = sequence.prefill_instance
        assert index is not None
        if self._orphans.pop(sequence, None) is not None:
            pass  # its prefill instance died before
        elif sequence in self._unwanted:
            self._unwanted.discard(sequence)
        elif sequence.prefill_end_s is None:
            if self._allocates_first and not sequence.decode_pages:  # it was never queued there
                self._dispatcher.done("prefill", index, sequence.request)
            else:
                self._orphans[sequence] = "decode"
                self._senders[index].abort(sequence)
                self._prefills[index].notify()
                return
        elif sequence.transfer_end_s is None:
            self._hand_over(sequence)
        self._end(sequence)


class ResidentFleet:
    """One decode instance whose requests appear with their KV in place."""

    def __init__(self, around: Surroundings, deployment: Deployment) -> None:
        """Start an idle instance."""
        self._around = around
        self._plan = plan = deployment.pools["decode"]
        self.shared: SharedTiers | None = None
        self._scheduler = decode_scheduler(plan.scheduling, in_place=True)
        self._instance = make_instances(around, plan, [self._scheduler], self)[0]
        self.instances = {"decode": [self._instance]}

    def arrive(self, sequence: Sequence) -> None:
        """Queue a sequence for pages; it decodes as soon as it has them."""
        sequence.decode_instance = 0
        sequence.rejected = self._plan.too_long(sequence.request.total_tokens)
        if sequence.rejected:
            self._around.on_end(sequence)
            return
        self._scheduler.request_pages(sequence, self._instance.lead())
        self._instance.notify()

    def give_up(self, sequence: Sequence) -> None:
        """Drop a request at the next step boundary."""
        self._scheduler.abort(sequence)
        self._instance.notify()

    def planned(self, instance: Instance, plan: Plan) -> None:
        """Start the clocks of those that begin; report those that were given up on."""
        now_s = self._around.env.now
        for sequence in plan.admitted:
            sequence.last_token_s = now_s
            if sequence.generated_tokens == 1:
                sequence.first_token_s = now_s
        for sequence in plan.restored:
            ready_s = now_s + on_grid(self._plan.restore_s(sequence.stored_tokens))
            call_at(self._around.env, ready_s, self._restored, sequence)
        for sequence in (*plan.failed, *plan.dropped):
            self._around.on_end(sequence)

    def _restored(self, sequence: Sequence) -> None:
        self._scheduler.join(sequence, self._instance.lead())
        self._instance.notify()

    def committed(self, instance: Instance, outcome: Outcome) -> None:
        """Note and report those that are complete."""
        now_s = self._around.env.now
        for sequence in outcome.prefilled:
            note_prompt_done(instance, sequence, now_s)
        for sequence in outcome.finished:
            note_finished(sequence, now_s)
            self._around.on_end(sequence)
        for sequence in outcome.dropped:
            self._around.on_end(sequence)
