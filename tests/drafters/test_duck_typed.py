"""Drafters, rules and draft lengths written by users, with and without base classes, in the forms that docs show."""

import dataclasses
import functools
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.acceptance.base import as_rule
from jspec.acceptance.rejection import Rejection
from jspec.core.types import Verdict, pytree
from jspec.decoding.validate_arguments import check_rule
from jspec.drafters import AutoregressiveDrafter, Stateless
from jspec.drafters.base import Drafter, is_user_defined, kind_of
from jspec.drafters.capabilities import num_top_tokens_of
from jspec.drafters.chunked_prefill import begin, can_read, prefill_chunk
from jspec.drafters.draft_length import DEFAULT
from jspec.drafters.duck_length import as_draft_length
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.model import as_drafter
from jspec.generation.complete import default_draft_length
from support import toys

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 2)
# Every optional attribute of a drafter, with a value that is not its default.
OPTIONAL = {
    "max_positions": 7,
    "max_chain_length": 2,
    "tree": jspec.Tree((0, 0)),
    "replacement": True,
    "features": (1,),
    "num_top_tokens": 3,
    "embeddings": "vectors",
    "has_confidence": True,
    "unrolled": True,
}


class Plain:
    """A drafter that defines only what is required."""

    vocab_size = None

    def init(self, tokens, num_slots):
        return "state", tokens, num_slots

    def propose(self, state, context, num_draft_tokens):
        return jspec.NGramDrafter().propose(state, context, num_draft_tokens)

    def commit(self, state, draft, verdict, hidden):
        return hidden


class Full(Plain):
    """A drafter that requests everything."""

    features, num_top_tokens = (1,), 3

    def init(self, tokens, num_slots, features, lengths, target):
        return tokens, num_slots, features, lengths, target

    def read(self, state, tokens, start, count, features, target):
        return tokens, start, count, features, target

    def extend(self, carry, tokens, level, context):
        raise AssertionError

    def commit(self, state, draft, verdict, hidden, features, target, top_tokens):
        return hidden, features, target, top_tokens


@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_attribute_overrides_default(name):
    plain, given = as_drafter(Plain()), as_drafter(type("Given", (Plain,), {name: OPTIONAL[name]})())
    default = getattr(Drafter(), name)
    assert getattr(plain, name) == default and default != (value := getattr(given, name)) and value is OPTIONAL[name]
    # The same holds for an attribute, property or field of a class that derives from jspec's.
    for one in (
        type("Given", (Stateless,), {name: OPTIONAL[name]})(),
        type("Given", (Stateless,), {name: property(lambda _: OPTIONAL[name])})(),
        dataclasses.make_dataclass("Given", [name], bases=(Stateless,))(OPTIONAL[name]),
    ):
        assert getattr(one, name) is OPTIONAL[name] and as_drafter(one) is one
    assert getattr(type("Bare", (Stateless,), {})(), name) == default


FORMER = types.SimpleNamespace(num_likeliest=3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: type("Given", (Plain,), {"num_likeliest": 3})(),
        lambda: type("Given", (Plain,), {"__getattr__": lambda _, name: getattr(FORMER, name)})(),
        lambda: type("Given", (Stateless,), {"num_likeliest": 3})(),
        lambda: type("Given", (Stateless,), {"num_likeliest": property(lambda _: 3)})(),
        lambda: dataclasses.make_dataclass("Given", ["num_likeliest"], bases=(Stateless,))(3),
    ],
    ids=["free", "forwarded", "attribute", "property", "field"],
)
def test_former_name_of_num_top_tokens_works(make):
    assert num_top_tokens_of(as_drafter(make())) == 3


def test_only_adapters_probe_for_missing_attributes():
    names = (*OPTIONAL, "parts", "read", "extend", "branches", "independent", "should_draft", "is_worthwhile")
    probe = re.compile(rf'(get|has)attr\([^()]*"({"|".join(names)})"')
    root = Path(jspec.__file__).parent
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if probe.search(path.read_text("utf-8"))}
    assert found == {"acceptance/base.py", "drafters/base.py", "drafters/duck_length.py", "drafters/duck_typed.py"}


def test_capabilities_follow_from_definitions():
    plain, full = as_drafter(Plain()), as_drafter(Full())
    assert not can_read(plain) and can_read(full) and full.can_read
    assert full.is_token_by_token and full.has_confidence and not plain.has_confidence
    assert is_user_defined(plain) and kind_of(plain) == "Plain" and not is_user_defined(as_drafter(TARGET))
    assert not is_user_defined(None) and not is_user_defined(TARGET)


