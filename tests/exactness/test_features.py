"""The target's hidden states that a drafter reads: those of the prompt and of every accepted draft token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES
from jspec.acceptance.path import at_path
from jspec.core.row_ops import write_rows
from jspec.core.tree import Tree
from jspec.decoding.program import start
from jspec.decoding.round import decode_round
from jspec.drafters import AutoregressiveDrafter, FallbackDrafter, HorizontalDrafter, MixtureDrafter, NGramDrafter
from jspec.drafters.base import tree_of
from jspec.drafters.drafts import one_hot_draft
from jspec.drafters.duck_length import as_draft_length
from support import toys

pytestmark = pytest.mark.usefixtures("quick_compile")
LAYERS, NEW = (0, 2, 1), 20
TARGET, DRAFT = toys.tiny_llama(0, 2), toys.tiny_llama(1, 1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["draft"], meta_fields=["features"])
class Reader(AutoregressiveDrafter):
    """A drafter that drafts what `draft` does and keeps the hidden states of the whole sequence."""

    def __init__(self, draft, features=LAYERS):
        self.draft, self.features = draft, features

    vocab_size = property(lambda self: self.draft.vocab_size)
    max_positions = property(lambda self: self.draft.max_positions)

    def init(self, tokens, num_slots, features, lengths, target):
        store = jnp.pad(features, ((0, 0), (0, num_slots - features.shape[1]), (0, 0), (0, 0)))
        return self.draft.init(tokens, num_slots), store, jnp.zeros(len(tokens), jnp.int32)

    def begin(self, state, context, tree):
        logits, carry = self.draft.begin(state[0], context, tree)
        return logits, (carry, state[1], context.lengths - 1)

    def extend(self, carry, tokens, level, context):
        logits, inner = self.draft.extend(carry[0], tokens, level, context)
        return logits, (inner, *carry[1:])

    def end(self, carry):
        return self.draft.end(carry[0]), *carry[1:]

    def keep(self, state, start, path):
        return self.draft.keep(state[0], start, path), *state[1:]

    def commit(self, state, draft, verdict, hidden, features, target):
        return state[0], write_rows(state[1], at_path(features, verdict), state[2]), state[2]


def beside_another(draft):
    """Return a reader mixed with a reader of other states, as the fallback of a drafter that reads none."""
    return FallbackDrafter(NGramDrafter(1, 1), MixtureDrafter(Reader(draft, (1, 0)), Reader(draft), 0.5))


# The drafter, the draft length, the rule, and where the reader's state is in the drafter's state.
MADE = {
    "chain": (Reader, 3, "rejection", lambda state: state),
    "varying": (Reader, jspec.WhileConfident(3, 0.5), "block", lambda state: state),
    "tree": (
        lambda draft: jspec.TreeDrafter(Reader(draft), Tree.branching((2, 1, 2))),
        3,
        "traversal",
        lambda state: state[0],
    ),
    "search": (lambda draft: jspec.DynamicTreeDrafter(Reader(draft), 6, 3, 2), 3, "coupled", lambda state: state[0]),
    "beside another": (beside_another, 3, "rejection", lambda state: state[1][1]),
    "before another": (
        lambda draft: HorizontalDrafter(Reader(draft), draft, 2),
        jspec.UpTo(3),
        "block",
        lambda state: state[0],
    ),
    "of another's path": (
        lambda draft: jspec.MultiDrafter([NGramDrafter(), Reader(draft), TARGET], 3),
        3,
        "coupled",
        lambda state: state[1],
    ),
    "in a tree": (
        lambda draft: jspec.TreeDrafter(MixtureDrafter(draft, Reader(draft), 0.5), Tree.branching((2, 1, 2))),
        3,
        "rejection",
        lambda state: state[0][1],
    ),
}


def states(tokens):
    """Return the hidden states ``[B, S, F, E]`` of whole sequences: outputs of the layers before each of `LAYERS`."""
    cache, zeros = TARGET.new_cache(*tokens.shape), jnp.zeros(len(tokens), jnp.int32)
    return np.stack([TARGET.forward(tokens, cache, zeros, layers=range(i))[0] for i in LAYERS], axis=2)


def test_features_are_inputs_of_the_layers(prompts):
    tokens = jnp.asarray(prompts([9, 9], vocab_size=8)[0])
    found = TARGET.forward_with_features(tokens, TARGET.new_cache(2, 9), jnp.zeros(2, jnp.int32), LAYERS)
    np.testing.assert_allclose(found[1], states(tokens), atol=1e-6)
    np.testing.assert_array_equal(found[1][:, :, 1], found[0])


@pytest.mark.parametrize("name", [pytest.param("chain", marks=pytest.mark.slow), *list(MADE)[1:]])
def test_drafter_receives_states_of_all_tokens_but_last(prompts, name):
    """After every round, it has the states of all tokens but the last, even with rejections, row ends and limits."""
    make, length, rule, place = MADE[name]
    tokens, lengths, keys = prompts([5, 1, 3, 9], vocab_size=8)
    drafter, length = make(jspec.ModelDrafter(DRAFT)), as_draft_length(length)
    transforms = toys.both_transforms(jspec.SamplingParams(), 4)
    params = toys.request(keys, jnp.asarray(lengths), jnp.array([NEW, 7, NEW, 1]), *transforms)
    tokens = np.where(np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None], tokens, 0)
    state, _ = jax.jit(lambda: start(TARGET, drafter, params, jnp.asarray(tokens), NEW, length))()
    decode = jax.jit(lambda state: decode_round(TARGET, drafter, RULES[rule], length, params, state)[0])
    accepted = 0
    while not state.done.all():
        before, state = state, decode(state)
        accepted += int(jnp.maximum(state.lengths - before.lengths - 1, 0).sum())
        whole = states(state.tokens)
        store = place(state.drafter)[1]
        for row in np.flatnonzero(~before.done):
            upto = int(state.lengths[row]) - 1
            np.testing.assert_allclose(store[row, :upto], whole[row, :upto], atol=1e-5)
    assert accepted and tree_of(drafter, 3).max_depth == 3


@pytest.mark.parametrize("name", ["chain", pytest.param("search", marks=pytest.mark.slow)])
def test_reading_states_does_not_change_output(prompts, name):
    """Reading states does not change the output of the shipped program, which also checks each draft."""
    make, length, rule, _ = MADE[name]
    reading, alone = make(jspec.ModelDrafter(DRAFT)), jspec.ModelDrafter(DRAFT)
    if name == "search":
        alone = jspec.DynamicTreeDrafter(alone, 6, 3, 2)
    options = {"max_new_tokens": NEW, "accept": rule} | ({"num_draft_tokens": length} if name == "chain" else {})
    batch = prompts([4, 2], vocab_size=8)
    expected = jspec.speculative_generate(TARGET, alone, *batch, **options)
    with jax.enable_checks(True):
        found = jspec.speculative_generate(TARGET, reading, *batch, **options)
    np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.parametrize(
    ("features", "message"),
    [((3,), "features of Reader holds 3; expected whole numbers from 0 to 2 "), ((0.5,), "holds 0.5; expected whole")],
)
def test_invalid_feature_indices_are_rejected(prompts, features, message):
    drafter = Reader(jspec.ModelDrafter(DRAFT), features)
    with pytest.raises(ValueError, match=message):
        jspec.speculative_generate(TARGET, drafter, *prompts([3], vocab_size=8), max_new_tokens=8)


def test_unsupported_models_and_combinations_are_rejected(prompts):
    reader = Reader(jspec.ModelDrafter(DRAFT))
    with pytest.raises(TypeError, match="MarkovModel has no forward_with_features; use a"):
        jspec.speculative_generate(toys.markov_pair(0)[0], reader, *prompts([3], vocab_size=8), max_new_tokens=8)
    for error, make in (
        ("which drafts a tree", lambda: FallbackDrafter(NGramDrafter(), jspec.TokenRecyclingDrafter())),
        ("needs values other than tokens", lambda: jspec.CascadeDrafter(DRAFT, reader)),
        (
            "second is of type Reader, which reads the target's hidden states",
            lambda: HorizontalDrafter(DRAFT, reader, 1),
        ),
    ):
        with pytest.raises(TypeError, match=error):
            make()


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["num_top_tokens"])
@dataclasses.dataclass(frozen=True)
class Curious:
    """A drafter that drafts nothing and remembers the target's most likely tokens."""

    num_top_tokens: int
    vocab_size = max_positions = None

    def init(self, tokens, num_slots):
        return jnp.zeros((len(tokens), 4, self.num_top_tokens), jnp.int32)

    def propose(self, state, context, num_draft_tokens):
        tokens = jnp.zeros((len(state), num_draft_tokens), jnp.int32)
        return one_hot_draft(tokens, tokens > 0, context), state

    def commit(self, state, draft, verdict, hidden, top_tokens):
        return top_tokens


def test_each_part_receives_its_own_number_of_top_tokens(prompts):
    tokens, lengths, keys = prompts([5, 1], vocab_size=8)
    drafter = FallbackDrafter(Curious(2), FallbackDrafter(Curious(3), Reader(jspec.ModelDrafter(DRAFT))))
    transforms = toys.both_transforms(jspec.SamplingParams(temperature=0.0), 2)
    state, new = toys.first_round(TARGET, drafter, jnp.asarray(tokens), jnp.asarray(lengths), keys, transforms, 3)
    two, (three, _) = state.drafter
    assert two.shape == (2, 4, 2) and three.shape == (2, 4, 3)
    np.testing.assert_array_equal(two, three[..., :2])
    np.testing.assert_array_equal(three[:, 0, 0], new.tokens[:, 0])
