"""Slot assignment and prefill order, in plain Python on host data. Nothing here touches a device."""

import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from jspec.decoding.state import RequestParams
from jspec.engine.request import Request, Result
from jspec.engine.slot_output import Piece, SlotOutput, prompt_scores

_LOG = logging.getLogger("jspec")


def no_listener(_: Result) -> None:
    """Ignore a result."""


@dataclasses.dataclass(eq=False)
class ActiveRequest:
    """A request in the engine: waiting for a slot, in prefill, or decoding.

    Attributes:
        row: the request as arrays for the device.
        listen: the function that the engine calls whenever the result has grown.
        prefix_tokens: the tokens to prefill: the prompt and, if the request continues after a failure, new tokens.
        slot_order: the request's number in the order of slot assignment.
        assigned_at: when the request got its first slot, by `time.monotonic`; None before that.
        num_prefilled: how many tokens of `prefix_tokens` have been prefilled.
        num_pieces: the number of pieces prefilled since the request got its slot. Decoding starts with the last piece,
            so there is at least one piece, which may be empty.
        has_decoded: whether a round has been dispatched for the request since it got its slot.
        num_unread: an upper bound on the number of tokens that the drafter has not read.
        num_caught_up: the number of tokens that the drafter has read by catching up.
        draft_lengths: the number of tokens that each round was meant to draft; 0 if too many were unread.
        constraint: the number that the runner has assigned to the constraint, or 0.
        scored_pieces: prefilled pieces and their scores, kept until the scores are in the result.
        shared_prefixes: requests that got slots earlier: each request, its slot, and the length of the prefix that both
            texts share.
        calls: how many calls have delivered output to the request since it got its slot.
        failures: how many calls have failed while the request had a slot, since the request was last trusted.
    """

    request: Request
    row: RequestParams
    listen: Callable[[Result], None]
    result: Result = dataclasses.field(default_factory=Result)
    prefix_tokens: tuple[int, ...] = ()
    slot_order: int = 0
    assigned_at: float | None = None
    num_prefilled: int = 0
    num_pieces: int = 0
    has_decoded: bool = False
    num_unread: int = 0
    num_caught_up: int = 0
    draft_lengths: list[int] = dataclasses.field(default_factory=list[int])
    constraint: int = 0
    scored_pieces: list[Piece] = dataclasses.field(default_factory=list[Piece])
    shared_prefixes: list[tuple["ActiveRequest", int, int]] = dataclasses.field(
        default_factory=list[tuple["ActiveRequest", int, int]]
    )
    calls: int = 0
    failures: int = 0
    cancelled: bool = False

    @property
    def is_trusted(self) -> bool:
        """Whether the request seems to cause no failures. First calls prove less: they are shorter and draft less."""
        return self.calls >= 3

    @property
    def is_suspect(self) -> bool:
        """Whether the request may be the cause of failed calls."""
        return self.failures > 1

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt and all new tokens so far."""
        return (*self.request.tokens, *self.new_tokens)

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """All new tokens so far, including those that another engine generated."""
        return (*self.request.generated, *self.result.tokens)

    def notify(self) -> None:
        """Call `listen`. A callback that raises cancels only its own request."""
        try:
            self.listen(self.result)
        except BaseException:
            _LOG.exception("The listener of a request has failed; the request is cancelled.")
            self.cancelled = True

    def record_prefill(self, piece: Piece) -> None:
        """Record that a piece has been dispatched for prefill."""
        self.num_prefilled, self.num_pieces = piece.end, self.num_pieces + 1
        if piece.scores is not None:
            self.scored_pieces.append(piece)
        if self.is_prefilled:
            self.shared_prefixes = []  # otherwise chains of references would keep ended requests alive

    def record_output(self, output: SlotOutput, draft_lengths: list[int]) -> None:
        """Append a call's output to the result. `draft_lengths` holds the intended draft length of each round."""
        result, num_top = self.result, self.request.top_logprobs
        if self.scored_pieces:
            scores = prompt_scores(self.scored_pieces, len(self.request.tokens), num_top)
            result.prompt_logprobs, result.prompt_top_logprobs = scores
            self.scored_pieces = []
        if num_top:
            result.top_logprobs.extend(top[:num_top] for top in output.top_logprobs)
        # Extend `tokens` last, so that another thread that sees the new tokens also finds the rest.
        result.origins.extend(output.origins)
        result.logprobs.extend(output.logprobs)
        result.raw_logprobs.extend(output.raw_logprobs)
        result.accepted.extend(output.accepted)
        result.judged.extend(output.judged)
        result.drafted.extend(output.drafted)
        result.tokens.extend(output.tokens)
        result.distortion += output.distortion
        self.draft_lengths += draft_lengths

    def restart(self) -> None:
        """Discard the output, count the restart and notify the listener. Keep the result object and `assigned_at`."""
        vars(self.result).update(vars(Result(restarts=self.result.restarts + 1)))
        self.draft_lengths = []
        self.notify()

    @property
    def is_prefilled(self) -> bool:
        """Whether prefill is complete, so that rounds include this request."""
        return self.num_pieces > 0 and self.num_prefilled == len(self.prefix_tokens) - 1


