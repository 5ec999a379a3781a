"""Scores of finished texts, compared with generation, with float64 and, for gradients, with transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from bench.rivals import hf_arrays
from convert.config import parse_config
from jspec.models.llama import Llama
from support import checkpoints, drafters, toys
from support.matrix import PROMPTS

pytestmark = pytest.mark.usefixtures("quick_compile")
NEW = 12


@pytest.fixture(scope="module")
def pair():
    target = toys.tiny_llama(10)
    return target, toys.tiny_llama(11, 1, related_to=target)


def prompts(count):
    tokens = np.zeros((count, 6), np.int32)
    for row, prompt in zip(tokens, PROMPTS * 2, strict=False):
        row[: len(prompt)] = prompt
    return (
        tokens,
        np.array([len(prompt) for prompt in (PROMPTS * 2)[:count]]),
        jax.random.split(jax.random.key(3), count),
    )


def of_new_tokens(scores, starts, out):
    """Return the entries of new tokens in the shape of ``out.tokens``, with zeros after the end."""
    index = np.minimum(starts[:, None] + np.arange(out.tokens.shape[1]), scores.shape[1] - 1)
    inside = np.arange(out.tokens.shape[1]) < np.asarray(out.lengths)[:, None]
    return np.where(inside, np.take_along_axis(np.asarray(scores), index, 1), 0)


@pytest.mark.parametrize("chunk", [1, 4, 128])
def test_scores_are_the_log_probabilities_of_generation(pair, chunk, report):
    """Every sampling parameter, limit and EOS id differs by row."""
    target, draft = pair
    tokens, lengths, keys = prompts(10)
    options = drafters.every_parameter(10, target.config.vocab_size)
    out = jspec.speculative_generate(target, draft, tokens, lengths, keys, max_new_tokens=NEW, **options)
    texts, ends = out.with_prompts(tokens, lengths)
    scores = jspec.logprobs(target, texts, ends, prompt_lengths=lengths, chunk=chunk, **options)
    errors = {}
    for field in ("logprobs", "raw_logprobs"):
        found, expected = of_new_tokens(getattr(scores, field), lengths, out), np.asarray(getattr(out, field))
        errors[field] = np.abs(found - expected).max()
    report(chunk=chunk, **{name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < 1e-5 and np.ptp(np.asarray(out.lengths)) > 0


def test_scores_are_those_of_float64(pair):
    target, reference = pair
    tokens, lengths, _ = prompts(5)
    scores = jax.jit(lambda *models: jspec.logprobs(models[0], tokens, lengths, reference=models[1]))(target, reference)
    logits = [np.asarray(model(jnp.asarray(tokens)), np.float64)[:, :-1] for model in pair]
    own, other = (part - np.log(np.exp(part).sum(-1, keepdims=True)) for part in logits)
    inside = np.arange(1, 6) < lengths[:, None]
    expected = {
        "raw_logprobs": np.take_along_axis(own, tokens[:, 1:, None], 2)[..., 0],
        "logprobs": np.take_along_axis(own, tokens[:, 1:, None], 2)[..., 0],
        "entropies": -(np.exp(own) * own).sum(-1),
        "kl": (np.exp(own) * (own - other)).sum(-1),
    }
    for field, values in expected.items():
        found = np.asarray(getattr(scores, field))
        assert (found[:, 0] == 0).all()
        np.testing.assert_allclose(found[:, 1:], np.where(inside, values, 0), atol=2e-6)


def test_gradients_are_those_of_transformers(report):
    import torch

    model = checkpoints.torch_model(num_key_value_heads=2, attention_bias=True)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    ours = Llama(parse_config(model.config.to_dict()), rngs=nnx.Rngs(0))
    jspec.load_weights(ours, state)
    tokens, lengths = np.random.default_rng(0).integers(3, 97, (2, 20)), np.array([20, 13])
    weights = np.where(np.arange(20) < lengths[:, None], np.random.default_rng(1).standard_normal((2, 20)), 0)
    weights[:, 0] = 0

    logits = torch.log_softmax(model(torch.tensor(tokens)).logits[:, :-1], -1)
    chosen = torch.gather(logits, 2, torch.tensor(tokens)[:, 1:, None])[..., 0]
    (chosen * torch.tensor(weights[:, 1:], dtype=torch.float32)).sum().backward()

    @jax.jit
    def gradient(model):
        def loss(model):
            return (jspec.logprobs(model, tokens, lengths, chunk=8).raw_logprobs * weights).sum()

        return jax.grad(loss)(model)

    found, worst = hf_arrays(gradient(ours)), 0.0
    for name, parameter in model.named_parameters():
        expected = parameter.grad.numpy()
        worst = max(worst, np.abs(found[name] - expected).max() / np.abs(expected).max())
    report(relative_error=f"{worst:.1e}")
    assert worst < 1e-4


def test_gradients_are_finite_under_every_parameter(pair):
    """A filtered token has the log-probability -inf, but does not make other gradients NaN."""
    target, _ = pair
    tokens, lengths, keys = prompts(8)
    options = drafters.every_parameter(8, target.config.vocab_size)
    out = jspec.generate(target, tokens, lengths, keys, max_new_tokens=NEW, **options)
    texts, ends = out.with_prompts(tokens, lengths)

    @jax.jit
    @jax.value_and_grad
    def loss(model):
        scores = jspec.logprobs(model, texts, ends, prompt_lengths=lengths, chunk=4, **options)
        mask = (np.arange(texts.shape[1]) >= lengths[:, None]) & jnp.isfinite(scores.logprobs)
        return jnp.where(mask, scores.logprobs + scores.entropies, 0).sum()

    value, gradient = loss(target)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in leaves) and any(leaf.any() for leaf in leaves)


def test_improbable_tokens_have_finite_scores_and_gradients(pair):
    """At temperature 0.02, probabilities underflow, but their logs do not."""
    target, _ = pair
    tokens, lengths, _ = prompts(5)
    sampling = jspec.SamplingParams(temperature=0.02)
    scores = jspec.logprobs(target, tokens, lengths, sampling=sampling)
    logits = np.asarray(target(jnp.asarray(tokens)), np.float64)[:, :-1] / 0.02
    exact = logits - logits.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    expected = np.take_along_axis(exact, tokens[:, 1:, None], 2)[..., 0]
    inside = np.arange(1, 6) < lengths[:, None]
    assert expected[inside].min() < -120
    np.testing.assert_allclose(np.asarray(scores.logprobs)[:, 1:][inside], expected[inside], rtol=1e-5, atol=1e-3)
    gradient = jax.grad(lambda m: jspec.logprobs(m, tokens, lengths, sampling=sampling).logprobs.sum())(target)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_second_call_compiles_nothing(pair, compilations):
    target, _ = pair
    tokens, lengths, _ = prompts(3)
    jspec.logprobs(target, tokens, lengths, sampling=jspec.SamplingParams(temperature=[1.0, 0.5, 2.0]))
    before = compilations()
    jspec.logprobs(target, tokens, lengths - 0, sampling=jspec.SamplingParams(temperature=[0.5, 0.25, 0.0]))
    assert compilations() == before


@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_scores_on_a_mesh(pair, kind):
    target, _ = pair
    tokens, lengths, _ = prompts(2)
    options = {"sampling": jspec.SamplingParams(presence_penalty=0.5), "prompt_lengths": lengths - 1, "chunk": 2}
    expected = jspec.logprobs(target, tokens, lengths, **options)
    types = jax.sharding.AxisType
    mesh = jax.make_mesh((1,), ("x",), axis_types=(types.Explicit if kind == "explicit" else types.Auto,))
    rows = jax.sharding.PartitionSpec("x")
    if kind == "explicit":
        with jax.set_mesh(mesh):
            placed = jax.device_put((tokens, lengths), jax.NamedSharding(mesh, rows))
            found = jspec.logprobs(target, *placed, **options)
    else:
        nowhere = jax.sharding.PartitionSpec()

        def score(target, tokens, lengths):
            return jspec.logprobs(target, tokens, lengths, **options | {"prompt_lengths": lengths - 1})

        mapped = jax.shard_map(score, mesh=mesh, in_specs=(nowhere, rows, rows), out_specs=rows)
        found = jax.jit(mapped)(target, tokens, lengths)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_text_may_begin_with_eos(pair):
    """A prompt of EOS, such as Llama's start of a text, and a first token of EOS look like padding on the left."""
    scores = jspec.logprobs(pair[0], [[2, 2, 0, 0]], [2], eos_ids=2)
    assert scores.logprobs[0, 1] < 0