def test_default_draft_length_depends_on_attributes():
    assert default_draft_length(Plain()) == 4
    assert default_draft_length(type("Short", (Plain,), {"max_chain_length": 2})()) == 2
    assert default_draft_length(type("Branches", (Plain,), {"tree": jspec.Tree((0, 0))})()) is DEFAULT


def test_methods_receive_requested_signals_as_arguments():
    plain, full, prompt = as_drafter(Plain()), as_drafter(Full()), PromptSignals("features", "lengths", "target")
    assert plain.init("tokens", 5, NO_SIGNALS) == ("state", "tokens", 5)
    assert full.init("tokens", 5, prompt) == ("tokens", 5, "features", "lengths", "target")
    chunk = PromptSignals("features", None, "target")
    assert prefill_chunk(full, (), "tokens", 1, 2, chunk) == ("tokens", 1, 2, "features", "target")
    assert prefill_chunk(plain, "state", "tokens", 1, 2, NO_SIGNALS) == "state"
    assert plain.commit((), None, None, TargetSignals("hidden")) == "hidden"
    signals = TargetSignals("hidden", "features", "top tokens", "target")
    assert full.commit((), None, None, signals) == ("hidden", "features", "target", "top tokens")
    static = type("Static", (Stateless,), {"init": staticmethod(lambda tokens, num_slots: tokens)})
    assert static().init("tokens", 5, NO_SIGNALS) == "tokens"


@pytree
class Remembers(AutoregressiveDrafter):
    """A drafter whose `commit` takes `hidden` under another name and calls the base class's `commit`."""

    logits: jax.Array
    vocab_size = max_positions = None

    def init(self, tokens, num_slots):
        return jnp.zeros((len(tokens), 4, TARGET.config.hidden_size))

    def begin(self, state, context, tree):
        return jnp.broadcast_to(self.logits, (context.lengths.size, self.logits.size)), state

    def extend(self, carry, tokens, level, context):
        return jnp.broadcast_to(self.logits, (*tokens.shape, self.logits.size)), carry

    def end(self, carry):
        return carry

    def commit(self, state, draft, verdict, states_of_target):
        return super().commit(states_of_target, draft, verdict, states_of_target)


class _Mixin:
    """A class that defines `commit` and does not depend on jspec."""

    def commit(self, state, draft, verdict, hidden):
        return hidden


@pytree
class Mixed(_Mixin, Remembers):
    """A drafter whose `commit` comes from another base class."""


@pytest.mark.parametrize("make", [Remembers, Mixed])
def test_subclass_commit_may_take_hidden_states(prompts, make):
    tokens, lengths, keys = prompts([5, 2], vocab_size=8)
    drafter = as_drafter(make(jnp.zeros(8)))
    assert isinstance(drafter, make)
    transforms = toys.both_transforms(jspec.SamplingParams(temperature=0.0), 2)
    tokens, lengths = jnp.where(jnp.arange(5) < jnp.asarray(lengths)[:, None], tokens, 0), jnp.asarray(lengths)
    state, _ = toys.first_round(TARGET, drafter, tokens, lengths, keys, transforms, 3)
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    before = TARGET.forward(tokens, TARGET.new_cache(2, 8), jnp.zeros(2, jnp.int32))[1]
    hidden = TARGET.forward(last, before, lengths - 1)[0]
    np.testing.assert_allclose(state.drafter[:, :1], hidden, atol=1e-5)
    assert make.commit(drafter, (), None, Verdict(None, None), "array") == "array"  # as the class's author may call it


def test_required_field_stays_required():
    for make in (jspec.TreeDrafter, jspec.RetrievalDrafter, jspec.PassDrafter):
        with pytest.raises(TypeError, match="missing"):
            make(*[jspec.UnigramDrafter(jnp.zeros(4))] * (make is jspec.TreeDrafter))

    @dataclasses.dataclass(frozen=True)
    class Both(Stateless):
        tree: jspec.Tree
        width: int  # if `tree` had a default, a field without one could not follow

    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'tree' and 'width'"):
        Both()
    assert Both(jspec.Tree((0,)), 3).tree.size == 1
    with pytest.raises(AttributeError):
        _ = Drafter.tree


@dataclasses.dataclass(frozen=True)
class Always:
    """A rule without a base class: speculative sampling."""

    label: str = ""
    exact, shares_noise = True, False

    def accept(self, keys, start, draft, target_probs):
        return Rejection().accept(keys, start, draft, target_probs)


