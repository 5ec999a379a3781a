"""Planted tree bugs, each of which somebody has shipped or might ship: every one is caught."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import Tree, TreeDrafter
from jspec.acceptance import rejection, traversal, walk
from jspec.core import keys
from jspec.core.probs import at_tokens
from jspec.core.tree import Branches
from jspec.core.types import Draft
from jspec.decoding import round as rounds
from jspec.decoding import verify as verification
from jspec.drafters import BigramDrafter, UnigramDrafter
from support import drafters, mutant_checks, oracle, toys
from support.few import by_default

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")

TREE = Tree((0, 0, 1, 1, 3))


@pytest.fixture(autouse=True)
def traced_anew():
    """Clear caches, so that earlier programs do not hide a patched function and later ones do not contain it."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def positions_by_row(patch):
    patch(Tree, "branches", property(lambda tree: Branches(np.arange(tree.size + 1), tree.ancestors)))


def all_nodes_visible(patch):
    """Let a node see its earlier siblings too, as in a chain."""
    causal = property(lambda tree: Branches(tree.offsets, np.tri(tree.size + 1, dtype=bool)))
    patch(Tree, "branches", causal)


def penalties_by_row(patch):
    token_probs = verification.token_probs
    patch(verification, "token_probs", lambda *args: token_probs(*args[:4]))


def wrong_path_kept(patch):
    patch(rounds, "keep", lambda cache, start, path: cache)


def path_one_node_off(patch):
    keep = rounds.keep
    patch(rounds, "keep", lambda cache, start, path: keep(cache, start, jnp.maximum(path - 1, 0)))


def youngest_first(patch):
    """Follow the last accepted child, which was verified against what its earlier siblings had left."""
    follow = walk.follow

    def mutant(kept, tree):
        parents = np.array(tree.parents)
        younger = jnp.asarray(np.triu(parents[:, None] == parents, 1))
        return follow(kept & ~(kept[:, None, :] & younger).any(-1), tree)

    patch(rejection, "follow", mutant)


def noise_of_the_elder_sibling(patch):
    for module in (keys, walk):
        patch(module, "of_sibling", lambda keys, rank: keys)


def pruned_by_own_confidence(patch):
    """Make the existence of a drawn node depend on what was drawn there."""
    propose = TreeDrafter.propose

    def mutant(self, state, context, num_draft_tokens):
        draft, state = propose(self, state, context, num_draft_tokens)
        sure = at_tokens(draft.probs, draft.tokens) > 0.25
        return dataclasses.replace(draft, probs=jnp.where(sure[..., None], draft.probs, 0)), state

    patch(TreeDrafter, "propose", mutant)


def equal_children_merged(patch):
    """Treat the later of two independent children with the same token as no draft token."""
    propose = TreeDrafter.propose

    def mutant(self, state, context, num_draft_tokens):
        draft, state = propose(self, state, context, num_draft_tokens)
        parents = np.array(self.tree.parents)
        elder = jnp.asarray(np.tril(parents[:, None] == parents, -1))
        again = ((draft.tokens[:, :, None] == draft.tokens[:, None, :]) & elder).any(-1)
        return dataclasses.replace(draft, probs=jnp.where(again[..., None], 0, draft.probs)), state

    patch(TreeDrafter, "propose", mutant)


def full_laws(patch):
    """Give children drawn without replacement the distribution from before any of them was drawn."""
    propose = TreeDrafter.propose

    def mutant(self, state, context, num_draft_tokens):
        draft, state = propose(self, state, context, num_draft_tokens)
        eldest = [self.tree.children[parent][0] - 1 for parent in self.tree.parents]
        return dataclasses.replace(draft, probs=draft.probs[:, np.array(eldest)]), state

    patch(TreeDrafter, "propose", mutant)


def noise_of_a_cousin(patch):
    """Draw children of several parents with the noise of their rank alone, which is wrong only for traversal."""
    ranks = property(lambda tree: np.array([0, *(n - tree.children[p][0] for n, p in enumerate(tree.parents, 1))]))
    patch(Tree, "rank_at_depth", ranks)


IN_TEXTS = (positions_by_row, all_nodes_visible, penalties_by_row, wrong_path_kept, path_one_node_off)
IN_LAWS = (youngest_first, noise_of_the_elder_sibling, pruned_by_own_confidence, equal_children_merged, full_laws)


