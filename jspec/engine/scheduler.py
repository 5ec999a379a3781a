"""Who gets which slot, and what is read next: plain Python over what the host knows; nothing here touches a device."""

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
    """Listens to nothing."""


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
        alike: who was seated before it with a text that begins as its own does: the slot, and with how many tokens.
        calls: how many have been handed on to it since it was seated.
        failures: how many have failed while it had a slot, since it last went well.
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
        """Whether no call fails because of it: the first are shorter than others, and draft less."""
        return self.calls >= 3

    @property
    def is_suspect(self) -> bool:
        """Whether calls may fail because of it."""
        return self.failures > 1

    @property
    def text(self) -> tuple[int, ...]:
        """All of it so far."""
        return (*self.request.tokens, *self.result.tokens)

    def tell(self) -> None:
        """Say that there is more; whoever cannot hear it harms nobody else."""
        try:
            self.listen(self.result)
        except BaseException:
            _LOG.exception("Whoever listens to a request has failed; the request is cancelled.")
            self.cancelled = True

    def has_read(self, piece: Piece) -> None:
        """The device has been told to read it."""
        self.read, self.pieces = piece.end, self.pieces + 1
        if piece.scores is not None:
            self.scored.append(piece)
        if self.is_written:
            self.alike = []  # else it would keep them, and they those before them

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
        """Seat the next request: its slot, and with ``tenant.read`` what it need not read; None where none can be.

        One that calls may fail because of is tried beside those alone that go well, and then with nobody else.
        """
        free = [slot for slot, tenant in enumerate(self.tenants) if tenant is None]
        if not free or not self.waiting:
            return None
        tenant = self.waiting[0]
        if not self._may_join(tenant):
            return None
        tenant.given = tenant.text
        # The slot that holds most of it; of those the one that has been left for longest.
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
        """Whether it would be known then because of whom a call fails."""
        others = [other for _, other in self._seated()]
        if any(other.is_suspect for other in others):
            return False
        if not tenant.is_suspect or not others:
            return True
        return tenant.failures == 2 and all(other.goes_well for other in others)

    def lender(self, tenant: Tenant) -> tuple[int, int]:
        """How many tokens of a text another slot holds, and which; the slot that holds most."""
        given = len(tenant.given)
        left = [(_kept(tenant, *held), slot) for slot, held in enumerate(self.residents) if self.tenants[slot] is None]
        there = [(_most(alike, other.read + 1, given), slot) for other, slot, alike in self._alike(tenant)]
        return max([*left, *there], default=(0, 0))

    def will_be_read(self, tenant: Tenant) -> int:
        """How many tokens of a text will have been read by others who are about it; not by who reads all for scores."""
        given = len(tenant.given)
        return max((_most(alike, len(other.given), given) for other, _, alike in self._alike(tenant)
                    if not other.request.prompt_logprobs), default=0)  # fmt: skip

    def _alike(self, tenant: Tenant) -> list[tuple[Tenant, int, int]]:
        """Those of ``tenant.alike`` who are still there."""
        return [one for one in tenant.alike if self.tenants[one[1]] is one[0]]

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
        self.tenants[slot], self.residents[slot], tenant.alike = None, (held, tenant.request.salt), []
        self._left[slot] = next(self._clock)
        return tenant


def _kept(tenant: Tenant, held: Sequence[int], salt: str) -> int:
    """How many tokens of a text are there where those `held` are."""
    if not _may_share(tenant, salt):
        return 0
    text = tenant.given or tenant.text
    return _most(_num_alike(held, text), len(held), len(text))


def _may_share(tenant: Tenant, salt: str) -> bool:
    return salt == tenant.request.salt and not tenant.request.prompt_logprobs


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many tokens both begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _most(alike: int, held: int, given: int) -> int:
    """How many tokens of a text need not be read, where so many of those held are alike.

    Never its last two, for a drafter that must read one. Nor the last that both have: a drafter may have read it
    together with what came behind it.
    """
    return max(0, min(alike - 1, held - 1, given - 2))
