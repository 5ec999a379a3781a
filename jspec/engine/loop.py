"""The host's loop between device calls. It runs in one thread and never waits for sockets."""

import contextlib
import itertools
import logging
from collections import deque
from time import perf_counter

import numpy as np

from jspec.drafters.base import kind_of
from jspec.engine.call import Call, Kind
from jspec.engine.length_policy import RECENT, LengthPolicy
from jspec.engine.prefill import Prefill
from jspec.engine.round_budget import RoundBudget
from jspec.engine.runner import Runner
from jspec.engine.scheduler import ActiveRequest, Scheduler, no_listener
from jspec.engine.slot_output import SlotOutput, unpack
from jspec.engine.slots import Variant
from jspec.engine.weights import Running, Update

_LOG = logging.getLogger("jspec")
_MIN_CONSTRAINED = 4  # number of measurements before the cost of constrained rounds is used
_PATIENCE = 5  # failures that end a request if it ran alone in the last one; 3 times as many in a row end all requests


class Loop:
    """A loop that admits, prefills and decodes requests and delivers output. At most two calls are in flight."""

    def __init__(self, runner: Runner, prefill_tokens: int, call_seconds: float):
        self._runner, self._sizes = runner, runner.sizes
        self._prefill = Prefill(runner, prefill_tokens)
        self.round_budget = RoundBudget(self._sizes.rounds, call_seconds)
        self._length_policy = LengthPolicy(self._sizes.num_draft_tokens[-1])
        self._scheduler = Scheduler(self._sizes.slots)
        # The constraints of ended requests. A running call may still query those of requests that ended in this turn.
        self._ended_constraints: list[int] = []
        self._unused_constraints: list[int] = []
        self._in_flight: deque[Call] = deque()
        self._last_kind: Kind | None = None
        self._stop = np.zeros(self._sizes.slots, bool)
        self._failures = 0
        self.cancel_all = False  # whether to cancel all requests
        self.update: Update | None = None  # new weights that are not in use yet
        self._needs_reset = False  # whether the slots could not be emptied after a failure

    def submit(self, active: ActiveRequest) -> None:
        """Queue a request."""
        self._scheduler.submit(active)

    @property
    def num_waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._scheduler.waiting)

    @property
    def running_requests(self) -> list[ActiveRequest]:
        """The requests with a slot."""
        return [active for active in self._scheduler.active_requests if active is not None]

    @property
    def is_busy(self) -> bool:
        """Whether there is work to do."""
        has_requests = self._scheduler.waiting or any(self._scheduler.active_requests)
        return bool(
            has_requests or self._in_flight or self._ended_constraints or self._unused_constraints or self.update
        )

    def turn(self) -> None:
        """Run one iteration: admit, prefill, decode, and deliver the output of the previous call."""
        try:
            self._try_update()
            self._turn()
        except Exception as error:
            self.recover(error)

    def _try_update(self) -> None:
        """Apply a pending update, unless running requests must finish first. Pass an error to its caller."""
        update = self.update
        if update is None or (update.waits_for_running and self._any_request_has_begun()):
            return
        old = self._runner.models
        try:
            new = old.replacement(update.target, update.drafter)
            changes_target = old.has_other_target(new)
        except Exception as error:  # the engine keeps the old weights
            return self._end(update, error)
        if changes_target and update.running == "finish" and self._any_request_has_begun():
            update.waits_for_running = True
            return
        try:
            if changes_target:
                self._stop_requests(update.running)
            self._runner.replace_weights(new)
            if changes_target or self._needs_reset:
                self._runner.reset()  # the slots' states depend on the old weights
                self._needs_reset = False
        except BaseException as error:
            self._runner.replace_weights(old)
            self._end(update, error)
            raise
        self._end(update, None)

    def _end(self, update: Update, error: BaseException | None) -> None:
        self.update, update.error = None, error
        update.done.set()

    def _any_request_has_begun(self) -> bool:
        return bool(self._in_flight or self.running_requests or self._next_has_begun())

    def _next_has_begun(self) -> bool:
        """Return whether the next queued request had a slot before. After a failed call, such requests are first."""
        return bool(self._scheduler.waiting) and self._scheduler.waiting[0].assigned_at is not None

    def _stop_requests(self, running: Running) -> None:
        """Empty the slots. Restart or cancel all requests that have begun."""
        with contextlib.suppress(Exception):  # a failed call is harmless, because its output is discarded
            self._runner.wait()
        active_requests = itertools.chain(*self._empty())
        for active in active_requests:
            if active.assigned_at is None:
                self._scheduler.submit(active)
            elif running == "restart" and not (active.cancelled or self.cancel_all or active.request.generated):
                self._scheduler.submit(active)
                active.restart()
            else:
                self._retire(active, "cancelled")

    def _turn(self) -> None:
        compile_seconds = self._runner.compile_seconds
        # On a CPU, dispatching constrained rounds waits for them. Deliver their output before the next dispatch.
        while self._in_flight and self._in_flight[0].packed.is_ready:
            self._collect(self._in_flight.popleft())
        self._drop_cancelled()
        self._admit()
        repeated_length = self._plan_repeat()
        if repeated_length is None:
            self._prefill.run(self._scheduler)
        decoding = dict(self._scheduler.decoding())
        if decoding or self._stop.any():
            kind = self._plan(decoding, repeated_length)
            self._dispatch(decoding, kind, repeated_length is not None)
        self.round_budget.exclude_time(self._runner.compile_seconds - compile_seconds)
        while len(self._in_flight) > bool(decoding):
            self._collect(self._in_flight.popleft())
        for number in self._unused_constraints:
            self._runner.release(number)
        self._unused_constraints, self._ended_constraints = self._ended_constraints, []

    def _drop_cancelled(self) -> None:
        """End cancelled requests at once. If they have a slot, the next call stops their rows."""
        for active in [active for active in self._scheduler.waiting if active.cancelled or self.cancel_all]:
            self._scheduler.waiting.remove(active)
            self._retire(active, "cancelled")
        for slot, active in enumerate(self._scheduler.active_requests):
            if active is not None and (active.cancelled or self.cancel_all):
                self._stop[slot] = True
                self._scheduler.release_slot(slot)
                self._retire(active, "cancelled")

    def _admit(self) -> None:
        while (self.update is None or self._next_has_begun()) and (assignment := self._scheduler.admit()) is not None:
            slot, active = assignment
            try:
                active.constraint = self._runner.constrain(active.request.constraint)
            except BaseException as error:  # raised by the constraint; other requests are not affected
                if isinstance(error, KeyboardInterrupt):
                    raise
                _LOG.exception("A constraint cannot be created; its request ends.")
                self._scheduler.release_slot(slot)
                wrong = f"The constraint cannot be created: {type(error).__name__}: {error}"
                self.fail(active, wrong, "constraint_failed")
                continue
            num_tokens = len(active.prefix_tokens)
            self._runner.assign_slot(slot, active.row, num_tokens, active.num_prefilled, active.constraint)
            self._stop[slot] = False  # reassigning the slot has already stopped it

    def _plan_repeat(self) -> int | None:
        """Return the last call's draft length if it is time to repeat that call undisturbed, to measure its cost.

        Without such repeats, the cost of a round would never be measured while requests keep waiting or prefilling.
        """
        if self._last_kind is None or not (decoding := self._scheduler.decoding()):
            return None
        num_draft_tokens, variant, num_slots = kind = self._last_kind
        is_alike = self._call_shape(dict(decoding)) == (num_slots, variant)
        return num_draft_tokens if is_alike and self.round_budget.is_stale(kind) else None

    def _plan(self, decoding: dict[int, ActiveRequest], repeated_length: int | None) -> Kind:
        """Return the kind of the next call. The first call of new requests drafts nothing, so that it ends sooner."""
        num_slots, variant = self._call_shape(decoding)
        if repeated_length is not None:
            return repeated_length, variant, num_slots
        lengths = self._runner.lengths(variant, num_slots)
        is_first = not any(active.has_decoded for active in decoding.values())
        if is_first and 0 in lengths:
            return 0, variant, num_slots
        # The warm-up measures no constrained rounds: use unconstrained costs until constrained ones are measured
        # several times. After one disturbed measurement, the engine might not draft for hundreds of calls.
        kinds = [(k, measured, num_slots) for measured in (min(variant, Variant.FULL), variant) for k in lengths]
        costs = {
            kind[0]: self.round_budget.costs[kind]
            for kind in kinds
            if self.round_budget.is_measured(kind, _MIN_CONSTRAINED if kind[1] is Variant.CONSTRAINED else 1)
        }
        rows = [(active.result.accepted[-RECENT:], active.draft_lengths[-RECENT:]) for active in decoding.values()]
        return self._length_policy.next(lengths, costs, rows), variant, num_slots

    def _slots_to_run(self, decoding: dict[int, ActiveRequest]) -> list[int]:
        """Return the slots that a call must include: those that decode, and those that the call must stop."""
        return sorted({*decoding, *np.flatnonzero(self._stop).tolist()})

    def _call_shape(self, decoding: dict[int, ActiveRequest]) -> tuple[int, Variant]:
        """Return the next call's number of slots and variant."""
        variant = max((active.request.variant for active in decoding.values()), default=Variant.TEMPERATURE_ONLY)
        return self._sizes.shape(len(self._slots_to_run(decoding)), variant)

    def _dispatch(self, decoding: dict[int, ActiveRequest], kind: Kind, undisturbed: bool) -> None:
        """Dispatch rounds for the requests in `decoding`."""
        num_draft_tokens, variant, num_slots = kind
        if num_draft_tokens and self._runner.reads_separately and not undisturbed:
            self._prefill.catch_up_drafter(decoding, num_draft_tokens, variant)
        full_rounds = self.round_budget.rounds(kind)
        is_first = not any(active.has_decoded for active in decoding.values())
        # Deliver a first token early, unless other requests are decoding: a short call would delay them.
        rounds = (1 if is_first else full_rounds) if decoding else 0
        for active in decoding.values():
            active.has_decoded = True
        frees_slots = bool(self._scheduler.waiting and not undisturbed)
        stop_when_done = np.isin(np.arange(self._sizes.slots), [*decoding]) & frees_slots
        rows = self._sizes.rows(self._slots_to_run(decoding), num_slots)
        dispatched_at = perf_counter()
        packed = self._runner.decode_rounds(num_draft_tokens, rounds, self._stop.copy(), variant, stop_when_done, rows)
        self._stop[:] = False
        num_caught_up = {slot: active.num_caught_up for slot, active in decoding.items()}
        alone = not self._prefill.has_run
        self._in_flight.append(Call(packed, decoding, num_caught_up, kind, dispatched_at, alone, full_rounds))
        self._last_kind, self._prefill.has_run = kind, False

    def _collect(self, call: Call) -> None:
        """Wait for a call's output, and deliver it to the requests that the call was dispatched for."""
        num_draft_tokens, variant, _ = call.kind
        top_slots = [slot for slot, active in call.decoding.items() if active.request.top_logprobs]
        num_top = self._sizes.top_logprobs if variant >= Variant.FULL else 0
        outputs = unpack(call.packed, call.decoding, num_top, top_slots)
        rounds = max((len(output.accepted) for output in outputs.values()), default=0)
        # A call that was cut short for a waiting request spreads its fixed cost over fewer rounds.
        self.round_budget.record_call(call.kind, rounds, call.dispatched_at, call.alone and rounds == call.rounds)
        self._record_acceptance(outputs, num_draft_tokens)
        for slot, active in call.decoding.items():
            if active.result.finish_reason is None:
                # The output counts as unread even the tokens that the drafter has read since dispatch.
                active.num_unread = outputs[slot].num_unread - (active.num_caught_up - call.num_caught_up[slot])
                self._deliver(slot, active, outputs[slot], num_draft_tokens)
        for active in call.decoding.values():
            self._failures, active.calls = 0, active.calls + 1
            active.failures = 0 if active.is_trusted else active.failures

    def _record_acceptance(self, outputs: dict[int, SlotOutput], num_draft_tokens: int) -> None:
        """Record how many draft tokens were accepted. Skip rounds with too much unread text: they predict nothing."""
        accepted = [
            count
            for output in outputs.values()
            for count in itertools.compress(output.accepted, self._draft_lengths(output, 1))
        ]
        self._length_policy.record(accepted, num_draft_tokens)

    def _draft_lengths(self, output: SlotOutput, num_draft_tokens: int) -> list[int]:
        """Return how many tokens each round was meant to draft."""
        return [num_draft_tokens if drafted or not self._runner.reads_separately else 0 for drafted in output.drafted]

    def _deliver(self, slot: int, active: ActiveRequest, output: SlotOutput, num_draft_tokens: int) -> None:
        if wrong := self._runner.constraints.error(active.constraint):  # the last tokens were not constrained
            self._stop[slot] = True
            self._scheduler.release_slot(slot)
            return self.fail(active, str(wrong), wrong.code)
        active.record_output(output, self._draft_lengths(output, num_draft_tokens))
        if not (output.done or output.out_of_vocab):
            return active.notify() if output.tokens else None
        self._scheduler.release_slot(slot)
        if output.out_of_vocab:
            self._stop[slot] = True
            name = kind_of(self._runner.drafter)
            wrong = (
                f"{name} drafted ids outside the vocabulary; draft the target's ids, or return an all-zero "
                "distribution to draft no token."
            )
            return self.fail(active, wrong)
        if output.invalid and active.request.constraint is not None:
            wrong = self._runner.constraints.why_nothing_follows(active.constraint, active.new_tokens)
            return self.fail(active, str(wrong), wrong.code)
        if output.invalid:
            wrong = "The target's logits are not finite: its weights are damaged, or too large for the dtype."
            return self.fail(active, wrong)
        tokens, eos_ids = active.result.tokens, active.request.eos_ids
        has_ended = bool(tokens) and tokens[-1] in eos_ids
        return self._retire(active, "eos" if has_ended else "length")

    def fail(self, active: ActiveRequest, error: str, code: str | None = None) -> None:
        """End a request that has no slot. Its result gets the error, and a `code` if its constraint cannot be met."""
        _LOG.error("A request ends with an error: %s", error)
        active.result.error, active.result.error_code = error, code
        self._retire(active, "error")

    def _retire(self, active: ActiveRequest, reason: str) -> None:
        if active.constraint:
            self._ended_constraints.append(active.constraint)
        active.result.finish_reason = reason
        active.notify()
        active.listen = no_listener  # the listener may hold `active`: a reference cycle that would keep both alive

    def _empty(self) -> tuple[list[ActiveRequest], deque[ActiveRequest]]:
        """Forget all slots and running calls. Return the requests that had a slot, and those that wait."""
        running, waiting = self.running_requests, self._scheduler.waiting
        self._scheduler = Scheduler(self._sizes.slots)
        self._in_flight.clear()
        self._last_kind = None
        self._ended_constraints, self._unused_constraints = [], []
        self._stop[:] = False
        return running, waiting

    def recover(self, error: BaseException) -> None:
        """Empty the slots after a failure. Requests with a key are prefilled again, and their output is the same.

        End a request that failed repeatedly and ran alone the last time. End all requests if every call fails, except
        new requests that wait for an update, because the new weights may fix the failure.
        """
        _LOG.error("An engine call has failed.", exc_info=error)
        self._failures += 1
        running, waiting = self._empty()
        try:
            self._runner.reset()
            self._needs_reset = False
        except Exception as worse:
            error, self._failures, self._needs_reset = worse, 3 * _PATIENCE, True
        for active in running:
            active.failures += 1
        all_fail = self._failures >= 3 * _PATIENCE
        one_fails = len(running) == 1 and running[0].failures >= _PATIENCE
        if all_fail or one_fails:  # the failures are now explained
            self._failures = 0
        # First queue the requests that must be tried alone, while no slot is taken.
        for active in sorted([*running, *waiting], key=lambda active: -active.failures):
            may_succeed = self.update is not None and active.assigned_at is None  # with the new weights
            if (all_fail and not may_succeed) or (active in running and (one_fails or active.request.key is None)):
                self.fail(active, f"{type(error).__name__}: {error}")
            else:
                self._scheduler.submit(active)
