"""Tree drafts through the shipped program: distribution, coupled output, caches, counts, and rejected input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import DynamicTreeDrafter, Tree, TreeDrafter
from jspec.core.types import ACCEPTED, BONUS, CORRECTED
from jspec.drafters.draft_length import DEFAULT
from support import drafters, toys
from support.few import by_default
from support.matrix import check_texts, pair, ragged, text_p_values

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")

# Drafters that give the next token's distribution one token at a time, so that they can branch.
BRANCHING = (
    "model",
    "unigram",
    "bigram",
    "retrieval",
    "early exit",
    "mixture",
    "few tokens",
    "block",
    "block with corrections",
)
# One has its own cache, and one has data for every branch. The others are as simple, or have both.
FEW = ("model", "retrieval")
MOST = by_default(BRANCHING, FEW)
TREES = {"3-2": Tree.branching((3, 2)), "2-2-1": Tree.branching((2, 2, 1)), "depth first": Tree((0, 1, 2, 1, 0, 5, 5))}


def tree_drafter(name, tree, models, replacement=False):
    return TreeDrafter(drafters.make(name, *models), TREES[tree], replacement=replacement)


def check_law(report, name, tree, rule, draws, replacement=False, batches=None):
    found = text_p_values(tree_drafter(name, tree, pair(), replacement), rule, draws, DEFAULT, batches)
    check_texts(report, found, draws, len(BRANCHING) * len(TREES) * len(RULES))


# Replacement and the rule. Other tests show that coupled output equals plain decoding.
RULES = ((False, "rejection"), (True, "rejection"), (False, "traversal"), (True, "traversal"), (True, "k-seq"))


JOINT_LAWS = (
    ("model", "depth first", True, "traversal"),
    ("early exit", "2-2-1", False, "rejection"),
    ("retrieval", "3-2", False, "traversal"),
    ("unigram", "2-2-1", True, "k-seq"),
)


@pytest.mark.parametrize(("name", "tree", "replacement", "rule"), by_default(JOINT_LAWS, JOINT_LAWS[:1]))
def test_three_tokens_have_target_joint_distribution(report, name, tree, replacement, rule):
    check_law(report, name, tree, rule, 8_192, replacement)


@pytest.mark.slow
@pytest.mark.parametrize(("replacement", "rule"), [*RULES, (False, "coupled")])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", BRANCHING)
def test_three_tokens_have_target_joint_distribution_at_length(report, name, tree, replacement, rule):
    alone = [([ragged(3)[0][2]], [settings]) for settings in ragged(3)[1]]
    check_law(report, name, tree, rule, 200_000, replacement, [*alone, ragged(5)])


def check_coupled(report, toy, prompts, name, trees, requests):
    """Check that "coupled" output equals `generate`'s, and that every tree needs fewer rounds than plain decoding."""
    batch = prompts([1 + i % 9 for i in range(requests)])
    options = {"max_new_tokens": 64} | drafters.every_parameter(requests, 61)
    target, draft = (toy(0, distance=distance, num_hidden_layers=2) for distance in (0, 0.1))
    plain, different, rounds = jspec.generate(target, *batch, **options), 0, {}
    for tree in trees:
        drafter = tree_drafter(name, tree, (target, draft))
        out = drafters.generate(target, drafter, batch, accept="coupled", **options)
        different += (out.tokens != plain.tokens).any(1).sum()
        np.testing.assert_array_equal(out.lengths, plain.lengths)
        np.testing.assert_allclose(out.logprobs, plain.logprobs, atol=1e-4)
        np.testing.assert_allclose(out.raw_logprobs, plain.raw_logprobs, atol=1e-4)
        rounds[tree] = int(out.stats.rounds.sum())
    report(texts=requests * len(trees), tokens=int(plain.lengths.sum()), different=different, rounds=rounds)
    assert different == 0
    assert max(rounds.values()) < plain.stats.rounds.sum()


