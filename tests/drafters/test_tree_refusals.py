"""Rejected trees, rejected tree drafters, and the drafts of custom drafters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import DynamicTreeDrafter, Tree, TreeDrafter
from jspec.core.types import Draft, pytree
from jspec.drafters import CascadeDrafter, FallbackDrafter, NGramDrafter
from support import drafters, toys

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")

MODEL = toys.tiny_llama(0)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "num_draft_tokens=4 conflicts with a TreeDrafter, whose tree", {"num_draft_tokens": 4}),
        (
            ValueError,
            r"accept=Block verifies chains only, but TreeDrafter drafts a tree; use one of",
            {"accept": "block"},
        ),
        (ValueError, "accept=TopK verifies chains only", {"accept": jspec.TopK(2)}),
        (ValueError, "accept=Threshold verifies chains only", {"accept": jspec.Threshold(0.1)}),
        (ValueError, "accept=Relaxed verifies chains only", {"accept": jspec.Relaxed(3, 1.0)}),
        (
            ValueError,
            "accept=KSeq needs children that were drawn independently of each other, but this TreeDrafter draws "
            "them without replacement; use replacement=True",
            {"accept": "k-seq"},
        ),
        (ValueError, "replacement=True draws children independently", {"accept": "coupled", "replacement": True}),
        (
            ValueError,
            "A node of the tree has 9 children, but the vocabulary has only 8 different tokens",
            {"tree": Tree.branching((9,))},
        ),
        (
            ValueError,
            "The tree is 5000 tokens deep, but the target model has only 4096 positions",
            {"tree": Tree.chain(5000)},
        ),
        (ValueError, "tree has no draft tokens", {"tree": Tree(())}),
        (TypeError, r"tree is of type tuple; pass a jspec\.Tree", {"tree": (0, 0)}),
        (TypeError, "replacement must be True or False; got 1", {"replacement": 1}),
        (TypeError, "draft is of type NGramDrafter, which cannot branch", {"draft": NGramDrafter()}),
        (ValueError, "The draft's vocabulary has 61 tokens and the target's 8", {"draft": "toy"}),
    ],
)
def test_invalid_tree_options_are_rejected(toy, prompts, error, message, options):
    options = {"draft": MODEL, "tree": Tree.branching((2, 1)), "replacement": False} | options
    draft = toy(0) if options["draft"] == "toy" else options["draft"]
    others = {name: options[name] for name in ("num_draft_tokens", "accept") if name in options}
    with pytest.raises(error, match=message):
        drafter = TreeDrafter(draft, options["tree"], options["replacement"])
        jspec.speculative_generate(MODEL, drafter, *prompts([3], vocab_size=8), max_new_tokens=8, **others)


@pytest.mark.parametrize(
    ("message", "drafter", "accept"),
    [
        ("accept=Rejection would bias the output, because the tree of a", (MODEL, 4, 2), "rejection"),
        ("accept=Traversal would bias", (MODEL, 4, 2), "traversal"),
        ("num_nodes=30 is more than the 6 nodes that a search with width=2", (MODEL, 30, 2, 2), "coupled"),
        ("max_depth=5 cannot be reached with num_nodes=4", (MODEL, 4, 5), "coupled"),
        ("width must be an int of at least 1; got 0", (MODEL, 4, 2, 0), "coupled"),
        ("num_nodes must be an int of at least 1; got 2.5", (MODEL, 2.5, 2), "coupled"),
    ],
)
def test_invalid_dynamic_trees_are_rejected(prompts, message, drafter, accept):
    with pytest.raises(ValueError, match=message):
        jspec.speculative_generate(
            MODEL, DynamicTreeDrafter(*drafter), *prompts([3], vocab_size=8), max_new_tokens=8, accept=accept
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Tree.chain(2.5), "num_draft_tokens must be an int of at least 0; got 2.5"),
        (lambda: Tree.chain(-1), "num_draft_tokens must be an int of at least 0; got -1"),
        (lambda: Tree.chain(True), "num_draft_tokens must be an int of at least 0; got True"),
        (lambda: Tree.branching(3), "children must be a sequence of ints"),
        (lambda: jspec.theory.tree_yield((0, 0), [0.5]), "tree is of type tuple; pass a jspec"),
        (lambda: jspec.theory.best_tree(["a"], 3, 2), "must be a list of probabilities"),
    ],
)
def test_invalid_trees_and_numbers_give_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_invalid_target_is_reported(prompts):
    with pytest.raises(TypeError, match="target is of type str, which lacks config"):
        jspec.speculative_generate("x", TreeDrafter(MODEL, Tree.chain(2)), *prompts([3]), max_new_tokens=4)


@pytree
class Trie(jspec.drafters.Stateless):
    """A custom drafter with a field that happens to be called `tree`."""

    tree: jax.Array
    vocab_size = max_positions = None

    def propose(self, state, context, num_draft_tokens):
        return self.made(jnp.zeros((context.lengths.size, num_draft_tokens), jnp.int32), context.vocab_size), state

    def made(self, tokens, vocab_size):
        return Draft(tokens, jax.nn.one_hot(tokens, vocab_size))


@pytree
class Lawless(Trie):
    def made(self, tokens, vocab_size):
        return Draft(tokens, None, None, jnp.ones(tokens.shape, bool))


@pytree
class Misshapen(Trie):
    def made(self, tokens, vocab_size):
        return Draft(tokens, None, None, jnp.ones(3, bool))


@pytree
class Bare(Trie):
    def made(self, tokens, vocab_size):
        return Draft(tokens, None)


def test_custom_tree_drafters_are_supported_and_validated(prompts):
    batch = prompts([3, 2], vocab_size=8)
    plain = jspec.generate(MODEL, *batch, max_new_tokens=6)
    for drafter in (Trie(jnp.zeros(2)), Lawless(jnp.zeros(2))):
        out = drafters.generate(MODEL, drafter, batch, max_new_tokens=6, accept="coupled")
        np.testing.assert_array_equal(out.tokens, plain.tokens)
    for drafter, message in (
        (Lawless(jnp.zeros(2)), "Lawless drafts tokens without distributions, which Rejection needs"),
        (Misshapen(jnp.zeros(2)), r"proposed a draft with valid bool\[3\]; expected bool\[2, 4\]"),
        (Bare(jnp.zeros(2)), "Bare proposed tokens without distributions"),
    ):
        with pytest.raises(ValueError, match=message):
            jspec.speculative_generate(MODEL, drafter, *batch, max_new_tokens=6)


def test_trees_cannot_be_combined_or_tuned(prompts):
    tree = TreeDrafter(MODEL, Tree.branching((2,)))
    for make in (lambda: FallbackDrafter(tree, MODEL), lambda: CascadeDrafter(MODEL, tree)):
        with pytest.raises(TypeError, match="drafts a tree, but only chains can be combined"):
            make()
    with pytest.raises(TypeError, match=r"jspec\.tune supports chain drafters only"):
        jspec.tune(MODEL, tree, *prompts([3], vocab_size=8))