class Branching(Always):
    branches = independent = True


@dataclasses.dataclass(frozen=True)
class Two:
    """A draft-length policy without a base class."""

    needs_confidence = False
    max_draft_tokens = 2

    def init(self, batch):
        return ()

    def budget(self, state, batch):
        return jnp.full(batch, 2, jnp.int32)

    def continues(self, state, confidence):
        return confidence >= 0

    def update(self, state, drafted, accepted):
        return state


class Choosy(Two):
    def should_draft(self, state, confidence):
        return confidence >= 2


class Thrifty(Two):
    def is_worthwhile(self, state, num_drafted, expected, survival):
        return (num_drafted < 1) & (expected == 1) & (survival <= 1)


def test_rule_and_length_may_be_duck_typed(prompts):
    batch, draft = prompts([4, 2], vocab_size=8), toys.tiny_llama(1, 1)
    run = functools.partial(jspec.speculative_generate, TARGET, draft, *batch, max_new_tokens=6)
    own, other = run(num_draft_tokens=2), run(num_draft_tokens=Two(), accept=Always())
    np.testing.assert_array_equal(own.tokens, other.tokens)
    np.testing.assert_array_equal(own.stats.drafted, other.stats.drafted)
    assert not run(num_draft_tokens=Choosy()).stats.drafted.any()
    thrifty = run(num_draft_tokens=Thrifty()).stats
    np.testing.assert_array_equal(thrifty.drafted, thrifty.rounds)
    assert not as_rule(Always()).branches and not as_rule(Always()).independent
    assert as_rule(Branching()).branches and as_rule(Branching()).independent
    # Equal objects count as the same static argument, so they share one program.
    for adapt, make in ((as_rule, Always), (as_draft_length, Two)):
        assert adapt(make()) == adapt(make()) and hash(adapt(make())) == hash(adapt(make()))
    assert as_rule(Always("a")) != as_rule(Always("b")) and as_rule(Rejection()) == check_rule("rejection")


def test_messages_name_the_users_class(prompts):
    batch, tree = prompts([4], vocab_size=8), jspec.TreeDrafter(toys.tiny_llama(1, 1), jspec.Tree((0, 0)))
    lacking = type("Lacking", (), {"propose": Plain.propose})()
    for error, match, draft, options in (
        (TypeError, "type Lacking, which lacks init, commit, vocab_size", lacking, {}),
        (TypeError, "type Empty, which lacks propose, vocab_size", type("Empty", (Stateless,), {})(), {}),
        (TypeError, "type Plain, which is not a pytree", Plain(), {}),
        (ValueError, "accept=Always verifies chains only", tree, {"accept": Always()}),
        (ValueError, "accept=Branching needs children", tree, {"accept": Branching()}),
        (TypeError, "num_draft_tokens is of type Lacks, which", tree.draft, {"num_draft_tokens": _lacks()}),
        (ValueError, "Choosy needs .* NGramDrafter does not", jspec.NGramDrafter(), {"num_draft_tokens": Choosy()}),
        (ValueError, "Thrifty needs .* NGramDrafter does not", jspec.NGramDrafter(), {"num_draft_tokens": Thrifty()}),
    ):
        with pytest.raises(error, match=match):
            jspec.speculative_generate(TARGET, draft, *batch, max_new_tokens=2, **options)
    with pytest.raises(TypeError, match="draft is of type Plain, which cannot branch"):
        jspec.TreeDrafter(Plain(), jspec.Tree((0, 0)))
    with pytest.raises(TypeError, match="second is of type Plain, which does not provide its distribution"):
        jspec.MixtureDrafter(jspec.UnigramDrafter(jnp.zeros(4)), Plain(), 0.5)
    assert begin(as_drafter(Plain()), TARGET, 2, 9)[2] == 9


def _lacks():
    return type("Lacks", (), {"budget": Two.budget})()


def test_adapter_forwards_unknown_attributes():
    length = type("Length", (), {"max_draft_tokens": 2, "needs_confidence": False, "secret": 5})()
    assert as_draft_length(length).secret == 5
    given = type("Given", (Plain,), {"secret": 6})()
    combined = jspec.FallbackDrafter(jspec.NGramDrafter(3, 2), pytree(type("Given", (Plain,), {"secret": 6}))())
    assert as_drafter(given).secret == combined.second.secret == 6
    assert can_read(as_drafter(type("Given", (Plain,), {"init": Stateless.init})()))
