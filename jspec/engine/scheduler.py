"""Who gets which slot, and what is read next: plain Python over what the host knows; nothing here touches a device."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

from jspec.engine.news import Piece
from jspec.engine.request import Request, Result
from jspec.state import RequestParams


@dataclasses.dataclass(eq=False)
class Tenant:
    """A request on its way.

    Attributes:
        row: it for the device.
        listen: is called whenever there is more of the result.
        given: what it came with to its slot; more than its prompt where it goes on after a failure.
        seat: counts those that got a slot.
        seated_at: when it got its first one, by `time.monotonic`; None before.
        read: how many tokens of `given` have been read.
        pieces: in how many pieces since it was seated; at least in one, be it empty, with which it begins to write.
        is_begun: whether a round has been played for it since it was seated.
        lag: how many tokens its drafter may be behind.
        followed: how many tokens it has been told to read.
        lengths: how many tokens each round of it was to draft; 0 where its drafter was behind.
        constraint: the number that the device has given it, or 0.
        scored: pieces that it was read by, with what was told of them, which nobody has looked at.
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
    cancelled: bool = False

    @property
    def text(self) -> tuple[int, ...]:
        """All of it so far."""
        return (*self.request.tokens, *self.result.tokens)

    def has_read(self, piece: Piece) -> None:
        """The device has been told to read it."""
        self.read, self.pieces = piece.end, self.pieces + 1
        if piece.scores is not None:
            self.scored.append(piece)

    @property
    def is_written(self) -> bool:
        """Whether it is past reading, so that rounds go on with it."""
        return self.pieces > 0 and self.read == len(self.given) - 1


class Scheduler:
    """First come, first served, into slots of a fixed number.

    Attributes:
        waiting: who has no slot yet, in order.
        tenants: by slot.
        residents: by slot, what its cache holds, and the salt of whose it is.
    """

    def __init__(self, slots: int):
        self.waiting: deque[Tenant] = deque()
        self.tenants: list[Tenant | None] = [None] * slots
        self.residents: list[tuple[Sequence[int], str]] = [((), "")] * slots
        self._clock, self._left = itertools.count(1), [0] * slots

    def submit(self, tenant: Tenant) -> None:
        """At the end of the queue."""
        self.waiting.append(tenant)

    def admit(self) -> tuple[int, Tenant] | None:
        """Seat the next request: its slot, and with ``tenant.read`` what it need not read; None where none can be."""
        free = [slot for slot, tenant in enumerate(self.tenants) if tenant is None]
        if not free or not self.waiting:
            return None
        tenant = self.waiting.popleft()
        tenant.given = tenant.text
        # The slot that holds most of it; of those the one that has been left for longest.
        slot = max(free, key=lambda slot: (self._kept(slot, tenant), -self._left[slot]))
        tenant.read = tenant.result.cached = self._kept(slot, tenant)
        tenant.scored, tenant.is_begun = [], False
        tenant.pieces, tenant.lag, tenant.seat = 0, len(tenant.given), next(self._clock)
        if tenant.seated_at is None:
            tenant.seated_at = time.monotonic()
        self.tenants[slot] = tenant
        self.residents[slot] = (), ""
        return slot, tenant

    def _kept(self, slot: int, tenant: Tenant) -> int:
        """How many tokens of a text the slot holds; never the last two, for a drafter that must read one.

        Nor the last that both have: a drafter may have read it together with what came behind it.
        """
        held, salt = self.residents[slot]
        if salt != tenant.request.salt or tenant.request.prompt_logprobs:
            return 0
        pairs = zip(held, tenant.given or tenant.text, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return max(0, min(same - 1, len(held) - 1, len(tenant.given) - 2))

    def reading(self) -> list[tuple[int, Tenant]]:
        """Slots whose texts are still being read, first come first."""
        found = [(slot, tenant) for slot, tenant in self._seated() if not tenant.is_written]
        return sorted(found, key=lambda one: one[1].seat)

    def writing(self) -> list[tuple[int, Tenant]]:
        """Slots with which rounds go on."""
        return [(slot, tenant) for slot, tenant in self._seated() if tenant.is_written]

    def _seated(self) -> list[tuple[int, Tenant]]:
        return [(slot, tenant) for slot, tenant in enumerate(self.tenants) if tenant is not None]

    def leave(self, slot: int) -> Tenant:
        """Free a slot; what it holds may serve another."""
        tenant = self.tenants[slot]
        assert tenant is not None, "nobody leaves an empty slot"
        held = tenant.text if tenant.is_written else tenant.given[: tenant.read + 1]
        self.tenants[slot], self.residents[slot] = None, (held, tenant.request.salt)
        self._left[slot] = next(self._clock)
        return tenant
