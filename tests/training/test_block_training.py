"""Training of block drafters: blocks that are trained together equal the blocks that are drafted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.heads.block.config import MarkovConfig
from jspec.core.tree import Level, Tree
from jspec.drafters import BlockDrafter, EagleDrafter
from jspec.drafters.base import Context, TargetView
from jspec.drafters.signals import PromptSignals
from jspec.models.kv_cache import prefill_with_features
from jspec.training import block_training, kinds
from jspec.training.objective import judge
from jspec.training.target_states import run_target
from support import blocks, eagle_heads
from support.trainings import TARGET, V

pytestmark = pytest.mark.usefixtures("quick_compile")
S = 20
MARKOV = {kind: {"markov": MarkovConfig(kind, 5), "drafts_from_first": True} for kind in ("vanilla", "gated", "rnn")}
LAYOUTS = {"dflash": {}, "jetspec": {"causal": True}, "causal dspark": MARKOV["vanilla"] | {"causal": True}, **MARKOV}


def text(seed=0, rows=2):
    tokens = np.random.default_rng(seed).integers(V, size=(rows, S))
    learned = np.arange(S) >= np.array([[6], [11]] * rows)[:rows]
    learned[0, 15] = False  # a gap, as between two answers
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(learned)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_run_together_equal_single_blocks(layout):
    block, (tokens, _) = blocks.block(TARGET, features=(1, 3), **LAYOUTS[layout]), text()
    states, starts = run_target(TARGET, tokens, block.config.features).states, jnp.array([[1, 5, 9], [2, 18, 3]])
    found = block_training.run(block, TARGET, tokens, states, starts)
    for row, start in np.ndindex(*starts.shape):
        at = starts[row, start][None]
        cache = block.new_cache(1, S + block.config.block_size)
        cache = block.read(states[row][None], cache, jnp.zeros(1, jnp.int32), TARGET)
        rows = jnp.full((1, block.config.block_size), block.config.mask_id).at[0, 0].set(tokens[row, at[0]])
        alone, _ = block.forward(rows, cache, at, TARGET)
        np.testing.assert_allclose(found[row, start], alone[0, -block.config.num_draft_tokens :], atol=2e-6)


def test_many_blocks_attend_in_bfloat16():
    """XLA's CPU backend supports some bfloat16 products only for small batches."""
    shapes = (4, 9, 1280, 64), (4, 3, 1280, 64), (4, 3, 512, 64)
    keys = jax.random.split(jax.random.key(0), 3)
    q, own, past = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    starts = jnp.arange(1024).reshape(4, 256) % 512
    attend = jax.jit(lambda q, own, past: block_training._attend(q, (own, own), (past, past), starts, False))
    found, expected = (
        np.asarray(attend(*(part.astype(dtype) for part in (q, own, past))), np.float32)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    np.testing.assert_allclose(found, expected, atol=0.05)


def drafted(block, tokens, length, depth):
    """Yield the logits of a draft that starts after ``tokens[:length]`` and matches the text."""
    prompt, lengths = jnp.where(jnp.arange(S) < length, tokens, 0)[None], jnp.array([length])
    drafter = BlockDrafter(block)
    cache, states = prefill_with_features(TARGET, prompt, S, drafter.features)
    state = drafter.init(prompt, S, PromptSignals(states, lengths, TARGET))
    noise = jnp.zeros((1, depth, 1, 2, 1))
    context = Context(tokens[None], lengths, noise, None, None, TargetView(TARGET, cache, 1), V)
    logits, carry = drafter.begin(state, context, Tree.chain(depth))
    yield logits[0]
    for k in range(1, depth):
        logits, carry = drafter.extend(carry, tokens[None, length + k - 1][:, None], Level(k), context)
        yield logits[0, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_score_is_that_of_drafts(layout):
    """The acceptance rates equal those of real drafts, averaged over the blocks that are chosen."""
    block, (tokens, learned), depth = blocks.block(TARGET, **LAYOUTS[layout]), text(1), 3
    states = run_target(TARGET, tokens, block.config.features)
    score = block_training.score(block, TARGET, tokens, states, judge(TARGET, states, None, learned), depth, "tvd")
    probs, kept = np.asarray(jax.nn.softmax(TARGET.logits(states.hidden))), [[] for _ in range(depth)]
    starts, used = block_training.choose_blocks(tokens, learned)
    for row, i in zip(*np.nonzero(np.asarray(used)), strict=True):
        start = int(starts[row, i])
        for k, logits in enumerate(drafted(block, tokens[row], start + 1, depth)):
            if start + k + 1 >= S or not learned[row, start + k + 1]:
                break
            kept[k].append(np.minimum(probs[row, start + k], jax.nn.softmax(logits)).sum())
    np.testing.assert_allclose(score.acceptance, [np.mean(rates) for rates in kept], atol=2e-6)
    np.testing.assert_array_equal(score.tokens, [len(rates) for rates in kept])
    np.testing.assert_allclose(score.loss, 1 - score.acceptance, atol=2e-6)


def test_blocks_start_before_learned_tokens():
    tokens, learned = text(2)
    starts, used = (np.asarray(part) for part in block_training.choose_blocks(tokens, learned))
    for row in range(2):
        chosen = starts[row][used[row]]
        wanted = {at for at in range(1, S - 1) if learned[row, at + 1]}
        assert set(chosen) <= wanted and len(set(chosen)) == len(chosen) == min(len(wanted), S // 2)
    again = block_training.choose_blocks(tokens, learned)
    np.testing.assert_array_equal(again[0], starts)
    others = block_training.choose_blocks(tokens[::-1].at[0, 0].add(1), learned)
    assert (np.asarray(others[0])[0] != starts[0]).any()  # another batch, other blocks


def test_confidence_learns_the_acceptance_rate():
    """The gradient of the confidence head's bias is its estimate minus the acceptance rate, summed over the depths."""
    block, (tokens, learned) = blocks.block(TARGET, confidence="state and token", **MARKOV["vanilla"]), text(3)
    weight = block.confidence_head.weight
    weight.set_value(jnp.zeros_like(weight[...]))
    states = run_target(TARGET, tokens, block.config.features)
    judged = judge(TARGET, states, None, learned)

    def score(block):
        return block_training.score(block, TARGET, tokens, states, judged, 2, "tvd")

    slope = jax.grad(lambda block: score(block).loss.sum())(block).confidence_head.bias[...]
    estimate = jax.nn.sigmoid(block.confidence_head.bias[...])
    np.testing.assert_allclose(slope, (estimate - score(block).acceptance).sum()[None], rtol=1e-4)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (lambda: EagleDrafter(eagle_heads.eagle(TARGET)).quantize(), "The drafter is int8 and cannot be trained"),
        (lambda: blocks.drafter(TARGET).quantize(), "The drafter is int8 and cannot be trained"),
        (lambda: blocks.drafter(TARGET, windows=(8, None)), "has layers with windows, which cannot be trained"),
    ],
)
def test_heads_that_cannot_be_trained_are_refused(drafter, message):
    with pytest.raises(ValueError, match=message):
        kinds.check_fits(drafter(), TARGET, 2)


def test_tables_are_not_trained_by_muon():
    drafter = kinds.of_block(TARGET, np.arange(V - 2), 3, 0)
    assert drafter.block.config.markov.rank == 32  # so that its tables can be packed
    trainee = kinds.trainee_of(drafter)
    sizes = {trainee.weights[name].shape[1] for name in trainee.tables}
    assert len(trainee.tables) == 2 and sizes == {V, V - 2}
    assert trainee.draft_ids.tolist() == list(range(V - 2))
