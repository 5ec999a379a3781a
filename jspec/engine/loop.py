"""The host's loop between device calls. It runs in one thread and never waits for sockets."""

import dataclasses
import itertools
import logging
from collections import deque

import numpy as np

from jspec.engine.length_policy import RECENT, Choice
from jspec.engine.round_budget import Pace
from jspec.engine.runner import Device
from jspec.engine.scheduler import Scheduler, Tenant, nobody
from jspec.engine.slot_output import News, Packed, of_prompt, unpack
from jspec.engine.slots import Needs

_LOG = logging.getLogger("jspec")
_PATIENCE = 5  # failures that end a request, if it ran alone at the last; three times as many in a row end all


@dataclasses.dataclass(frozen=True)
class _Call:
    """A dispatched call that runs rounds.

    Attributes:
        writing: the decoding requests, by slot.
        followed: each request's `followed` at dispatch, by slot.
        num_draft_tokens, needs, count: the draft length, the needs, and the number of slots.
        at_once: whether another call was running at dispatch.
        alone: whether no prefill ran between the previous call and this one.
        rounds: the number of rounds in a full call.
    """

    packed: Packed
    writing: dict[int, Tenant]
    followed: dict[int, int]
    num_draft_tokens: int
    needs: Needs
    count: int
    at_once: bool
    alone: bool
    rounds: int

    @property
    def kind(self) -> tuple[int, Needs, int]:
        """The key under which the cost of the call is recorded."""
        return self.num_draft_tokens, self.needs, self.count


