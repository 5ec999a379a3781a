"""Helpers for the early-exit tests and others."""

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec.core.keys import draft_noise
from jspec.drafters.base import Context, TargetView
from jspec.models.kv_cache import prefill
from support import toys

K = 3


TOKENS, LENGTHS = np.random.default_rng(0).integers(8, size=(5, 6)), np.array([1, 2, 3, 5, 6])


def drafted(drafter, target=None, unread=1, budget=None, draft_length=None, **sampling):
    """Return `drafter`'s draft for `TOKENS`, of which the target has read all but the last `unread`."""
    keys, transforms = (
        jax.random.split(jax.random.key(3), 5),
        toys.both_transforms(jspec.SamplingParams(**sampling), 5)[1],
    )
    noise = draft_noise(keys, LENGTHS[:, None] + np.arange(K), 8)
    text = jnp.pad(jnp.asarray(TOKENS), ((0, 0), (0, K + 1)))
    # Values after the text read so far must not matter.
    unknown = np.arange(TOKENS.shape[1] + K + 1) >= np.maximum(LENGTHS - unread, 0)[:, None]
    cache = None if target is None else prefill(target, jnp.where(unknown, 7, text), text.shape[1])
    view = TargetView(target, cache, unread)
    context = Context(text, jnp.asarray(LENGTHS), noise, transforms, None, view, 8, 2, budget, draft_length)
    propose = jax.jit(lambda drafter, context: drafter.propose(drafter.init(text, text.shape[1]), context, K)[0])
    return jax.device_get(propose(drafter, context))
