"""The choice of exit layers: scores match plain passes and real drafting, and the search finds a planted optimum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core.sampling import TokenCounts, broadcast_rows, token_probs
from jspec.decoding.program import traced
from jspec.tuning import tune_exit as exit_tuning
from support import toys

pytestmark = pytest.mark.usefixtures("quick_compile")

CHOICES = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0]], bool)


def test_scores_equal_plain_passes(report):
    """Scores match plain passes block by block, with penalties and filters.

    The text before a block runs through all layers, the block itself through the chosen ones.
    """
    target, lengths, (block, blocks) = toys.tiny_llama(10, 4), np.array([3, 2]), (3, 2)
    texts = np.random.default_rng(0).integers(8, size=(2, 9))
    sampling = jspec.SamplingParams(temperature=0.7, draft_temperature=1.2, top_p=0.9, repetition_penalty=1.3)
    params = traced(sampling, (), 0)
    own, drafts = params.transforms, params.draft_transforms
    found = exit_tuning.acceptance_rates(
        target, CHOICES, jnp.asarray(texts), jnp.asarray(lengths), own, drafts, block=block, blocks=blocks
    )

    seen = [
        (row, length + number * block + at)
        for row, length in enumerate(lengths)
        for number in range(blocks)
        for at in range(block)
    ]
    counts = TokenCounts(
        jnp.array([np.bincount(texts[row, : lengths[row]], minlength=8) > 0 for row, _ in seen]),
        jnp.array([np.bincount(texts[row, lengths[row] : end], minlength=8) for row, end in seen], jnp.int32),
    )

    @functools.partial(jax.jit, static_argnames="layers")
    def laws(layers, transforms):
        """Return the distributions ``[2, blocks, block, V]``; each block overwrites its part of an all-layer cache."""
        _, whole = target.forward(jnp.asarray(texts), target.new_cache(2, 9), jnp.zeros(2, int))
        found = []
        for number in range(blocks):
            at = lengths[:, None] - 1 + number * block + np.arange(block)
            hidden, _ = target.forward(jnp.take_along_axis(texts, at, axis=1), whole, at[:, 0], layers=layers)
            found.append(target.logits(hidden))
        rows = broadcast_rows(transforms, len(seen))
        return token_probs(jnp.stack(found, axis=1).reshape(len(seen), 1, 8), rows, counts)

    p, expected = laws((0, 1, 2, 3), own), []
    for chosen in CHOICES:
        q = laws(tuple(np.flatnonzero(chosen).tolist()), drafts)
        expected.append(np.minimum(p, q).sum((1, 2)).reshape(2, -1).mean(1))
    expected = np.transpose(expected)
    report(rates=expected.mean(0).round(3).tolist(), error=f"{abs(found - expected).max():.1e}")
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_scores_match_acceptance_of_drafting(report):
    """Scores match the acceptance rate of one-token drafts on other texts."""
    target, rows, new = toys.tiny_llama(10, 4), 64, 64
    batch = np.ones((rows, 1), int), np.ones(rows, int), jax.random.split(jax.random.key(0), rows)
    out = jspec.speculative_generate(
        target, jspec.EarlyExitDrafter(4, (1,)), *batch, max_new_tokens=new, num_draft_tokens=1
    )
    measured = np.asarray(out.stats.acceptance_rate)
    texts = jspec.generate(target, *batch[:2], jax.random.split(jax.random.key(1), rows), max_new_tokens=new).tokens
    params, texts = traced(jspec.SamplingParams(), (), 0), jnp.pad(texts, ((0, 0), (1, 0)), constant_values=1)
    asked = texts, batch[1], params.transforms, params.draft_transforms
    found = exit_tuning.acceptance_rates(target, CHOICES[2:3], *asked, block=1, blocks=new)[:, 0]
    error = (measured.var(ddof=1) / rows + np.var(found, ddof=1) / rows) ** 0.5
    report(measured=f"{measured.mean():.3f}", scored=f"{found.mean():.3f}", error=f"{error:.4f}")
    assert abs(measured.mean() - found.mean()) < 4 * error


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2, 3, 5), (1, 4), (5,)], ids=str)
def test_search_finds_best_layers(layers):
    """Find the best choice if worth falls with every differing layer, in a few evaluations of six choices each."""
    best, asked = np.isin(np.arange(6), layers), []

    def worth(chosen):
        asked.append(len(chosen))
        return -(chosen != best).sum(1).astype(float)

    np.testing.assert_array_equal(exit_tuning.search(worth, 6), best)
    assert set(asked) == {6} and len(asked) <= 3 + exit_tuning._STEPS


@pytest.mark.parametrize("num_layers", [2, 5])
def test_search_skips_and_keeps_at_least_one_layer(num_layers):
    for sign in (1, -1):  # more layers are better, fewer layers are better
        found = exit_tuning.search(lambda chosen, sign=sign: sign * chosen.sum(1).astype(float), num_layers)
        assert found.sum() == (num_layers - 1 if sign == 1 else 1)


def test_pass_costs_count_bytes_read():
    costs = exit_tuning.pass_costs(target := toys.tiny_llama(0, 4), CHOICES)
    layer, head = sum(leaf.nbytes for leaf in jax.tree.leaves(target.layers[0])), 8 * 16 * 4
    np.testing.assert_allclose(costs, (CHOICES.sum(1) * layer + head) / (4 * layer + head))


def test_useless_layers_are_skipped():
    """Two of four layers add nothing to the residual stream, so without them the draft is the target."""
    target = toys.tiny_llama(10, 4)
    for i in (1, 3):
        for part in (target.layers[i].self_attn.o_proj, target.layers[i].mlp.down_proj):
            part.weight.set_value(jnp.zeros_like(part.weight[...]))
    batch = [[1, 2, 3], [4, 5, 0]], [3, 2], jax.random.split(jax.random.key(0), 2)
    found = jspec.best_exit(target, *batch, max_new_tokens=20, max_draft_tokens=4)
    assert set(found.layers) <= {0, 2}
    greedy = jspec.SamplingParams(temperature=0)
    assert jspec.best_exit(target, *batch, max_new_tokens=20, max_draft_tokens=4, sampling=greedy).num_layers <= 3


def test_mistakes_are_reported(toy, prompts):
    target = toys.tiny_llama(0, 2)
    for error, message, call in (
        (
            TypeError,
            "jspec.best_exit runs the layers of a jspec.Llama, but MarkovModel has no `layers`",
            lambda: jspec.best_exit(toys.markov_pair(0)[0], *prompts([3])),
        ),
        (
            ValueError,
            "target has only one layer, so none can be skipped",
            lambda: jspec.best_exit(toy(0), *prompts([3])),
        ),
        (
            ValueError,
            "max_new_tokens=20 is too small to measure 8",
            lambda: jspec.best_exit(target, *prompts([3], vocab_size=8), max_new_tokens=20),
        ),
        (
            ValueError,
            "jspec.best_exit .* is not possible inside jax.jit",
            lambda: jax.jit(lambda *batch: jspec.best_exit(target, *batch).num_layers)(*prompts([3], vocab_size=8)),
        ),
    ):
        with pytest.raises(error, match=message):
            call()