class Loop:
    """A loop that admits, prefills, decodes and delivers. It never has more than two calls in flight."""

    def __init__(self, device: Device, read_tokens: int, call_seconds: float):
        self._device, self._sizes, self._read_tokens = device, device.sizes, read_tokens
        self.pace = Pace(self._sizes.rounds, call_seconds)
        self._choice = Choice(self._sizes.num_draft_tokens[-1])
        self._scheduler = Scheduler(self._sizes.slots)
        self._reads = False  # whether anything was prefilled since the last call that ran rounds
        # Constraints of ended requests. A running call may still query those that ended in this turn.
        self._over: list[int] = []
        self._over_before: list[int] = []
        self._played: deque[_Call] = deque()
        self._stop = np.zeros(self._sizes.slots, bool)
        self._failures = 0
        self.cancels = False  # whether to cancel all requests

    def submit(self, tenant: Tenant) -> None:
        """Queue a request."""
        self._scheduler.submit(tenant)

    @property
    def num_waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._scheduler.waiting)

    @property
    def seated(self) -> list[Tenant]:
        """The requests with a slot."""
        return [tenant for tenant in self._scheduler.tenants if tenant is not None]

    @property
    def is_busy(self) -> bool:
        """Whether there is work to do."""
        return bool(self._scheduler.waiting or any(self._scheduler.tenants) or self._played
                    or self._over or self._over_before)  # fmt: skip

    def turn(self) -> None:
        """Run one iteration: admit, prefill, decode, and deliver the output of the previous call."""
        try:
            self._turn()
        except Exception as error:
            self.failed(error)

    def _turn(self) -> None:
        compiling = self._device.compiling
        self._drop_cancelled()
        self._admit()
        again = self._to_measure()
        if again is None:
            self._read()
        writing = dict(self._scheduler.writing())
        if writing or self._stop.any():
            self._play(writing, again)
        self.pace.away(self._device.compiling - compiling)
        while len(self._played) > bool(writing):
            self._settle(self._played.popleft())
        for number in self._over_before:
            self._device.release(number)
        self._over_before, self._over = self._over, []

    def _drop_cancelled(self) -> None:
        """End cancelled requests at once. If they have a slot, the next call stops their rows."""
        for tenant in [tenant for tenant in self._scheduler.waiting if tenant.cancelled or self.cancels]:
            self._scheduler.waiting.remove(tenant)
            self._finish(tenant, "cancelled")
        for slot, tenant in enumerate(self._scheduler.tenants):
            if tenant is not None and (tenant.cancelled or self.cancels):
                self._stop[slot] = True
                self._scheduler.leave(slot)
                self._finish(tenant, "cancelled")

    def _admit(self) -> None:
        while (seat := self._scheduler.admit()) is not None:
            slot, tenant = seat
            try:
                tenant.constraint = self._device.constrain(tenant.request.constraint)
            except BaseException as error:  # raised by the constraint; other requests are not affected
                if isinstance(error, KeyboardInterrupt):
                    raise
                _LOG.exception("A constraint cannot be made; its request ends.")
                self._scheduler.leave(slot)
                wrong = f"The constraint cannot be made: {type(error).__name__}: {error}"
                self.fail(tenant, wrong, "constraint_failed")
                continue
            self._device.seat(slot, tenant.row, len(tenant.given), tenant.read, tenant.constraint)
            self._stop[slot] = False  # reassigning the slot has already stopped it

    def _read(self) -> None:
        """Prefill requests in turn, one piece at a time, for as long as other requests should wait."""
        budget = self._read_tokens - self._take_over()
        ready = [one for one in self._scheduler.reading() if not self._waits_for_another(one[1])]
        budget -= self._read_several(dict(ready))
        reading = deque(one for one in ready if not one[1].is_written)
        while reading and budget > 0:
            slot, tenant = reading.popleft()
            budget -= self._device.chunk(len(tenant.given) - tenant.read, tenant.request.prompt_logprobs)
            self._reads = True
            tenant.has_read(self._device.read(slot, tenant.given, tenant.read, tenant.request.prompt_logprobs))
            if not tenant.is_written:
                reading.append((slot, tenant))
        if reading and not self._scheduler.writing():
            self._device.wait()  # nothing else waits, and new requests should not queue behind an entire long text

    def _take_over(self) -> int:
        """Copy prefixes from other slots, unless those will soon hold more. Return the approximate cost in tokens."""
        least, copied = self._sizes.chunks[0], 0
        for slot, tenant in self._scheduler.reading():
            count, source = self._scheduler.lender(tenant)
            if count < tenant.read + least or self._waits_for_another(tenant) or copied >= self._read_tokens:
                continue
            self._device.seat(slot, tenant.row, len(tenant.given), count, tenant.constraint, source)
            result = tenant.result
            result.cached = min(result.cached + count - tenant.read, len(tenant.request.tokens))
            tenant.read, copied, self._reads = count, copied + least, True
        return copied

    def _waits_for_another(self, tenant: Tenant) -> bool:
        """Return whether another request is prefilling so much of this text that copying it later is better."""
        worth = self._scheduler.will_be_read(tenant) - self._sizes.chunks[0]
        return worth >= tenant.read and worth >= self._scheduler.lender(tenant)[0]

    def _read_several(self, reading: dict[int, Tenant]) -> int:
        """Prefill short remainders in many slots at once, and return the cost in tokens."""
        least, count = self._sizes.chunks[0], self._sizes.slots
        short = {slot: tenant for slot, tenant in reading.items()
                 if len(tenant.given) - 1 - tenant.read <= least and not tenant.request.prompt_logprobs}  # fmt: skip
        if len(short) < max(2, count // 2):  # a pass over all slots costs as much as this many single passes
            return 0
        found = self._device.read_several({slot: (tenant.given, tenant.read) for slot, tenant in short.items()})
        for slot, piece in found.items():
            short[slot].has_read(piece)
        self._reads = True
        return least * count

    def _follow(self, writing: dict[int, Tenant], num_draft_tokens: int) -> None:
        """Let lagging drafters catch up, starting with those that have the least to read."""
        budget, tolerated = self._read_tokens, self._device.tolerated(num_draft_tokens)
        for slot, tenant in sorted(writing.items(), key=lambda one: one[1].lag):
            if tenant.lag > tolerated and budget > 0:
                self._reads = True
                read = self._device.follow(slot, tenant.lag)
                budget, tenant.lag, tenant.followed = budget - read, tenant.lag - read, tenant.followed + read

    def _to_measure(self) -> int | None:
        """Return the running call's draft length if it is time to repeat that call undisturbed, to measure its cost.

        Otherwise the cost of a round would never be measured while requests are always waiting or prefilling.
        """
        if not self._played or not (writing := self._scheduler.writing()):
            return None
        last = self._played[-1]
        is_alike = self._shape(dict(writing)) == (last.count, last.needs)
        return last.num_draft_tokens if is_alike and self.pace.is_stale(last.kind) else None

    def _moving(self, writing: dict[int, Tenant]) -> list[int]:
        """Return the slots that a call must include: those that decode, and those that the call must stop."""
        return sorted({*writing, *np.flatnonzero(self._stop).tolist()})

    def _shape(self, writing: dict[int, Tenant]) -> tuple[int, Needs]:
        """Return the number of slots in the next call, and the needs that it must support."""
        needs = max((tenant.request.needs for tenant in writing.values()), default=Needs.LEAN)
        return self._sizes.shape(len(self._moving(writing)), needs)

    def _play(self, writing: dict[int, Tenant], again: int | None) -> None:
        """Dispatch rounds for `writing`. If `again` is a draft length, use that length and run undisturbed."""
        begins = not any(tenant.is_begun for tenant in writing.values())
        count, needs = self._shape(writing)
        k = self._length(writing, begins, needs, count) if again is None else again
        if k and self._device.lags and again is None:
            self._follow(writing, k)
        whole = self.pace.rounds((k, needs, count))
        # Deliver a first token early, unless other requests are decoding: a short call would delay them.
        rounds = (1 if begins else whole) if writing else 0
        for tenant in writing.values():
            tenant.is_begun = True
        yields = np.isin(np.arange(self._sizes.slots), [*writing]) & bool(self._scheduler.waiting and again is None)
        rows = self._sizes.rows(self._moving(writing), count)
        packed = self._device.play(k, rounds, self._stop.copy(), needs, yields, rows)
        self._stop[:] = False
        followed = {slot: tenant.followed for slot, tenant in writing.items()}
        at_once, alone = bool(self._played), not self._reads
        self._played.append(_Call(packed, writing, followed, k, needs, count, at_once, alone, whole))
        self._reads = False

    def _length(self, writing: dict[int, Tenant], begins: bool, needs: Needs, count: int) -> int:
        """Return the next call's draft length; 0, if possible, before the drafter has read any text."""
        lengths = self._device.lengths(needs, count)
        if self._device.lags and begins and 0 in lengths:
            return 0
        # The warm-up measures no constrained rounds: use unconstrained costs until constrained ones are known.
        kinds = [(k, its, count) for its in (min(needs, Needs.FULL), needs) for k in lengths]
        costs = {kind[0]: self.pace.costs[kind] for kind in kinds if self.pace.knows(kind)}
        rows = [(one.result.accepted[-RECENT:], one.lengths[-RECENT:]) for one in writing.values()]
        return self._choice.next(lengths, costs, rows)

    def _settle(self, call: "_Call") -> None:
        """Deliver a call's output to the requests that it was dispatched for."""
        wanted = [slot for slot, tenant in call.writing.items() if tenant.request.top_logprobs]
        news = unpack(call.packed, call.writing, self._sizes.top_logprobs if call.needs >= Needs.FULL else 0, wanted)
        rounds = max((len(new.accepted) for new in news.values()), default=0)
        # A call that was cut short for a waiting request spreads its fixed cost over fewer rounds.
        alone = call.alone and rounds == call.rounds
        self.pace.settled(call.kind, rounds, call.at_once, alone)
        self._judge(call, news)
        for slot, tenant in call.writing.items():
            if tenant.result.finish_reason is None:
                # The lag in the output ignores tokens that the drafter has been given to read since dispatch.
                tenant.lag = news[slot].lag - (tenant.followed - call.followed[slot])
                self._tell(slot, tenant, news[slot], call.num_draft_tokens)
        for tenant in call.writing.values():
            self._failures, tenant.calls = 0, tenant.calls + 1
            tenant.failures = 0 if tenant.goes_well else tenant.failures

    def _judge(self, call: "_Call", news: dict[int, News]) -> None:
        """Record how many draft tokens were accepted. Skip rounds in which the drafter lagged: they predict nothing."""
        seen: list[int] = []
        for new in news.values():
            seen += itertools.compress(new.accepted, self._lengths(new, 1))
        self._choice.saw(seen, call.num_draft_tokens)

    def _lengths(self, new: News, num_draft_tokens: int) -> list[int]:
        """Return how many tokens each round was meant to draft."""
        return [num_draft_tokens if drafted or not self._device.lags else 0 for drafted in new.drafted]

    def _tell(self, slot: int, tenant: Tenant, new: News, num_draft_tokens: int) -> None:
        result, num_top = tenant.result, tenant.request.top_logprobs
        if wrong := self._device.constraints.error(tenant.constraint):  # the last tokens were not constrained
            self._stop[slot] = True
            self._scheduler.leave(slot)
            return self.fail(tenant, str(wrong), wrong.code)
        if tenant.scored:
            told = of_prompt(tenant.scored, len(tenant.request.tokens), num_top)
            result.prompt_logprobs, result.prompt_top_logprobs = told
            tenant.scored = []
        if num_top:
            result.top_logprobs.extend(one[:num_top] for one in new.top_logprobs)
        # Extend `tokens` last, so that another thread that sees the new tokens also finds the rest.
        for name in ("origins", "logprobs", "raw_logprobs", "accepted", "judged", "drafted", "tokens"):
            getattr(result, name).extend(getattr(new, name))
        result.distortion += new.distortion
        tenant.lengths += self._lengths(new, num_draft_tokens)
        if not (new.done or new.strange):
            return tenant.tell() if new.tokens else None
        self._scheduler.leave(slot)
        if new.strange:
            self._stop[slot] = True
            who = type(self._device.drafter).__name__
            return self.fail(
                tenant, f"{who} drafted ids outside the vocabulary; draft the target's, or a law of zeros for no guess."
            )
        if new.invalid and tenant.request.constraint is not None:
            wrong = self._device.constraints.why_nothing_follows(tenant.constraint, result.tokens)
            return self.fail(tenant, str(wrong), wrong.code)
        if new.invalid:
            wrong = "The target's logits are not finite: its weights are damaged, or too large for the dtype."
            return self.fail(tenant, wrong)
        ended = bool(result.tokens) and result.tokens[-1] in tenant.request.eos_ids
        return self._finish(tenant, "eos" if ended else "length")

    def fail(self, tenant: Tenant, error: str, code: str | None = None) -> None:
        """End a request that has no slot with an error, and with a `code` if its constraint cannot be met."""
        _LOG.error("A request ends: %s", error)
        tenant.result.error, tenant.result.error_code = error, code
        self._finish(tenant, "error")

    def _finish(self, tenant: Tenant, reason: str) -> None:
        if tenant.constraint:
            self._over.append(tenant.constraint)
        tenant.result.finish_reason = reason
        tenant.tell()
        tenant.listen = nobody  # the listener may hold the tenant: a reference cycle that would keep both alive

    def failed(self, error: BaseException) -> None:
        """Empty the slots after a failure. Requests with a key prefill their text again, and their output is the same.

        End a request that failed repeatedly and ran alone the last time. End all requests if every call fails.
        """
        _LOG.error("A call of the engine has failed.", exc_info=error)
        self._failures += 1
        seated = self.seated
        waiting, self._scheduler = self._scheduler.waiting, Scheduler(self._sizes.slots)
        self._played.clear()
        self._over, self._over_before = [], []
        self._stop[:] = False
        try:
            self._device.reset()
        except Exception as worse:
            error, self._failures = worse, 3 * _PATIENCE
        for tenant in seated:
            tenant.failures += 1
        hopeless = self._failures >= 3 * _PATIENCE
        its_own = len(seated) == 1 and seated[0].failures >= _PATIENCE
        if hopeless or its_own:  # the failures are now explained
            self._failures = 0
        # Queue the requests that must be tried alone first, while no slot is taken.
        for tenant in sorted([*seated, *waiting], key=lambda one: -one.failures):
            if hopeless or (tenant in seated and (its_own or tenant.request.key is None)):
                self.fail(tenant, f"{type(error).__name__}: {error}")
            else:
                self._scheduler.submit(tenant)