def test_other_prompts_cannot_precede_an_output(pair):
    tokens, lengths, keys = prompts(3)
    out = jspec.generate(pair[0], tokens.astype(np.uint16), lengths, keys, max_new_tokens=4)
    texts, _ = out.with_prompts(tokens.astype(np.uint16), lengths)
    np.testing.assert_array_equal(texts[1, : lengths[1]], tokens[1, : lengths[1]])
    with pytest.raises(ValueError, match="output has 3 rows, but there are 2 prompts"):
        out.with_prompts(tokens[:2], lengths[:2])


def test_samples_of_a_prompt_are_scored(pair):
    target, _ = pair
    tokens, lengths, _ = prompts(2)
    keys = jax.random.split(jax.random.key(0), 6)
    out = jspec.generate(target, tokens, lengths, keys, max_new_tokens=NEW, samples_per_prompt=3)
    texts, ends = out.with_prompts(tokens, lengths)
    assert texts.shape == (6, 6 + NEW) and (texts[4, : lengths[1]] == tokens[1, : lengths[1]]).all()
    scores = jspec.logprobs(target, texts, ends)
    np.testing.assert_allclose(of_new_tokens(scores.logprobs, np.repeat(lengths, 3), out), out.logprobs, atol=1e-5)


def test_memory_does_not_grow_with_length_times_vocabulary(report):
    """Compile the gradient for 2,048 tokens of a vocabulary of 128,256, without running it."""
    config = toys.llama_config(2, vocab_size=128256, hidden_size=64, max_position_embeddings=4096)
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def loss(model, tokens, lengths):
        return jspec.logprobs(model, tokens, lengths, sampling=jspec.SamplingParams(top_p=0.9)).logprobs.sum()

    memory = jax.jit(jax.grad(loss)).lower(model, *tokens).compile().memory_analysis()
    total = (memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes) / 1e9
    report(gigabytes=f"{total:.2f}")
    assert total < 1.0  # the logits of all positions would take 1.05 GB