class Scheduler:
    """A first-come, first-served scheduler for a fixed number of slots.

    Attributes:
        waiting: requests without a slot, in order.
        active_requests: the request in each slot, or None.
        cached_texts: for each slot, the tokens in its KV cache and their request's salt.
    """

    def __init__(self, slots: int):
        self.waiting: deque[ActiveRequest] = deque()
        self.active_requests: list[ActiveRequest | None] = [None] * slots
        self.cached_texts: list[tuple[Sequence[int], str]] = [((), "")] * slots
        self._clock, self._released_at = itertools.count(1), [0] * slots

    def submit(self, active: ActiveRequest) -> None:
        """Append a request to the queue."""
        self.waiting.append(active)

    def admit(self) -> tuple[int, ActiveRequest] | None:
        """Assign a slot to the next request. Set ``active.num_prefilled`` to the number of tokens in the slot.

        Return the slot and the request, or None if no request can get a slot. A suspect request, which may cause calls
        to fail, first runs only beside trusted requests, and then alone.
        """
        free = [slot for slot, active in enumerate(self.active_requests) if active is None]
        if not free or not self.waiting:
            return None
        active = self.waiting[0]
        if not self._may_join(active):
            return None
        active.prefix_tokens = active.text
        # Choose the slot that holds most of the request's text. Among ties, choose the one that has been free longest.
        slot = max(free, key=lambda slot: (_num_reusable(active, *self.cached_texts[slot]), -self._released_at[slot]))
        active.num_prefilled = _num_reusable(active, *self.cached_texts[slot])
        active.result.cached = min(active.num_prefilled, len(active.request.tokens))
        active.shared_prefixes = [
            (other, other_slot, _num_shared(active.prefix_tokens, other.prefix_tokens))
            for other_slot, other in self._occupied()
            if _may_share(active, other.request.salt)
        ]
        active.scored_pieces, active.has_decoded, active.calls = [], False, 0
        active.num_pieces, active.num_unread, active.slot_order = 0, len(active.prefix_tokens), next(self._clock)
        if active.assigned_at is None:
            active.assigned_at = time.monotonic()
        self.active_requests[slot] = self.waiting.popleft()
        self.cached_texts[slot] = (), ""
        return slot, active

    def _may_join(self, active: ActiveRequest) -> bool:
        """Return whether a failed call could still be attributed to one request if `active` ran, too."""
        others = [other for _, other in self._occupied()]
        if any(other.is_suspect for other in others):
            return False
        if not active.is_suspect or not others:
            return True
        return active.failures == 2 and all(other.is_trusted for other in others)

    def find_prefix(self, active: ActiveRequest) -> tuple[int, int]:
        """Return the number of tokens of a request's text that the best other slot holds, and that slot."""
        num_tokens = len(active.prefix_tokens)
        in_free = [
            (_num_reusable(active, *text), slot)
            for slot, text in enumerate(self.cached_texts)
            if self.active_requests[slot] is None
        ]
        in_use = [
            (_limit_reuse(num_shared, other.num_prefilled + 1, num_tokens), slot)
            for other, slot, num_shared in self._current_prefixes(active)
        ]
        return max([*in_free, *in_use], default=(0, 0))

    def pending_prefix(self, active: ActiveRequest) -> int:
        """Return how many tokens of this text another request will prefill. Ignore requests that need prompt scores."""
        num_tokens = len(active.prefix_tokens)
        return max(
            (
                _limit_reuse(num_shared, len(other.prefix_tokens), num_tokens)
                for other, _, num_shared in self._current_prefixes(active)
                if not other.request.prompt_logprobs
            ),
            default=0,
        )

    def _current_prefixes(self, active: ActiveRequest) -> list[tuple[ActiveRequest, int, int]]:
        """Return the entries of ``active.shared_prefixes`` whose requests still have their slots."""
        return [entry for entry in active.shared_prefixes if self.active_requests[entry[1]] is entry[0]]

    def prefilling(self) -> list[tuple[int, ActiveRequest]]:
        """Return the slots in prefill with their requests, in the order of slot assignment."""
        slots = [(slot, active) for slot, active in self._occupied() if not active.is_prefilled]
        return sorted(slots, key=lambda entry: entry[1].slot_order)

    def decoding(self) -> list[tuple[int, ActiveRequest]]:
        """Return the decoding slots with their requests."""
        return [(slot, active) for slot, active in self._occupied() if active.is_prefilled]

    def _occupied(self) -> list[tuple[int, ActiveRequest]]:
        return [(slot, active) for slot, active in enumerate(self.active_requests) if active is not None]

    def release_slot(self, slot: int) -> ActiveRequest:
        """Free a slot. Another request may reuse the tokens in its KV cache."""
        active = self.active_requests[slot]
        assert active is not None, "an empty slot cannot be released"
        cached = active.text if active.is_prefilled else active.prefix_tokens[: active.num_prefilled + 1]
        self.active_requests[slot], self.cached_texts[slot] = None, (cached, active.request.salt)
        active.shared_prefixes = []
        self._released_at[slot] = next(self._clock)
        return active


def _num_reusable(active: ActiveRequest, cached: Sequence[int], salt: str) -> int:
    """Return how many tokens of a request's text can be reused from a slot that holds the tokens `cached`."""
    if not _may_share(active, salt):
        return 0
    text = active.prefix_tokens or active.text
    return _limit_reuse(_num_shared(cached, text), len(cached), len(text))


def _may_share(active: ActiveRequest, salt: str) -> bool:
    return salt == active.request.salt and not active.request.prompt_logprobs


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _limit_reuse(num_shared: int, num_cached: int, num_tokens: int) -> int:
    """Return how many of a text's `num_tokens` tokens can be reused, if `num_shared` of `num_cached` tokens match.

    The last two tokens of a text are never reused, because a drafter must read one of them. The last common token is
    not reused either, because a drafter may have read it together with the next token.
    """
    return max(0, min(num_shared - 1, num_cached - 1, num_tokens - 2))