def coupled_texts(toy, prompts):
    """Return how many of 20 outputs under "coupled" differ from `generate`'s."""
    batch, options = prompts([1 + i % 9 for i in range(20)]), {"max_new_tokens": 32}
    options |= {"sampling": drafters.every_parameter(20, 61)["sampling"]}
    target, draft = (toy(0, distance=distance, num_hidden_layers=2) for distance in (0, 0.1))
    plain = jspec.generate(target, *batch, **options)
    out = drafters.generate(target, TreeDrafter(draft, TREE), batch, accept="coupled", **options)
    return int((out.tokens != plain.tokens).any(1).sum())


def law_of_cousins():
    """Return how far P(3 | 1) is off, in standard errors.

    The children of 0, drawn beside those of 1, are often rejected.
    """

    def model(rows):
        return jnp.log(jnp.asarray(rows, jnp.float32) + 1e-9)

    anything = [0.25] * 4
    target = toys.MarkovModel(model([[0, 0, 0.95, 0.05], [0, 0, 0.5, 0.5], anything, [0.5, 0.5, 0, 0]]))
    counts = BigramDrafter(model([[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5], anything, [0.9, 0.1, 0, 0]]))
    batch = np.full((20_000, 1), 3), np.ones(20_000, int), jax.random.split(jax.random.key(5), 20_000)
    out = drafters.generate(
        target, TreeDrafter(counts, Tree((0, 0, 1, 2))), batch, max_new_tokens=2, accept="traversal"
    )
    behind = out.tokens[out.tokens[:, 0] == 1, 1]
    return abs((behind == 3).mean() - 0.5) / (0.5 / len(behind) ** 0.5)


@pytest.mark.slow
def test_cousins_sharing_noise_are_caught(report, monkeypatch):
    assert law_of_cousins() < 4
    noise_of_a_cousin(monkeypatch.setattr)
    jax.clear_caches()
    off = law_of_cousins()
    report(standard_errors=f"{off:.0f}")
    assert off > 20


def law(mutant=None):
    """Return the p-value of three tokens, and what was seen. Only `equal_children_merged` uses replacement."""
    counts = UnigramDrafter.from_tokens(np.repeat(np.arange(8), [1, 1, 9, 1, 9, 1, 1, 1]), 8)
    drafter = TreeDrafter(counts, Tree((0, 0, 0, 0, 2, 2)), replacement=mutant is equal_children_merged)
    return mutant_checks.law({}, drafter=drafter, length=2)


@pytest.mark.parametrize("mutant", by_default(IN_TEXTS, (wrong_path_kept,)))
def test_coupled_output_catches_planted_bug(report, monkeypatch, toy, prompts, mutant):
    mutant(monkeypatch.setattr)
    different = coupled_texts(toy, prompts)
    report(different=different, of=20)
    assert different


@pytest.mark.parametrize("mutant", by_default(IN_LAWS, ()))
def test_distribution_catches_planted_bug(report, monkeypatch, mutant):
    mutant(monkeypatch.setattr)
    p, seen = law(mutant)
    report(seen=seen, alpha=oracle.ALPHA)
    assert p < oracle.ALPHA


@pytest.mark.slow
def test_correct_code_raises_no_alarm(toy, prompts):
    assert coupled_texts(toy, prompts) == 0
    assert law()[0] > oracle.ALPHA
    assert law(equal_children_merged)[0] > oracle.ALPHA  # the same drafts, without the bug


def test_acceptance_comparison_is_strict():
    """A token that the target cannot draw is not kept, even at a uniform of 0."""
    draft = Draft(jnp.asarray([[0, 1]]), jnp.asarray([[[0.5, 0.5], [0.0, 1.0]]]), Tree((0, 0)))
    target_probs = jnp.asarray([[[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]]])
    kept, _ = walk.kept_in_turn([jnp.zeros((1, 1))] * 2, draft, target_probs)
    np.testing.assert_array_equal(kept, [[False, True]])
    end, _ = traversal.traverse(jnp.zeros((1, 2)), draft, target_probs)
    np.testing.assert_array_equal(end, [2])
