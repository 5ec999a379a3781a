"""Methods of drafters that take signals, or the same values as separate arguments, and calls in either form."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jspec
from jspec.core.types import pytree
from jspec.drafters import Stateless
from jspec.drafters.base import Drafter
from jspec.drafters.signals import NO_SIGNALS, TargetSignals
from jspec.engine import Engine, Request
from support import toys

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 2)


class Forwards:
    """A cooperative class that takes separate arguments and passes them on."""

    def init(self, tokens, num_slots, **requested):
        return super().init(tokens, num_slots, **requested)

    def commit(self, state, draft, verdict, hidden, **requested):
        return super().commit(state, draft, verdict, hidden=hidden, **requested)


class Returns(Stateless):
    """A drafter that takes signals, and returns them."""

    def init(self, tokens, num_slots, signals):
        return signals

    def commit(self, state, draft, verdict, signals):
        return signals


def test_calls_in_other_form_are_translated():
    signals = TargetSignals("hidden", "features", "top tokens", "target")
    for one in (Returns(), type("Both", (Forwards, Returns), {})()):
        assert one.commit((), None, None, signals) == one.commit((), None, None, signals=signals) == signals
        for name in ("top_tokens", "likeliest"):
            requested = {"features": "features", name: "top tokens", "target": "target"}
            assert one.commit((), None, None, "hidden", **requested) == signals
        assert one.init("tokens", 5) == NO_SIGNALS
        assert one.init("tokens", 5, features="features").features == "features"


def test_former_name_of_top_tokens_works():
    class Former(Stateless):
        def commit(self, state, draft, verdict, hidden, likeliest):
            return likeliest

    class Requests(Stateless):
        num_likeliest = 1

        def commit(self, state, draft, verdict, hidden, **requested):
            return requested["likeliest"]

    class Current(Stateless):
        def commit(self, state, draft, verdict, hidden, top_tokens):
            return top_tokens

    signals = TargetSignals("hidden", top_tokens="top tokens")
    assert signals.likeliest == "top tokens"
    for one in (Former(), Requests(), Current(), type("Both", (Forwards, Former), {})()):
        assert one.commit((), None, None, signals) == "top tokens"
        for name in ("top_tokens", "likeliest"):
            assert one.commit((), None, None, "hidden", **{name: "top tokens"}) == "top tokens"


def test_method_read_from_class_belongs_to_that_class():
    first = type("First", (Forwards, Returns), {})
    second = type("Second", (first, type("Other", (Forwards,), {"commit": lambda *_: "other"})), {})
    signals = TargetSignals("hidden")
    assert first.commit(first(), (), None, None, signals) == signals
    assert second.commit(second(), (), None, None, signals) == "other"


def test_arguments_may_be_passed_by_name():
    signals = Returns().commit(state=(), draft=None, verdict=None, hidden="hidden", features="features")
    assert signals == TargetSignals("hidden", "features")


def test_method_may_be_any_callable_attribute():
    def commit(option, state, draft, verdict, hidden):
        return option, hidden

    class Object:
        def __call__(self, state, draft, verdict, hidden):
            return "option", hidden

    def later(self, state, draft, verdict, *, signals):
        return "option", signals.hidden

    for one in (
        functools.partial(commit, "option"),
        functools.partialmethod(lambda self, *rest: commit(*rest), "option"),
        property(lambda self: functools.partial(commit, "option")),
        Object(),
        later,
    ):
        made = type("Given", (Stateless,), {"commit": one})()
        assert made.commit((), None, None, TargetSignals("hidden")) == ("option", "hidden")


def test_method_follows_base_class_order():
    class Sub(Forwards):
        def commit(self, state, draft, verdict, hidden):
            return "sub"

    first = type("First", (Forwards, Returns), {})
    assert type("Second", (first, Sub), {})().commit((), None, None, TargetSignals("hidden")) == "sub"


def test_wrapper_exposes_attributes_of_wrapped_drafter():
    class Wrapper(Stateless):
        def __getattr__(self, name):
            return getattr(jspec.ModelDrafter(TARGET), name)

    assert Wrapper().max_positions == TARGET.config.max_position_embeddings and Wrapper().tree is None


@pytree
class Again(Drafter):
    """The drafter that the docs teach: it repeats the last token."""

    vocab_size = None

    def init(self, tokens, num_slots, signals):
        return ()

    def propose(self, state, context, num_draft_tokens):
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        tokens = jnp.repeat(last, num_draft_tokens, axis=1)
        return jspec.drafters.Draft(tokens, jax.nn.one_hot(tokens, context.vocab_size)), state

    def commit(self, state, draft, verdict, signals):
        return state


def test_engine_initialises_drafter_that_takes_signals():
    """The engine passes signals to `init` of a drafter that cannot read a prompt in pieces."""
    with Engine(TARGET, Again(), slots=1, max_length=32, num_draft_tokens=2) as engine:
        assert len(engine.generate([Request((1, 2, 3), 5)])[0].tokens) == 5
