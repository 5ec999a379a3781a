"""Helpers for the distribution tests and others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec.core.sampling import SamplingParams
from support import oracle, toys


def filled(batch, **settings):
    """Return `SamplingParams` with an array in every field, so that all settings share one compiled program."""
    settings = {"draft_temperature": settings.get("temperature", 1.0), **settings}
    defaults = {name: getattr(SamplingParams(), name) for name in toys.SPREAD_PARAMS}
    fields = {name: jnp.full(batch, settings.get(name, default), jnp.float32) for name, default in defaults.items()}
    return SamplingParams(**fields, logit_bias=settings.get("logit_bias"))


PROMPTS = ((5,), (2, 7), (1, 4, 4, 0, 6, 3, 2), (0,), (6, 1), (7, 7, 3, 5, 2, 0, 1))


NUM_TOKENS, VOCAB = 3, 8


def default(name, row):
    """Return the value of a setting that `row` does not name."""
    known = {"draft_temperature": row.get("temperature", 1.0), "logit_bias": np.zeros(VOCAB)}
    return known.get(name, getattr(SamplingParams(), name))


@functools.cache
def llama_pair():
    """Return a two-layer target, a draft made from its first layer, and an unrelated draft."""
    target = toys.tiny_llama(10)
    return target, {"related": toys.tiny_llama(11, 1, related_to=target), "unrelated": toys.tiny_llama(12, 1)}


def exact_law(target, prompt, settings, bias=None, eos=()):
    """Return the joint distribution, ``float64[512]``, from the target's logits over every text, sampled in float64.

    Args:
        bias: ``(generated tuple) -> float64[V]``, added to the logits after that text; None for no bias.
        eos: tokens that end a text, which is then padded with token 0.
    """
    texts = np.stack(np.unravel_index(np.arange(VOCAB**2), (VOCAB, VOCAB)), axis=1)
    width = max(map(len, PROMPTS)) + 2
    tokens = np.zeros((len(texts), width), np.int32)
    tokens[:, : len(prompt)] = prompt
    tokens[:, len(prompt) : len(prompt) + 2] = texts
    logits = np.asarray(plain(target, tokens))
    settings = {key: value for key, value in settings.items() if key != "draft_temperature"}

    @functools.cache
    def next_law(text):
        row = int(np.ravel_multi_index((*text, 0, 0)[:2], (VOCAB, VOCAB)))
        after = logits[row, len(prompt) - 1 + len(text)] + (0 if bias is None else bias(text))
        return oracle.sampling_law(after, prompt=prompt, generated=text, **settings)

    return oracle.joint_law(next_law, VOCAB, NUM_TOKENS, eos)


plain = jax.jit(lambda model, tokens: model(tokens))


@functools.partial(jax.jit, static_argnames=("rule", "k"))
def text_counts(target, drafter, tokens, lengths, keys, sampling, rule, k):
    """Count the outputs of ``keys[N, B]`` as ``int[B, 512]``, with N copies of the batch in one public call."""

    def copies(part):
        return jnp.tile(part, (len(keys), *[1] * (part.ndim - 1))) if np.ndim(part) else part

    batch, sampling = (copies(tokens), copies(lengths), keys.ravel()), jax.tree.map(copies, sampling)
    options = {"max_new_tokens": NUM_TOKENS, "num_draft_tokens": k, "accept": rule, "sampling": sampling}
    out = jspec.speculative_generate(target, drafter, *batch, **options)
    texts = (out.tokens @ jnp.asarray([VOCAB**2, VOCAB, 1])).reshape(keys.shape)
    rows = jnp.broadcast_to(jnp.arange(keys.shape[1]), texts.shape)
    return jnp.zeros((keys.shape[1], VOCAB**NUM_TOKENS), jnp.int32).at[rows, texts].add(1)
