"""One round: the program collects exactly what rounds return, and every leaf of a round has one entry per row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES
from jspec.decoding.program import start
from jspec.decoding.round import decode_round
from support import drafters, toys
from support.matrix import pair

pytestmark = pytest.mark.usefixtures("quick_compile")

NEW, ROWS = 9, 5
LENGTHS = np.array([2, 1, 4, 3, 2])
TOKENS = np.where(np.arange(4) < LENGTHS[:, None], np.random.default_rng(0).integers(8, size=(ROWS, 4)), 0)
KEYS = jax.random.key(2), ROWS
SAMPLING = jspec.SamplingParams(temperature=[1.0, 0.7, 0.0, 1.0, 1.0], repetition_penalty=1.2)
LIMITS, EOS_IDS = np.array([NEW, 4, NEW, NEW, 1]), np.array([[-1], [-1], [-1], [3], [-1]])


def begin(drafter, draft_length):
    """Return the parameters, which stay constant, and the state before the first round."""
    params = toys.request(jax.random.split(*KEYS), jnp.asarray(LENGTHS), NEW, *toys.both_transforms(SAMPLING, ROWS))
    params = dataclasses.replace(params, limits=jnp.asarray(LIMITS), eos_ids=jnp.asarray(EOS_IDS))
    return params, start(pair()[0], drafter, params, jnp.asarray(TOKENS), NEW, draft_length)[0]


@pytest.mark.parametrize("name", drafters.NAMES)
def test_every_leaf_has_one_entry_per_row(name):
    drafter, length = drafters.make(name, *pair()), jspec.ByAcceptance(3)

    def decode():
        params, state = begin(drafter, length)
        return params, *decode_round(pair()[0], drafter, RULES["rejection"], length, params, state)

    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(decode))]
    assert len(shapes) > 20 and {shape[0] for shape in shapes} == {ROWS}


def test_concatenated_rounds_equal_output():
    drafter, length, rule = drafters.make("model", *pair()), jspec.WhileConfident(3), jspec.Lenient(0.5)
    decode = jax.jit(lambda params, state: decode_round(pair()[0], drafter, rule, length, params, state))
    params, state = jax.jit(begin, static_argnums=1)(drafter, length)
    rounds = []
    while not state.done.all():
        state, new = decode(params, state)
        rounds.append(jax.device_get(new))
    batch, sampling = (TOKENS, LENGTHS, jax.random.split(*KEYS)), dataclasses.replace(SAMPLING, max_tokens=LIMITS)
    options = {"max_new_tokens": NEW, "num_draft_tokens": length, "accept": rule, "eos_ids": EOS_IDS}
    out = drafters.generate(pair()[0], drafter, batch, sampling=sampling, **options)
    for row, size in enumerate(out.lengths):
        for name in ("tokens", "logprobs", "origins"):
            pieces = [getattr(new, name)[row, : new.count[row]] for new in rounds]
            np.testing.assert_allclose(np.concatenate(pieces), getattr(out, name)[row, :size], atol=1e-5)
    for name in ("drafted", "judged", "accepted", "distortion"):
        total = np.sum([getattr(new, name) for new in rounds], axis=0)
        np.testing.assert_allclose(total, getattr(out.stats, name), atol=1e-5)
    assert len(set(out.lengths.tolist())) > 2 and out.stats.distortion.any()
