"""Helpers for the tests of drafters with their own trees, and others."""

import functools

import jax
import jax.numpy as jnp

from jspec.drafters.base import Context


def context(tokens, lengths, vocab_size):
    return Context(jnp.asarray(tokens), jnp.asarray(lengths), None, None, None, None, vocab_size)


def matches(tokens, max_ngram, min_ngram):
    """Return the ends of earlier matches of the last tokens, longest first, then most recent."""
    found = []
    for end in range(len(tokens) - 1):
        size = 0
        while size < min(max_ngram, end + 1) and tokens[end - size] == tokens[len(tokens) - 1 - size]:
            size += 1
        found += [(size, end)] * (size >= min_ngram)
    return [end for _, end in sorted(found, reverse=True)]


@functools.partial(jax.jit, static_argnums=3)
def propose(drafter, state, asked, num_draft_tokens):
    return drafter.propose(state, asked, num_draft_tokens)
