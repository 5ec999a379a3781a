"""Prefill between calls: one piece at a time, in many slots at once, or by copying a prefix from another slot."""

from collections import deque

from jspec.engine.runner import Runner
from jspec.engine.scheduler import ActiveRequest, Scheduler
from jspec.engine.slots import Variant


class Prefill:
    """Prefills an engine's requests between calls.

    Args:
        tokens: the approximate number of tokens to prefill between two calls.

    Attributes:
        has_run: whether anything was prefilled since the last call that ran rounds.
    """

    def __init__(self, runner: Runner, tokens: int):
        self._runner, self._sizes, self._tokens, self.has_run = runner, runner.sizes, tokens, False

    def run(self, scheduler: Scheduler) -> None:
        """Prefill requests in turn, one piece at a time, for as long as other requests should wait."""
        budget = self._tokens - self._reuse_prefixes(scheduler)
        ready = [
            (slot, active) for slot, active in scheduler.prefilling() if not self._waits_for_prefix(scheduler, active)
        ]
        budget -= self._prefill_batch(dict(ready))
        prefilling = deque((slot, active) for slot, active in ready if not active.is_prefilled)
        while prefilling and budget > 0:
            slot, active = prefilling.popleft()
            text, start, scored = active.prefix_tokens, active.num_prefilled, active.request.prompt_logprobs
            budget -= self._runner.piece_size(len(text) - start, scored)
            self.has_run = True
            active.record_prefill(self._runner.prefill(slot, text, start, scored))
            if not active.is_prefilled:
                prefilling.append((slot, active))
        if prefilling and not scheduler.decoding():
            self._runner.wait()  # nothing else waits, and new requests should not queue behind an entire long text

    def _reuse_prefixes(self, scheduler: Scheduler) -> int:
        """Copy prefixes from other slots, unless longer ones will soon exist. Return the approximate cost in tokens."""
        smallest, cost = self._sizes.chunks[0], 0
        for slot, active in scheduler.prefilling():
            count, source = scheduler.find_prefix(active)
            is_short = count < active.num_prefilled + smallest
            if is_short or self._waits_for_prefix(scheduler, active) or cost >= self._tokens:
                continue
            self._runner.assign_slot(slot, active.row, len(active.prefix_tokens), count, active.constraint, source)
            active.result.cached = min(active.result.cached + count - active.num_prefilled, len(active.request.tokens))
            active.num_prefilled, cost, self.has_run = count, cost + smallest, True
        return cost

    def _waits_for_prefix(self, scheduler: Scheduler, active: ActiveRequest) -> bool:
        """Return whether another request is prefilling so much of this text that copying it later is better."""
        count = scheduler.pending_prefix(active) - self._sizes.chunks[0]
        return count >= active.num_prefilled and count >= scheduler.find_prefix(active)[0]

    def _prefill_batch(self, prefilling: dict[int, ActiveRequest]) -> int:
        """Prefill short remainders in many slots at once, and return the cost in tokens."""
        smallest, num_slots = self._sizes.chunks[0], self._sizes.slots
        short = {
            slot: active
            for slot, active in prefilling.items()
            if not active.request.prompt_logprobs and len(active.prefix_tokens) - 1 - active.num_prefilled <= smallest
        }
        if len(short) < max(2, num_slots // 2):  # a pass over all slots costs as much as this many single passes
            return 0
        texts = {slot: (active.prefix_tokens, active.num_prefilled) for slot, active in short.items()}
        for slot, piece in self._runner.prefill_batch(texts).items():
            short[slot].record_prefill(piece)
        self.has_run = True
        return smallest * num_slots

    def catch_up_drafter(self, decoding: dict[int, ActiveRequest], num_draft_tokens: int, variant: Variant) -> None:
        """Let the drafter catch up if too much is unread, starting with the request with the fewest unread tokens."""
        budget, max_unread = self._tokens, self._runner.max_unread(num_draft_tokens, variant)
        for slot, active in sorted(decoding.items(), key=lambda entry: entry[1].num_unread):
            if active.num_unread > max_unread and budget > 0:
                self.has_run = True
                count = self._runner.catch_up_drafter(slot, active.num_unread)
                budget, active.num_unread = budget - count, active.num_unread - count
                active.num_caught_up += count
