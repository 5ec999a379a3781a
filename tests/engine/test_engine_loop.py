"""The engine's host side, with a fake device of a few lines of Python: no request receives another's tokens."""

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
from jspec.engine.slots import Variant
from support.fake_runner import KEY, FakeRunner, make_active


class Requests(RuleBasedStateMachine):
    """Requests of any length arrive and are cancelled at any time, and occasionally the device fails."""

    def __init__(self):
        super().__init__()
        self.runner = FakeRunner()
        self.loop, self.asked, self.told = Loop(self.runner, 8, 1.0), [], []

    @rule(
        length=st.integers(1, 30),
        limit=st.integers(1, 12),
        keyed=st.booleans(),
        kind=st.sampled_from(["new", "again", "alike"]),
    )
    def submit(self, length, limit, keyed, kind):
        number = len(self.asked) + 1
        tokens = (number, *[7] * (length - 1))
        if kind == "again" and self.asked and len(self.asked[-1].text) < 50:  # it continues where another ended
            tokens = self.asked[-1].text
        if kind == "alike" and self.asked:  # it shares a prefix with another, which may be in prefill
            tokens = (*self.asked[-1].request.tokens[: length + 10], *[8] * (length // 2))[:50]
        told = lambda _: self.told.__setitem__(number - 1, self.told[number - 1] + 1)  # noqa: E731
        active = make_active(Request(tokens, limit, key=KEY if keyed else None), told)
        self.asked.append(active)
        self.told.append(0)
        self.loop.submit(active)

    @rule(which=st.integers(0, 40))
    def cancel(self, which):
        if self.asked:
            self.asked[which % len(self.asked)].cancelled = True

    @rule()
    def fail(self):
        self.runner.fails = True

    @rule(waits=st.booleans())
    def wait(self, waits):
        self.runner.waits = waits

    @rule(count=st.integers(1, 5))
    def turn(self, count):
        for _ in range(count):
            self.loop.turn()

    @invariant()
    def everybody_has_their_own(self):
        for active in self.asked:
            first = active.request.tokens[0]
            assert active.result.tokens == [1000 * first + i for i in range(len(active.result.tokens))]
            assert len(active.result.tokens) <= active.request.max_new_tokens
            assert 0 <= active.result.cached <= len(active.request.tokens)
            if active.result.finish_reason == "length":
                assert len(active.result.tokens) == active.request.max_new_tokens

    def teardown(self):
        self.runner.fails = False
        for _ in range(20 + 40 * len(self.asked)):
            self.loop.turn()
        assert not self.loop.is_busy
        assert self.loop._scheduler.active_requests == [None] * 3 and not any(self.runner.moves)
        for active, told in zip(self.asked, self.told, strict=True):
            assert told and active.result.finish_reason in ("length", "cancelled", "error")
            assert active.result.finish_reason != "error" or "planted" in active.result.error


TestRequests = Requests.TestCase
TestRequests.settings = hypothesis.settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_random_request_sequences_keep_invariants():
    settings = hypothesis.settings(max_examples=400, stateful_step_count=50, deadline=None)
    hypothesis.stateful.run_state_machine_as_test(Requests, settings=settings)


def test_slot_with_longest_cached_prefix_is_chosen():
    scheduler = Scheduler(3)
    scheduler.cached_texts = [((1, 2, 3, 4), ""), ((1, 2, 9), ""), ((1, 2, 3, 4, 5, 6), "salt")]
    for tokens, salt, slot, kept in (
        ((1, 2, 3, 4, 5, 6, 7), "", 0, 3),
        ((1, 2, 9, 9, 9), "", 1, 2),
        ((1, 2), "salt", 2, 0),
    ):
        scheduler.submit(make_active(Request(tokens, 1, salt=salt), print))
        found, active = scheduler.admit()
        assert (found, active.num_prefilled) == (slot, kept)
    scheduler.submit(make_active(Request((1,), 1), print))
    assert scheduler.admit() is None


def turns(loop, *asked):
    """Return the number of turns before each request's first token, and check that all requests end."""
    first = {}
    for turn in range(200):
        loop.turn()
        first = {i: turn for i, one in enumerate(asked) if one.result.tokens} | first
    assert not loop.is_busy
    return [first.get(i) for i in range(len(asked))]


def counted(runner, monkeypatch, name="prefill"):
    """Return a list that collects the results of the runner's method `name`: for `prefill`, the pieces read."""
    found = []
    known = getattr(runner, name)
    monkeypatch.setattr(runner, name, lambda *one: (found.append(new := known(*one)), new)[1])
    return found


TEXT = (1, *[7] * 40)


@pytest.mark.parametrize("salts, most", [(("", "", ""), 40 + 2 * 8), (("", "its own", ""), 2 * 40 + 8)])
def test_prefix_in_prefill_is_awaited_and_copied(salts, most, monkeypatch):
    runner = FakeRunner()
    pieces, assigned = counted(runner, monkeypatch), counted(runner, monkeypatch, "assign_slot")
    loop = Loop(runner, 8, 1.0)
    asked = [make_active(Request(TEXT[: 41 - i], 3, salt=salt), print) for i, salt in enumerate(salts)]
    for active in asked:
        loop.submit(active)
    turns(loop)
    assert [active.result.tokens for active in asked] == [[1000, 1001, 1002]] * 3
    assert len(assigned) == 3 + len(salts) - len({*salts})  # copied at once, not piece by piece
    read = sum(piece.count for piece in pieces)
    assert read == sum(len(one.request.tokens) - 1 - one.result.cached for one in asked) and read <= most


def test_cached_prefix_is_used_during_scored_prefill():
    loop = Loop(FakeRunner(), 16, 1.0)
    before, scored, asked = (make_active(Request(TEXT, 12, prompt_logprobs=one), print) for one in (False, True, False))
    loop.submit(before)
    while not before.is_prefilled:
        loop.turn()
    loop.submit(scored)
    loop.turn()
    loop.submit(asked)
    for _ in range(4):
        loop.turn()
        if asked.is_prefilled:
            break
    assert not scored.is_prefilled and asked.is_prefilled and asked.result.cached == len(TEXT) - 2


def test_prefix_of_cancelled_request_is_reused():
    loop = Loop(FakeRunner(), 8, 1.0)
    first, asked = (make_active(Request(TEXT, 3), print) for _ in range(2))
    loop.submit(first)
    loop.submit(asked)
    while first.num_prefilled < 24:
        loop.turn()
    assert asked.num_prefilled < 24
    first.cancelled = True
    loop.turn()
    assert asked.num_prefilled >= 24 and asked.result.cached == first.num_prefilled
    turns(loop)
    assert asked.result.tokens == [1000, 1001, 1002]


@pytest.mark.parametrize("reads_separately", [False, True])
def test_first_token_is_not_drafted(reads_separately, monkeypatch):
    """The first call of a new request drafts nothing, unless other requests are decoding."""
    runner, lengths = FakeRunner(), []
    runner.reads_separately = reads_separately
    loop, decode_rounds = Loop(runner, 8, 1.0), runner.decode_rounds
    monkeypatch.setattr(runner, "decode_rounds", lambda *one: (lengths.append(one[0]), decode_rounds(*one))[1])
    for count in (1, 2):
        for k in loop._runner.lengths(Variant.TEMPERATURE_ONLY, count):
            for _ in range(2):
                loop.round_budget.record((k, Variant.TEMPERATURE_ONLY, count), 1.0)
    first, second = (make_active(Request((i, 7), 30), lambda _: None) for i in (1, 2))
    loop.submit(first)
    while len(lengths) < 3:
        loop.turn()
    assert lengths == [0, 2, 2]
    loop.submit(second)
    while not second.result.tokens:
        loop.turn()
    assert 0 not in lengths[1:]


@pytest.mark.parametrize("waits", [False, True])
def test_finished_call_is_delivered_before_the_next_dispatch(waits, monkeypatch):
    runner, seen = FakeRunner(), []
    runner.waits = waits
    loop, decode_rounds = Loop(runner, 8, 1.0), runner.decode_rounds
    active = make_active(Request((1, 7), 30), lambda _: None)
    monkeypatch.setattr(
        runner, "decode_rounds", lambda *one: (seen.append(len(active.result.tokens)), decode_rounds(*one))[1]
    )
    loop.submit(active)
    while len(seen) < 3:
        loop.turn()
    assert seen[0] == 0 and (seen[1] > 0) == waits and seen[2] > 0


@pytest.mark.parametrize("waits", [False, True])
def test_round_costs_are_remeasured_under_constant_load(waits, monkeypatch):
    """If requests always wait, some calls still run uncut, as long as the previous one, with no prefill between."""
    runner, done = FakeRunner(), []
    runner.waits = waits
    runner.sizes = dataclasses.replace(runner.sizes, small_batch_sizes=())
    loop = Loop(runner, 8, 1.0)
    for k in (0, 0, 2, 2):
        loop.round_budget.record((k, Variant.TEMPERATURE_ONLY, 3), 0.5)
    decode_rounds = runner.decode_rounds

    def noted(name):
        known = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda *one: (done.append(name), known(*one))[1])

    noted("prefill")
    noted("catch_up_drafter")
    monkeypatch.setattr(
        runner, "decode_rounds", lambda *one: (done.append((one[0], one[4].any())), decode_rounds(*one))[1]
    )
    for i in range(1, 200):
        loop.submit(make_active(Request((i, *[7] * 5), 4, key=KEY), lambda _: None))
    while loop.is_busy:
        loop.turn()
    assert done.count("prefill") > 100
    whole = [i for i, one in enumerate(done[:-20]) if isinstance(one, tuple) and i and not one[1]]
    undisturbed = [i for i in whole if isinstance(done[i - 1], tuple) and done[i - 1][0] == done[i][0]]
    calls = sum(isinstance(one, tuple) for one in done)
    least = 0 if waits else calls / 60  # a finished call may leave no request that could be repeated
    assert least < len(undisturbed) < calls / 20, (calls, len(undisturbed))


@pytest.fixture
def no_collector():
    """Disable the garbage collector, so that only the last reference frees an object."""
    gc.disable()
    yield
    gc.enable()


def test_finished_requests_are_garbage_collected(no_collector):
    """A finished request is not kept by its listener, by requests that arrived meanwhile, or by their successors."""
    loop = Loop(FakeRunner(), 8, 1.0)
    done = []
    for i in range(1, 30):
        active = make_active(Request((1, *[7] * i), 12), None)
        active.listen = lambda _, active=active: None
        loop.submit(active)
        done.append(weakref.ref(active))
        del active
        for _ in range(2):
            loop.turn()
    in_flight = [id(active) for call in loop._in_flight for active in call.decoding.values()]
    kept = [one() for one in done if one() is not None]
    assert loop.is_busy and len(kept) < len(done)
    assert all(one.result.finish_reason is None or id(one) in in_flight for one in kept)


def test_cancelled_request_stops_decoding():
    runner = FakeRunner()
    loop, active = Loop(runner, 8, 1.0), make_active(Request((1, 7, 7), 50), print)
    loop.submit(active)
    while not active.result.tokens:
        loop.turn()
    assert any(runner.moves)
    active.cancelled = True
    loop.turn()
    assert active.result.finish_reason == "cancelled" and not any(runner.moves)


def test_requests_are_served_in_order():
    scheduler, active_requests = Scheduler(2), [make_active(Request((i, i), 1), print) for i in range(5)]
    for active in active_requests:
        scheduler.submit(active)
    order = []
    while (assignment := scheduler.admit()) or any(scheduler.active_requests):
        if assignment:
            order.append(assignment[1])
        else:
            scheduler.release_slot(next(slot for slot, one in enumerate(scheduler.active_requests) if one))
    assert order == active_requests
    assert [active.slot_order for active in active_requests] == sorted(active.slot_order for active in active_requests)
    assert dataclasses.asdict(active_requests[0].result)["finish_reason"] is None