def test_gradient_of_generation_names_the_remedy(pair):
    tokens, lengths, keys = prompts(2)
    with pytest.raises(ValueError, match=r"differentiate jspec\.logprobs of the finished texts"):
        jax.grad(lambda m: jspec.generate(m, tokens, lengths, keys, max_new_tokens=4).logprobs.sum())(pair[0])


def test_text_of_one_token_has_no_scores(pair):
    scores = jspec.logprobs(pair[0], [[3]], [1])
    assert scores.logprobs.shape == (1, 1) and scores.logprobs[0, 0] == 0


PENALTY = jspec.SamplingParams(presence_penalty=0.5)
MISTAKES = {
    "prompts": ({"sampling": PENALTY}, "which need the boundary between prompt and new tokens; pass prompt_lengths"),
    "chunk": ({"chunk": 0}, "chunk must be an int of at least 1"),
    "lengths": ({"lengths": [9, 1]}, r"lengths\[0\] is 9, but a text has 1 to 6 tokens"),
    "vocabulary": (
        {"reference": toys.tiny_llama(1, vocab_size=16)},
        "reference's vocabulary has 16 tokens and the target's 8",
    ),
    "eos_ids": ({"eos_ids": 9}, "eos_ids holds 9, outside the vocabulary"),
    "shape": ({"prompt_lengths": [1]}, r"prompt_lengths must be integers of shape \[2\], one for each text"),
    "beyond the end": ({"prompt_lengths": [4, 2]}, r"prompt_lengths\[1\] is 2, but text 1 has 1 tokens"),
    "too long": (
        {"tokens": np.zeros((1, 5000), int), "lengths": [5000]},
        "Text 0 of 5000 tokens exceeds the 4096 positions of the target",
    ),
    "sampling": ({"sampling": jspec.SamplingParams(top_p=2.0)}, "top_p must be above 0 and at most 1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(pair, mistake):
    options, message = MISTAKES[mistake]
    tokens, lengths, _ = prompts(2)
    arguments = {"tokens": tokens, "lengths": lengths} | options
    with pytest.raises(ValueError, match=message):
        jspec.logprobs(pair[0], **arguments)
