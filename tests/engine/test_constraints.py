"""Constrained requests: their enumerated distribution, outputs independent of drafting, and failing constraints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core.types import Draft
from jspec.drafters.drafts import force_tokens
from jspec.engine import Engine, Request
from jspec.engine.grammar_matcher import tree_masks
from jspec.engine.runner import Runner
from jspec.engine.slots import Variant
from support import drafters, oracle
from support.constrained import OPTIONS, Guesses, NoMultiples, models, requests, texts
from support.law import NUM_TOKENS, VOCAB, exact_law
from support.matrix import PROMPTS

pytestmark = pytest.mark.usefixtures("quick_compile")
SETTINGS = ({}, {"top_p": 0.8, "repetition_penalty": 1.3})


@pytest.fixture(autouse=True)
def compiled_when_met(monkeypatch):
    """Disable background compilation."""
    monkeypatch.setattr(Runner, "deferred_compiles", lambda _: [])


@functools.cache
def law(row):
    """Return the joint distribution, ``float64[512]``, of three tokens that `NoMultiples` allows after a prompt."""

    def bias(text):
        matcher = NoMultiples()
        matcher.text = list(text)
        return np.where([matcher.may(token) for token in range(VOCAB)], 0, -np.inf)

    return exact_law(models()[0], PROMPTS[row], SETTINGS[row], bias)


def drafter_of(kind):
    return models()[1] if kind == "chain" else jspec.TreeDrafter(models()[1], jspec.Tree.branching((2, 1)))


def check_law(report, kind, count):
    """Check requests with and without a key and with and without forced tokens, next to unconstrained requests."""
    kinds = [(keyed, i, forces) for _ in range(count // 2) for forces in (0, 1) for i in range(2) for keyed in (0, 1)]
    keys = iter(jax.random.split(jax.random.key(1), len(kinds)))
    requests = [
        Request(
            PROMPTS[i],
            NUM_TOKENS,
            jspec.SamplingParams(**SETTINGS[i]),
            next(keys) if keyed else None,
            constraint=Guesses if forces else NoMultiples,
        )
        for keyed, i, forces in kinds
    ]
    counts = np.zeros((2, 2, 2, VOCAB**NUM_TOKENS), np.int64)
    drafts = {"num_draft_tokens": 2} if kind == "chain" else {}
    with Engine(models()[0], drafter_of(kind), slots=32, max_waiting=256, **OPTIONS, **drafts) as engine:
        free = [Request(PROMPTS[2], NUM_TOKENS)] * 20
        results = engine.generate([*free, *requests])[len(free) :]
    for setting, result in zip(kinds, results, strict=True):
        assert result.finish_reason == "length", result.error
        counts[*setting, np.ravel_multi_index(result.tokens, (VOCAB,) * NUM_TOKENS)] += 1
    p_values = [oracle.p_value(counts[one], law(one[1])) for one in np.ndindex(2, 2, 2)]
    sees = oracle.detectable(count // 2, VOCAB**NUM_TOKENS - 1, oracle.ALPHA / 8)
    report(settings=8, texts_each=count // 2, min_p=f"{min(p_values):.2g}", sees_tv=f"{sees:.3f}")
    assert min(p_values) > oracle.ALPHA / 8


@pytest.mark.parametrize("kind", ["chain", pytest.param("tree", marks=pytest.mark.slow)])
def test_constrained_texts_have_constrained_distribution(report, kind):
    check_law(report, kind, 2_000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_constrained_texts_have_constrained_distribution_at_length(report, kind):
    check_law(report, kind, 40_000)


def test_constrained_text_does_not_depend_on_drafting():
    """The output does not depend on the drafter, on neighbouring slots, or on a failed device call."""
    found = []
    for draft, slots in ((None, 1), (drafter_of("chain"), 3), (drafter_of("tree"), 2)):
        with Engine(models()[0], draft, slots=slots, **OPTIONS) as engine:
            found.append(texts(engine.generate(requests())))
    with Engine(models()[0], drafter_of("chain"), slots=3, num_draft_tokens=2, **OPTIONS) as engine:
        decode_rounds, calls = engine.device.decode_rounds, iter(range(1000))
        engine.device.decode_rounds = lambda *how: 1 / 0 if next(calls) == 4 else decode_rounds(*how)
        found.append(texts(engine.generate(requests())))
    assert found[1:] == found[:1] * 3
    for request, tokens in zip(requests(), found[0], strict=True):
        matcher = NoMultiples()
        assert request.constraint is None or all(map(matcher.consume, tokens))


def test_failing_constraint_ends_only_its_request():
    free, failing, other = requests(3)
    failing = Request(failing.tokens, 24, key=failing.key, constraint=lambda: NoMultiples(fails_at=4))
    with Engine(*models(), slots=3, **OPTIONS) as engine:
        alone = texts(engine.generate([free, other]))
        found = engine.generate([free, failing, other])
        assert engine.generate([free])[0].tokens == alone[0] and not engine.device.constraints._active
    assert texts([found[0], found[2]]) == alone
    assert found[1].finish_reason == "error" and found[1].error.endswith("RuntimeError: planted")
    assert all(map(NoMultiples().consume, found[1].tokens[:1])) and len(found[1].tokens) <= 4


def test_constraint_failure_on_draft_tokens_does_not_end_request():
    """A constraint that fails on draft tokens ends the request only if the output itself reaches that point."""

    class Breaks(NoMultiples):
        """A constraint that breaks for good after the same token three times, like a parser that exceeds its limits."""

        broken = False

        def consume(self, token):
            self.broken |= self.may(token) and self.text[-2:] == [token] * 2
            return not self.alarm() and super().consume(token)

        def allowed(self):
            return None if self.alarm() else super().allowed()

        def alarm(self):
            if self.broken:
                raise RuntimeError("planted")

    found, tried = [], jspec.SamplingParams(temperature=3.0)
    keys = jax.random.split(jax.random.key(3), 12)
    for drafts, slots in (((), 1), (models()[1:], 3)):
        with Engine(models()[0], *drafts, slots=slots, **OPTIONS) as engine:
            found.append(engine.generate([Request((1, 2), 24, tried, key, constraint=Breaks) for key in keys]))
    whole = [[one.finish_reason for one in results] for results in found]
    assert whole[0] == whole[1] and {"error", "length"} <= {*whole[0]}
    for plain_one, drafted in zip(*found, strict=True):
        if plain_one.finish_reason == "length":
            assert plain_one.tokens == drafted.tokens
        else:
            assert drafted.is_refused and ("planted" in drafted.error or "cannot be" in drafted.error)


@pytest.mark.parametrize("keyed", [False, True])
def test_constraint_that_cannot_be_created_ends_only_its_request(keyed):
    def fails():
        raise KeyError("planted")

    free, _, other = requests(3)
    bad = Request((1, 2), 9, key=free.key if keyed else None, constraint=fails)
    with Engine(*models(), slots=3, **OPTIONS, journal=True) as engine:
        alone = texts(engine.generate([free, other]))
        found = engine.generate([free, bad, other, bad])
    names = [name for name, _ in engine.device.commands]
    assert names.count("constrain") == names.count("release") == engine.device.constraints.add(NoMultiples) - 1 == 2
    assert texts([found[0], found[2]]) == alone
    assert [found[i].error for i in (1, 3)] == ["The constraint cannot be created: KeyError: 'planted'"] * 2


def test_constraints_ignore_ids_beyond_vocabulary():
    """Drafters with embeddings feed the target ids beyond its vocabulary; constraints are never asked about these."""
    table = np.ones(VOCAB, bool)

    class Table(NoMultiples):
        def may(self, token):
            return bool(table[token]) and super().may(token)

    drafter = drafters.make("vectors", *models())
    with Engine(models()[0], drafter, slots=1, **OPTIONS) as engine:
        for result in engine.generate([Request((1, 2), 12, constraint=Table)] * 3):
            assert result.finish_reason == "length", result.error


def test_empty_set_of_allowed_tokens_is_reported():
    bias = np.where(np.arange(VOCAB) == 0, 0, -np.inf).astype(np.float32)  # the constraint forbids a 0 after a 0
    with Engine(*models(), slots=3, **OPTIONS) as engine:
        result = engine.generate([Request((1,), 5, jspec.SamplingParams(logit_bias=bias), constraint=NoMultiples)])[0]
    assert result.tokens == [0] and "No token may follow" in result.error


def test_draft_ends_after_first_forced_tokens():
    masks, forced = tree_masks(Guesses(), [0, 5, 5, 5, 5], range(5), VOCAB, lambda _: 1 / 0)
    assert forced == [-1, 1, 0, -1, -1]
    assert [mask is None for mask in masks] == [False] * 4 + [True] * 2
    assert tree_masks(Guesses(), [0, 5, 5], [0, 1, 1], VOCAB, lambda _: 1 / 0)[1] == [-1] * 3, "a tree forces nothing"
    draft = Draft(jnp.array([[0, 5, 5, 5, 5]]), jnp.full((1, 5, VOCAB), 1 / VOCAB))
    draft = force_tokens(draft, jnp.array([forced]))
    assert draft.tokens.tolist() == [[0, 1, 0, 0, 0]]
    assert np.array_equal(draft.probs[0, 1:], [*np.eye(VOCAB)[[1, 0]], *np.zeros((2, VOCAB))])


def test_failure_to_force_tokens_changes_no_mask():
    class Fails(NoMultiples):
        def forced(self):
            self.text.append(1)  # the matcher is left in a wrong state
            raise RuntimeError("planted")

    def reset(path):
        matcher = Fails()
        assert all(map(matcher.consume, path))
        return matcher

    chain = [0, 1, 1, 0], range(4), VOCAB
    masks, forced = tree_masks(Fails(), *chain, reset)
    assert forced == [-1] * 4 and masks == tree_masks(NoMultiples(), *chain, None)[0]


def test_auto_drafts_under_a_constraint_when_forced_tokens_pay():
    """The engine drafts because of the forced tokens. At these costs, drafting would not pay off without them."""

    class Cycle(NoMultiples):
        """A constraint that allows only one text."""

        def may(self, token):
            return token == (self.text[-1] + 1 if self.text else 0) % VOCAB

    class Forcing(Cycle):
        def forced(self):
            return [(len(self.text) + i) % VOCAB for i in range(3)]

    shares = {}
    for constraint in (Cycle, Forcing):
        with Engine(*models(), slots=1, **OPTIONS) as engine:
            round_budget = engine._loop.round_budget
            round_budget.costs.clear()
            round_budget.costs |= {(k, Variant.CONSTRAINED, 1): 1 + k / 2 for k in (0, 4)}
            round_budget.is_measured = lambda kind, _: kind in engine._loop.round_budget.costs
            round_budget.record = lambda *_: None
            results = engine.generate([Request((1, 2), 36, constraint=constraint)] * 8)
        drafted = [count > 0 for result in results[2:] for count in result.drafted]
        shares[constraint] = sum(drafted) / len(drafted)
    assert shares[Cycle] < 0.2 and shares[Forcing] > 0.8, shares
