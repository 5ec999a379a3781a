"""`jax.vmap` over a decoding call: one batch with more rows, whatever is mapped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from support import drafters

pytestmark = pytest.mark.usefixtures("quick_compile")
CALLS, NEW, K = 3, 9, 2


@pytest.fixture(scope="module")
def models(toy):
    return toy(0), toy(0, distance=0.2)


@pytest.fixture
def batches(prompts):
    """Return three stacked batches of two ragged prompts."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *[prompts([4, 7], seed=seed) for seed in range(CALLS)])


def check_equal(mapped, separate):
    """Check every field of outputs under `jax.vmap` against those of separate calls."""
    found, expected = _comparable(mapped), _comparable(jax.tree.map(lambda *leaves: np.stack(leaves), *separate))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def _comparable(out):
    """Return `out` without the arbitrary draft tokens that a record holds after a row's end."""
    if out.record is None:
        return out
    tokens, parents = (np.where(out.record.fates > 0, part, 0) for part in (out.record.tokens, out.record.parents))
    return dataclasses.replace(out, record=dataclasses.replace(out.record, tokens=tokens, parents=parents))


def nth(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


@pytest.mark.parametrize("accept", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("samples", [1, 2])
def test_rows_parameters_and_records_are_folded(models, batches, accept, samples):
    """All inputs of a row are mapped, and all outputs equal those of separate calls."""
    keys = jax.random.split(jax.random.key(5), (CALLS, 2 * samples))
    options = {
        "sampling": jspec.SamplingParams(
            temperature=jnp.linspace(0, 2, CALLS), top_k=jnp.array([0, 9, 3]), max_tokens=jnp.array([9, 4, 0])
        ),
        "eos_ids": jnp.array([[3, 4], [5, 5], [6, 7]]),
        "pad_id": jnp.array([7, 8, 9]),
    }

    def call(batch, keys, options):
        sizes = {"max_new_tokens": NEW, "num_draft_tokens": K, "samples_per_prompt": samples}
        return jspec.speculative_generate(*models, *batch[:2], keys, accept=accept, record=True, **sizes, **options)

    mapped = jax.jit(jax.vmap(call))(batches, keys, options)
    check_equal(mapped, [call(nth(batches, i), keys[i], nth(options, i)) for i in range(CALLS)])


@pytest.mark.parametrize("kind", ["n-gram", "medusa", "eagle", "tree"])
def test_every_kind_of_drafter_can_be_mapped(models, batches, kind):
    if kind == "tree":
        drafter = jspec.TreeDrafter(models[1], jspec.Tree.branching((2, 1)))
    else:
        drafter = jspec.NGramDrafter() if kind == "n-gram" else drafters.make(kind, *models)
    options = {"max_new_tokens": NEW} | ({} if kind == "tree" else {"num_draft_tokens": K})

    def call(batch):
        return jspec.speculative_generate(models[0], drafter, *batch, accept="coupled", **options)

    check_equal(jax.vmap(call)(batches), [call(nth(batches, i)) for i in range(CALLS)])


def test_a_single_mapped_parameter_shares_the_prompts(models, batches):
    def call(temperature):
        sampling = jspec.SamplingParams(temperature=temperature)
        return jspec.generate(models[0], *nth(batches, 0), max_new_tokens=NEW, sampling=sampling)

    temperatures = jnp.array([0.0, 0.7, 1.5])
    check_equal(jax.vmap(call)(temperatures), [call(temperature) for temperature in temperatures])


def test_nested_and_inner_axes_are_folded(models, batches):
    """Arguments may be mapped over any axis, and `jax.vmap` may be nested."""
    tokens, lengths, keys = batches

    def call(tokens, length, key):
        return jspec.generate(models[0], tokens[None], length[None], key[None], max_new_tokens=NEW)

    inner = jax.vmap(call, in_axes=(1, 0, 0))
    mapped = jax.vmap(inner, in_axes=(1, 0, 0))(tokens.transpose(2, 0, 1), lengths, keys)
    expected = [jspec.generate(models[0], *nth(batches, i), max_new_tokens=NEW) for i in range(CALLS)]
    np.testing.assert_array_equal(mapped.tokens[:, :, 0], [out.tokens for out in expected])


def test_mapped_weights_run_one_after_another(toy, batches):
    """Each model decodes its own batch."""
    models = [toy(seed) for seed in range(CALLS)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)

    def call(model, batch):
        return jspec.generate(model, *batch, max_new_tokens=NEW)

    check_equal(jax.vmap(call)(stacked, batches), [call(models[i], nth(batches, i)) for i in range(CALLS)])
    check_equal(
        jax.vmap(call, in_axes=(0, None))(stacked, nth(batches, 0)), [call(model, nth(batches, 0)) for model in models]
    )


def test_folded_loop_is_the_loop_of_a_batch(models, batches):
    """The mapped program has as many loops and matrix products as one batch, and returns the same tokens."""
    tokens, lengths, keys = (leaf.reshape(2 * CALLS, *leaf.shape[2:]) for leaf in batches)

    def together(tokens, lengths, keys):
        return jspec.speculative_generate(*models, tokens, lengths, keys, max_new_tokens=NEW, num_draft_tokens=K).tokens

    def single(tokens, length, key):
        return together(tokens[None], length[None], key[None])[0]

    def operations(function):
        text = jax.jit(function).lower(tokens, lengths, keys).as_text()
        return [sum(f" {name}" in line for line in text.splitlines()) for name in ("stablehlo.while", "stablehlo.dot")]

    assert operations(jax.vmap(single)) == operations(together)
    np.testing.assert_array_equal(jax.vmap(single)(tokens, lengths, keys), together(tokens, lengths, keys))


def test_gradient_through_mapped_calls_names_the_remedy(models, batches):
    def loss(target):
        return jax.vmap(lambda batch: jspec.generate(target, *batch, max_new_tokens=3).logprobs.sum())(batches).sum()

    with pytest.raises(ValueError, match=r"differentiate jspec.logprobs"):
        jax.grad(loss)(models[0])


def test_shared_prompts_are_prefilled_once(models, prompts, report):
    """Three temperatures of one long prompt cost less than one and a half single calls."""
    batch = prompts([60, 64])

    def call(temperature):
        sampling = jspec.SamplingParams(temperature=temperature)
        return jspec.generate(models[0], *batch, max_new_tokens=1, sampling=sampling).tokens

    def flops(function, temperatures):
        return jax.jit(function).lower(temperatures).compile().cost_analysis()["flops"]

    ratio = flops(jax.vmap(call), jnp.array([0.5, 0.8, 1.0])) / flops(call, jnp.float32(0.5))
    report(flops_over_single_call=ratio)
    assert ratio < 1.5
