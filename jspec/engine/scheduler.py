"""Slot assignment and prefill order, in plain Python on host data. Nothing here touches a device."""

import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from jspec.decoding.state import RequestParams
from jspec.engine.request import Request, Result
from jspec.engine.slot_output import Piece

_LOG = logging.getLogger("jspec")


def nobody(_: Result) -> None:
    """Ignore a result."""


@dataclasses.dataclass(eq=False)
class Tenant:
    """A request in the engine. It is "seated" while it has a slot.

    Attributes:
        row: the request as arrays for the device.
        listen: the function that the engine calls whenever the result has grown.
        given: the tokens that it brought to its slot; more than its prompt if it continues after a failure.
        seat: its number in the order of slot assignment.
        seated_at: when it got its first slot, by `time.monotonic`; None before that.
        read: how many tokens of `given` have been prefilled.
        pieces: the number of pieces in which these were prefilled since it was seated. Decoding begins with the last
            piece, so there is at least one, which may be empty.
        is_begun: whether a round has been dispatched for it since it was seated.
        lag: the most tokens by which its drafter may lag.
        followed: how many tokens its drafter has been given to read.
        lengths: how many tokens each of its rounds was meant to draft; 0 if its drafter lagged.
        constraint: the number that the device has assigned to its constraint, or 0.
        scored: its prefilled pieces with their scores, until these are in the result.
        alike: earlier seated requests: each request, its slot, and the length of the prefix that both texts share.
        calls: how many calls have delivered output to it since it was seated.
        failures: how many calls have failed while it had a slot, since it last went well.
    """

    request: Request
    row: RequestParams
    listen: Callable[[Result], None]
    result: Result = dataclasses.field(default_factory=Result)
    given: tuple[int, ...] = ()
    seat: int = 0
    seated_at: float | None = None
    read: int = 0
    pieces: int = 0
    is_begun: bool = False
    lag: int = 0
    followed: int = 0
    lengths: list[int] = dataclasses.field(default_factory=list)
    constraint: int = 0
    scored: list[Piece] = dataclasses.field(default_factory=list)
    alike: list[tuple["Tenant", int, int]] = dataclasses.field(default_factory=list)
    calls: int = 0
    failures: int = 0
    cancelled: bool = False

    @property
    def goes_well(self) -> bool:
        """Whether it seems to cause no failures. The first calls prove less: they are shorter and draft less."""
        return self.calls >= 3

    @property
    def is_suspect(self) -> bool:
        """Whether it may be the cause of failed calls."""
        return self.failures > 1

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt and all new tokens so far."""
        return (*self.request.tokens, *self.result.tokens)

    def tell(self) -> None:
        """Call `listen`. A callback that raises cancels only its own request."""
        try:
            self.listen(self.result)
        except BaseException:
            _LOG.exception("Whoever listens to a request has failed; the request is cancelled.")
            self.cancelled = True

    def has_read(self, piece: Piece) -> None:
        """Record that the device has been given a piece to prefill."""
        self.read, self.pieces = piece.end, self.pieces + 1
        if piece.scores is not None:
            self.scored.append(piece)
        if self.is_written:
            self.alike = []  # otherwise it would keep them alive, and they in turn earlier ones

    @property
    def is_written(self) -> bool:
        """Whether prefill is complete, so that rounds include it."""
        return self.pieces > 0 and self.read == len(self.given) - 1


class Scheduler:
    """A first-come, first-served scheduler for a fixed number of slots.

    Attributes:
        waiting: requests without a slot, in order.
        tenants: the request in each slot, or None.
        residents: for each slot, the tokens in its KV cache and their request's salt.
    """

    def __init__(self, slots: int):
        self.waiting: deque[Tenant] = deque()
        self.tenants: list[Tenant | None] = [None] * slots
        self.residents: list[tuple[Sequence[int], str]] = [((), "")] * slots
        self._clock, self._left = itertools.count(1), [0] * slots

    def submit(self, tenant: Tenant) -> None:
        """Append a request to the queue."""
        self.waiting.append(tenant)

    def admit(self) -> tuple[int, Tenant] | None:
        """Assign a slot to the next request. Set ``tenant.read`` to the number of tokens that the slot already holds.

        Return the slot and the request, or None if no request can be seated. A suspect request, which may cause calls
        to fail, first runs only beside requests that go well, and then alone.
        """
        free = [slot for slot, tenant in enumerate(self.tenants) if tenant is None]
        if not free or not self.waiting:
            return None
        tenant = self.waiting[0]
        if not self._may_join(tenant):
            return None
        tenant.given = tenant.text
        # The slot that holds the most of its text; among ties, the one that has been free for longest.
        slot = max(free, key=lambda slot: (_kept(tenant, *self.residents[slot]), -self._left[slot]))
        tenant.read = _kept(tenant, *self.residents[slot])
        tenant.result.cached = min(tenant.read, len(tenant.request.tokens))
        tenant.alike = [(other, at, _num_alike(tenant.given, other.given)) for at, other in self._seated()
                        if _may_share(tenant, other.request.salt)]  # fmt: skip
        tenant.scored, tenant.is_begun, tenant.calls = [], False, 0
        tenant.pieces, tenant.lag, tenant.seat = 0, len(tenant.given), next(self._clock)
        if tenant.seated_at is None:
            tenant.seated_at = time.monotonic()
        self.tenants[slot] = self.waiting.popleft()
        self.residents[slot] = (), ""
        return slot, tenant

    def _may_join(self, tenant: Tenant) -> bool:
        """Return whether a failed call could still be attributed to one request if this one were seated."""
        others = [other for _, other in self._seated()]
        if any(other.is_suspect for other in others):
            return False
        if not tenant.is_suspect or not others:
            return True
        return tenant.failures == 2 and all(other.goes_well for other in others)

    def lender(self, tenant: Tenant) -> tuple[int, int]:
        """Return how many tokens of a request's text the best other slot holds, and which slot that is."""
        given = len(tenant.given)
        left = [(_kept(tenant, *held), slot) for slot, held in enumerate(self.residents) if self.tenants[slot] is None]
        there = [(_most(alike, other.read + 1, given), slot) for other, slot, alike in self._alike(tenant)]
        return max([*left, *there], default=(0, 0))

    def will_be_read(self, tenant: Tenant) -> int:
        """Return how many tokens of a text other requests will prefill. Ignore requests that need prompt scores."""
        given = len(tenant.given)
        return max((_most(alike, len(other.given), given) for other, _, alike in self._alike(tenant)
                    if not other.request.prompt_logprobs), default=0)  # fmt: skip

    def _alike(self, tenant: Tenant) -> list[tuple[Tenant, int, int]]:
        """Return the entries of ``tenant.alike`` whose requests still have their slots."""
        return [one for one in tenant.alike if self.tenants[one[1]] is one[0]]

    def reading(self) -> list[tuple[int, Tenant]]:
        """Return the slots in prefill with their requests, in the order in which these were seated."""
        found = [(slot, tenant) for slot, tenant in self._seated() if not tenant.is_written]
        return sorted(found, key=lambda one: one[1].seat)

    def writing(self) -> list[tuple[int, Tenant]]:
        """Return the decoding slots with their requests."""
        return [(slot, tenant) for slot, tenant in self._seated() if tenant.is_written]

    def _seated(self) -> list[tuple[int, Tenant]]:
        return [(slot, tenant) for slot, tenant in enumerate(self.tenants) if tenant is not None]

    def leave(self, slot: int) -> Tenant:
        """Free a slot. Another request may reuse the tokens in its KV cache."""
        tenant = self.tenants[slot]
        assert tenant is not None, "nobody leaves an empty slot"
        held = tenant.text if tenant.is_written else tenant.given[: tenant.read + 1]
        self.tenants[slot], self.residents[slot], tenant.alike = None, (held, tenant.request.salt), []
        self._left[slot] = next(self._clock)
        return tenant


def _kept(tenant: Tenant, held: Sequence[int], salt: str) -> int:
    """Return how many tokens of a text can be reused from a slot that holds `held`."""
    if not _may_share(tenant, salt):
        return 0
    text = tenant.given or tenant.text
    return _most(_num_alike(held, text), len(held), len(text))


def _may_share(tenant: Tenant, salt: str) -> bool:
    return salt == tenant.request.salt and not tenant.request.prompt_logprobs


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _most(alike: int, held: int, given: int) -> int:
    """Return how many of the `given` tokens of a text can be reused, if `alike` of the `held` tokens are equal.

    The last two tokens of a text are never reused, because a drafter must read one of them. The last common token is
    not reused either, because a drafter may have read it together with the token after it.
    """
    return max(0, min(alike - 1, held - 1, given - 2))
