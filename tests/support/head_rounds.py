"""Helpers for the tests of trained heads and others."""

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec.acceptance import RULES
from jspec.decoding.program import start
from jspec.decoding.round import decode_round
from jspec.drafters.duck_length import as_draft_length
from support import toys

TARGET = toys.tiny_llama(0, 2)


V, NEW = TARGET.config.vocab_size, 20


def rounds(target, drafter, batch, length, rule, limits, eos_ids=(-1,)):
    """Yield the state before the first round and after each round."""
    tokens, lengths, keys = batch
    tokens = jnp.where(np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None], tokens, 0)
    transforms = toys.both_transforms(jspec.SamplingParams(), len(lengths))
    params = toys.request(keys, jnp.asarray(lengths), jnp.asarray(limits), *transforms, eos_ids)
    length = as_draft_length(length)
    state, _ = jax.jit(lambda: start(target, drafter, params, tokens, NEW, length))()
    decode = jax.jit(lambda state: decode_round(target, drafter, RULES[rule], length, params, state)[0])
    yield state
    while not state.done.all():
        state = decode(state)
        yield state
