"""The host's side of an engine, with a device that is a few lines of Python: nobody gets what is another's."""

import dataclasses
import gc
import weakref

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jspec.engine.loop import Loop
from jspec.engine.request import Request
from jspec.engine.scheduler import Scheduler
from jspec.engine.slots import Needs
from support.fake_device import KEY, FakeDevice, tenant_of


class Requests(RuleBasedStateMachine):
    """Requests of any length come at any time, are cancelled, and now and then the device fails."""

    def __init__(self):
        super().__init__()
        self.device = FakeDevice()
        self.loop, self.asked, self.told = Loop(self.device, 8, 1.0), [], []

    @rule(
        length=st.integers(1, 30),
        limit=st.integers(1, 12),
        keyed=st.booleans(),
        kind=st.sampled_from(["new", "again", "alike"]),
    )
    def submit(self, length, limit, keyed, kind):
        number = len(self.asked) + 1
        tokens = (number, *[7] * (length - 1))
        if kind == "again" and self.asked and len(self.asked[-1].text) < 50:  # it goes on where another has ended
            tokens = self.asked[-1].text
        if kind == "alike" and self.asked:  # it begins as another does, which may be read just now
            tokens = (*self.asked[-1].request.tokens[: length + 10], *[8] * (length // 2))[:50]
        told = lambda _: self.told.__setitem__(number - 1, self.told[number - 1] + 1)  # noqa: E731
        tenant = tenant_of(Request(tokens, limit, key=KEY if keyed else None), told)
        self.asked.append(tenant)
        self.told.append(0)
        self.loop.submit(tenant)

    @rule(which=st.integers(0, 40))
    def cancel(self, which):
        if self.asked:
            self.asked[which % len(self.asked)].cancelled = True

    @rule()
    def fail(self):
        self.device.fails = True

    @rule(count=st.integers(1, 5))
    def turn(self, count):
        for _ in range(count):
            self.loop.turn()

    @invariant()
    def everybody_has_their_own(self):
        for tenant in self.asked:
            first = tenant.request.tokens[0]
            assert tenant.result.tokens == [1000 * first + i for i in range(len(tenant.result.tokens))]
            assert len(tenant.result.tokens) <= tenant.request.max_new_tokens
            assert 0 <= tenant.result.cached <= len(tenant.request.tokens)
            if tenant.result.finish_reason == "length":
                assert len(tenant.result.tokens) == tenant.request.max_new_tokens

    def teardown(self):
        self.device.fails = False
        for _ in range(20 + 40 * len(self.asked)):
            self.loop.turn()
        assert not self.loop.is_busy
        assert self.loop._scheduler.tenants == [None] * 3 and not any(self.device.moves)
        for tenant, told in zip(self.asked, self.told, strict=True):
            assert told and tenant.result.finish_reason in ("length", "cancelled", "error")
            assert tenant.result.finish_reason != "error" or "planted" in tenant.result.error


TestRequests = Requests.TestCase
TestRequests.settings = hypothesis.settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_twenty_thousand_steps():
    settings = hypothesis.settings(max_examples=400, stateful_step_count=50, deadline=None)
    hypothesis.stateful.run_state_machine_as_test(Requests, settings=settings)


def test_the_slot_that_holds_most_of_a_text_is_taken():
    scheduler = Scheduler(3)
    scheduler.residents = [((1, 2, 3, 4), ""), ((1, 2, 9), ""), ((1, 2, 3, 4, 5, 6), "salt")]
    for tokens, salt, slot, kept in (
        ((1, 2, 3, 4, 5, 6, 7), "", 0, 3), ((1, 2, 9, 9, 9), "", 1, 2), ((1, 2), "salt", 2, 0),
    ):  # fmt: skip
        scheduler.submit(tenant_of(Request(tokens, 1, salt=salt), print))
        found, tenant = scheduler.admit()
        assert (found, tenant.read) == (slot, kept)
    scheduler.submit(tenant_of(Request((1,), 1), print))
    assert scheduler.admit() is None


def turns(loop, *asked):
    """After how many turns each has its first token; all have ended in the end."""
    first = {}
    for turn in range(200):
        loop.turn()
        first = {i: turn for i, one in enumerate(asked) if one.result.tokens} | first
    assert not loop.is_busy
    return [first.get(i) for i in range(len(asked))]


def counted(device, monkeypatch, name="read"):
    """What the device's function of that name returns from now on: pieces that are read."""
    found = []
    known = getattr(device, name)
    monkeypatch.setattr(device, name, lambda *one: (found.append(new := known(*one)), new)[1])
    return found


TEXT = (1, *[7] * 40)


@pytest.mark.parametrize("salts, most", [(("", "", ""), 40 + 2 * 8), (("", "its own", ""), 2 * 40 + 8)])
def test_what_somebody_is_reading_is_waited_for_and_copied(salts, most, monkeypatch):
    device = FakeDevice()
    pieces, seats, loop = counted(device, monkeypatch), counted(device, monkeypatch, "seat"), Loop(device, 8, 1.0)
    asked = [tenant_of(Request(TEXT[: 41 - i], 3, salt=salt), print) for i, salt in enumerate(salts)]
    for tenant in asked:
        loop.submit(tenant)
    turns(loop)
    assert [tenant.result.tokens for tenant in asked] == [[1000, 1001, 1002]] * 3
    assert len(seats) == 3 + len(salts) - len({*salts})  # copied once, not piece by piece
    read = sum(piece.count for piece in pieces)
    assert read == sum(len(one.request.tokens) - 1 - one.result.cached for one in asked) and read <= most


def test_who_reads_all_for_scores_is_not_waited_for_where_another_has_read_it():
    loop = Loop(FakeDevice(), 16, 1.0)
    before, scored, asked = (tenant_of(Request(TEXT, 12, prompt_logprobs=one), print) for one in (False, True, False))
    loop.submit(before)
    while not before.is_written:
        loop.turn()
    loop.submit(scored)
    loop.turn()
    loop.submit(asked)
    for _ in range(4):
        loop.turn()
        if asked.is_written:
            break
    assert not scored.is_written and asked.is_written and asked.result.cached == len(TEXT) - 2


def test_what_one_has_read_who_leaves_is_there_for_those_who_wait():
    loop = Loop(FakeDevice(), 8, 1.0)
    first, asked = (tenant_of(Request(TEXT, 3), print) for _ in range(2))
    loop.submit(first)
    loop.submit(asked)
    while first.read < 24:
        loop.turn()
    assert asked.read < 24
    first.cancelled = True
    loop.turn()
    assert asked.read >= 24 and asked.result.cached == first.read
    turns(loop)
    assert asked.result.tokens == [1000, 1001, 1002]


def test_what_a_round_costs_is_measured_now_and_then_though_somebody_always_waits(monkeypatch):
    """A call that is not cut short, of the length of the one before, with nothing read between the two."""
    device, done = FakeDevice(), []
    device.sizes = dataclasses.replace(device.sizes, fewer=())
    loop = Loop(device, 8, 1.0)
    loop.pace.learn((0, Needs.LEAN, 3), 0.5)
    loop.pace.learn((2, Needs.LEAN, 3), 0.5)
    play = device.play

    def noted(name):
        known = getattr(device, name)
        monkeypatch.setattr(device, name, lambda *one: (done.append(name), known(*one))[1])

    noted("read")
    noted("follow")
    monkeypatch.setattr(device, "play", lambda *one: (done.append((one[0], one[4].any())), play(*one))[1])
    for i in range(1, 200):
        loop.submit(tenant_of(Request((i, *[7] * 5), 4, key=KEY), lambda _: None))
    while loop.is_busy:
        loop.turn()
    assert done.count("read") > 100
    whole = [i for i, one in enumerate(done[:-20]) if isinstance(one, tuple) and i and not one[1]]
    undisturbed = [i for i in whole if isinstance(done[i - 1], tuple) and done[i - 1][0] == done[i][0]]
    calls = sum(isinstance(one, tuple) for one in done)
    assert calls / 60 < len(undisturbed) < calls / 20, (calls, len(undisturbed))


@pytest.fixture
def no_collector():
    """Whatever is freed is freed by its last reference."""
    gc.disable()
    yield
    gc.enable()


def test_nobody_is_kept_who_is_done(no_collector):
    """Not even by those who came while it was seated, and they by others; nor by who listens to them."""
    loop = Loop(FakeDevice(), 8, 1.0)
    done = []
    for i in range(1, 30):
        tenant = tenant_of(Request((1, *[7] * i), 12), None)
        tenant.listen = lambda _, tenant=tenant: None
        loop.submit(tenant)
        done.append(weakref.ref(tenant))
        del tenant
        for _ in range(2):
            loop.turn()
    kept = [one() for one in done if one() is not None]
    assert loop.is_busy and sum(one.result.finish_reason is not None for one in kept) <= 1


def test_who_is_cancelled_no_longer_moves():
    device = FakeDevice()
    loop, tenant = Loop(device, 8, 1.0), tenant_of(Request((1, 7, 7), 50), print)
    loop.submit(tenant)
    while not tenant.result.tokens:
        loop.turn()
    assert any(device.moves)
    tenant.cancelled = True
    loop.turn()
    assert tenant.result.finish_reason == "cancelled" and not any(device.moves)


def test_first_come_first_served():
    scheduler, tenants = Scheduler(2), [tenant_of(Request((i, i), 1), print) for i in range(5)]
    for tenant in tenants:
        scheduler.submit(tenant)
    order = []
    while (seat := scheduler.admit()) or any(scheduler.tenants):
        if seat:
            order.append(seat[1])
        else:
            scheduler.leave(next(slot for slot, one in enumerate(scheduler.tenants) if one))
    assert order == tenants
    assert [tenant.seat for tenant in tenants] == sorted(tenant.seat for tenant in tenants)
    assert dataclasses.asdict(tenants[0].result)["finish_reason"] is None