@pytest.mark.parametrize("name", MOST)
def test_coupled_output_equals_plain_decoding(report, toy, prompts, name):
    check_coupled(report, toy, prompts, name, [list(TREES)[BRANCHING.index(name) % len(TREES)]], 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", BRANCHING)
def test_coupled_output_equals_plain_decoding_at_length(report, toy, prompts, name):
    check_coupled(report, toy, prompts, name, TREES, 300)


def dynamic(name, models, width=3):
    return DynamicTreeDrafter(drafters.make(name, *models), num_nodes=3 if width == 1 else 8, max_depth=3, width=width)


def check_dynamic(report, toy, prompts, name, requests, width=3):
    batch = prompts([1 + i % 9 for i in range(requests)])
    options = {"max_new_tokens": 64} | drafters.every_parameter(requests, 61)
    target, draft = (toy(0, distance=distance, num_hidden_layers=2) for distance in (0, 0.1))
    plain = jspec.generate(target, *batch, **options)
    out = drafters.generate(target, dynamic(name, (target, draft), width), batch, accept="coupled", **options)
    different = (out.tokens != plain.tokens).any(1).sum()
    report(
        texts=requests,
        tokens=int(plain.lengths.sum()),
        different=int(different),
        tokens_a_round=f"{out.lengths.sum() / out.stats.rounds.sum():.2f}",
    )
    assert different == 0
    np.testing.assert_array_equal(out.lengths, plain.lengths)
    assert out.stats.rounds.sum() < plain.stats.rounds.sum()


@pytest.mark.parametrize("name", by_default(BRANCHING, FEW[:1]))
def test_dynamic_tree_output_equals_plain_decoding(report, toy, prompts, name):
    check_dynamic(report, toy, prompts, name, 50)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("name", BRANCHING)
def test_dynamic_tree_output_equals_plain_decoding_at_length(report, toy, prompts, name, width):
    check_dynamic(report, toy, prompts, name, 300, width)


@pytest.mark.slow
def test_dynamic_tree_of_width_one_is_a_chain(toy, prompts):
    """Under greedy decoding, both draft the most likely token, and after it the most likely token again."""
    target, draft, batch = toy(0), toy(0, distance=0.1), prompts([3, 5, 2])
    greedy = {"max_new_tokens": 24, "sampling": jspec.SamplingParams(temperature=0), "accept": "coupled"}
    tree = drafters.generate(target, DynamicTreeDrafter(draft, num_nodes=3, max_depth=3, width=1), batch, **greedy)
    chain = drafters.generate(target, draft, batch, num_draft_tokens=3, **greedy)
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(chain), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_larger_dynamic_tree_needs_fewer_rounds(report, toy, prompts):
    target, draft, batch = toy(0), toy(0, distance=0.1), prompts([1 + i % 9 for i in range(20)])
    rounds = {}
    for nodes in (3, 8, 24):
        drafter = DynamicTreeDrafter(draft, num_nodes=nodes, max_depth=3, width=4)
        out = drafters.generate(target, drafter, batch, max_new_tokens=48, accept="coupled")
        rounds[nodes] = int(out.stats.rounds.sum())
    report(rounds=rounds)
    assert rounds[3] > rounds[8] > rounds[24]


@pytest.mark.parametrize("accept", by_default(("rejection", "coupled", "traversal"), ("rejection",)))
def test_output_is_same_alone_and_in_batch(toy, prompts, accept):
    tokens, lengths, keys = prompts([9, 1, 5])
    target, draft = (toy(0, distance=distance, num_hidden_layers=2) for distance in (0, 0.1))
    drafter = tree_drafter("model", "depth first", (target, draft))
    together = drafters.generate(target, drafter, (tokens, lengths, keys), max_new_tokens=24, accept=accept)
    for row in range(3):
        one = [part[row : row + 1] for part in (tokens, lengths, keys)]
        alone = drafters.generate(target, drafter, one, max_new_tokens=24, accept=accept)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_array_equal(alone.stats.accepted_at[0], together.stats.accepted_at[row])


AS_CHAINS = [("model", "rejection"), ("early exit", "coupled")]
AS_CHAINS_SLOW = [(name, rule) for name in BRANCHING for rule in ("rejection", "traversal")]


@pytest.mark.parametrize(("name", "accept"), [*by_default(AS_CHAINS, AS_CHAINS[:1]), *by_default(AS_CHAINS_SLOW, ())])
def test_chain_shaped_tree_decodes_like_chain(toy, prompts, name, accept):
    """Tokens, origins and counts are equal: there is one way of drafting and verifying, not two."""
    batch = prompts([4, 1, 7])
    target, draft = (toy(0, distance=distance, num_hidden_layers=2) for distance in (0, 0.1))
    drafter = drafters.make(name, target, draft)
    options = {"max_new_tokens": 24, "accept": accept} | drafters.every_parameter(3, 61)
    chain = drafters.generate(target, drafter, batch, num_draft_tokens=3, **options)
    tree = drafters.generate(target, TreeDrafter(drafter, Tree.chain(3)), batch, **options)
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(chain), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_target_as_its_own_draft_is_accepted_to_the_leaves(toy, prompts):
    """Under greedy decoding, the first child is the target's token: a round yields the whole depth plus one token."""
    target, batch = toy(0), prompts([3, 5])
    drafter, greedy = TreeDrafter(target, Tree.branching((2, 1, 2))), jspec.SamplingParams(temperature=0)
    out = drafters.generate(target, drafter, batch, max_new_tokens=8, sampling=greedy)
    np.testing.assert_array_equal(out.stats.rounds, 2)
    np.testing.assert_array_equal(out.stats.accepted_at, [[2, 2, 2]] * 2)
    np.testing.assert_array_equal(out.stats.drafted, 2 * (2 + 2 + 4))
    np.testing.assert_array_equal(out.origins, [[ACCEPTED, ACCEPTED, ACCEPTED, BONUS] * 2] * 2)
    plain = jspec.generate(target, *batch, max_new_tokens=8, sampling=greedy)
    np.testing.assert_array_equal(out.tokens, plain.tokens)


def test_greedy_children_are_top_tokens(toy, prompts):
    """If there are as many children as tokens, some child is always right."""
    target, draft, batch = toys.tiny_llama(0), toys.tiny_llama(1, 1), prompts([3, 5], vocab_size=8)
    greedy = jspec.SamplingParams(temperature=0)
    out = drafters.generate(target, TreeDrafter(draft, Tree.branching((8,))), batch, max_new_tokens=16, sampling=greedy)
    np.testing.assert_array_equal(out.stats.acceptance_rate, 1)
    np.testing.assert_array_equal(out.tokens, jspec.generate(target, *batch, max_new_tokens=16, sampling=greedy).tokens)
    few = drafters.generate(target, TreeDrafter(draft, Tree.branching((2,))), batch, max_new_tokens=16, sampling=greedy)
    assert (few.origins == CORRECTED).any() and (few.origins == ACCEPTED).any()


def test_limits_and_eos_cut_drafts_and_counts(toy, prompts):
    """If the limit is below the depth, deeper nodes do not count as drafted."""
    target, batch = toy(0), prompts([3, 5])
    drafter = TreeDrafter(target, Tree.branching((2, 1, 2)))
    options = {"sampling": jspec.SamplingParams(temperature=0, max_tokens=[1, 2]), "eos_ids": [[-1], [-1]]}
    out = drafters.generate(target, drafter, batch, max_new_tokens=8, **options)
    np.testing.assert_array_equal(out.lengths, [1, 2])
    np.testing.assert_array_equal(out.stats.drafted, [2, 4])
    np.testing.assert_array_equal(out.stats.accepted, [1, 2])
    end = int(out.tokens[1, 0])
    options = {"sampling": jspec.SamplingParams(temperature=0, max_tokens=[8, 8]), "eos_ids": [[-1], [end]]}
    ended = drafters.generate(target, drafter, batch, max_new_tokens=8, **options)
    assert ended.lengths[1] == 1 and ended.stats.drafted[1] == 2 and ended.stats.accepted[1] == 1


def test_same_program_serves_other_prompts(toy, prompts, compilations):
    target = toy(0)
    drafter = TreeDrafter(toy(1), Tree.branching((2, 2)))
    options = {"max_new_tokens": 8}
    drafters.generate(target, drafter, prompts([3, 5]), **options)
    before = compilations()
    drafters.generate(target, drafter, prompts([4, 2], seed=1, width=5), **options)
    assert compilations() == before


MODEL = toys.tiny_llama(0)


def test_tree_drafts_satisfy_contract(toy, prompts):
    target, batch = toy(0), prompts([3, 5])
    with jax.enable_checks(True):
        out = drafters.generate(target, TreeDrafter(toy(1), TREES["2-2-1"]), batch, max_new_tokens=6)
    np.testing.assert_array_equal(out.lengths, 6)


def test_trees_decode_with_64_bit_types_enabled(toy, prompts):
    tokens, lengths, keys = prompts([4, 1])
    for accept in ("rejection", "coupled"):
        with jax.enable_x64(True):
            out = drafters.generate(
                toy(0),
                TreeDrafter(toy(1), TREES["3-2"]),
                (tokens.astype(np.int64), lengths, keys),
                max_new_tokens=4,
                accept=accept,
            )
        np.testing.assert_array_equal(out.lengths, 4)


@pytest.mark.parametrize(
    "accept", ["coupled", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rejection", "traversal", "k-seq"))]
)
def test_context_without_distribution_ends_text_in_tree(prompts, accept):
    """A row that reads token 7 gets no distribution. It stops there and is marked `invalid`."""
    model = jax.tree.map(lambda leaf: leaf, MODEL)
    model.embed_tokens.weight.set_value(model.embed_tokens.weight[...].at[:, 7].set(jnp.nan))
    batch = prompts([3] * 16, vocab_size=7)
    drafter = TreeDrafter(MODEL, TREES["2-2-1"], replacement=accept == "k-seq")
    out = drafters.generate(model, drafter, batch, max_new_tokens=16, accept=accept)
    ended = (out.tokens == 7).any(1)
    assert ended.any()
    np.testing.assert_array_equal(out.stats.invalid, ended & (out.lengths < 16))
    np.testing.assert_array_equal(out.raw_logprobs < 0, np.arange(16) < out.lengths[:, None])
    plain = jspec.generate(model, *batch, max_new_tokens=16)
    if accept == "coupled":
        np.testing.assert_array_equal(out.tokens, plain.tokens)
