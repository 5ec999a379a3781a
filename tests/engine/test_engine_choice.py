"""The engine's choice of draft length, compared with the best fixed length under made-up costs and acceptance rates."""

import itertools
import types
import unittest.mock

import numpy as np
import pytest

from jspec.engine import warmup
from jspec.engine.length_policy import RECENT, LengthPolicy
from jspec.engine.round_budget import RoundBudget
from jspec.engine.slots import Sizes, Variant

LENGTHS = (0, 1, 2, 4, 8)


class Requests:
    """Rows whose drafts are accepted at random, each at its own rate; a call is one round.

    In a share `easy` of each row's rounds everything is accepted; in the others tokens are accepted at the row's rate.
    """

    disturbed, by = 0.03, 4  # this share of calls takes this many times as long, at any draft length
    busy, more = 400, 1.6  # after every `busy` calls the machine becomes busy (`more` times slower) or idle

    def __init__(self, rates, costs, noise=0.05, seed=0, easy=0.0, biased=1.0):
        self.rates, self.true, self.noise, self.easy = rates, costs, noise, easy
        self.rng, self.rounds = np.random.default_rng(seed), [[] for _ in rates]
        self.round_budget, self.now, self.calls = RoundBudget(max_rounds=1, seconds=1.0), 0.0, 0
        with unittest.mock.patch("jspec.engine.round_budget.perf_counter", lambda: 0.0):
            self.round_budget.record_call(None, 0, 0.0, True)
        for k in LENGTHS * 3:  # like `warm_up`
            self.round_budget.record(k, costs[k] * np.exp(noise * self.rng.normal()) * (1 if k else biased))

    def play(self, policy, calls):
        """Return the tokens decoded in `calls` calls, and the seconds they would have taken on an idle machine."""
        tokens, seconds = 0, 0.0
        for _ in range(calls):
            self.calls += 1
            lately = [tuple(zip(*row[-RECENT:], strict=True)) or ((), ()) for row in self.rounds]
            costs = {k: cost for k, cost in self.round_budget.costs.items() if self.round_budget.is_measured(k)}
            k = policy.next(LENGTHS, costs, lately)
            each = self.true[k] * np.exp(self.noise * self.rng.normal())
            each *= self.by if self.rng.random() < self.disturbed else 1
            self.now, seconds = self.now + each * (self.more if self.calls // self.busy % 2 else 1), seconds + each
            with unittest.mock.patch("jspec.engine.round_budget.perf_counter", lambda: self.now):
                self.round_budget.record_call(k, 1, 0.0, True)
            found = [self.one(rate, k) for rate in self.rates]
            for row, accepted in zip(self.rounds, found, strict=True):
                row.append((accepted, k))
            policy.record(found, k)
            tokens += sum(found) + len(found)
        return tokens, seconds

    def one(self, rate, k):
        if self.rng.random() < self.easy:
            return k
        return next((i for i in range(k) if self.rng.random() > rate), k)

    def best(self):
        """Return the tokens per second of each length when it is always used."""
        slower = 1 + self.disturbed * (self.by - 1)
        tokens = {
            k: sum(self.easy * (k + 1) + (1 - self.easy) * (1 - rate ** (k + 1)) / (1 - rate) for rate in self.rates)
            for k in LENGTHS
        }
        return {k: tokens[k] / cost / slower for k, cost in self.true.items()}


def linear(draft, verify):
    """Return round costs in units of a target pass: each draft token costs `draft` to draft and `verify` to verify."""
    return {k: 1 + (draft + verify) * k for k in LENGTHS}


@pytest.mark.parametrize("costs", [linear(0.17, 0.02), linear(0.05, 0.0), linear(0.3, 0.5)], ids=["own", "low", "high"])
@pytest.mark.parametrize("easy", [0.0, 0.3])
@pytest.mark.parametrize("rows", [1, 8])
def test_chosen_length_is_nearly_as_good_as_best(report, rows, easy, costs):
    shares, of_plain = [], []
    for rate in (0.05, 0.3, 0.6, 0.75, 0.95):
        requests = Requests([rate] * rows, costs, seed=rows, easy=easy)
        best = requests.best()
        tokens, seconds = requests.play(LengthPolicy(LENGTHS[-1]), 6_000)
        shares.append(tokens / seconds / max(best.values()))
        of_plain.append(tokens / seconds / best[0])
    report(rates=5, calls=6_000, least_of_best=f"{min(shares):.3f}", least_of_plain=f"{min(of_plain):.3f}")
    assert min(shares) > 0.96 and min(of_plain) > 0.97


def test_policy_follows_changing_acceptance():
    """When acceptance changes with the text, drafting stops and starts again."""
    requests, policy, shares = Requests([0.9] * 4, linear(0.2, 0.1)), LengthPolicy(LENGTHS[-1]), []
    for rate in (0.9, 0.05, 0.9, 0.4):
        requests.rates = [rate] * 4
        requests.play(policy, 1_500)
        tokens, seconds = requests.play(policy, 1_500)
        shares.append(tokens / seconds / max(requests.best().values()))
    assert min(shares) > 0.95, shares


def test_each_length_is_tried_once_and_then_rarely():
    policy, costs, tried = LengthPolicy(LENGTHS[-1]), {}, []
    for _ in range(2_000):
        tried.append(policy.next(LENGTHS, costs, [([2, 2, 4, 0], [4] * 4)]))
        costs[tried[-1]] = 1 + 0.5 * tried[-1]
    assert tried[: len(LENGTHS)] == list(LENGTHS)
    runs = [(k, len(list(group))) for k, group in itertools.groupby(tried[len(LENGTHS) :])]
    best = max(runs, key=lambda run: run[1])[0]
    assert sum(size for k, size in runs if k != best) < 0.04 * 2_000
    assert {k for k, _ in runs} == {best, LENGTHS[LENGTHS.index(best) - 1], LENGTHS[LENGTHS.index(best) + 1]}


def test_disturbed_first_cost_is_measured_again(monkeypatch):
    """A call measured after prompts were read, as when an engine starts under load, is measured again."""
    clock = iter(np.cumsum([0.0, 12.0, 1.0, 1.0]).tolist())
    monkeypatch.setattr("jspec.engine.round_budget.perf_counter", lambda: next(clock))
    round_budget = RoundBudget(max_rounds=16, seconds=4.0)
    round_budget.record_call("kind", 0, 0.0, True)
    round_budget.record_call("kind", 1, 0.0, False)
    assert not round_budget.is_measured("kind") and round_budget.costs["kind"] == 12
    round_budget.record_call("kind", 1, 0.0, True)
    assert round_budget.is_measured("kind") and round_budget.costs["kind"] == 1


def test_rare_but_good_drafts_are_valued_by_average_gain():
    """A drafter that drafts in a quarter of all rounds gains a quarter of what its drafts gain."""
    rounds = [2, 0, 0, 0] * 8
    for cost, expected in ((1.4, 2), (1.6, 0)):  # the cost of drafting two tokens, which gain half a token per round
        policy = LengthPolicy(2)
        for _ in range(200):
            policy.record(rounds, 2)
        assert policy.next((0, 2), {0: 1.0, 2: cost}, [(rounds, [2] * 32)]) == expected


def test_policy_recovers_from_wrong_warm_up():
    """Recover from a warm-up that reported twice the true cost of plain rounds when plain rounds beat drafting."""
    requests, policy = Requests([0.3] * 4, linear(0.17, 0.3), biased=2.0), LengthPolicy(LENGTHS[-1])
    requests.play(policy, 1_500)
    tokens, seconds = requests.play(policy, 1_500)
    assert tokens / seconds > 0.95 * requests.best()[0]


def test_first_call_counts_only_until_second_measurement():
    round_budget = RoundBudget(8, 1.0)
    round_budget.record("kind", 9.0, alone=False)
    assert round_budget.costs == {"kind": 9.0} and not round_budget.is_measured("kind")
    for seconds, alone in ((1.0, True), (9.0, False)):
        round_budget.record("kind", seconds, alone)
        assert round_budget.costs == {"kind": 1.0} and round_budget.is_measured("kind")
    round_budget.record("another", 9.0)  # a program's first call is slow even if it runs alone
    assert not round_budget.is_measured("another")
    round_budget.record("another", 1.0)
    assert round_budget.is_measured("another", 2) and not round_budget.is_measured("another", 3)


def test_warm_up_measures_cost_of_each_kind(monkeypatch):
    """The warm-up measures each kind's cost, here on a clock that advances by a different amount for each kind.

    No request reaches its end.
    """
    sizes = Sizes(8, 256, 1, (8,), LENGTHS, 16, small_batch_sizes=(1, 4))
    clock, round_budget, tokens = [0.0], RoundBudget(16, 1.0), []
    kinds = sizes.kinds(Variant.TEMPERATURE_ONLY, Variant.FULL)
    costs = {kind: 0.125 * 2**i for i, kind in enumerate(kinds)}

    def decode_rounds(k, rounds, stop, variant, rows):
        tokens.append(rounds * (k + 1))
        return (k, variant, sizes.slots if rows is None else len(rows)), rounds

    def unpack(call, rows, num_top):
        clock[0] += costs[call[0]] * call[1]
        return {0: types.SimpleNamespace(accepted=[0] * call[1])}

    monkeypatch.setattr(warmup, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(warmup, "unpack", unpack)
    runner = types.SimpleNamespace(sizes=sizes, decode_rounds=decode_rounds, wait=lambda: None)
    for _ in range(2):
        tokens.clear()
        found = dict(warmup._round_costs(runner, round_budget, kinds))
        assert found == costs and sum(tokens) <= sizes.length - 2
        for kind in kinds:
            round_budget.record(kind, 0.01)  # so cheap that a call may have the maximum number of rounds


def test_prefill_between_calls_is_not_counted_as_cost(monkeypatch):
    clock = iter([3.0, 4.0, 14.0, 25.0, 26.0])
    monkeypatch.setattr("jspec.engine.round_budget.perf_counter", lambda: next(clock))
    round_budget = RoundBudget(max_rounds=16, seconds=4.0)
    for dispatched_at, alone in ((2.0, True), (2.5, True), (3.0, False), (24.0, True), (24.5, True)):
        round_budget.record_call("kind", 1, dispatched_at, alone)
    assert (
        round_budget.costs == {"kind": 1.0} and round_budget.rounds("kind") == 4 and round_budget.rounds("another") == 1
    )


def test_caller_time_between_calls_is_excluded(monkeypatch):
    round_budget, now = RoundBudget(1, 1.0), iter([0.0, 1.0, 2.0, 100.0, 101.0, 102.0])
    monkeypatch.setattr("jspec.engine.round_budget.perf_counter", lambda: next(now))
    for rounds in (0, 1, 1):
        round_budget.record_call("kind", rounds, 0.0, True)
    round_budget.exclude_time(97.0)
    round_budget.record_call("kind", 1, 0.0, True)
    assert round_budget.costs == {"kind": 1.0} and len(round_budget._measurements["kind"]) == 1
    round_budget.exclude_time(0.2)  # a brief pause while the device keeps working
    round_budget.record_call("kind", 1, 0.0, True)
    assert len(round_budget._measurements["kind"]) == 2 and round_budget.costs == {"kind": 1.0}


@pytest.mark.parametrize(
    ("num_slots", "variant", "count", "decoded"),
    [
        (0, Variant.TEMPERATURE_ONLY, 1, Variant.TEMPERATURE_ONLY),
        (1, Variant.TEMPERATURE_ONLY, 1, Variant.TEMPERATURE_ONLY),
        (1, Variant.CONSTRAINED, 1, Variant.CONSTRAINED),
        (2, Variant.TEMPERATURE_ONLY, 4, Variant.TEMPERATURE_ONLY),
        (4, Variant.FULL, 4, Variant.FULL),
        (2, Variant.CONSTRAINED, 8, Variant.CONSTRAINED),
        (5, Variant.TEMPERATURE_ONLY, 8, Variant.TEMPERATURE_ONLY),
        (8, Variant.FULL, 8, Variant.FULL),
    ],
)
def test_slots_are_rounded_up_to_smallest_program_size(num_slots, variant, count, decoded):
    """Constrained requests have no programs for half of the slots."""
    assert Sizes(8, 64, 1, (8,), (0, 4), 2, small_batch_sizes=(1, 4)).shape(num_slots, variant) == (count, decoded)
